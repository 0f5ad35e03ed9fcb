"""Segments that retention takes, and their directories, while they are being written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep import LogOptions
from everstep.errors import StorageError
from everstep.format.names import MANIFEST, base_dir, marker_name, segment_dir
from everstep.keeper.retain.retention import delete_segments
from everstep.seams import PosixFileSystem
from tests.support.log.every_step import World, opened, run_steps
from tests.support.world import flip

FILES = PosixFileSystem()
OPTIONS: dict[str, Any] = {
    "every": None,
    "log": LogOptions(to="disk", batch_steps=1, audit=False),
    "keeper": everstep.KeeperOptions(process=False),
}


def around(
    monkeypatch: pytest.MonkeyPatch, name: str, *, before: Callable[[PurePath], None] | None = None,
    after: Callable[[PurePath], None] | None = None,
) -> None:  # fmt: skip
    """Something happens around each call of the file system's, told its last path."""
    original = getattr(PosixFileSystem, name)

    def changed(self: PosixFileSystem, *paths: PurePath, **options: bool) -> object:
        if before is not None:
            before(paths[-1])
        result = original(self, *paths, **options)
        if after is not None:
            after(paths[-1])
        return result

    monkeypatch.setattr(PosixFileSystem, name, changed)


def trained(run: Path, steps: int) -> World:
    world = World()
    with opened(run, world, **OPTIONS) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, steps)
        ckpt.save()
    return world


def test_one_that_goes_as_soon_as_its_marker_is_there(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base of its last step is durable before it is, so nothing needs it any more; training is
    told nothing, and what comes behind it is written."""
    gone: list[PurePath] = []

    def take(path: PurePath) -> None:
        is_marker = path.name == marker_name(0) and path.parent.parent.name == "log"
        if is_marker and len(gone) < 2:  # those behind it stay
            delete_segments(FILES, run_folder, 1, lambda _: True, lambda: None, own=1)
            gone.append(path.parent)

    around(monkeypatch, "rename", after=take)
    world = trained(run_folder, 5)
    monkeypatch.undo()
    assert len(gone) == 2
    assert not any(Path(path).exists() for path in gone)
    other = World(seed=9)
    with opened(run_folder, other, **OPTIONS) as ckpt:
        assert ckpt.resume().step == 5
        assert other.snapshot() == world.snapshot()


def test_a_directory_that_goes_before_its_first_file_is_there(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks share it: another one has written its part, and deletes that, and finds it empty."""
    taken: list[PurePath] = []

    def take(path: PurePath) -> None:
        if path.parent.parent.name == "log" and path.parent not in taken:
            taken.append(path.parent)
            FILES.remove_dir(path.parent)

    around(monkeypatch, "create", before=take)
    trained(run_folder, 3)
    monkeypatch.undo()
    assert taken[0] == segment_dir(PurePath(run_folder), 1, 0, 1)


def test_a_run_that_is_gone_is_said(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of one segment: nothing can be written any more."""

    def take(path: PurePath) -> None:
        if path.parent.parent.name == "log":
            Path(path.parent).rmdir()
            Path(path.parent.parent).rename(run_folder / "elsewhere")

    around(monkeypatch, "create", before=take)
    with pytest.raises(StorageError, match="could not write the log") as caught:
        trained(run_folder, 3)
    assert "the log on disk ends here and continues after the next base" in str(caught.value)


def test_a_base_that_was_damaged_does_not_keep_the_log_for_ever(run_folder: Path) -> None:
    """It stays, for whoever wants to look at it; what leads on from it is of use as long as no
    newer ones are there."""
    world, options = World(), {**OPTIONS, "every": 10, "keep": 2, "on_failure": "warn"}
    segments: list[int] = []
    with warnings.catch_warnings(), opened(run_folder, world, **options) as ckpt:
        warnings.simplefilter("ignore")
        ckpt.resume()
        for at in range(10):
            run_steps(ckpt, world, 10)
            ckpt.wait()
            if at == 1:
                flip(base_dir(run_folder, 1, 20) / MANIFEST, 60)
            segments.append(len(list(segment_dir(run_folder, 1, 0, 1).parent.iterdir())))
    assert base_dir(run_folder, 1, 20).exists()
    assert max(segments[4:]) <= segments[1] + 10, segments
