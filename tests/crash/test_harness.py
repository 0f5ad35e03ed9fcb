"""The enumeration itself, on the smallest protocol there is: replacing a file."""

from __future__ import annotations

import errno
from collections.abc import Collection
from pathlib import PurePath

import pytest

from everstep.errors import StorageError
from tests.crash.sim.crashes import (
    Scenario,
    enumerate_crashes,
    enumerate_errors,
    replay,
    watch_crashes,
)
from tests.crash.sim.filesystem import SimFileSystem

FILE, STAGED = PurePath("/file"), PurePath("/file.tmp")
OLD, NEW = b"old" * 500, b"new" * 700


class Replacing(Scenario):
    """Replaces a file by temporary name, sync, rename, sync of the directory; or forgets some."""

    def __init__(self, forgets: Collection[str] = (), errors: str = "reported") -> None:
        self._forgets, self._errors = forgets, errors
        self._done = False

    def prepare(self, fs: SimFileSystem) -> None:
        file = fs.create(FILE)
        file.write(memoryview(OLD), 0)
        file.sync()
        file.close()
        fs.sync_dir(FILE.parent)

    def act(self, fs: SimFileSystem) -> None:
        self._done = False
        try:
            self._replace(fs)
        except OSError as error:
            if self._errors == "reported":
                raise StorageError("could not replace the file") from error
            if self._errors == "raw":
                raise
            return
        self._done = True

    def _replace(self, fs: SimFileSystem) -> None:
        name = FILE if "staging" in self._forgets else STAGED
        if name == FILE:
            fs.unlink(FILE)
        file = fs.create(name)
        if "order" in self._forgets:
            fs.rename(STAGED, FILE)
        try:
            file.write(memoryview(NEW), 0)
            if "sync" not in self._forgets:
                file.sync()
        finally:
            file.close()
        if name == STAGED and "order" not in self._forgets:
            fs.rename(STAGED, FILE)
        if "sync_dir" not in self._forgets:
            fs.sync_dir(FILE.parent)

    def check(self, fs: SimFileSystem, promised: bool) -> None:
        assert "/file" in fs.paths(), "the file is gone"
        found = fs.read_bytes(FILE)
        assert found in ((NEW,) if promised else (OLD, NEW)), "neither old nor new"

    def promised(self) -> bool:
        return self._done


def test_a_sound_protocol_passes_every_point() -> None:
    report = enumerate_crashes(Replacing(), images_per_point=8)
    report.raise_if_any()
    assert report.operations == 5
    assert report.points == 2 * 5 + 2  # before and after each, within the write, after the end
    assert report.images == report.points * (1 + 2 + 8)
    assert 5 < report.checked < report.images


@pytest.mark.parametrize("forgotten", ["staging", "sync", "order", "sync_dir"])
def test_every_forgotten_part_is_found(forgotten: str) -> None:
    report = enumerate_crashes(Replacing([forgotten]))
    with pytest.raises(AssertionError, match=r"violation\(s\)"):
        report.raise_if_any()


def test_watching_finds_them_too() -> None:
    watch_crashes(Replacing()).raise_if_any()
    for forgotten in ("staging", "sync", "order", "sync_dir"):
        assert watch_crashes(Replacing([forgotten])).violations


def test_a_violation_can_be_replayed() -> None:
    scenario = Replacing(["sync"])
    found = enumerate_crashes(scenario, seed=11).violations
    assert {violation.image for violation in found} != {-1}
    for violation in found:
        image = replay(Replacing(["sync"]), violation)
        assert image.origin == violation.origin
        with pytest.raises(AssertionError, match="neither old nor new"):
            scenario.check(image, violation.when == "ended")
        assert f"{violation.operation:4d} {violation.log[-1].op}" in str(violation)


def test_errors_reported_in_words_pass() -> None:
    report = enumerate_errors(Replacing())
    report.raise_if_any()
    assert report.points == 2 * 5


@pytest.mark.parametrize(
    ("errors", "complaint"), [("raw", "out came"), ("swallowed", "nobody was told")]
)
def test_other_errors_do_not(errors: str, complaint: str) -> None:
    report = enumerate_errors(Replacing(errors=errors), errnos_injected=[errno.EIO])
    assert report.violations
    assert all(complaint in violation.problem for violation in report.violations)
