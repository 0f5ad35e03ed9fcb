"""The room of a segment that could not be written may be the last of the disk, and goes back."""

from __future__ import annotations

import errno
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.errors import DeadlineError, EverstepError, OutOfSpaceError
from everstep.format.names import TEMPORARY_SUFFIX, marker_name, segment_dir, shard_name
from everstep.keeper.log import segment_queue
from everstep.keeper.retain.retention import delete_segments
from everstep.options import LogOptions
from everstep.run.fence import Fence
from everstep.seams import PosixFileSystem
from tests.support.log.budget import Trained, assert_rebuilt, spans
from tests.support.logged import segments_of
from tests.support.world import HookedFileSystem, raising

FILES = PosixFileSystem()
ALL = LogOptions(to="disk", batch_steps=2, history="all", audit=False)
SHARD, MARKER = f"*/log/*/{shard_name(0, 0)}", f"*/log/*/{marker_name(0)}"


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def in_log(run: Path) -> list[str]:
    """Files of segments, and directories of none."""
    log = run / "timeline-00001" / "log"
    made = [path for path in sorted(log.rglob("*")) if path.is_file() or not list(path.iterdir())]
    return [str(path.relative_to(log)) for path in made]


def whole(*steps: tuple[int, int]) -> list[str]:
    folders = [segment_dir(PurePath(), 1, *span).name for span in steps]
    return [f"{folder}/{name}" for folder in folders for name in (marker_name(0), shard_name(0, 0))]


def leave(run: Path, after: int, last: int, *names: str) -> Path:
    """What a process that was killed leaves of a segment."""
    directory = Path(segment_dir(run, 1, after, last))
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_bytes(b"partial")
    return directory


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("op", "path"),
    [
        ("reserve", SHARD + TEMPORARY_SUFFIX),
        ("write", SHARD + TEMPORARY_SUFFIX),
        ("sync", SHARD + TEMPORARY_SUFFIX),
        ("rename", SHARD),
        ("sync_dir", "*/log/*-*"),
        ("create", MARKER + TEMPORARY_SUFFIX),
        ("write", MARKER + TEMPORARY_SUFFIX),
        ("rename", MARKER),
    ],
)
def test_nothing_is_left_of_what_could_not_be_written(run_folder: Path, op: str, path: str) -> None:
    """Wherever the disk is full; and the log goes on behind the next base."""
    fs = HookedFileSystem()
    reported: list[EverstepError] = []
    options: dict[str, Any] = {"log": ALL, "every": 8, "on_failure": reported.append}
    with Trained(run_folder, fs=fs, **options) as run:
        run.train_slowly(2)
        fs.hook = raising(full(), op, path)
        run.train_slowly(2)
        assert in_log(run_folder) == whole((0, 2))
        run.train_slowly(8)
        (error,) = reported
        assert isinstance(error, OutOfSpaceError)
    assert spans(run_folder) == [(0, 2), (8, 12)]
    assert_rebuilt(run_folder, run.states, range(8, 13))


def test_one_that_got_its_marker_stays(run_folder: Path) -> None:
    """Whoever looks may have read it already."""
    fs = HookedFileSystem()
    options: dict[str, Any] = {"log": ALL, "every": 8, "on_failure": lambda error: None}
    with Trained(run_folder, fs=fs, **options) as run:
        run.train_slowly(2)
        fs.hook = raising(full(), "sync_dir", "*/log/*-*", nth=2)
        run.train_slowly(2)
        assert in_log(run_folder) == whole((0, 2), (2, 4))
    assert [segment.problem for segment in segments_of(run_folder)] == [None, None]


def test_what_cannot_fit_is_not_begun(run_folder: Path) -> None:
    fs = HookedFileSystem()
    reported: list[EverstepError] = []
    options: dict[str, Any] = {"log": ALL, "every": 100, "on_failure": reported.append}
    with Trained(run_folder, fs=fs, **options) as run:
        run.train_slowly(2)
        fs.free_bytes = lambda path: 100  # type: ignore[method-assign]
        before = len(fs.seen)
        run.train_slowly(2)
        del fs.free_bytes
        assert {op for op, _ in fs.seen[before:]} <= {"scan", "open"}
        run.train_slowly(1)
        (error,) = reported
        assert isinstance(error, OutOfSpaceError)
        assert "a log segment takes" in str(error)
        assert "100 are free" in str(error)


def test_where_the_disk_hangs_it_is_said_first(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are not removed then: that might hang, too. Retention removes them later."""
    fs = HookedFileSystem()
    reported: list[EverstepError] = []
    log = LogOptions(to="disk", batch_steps=2, audit=False)
    options: dict[str, Any] = {"log": log, "every": 4, "keep": 1, "on_failure": reported.append}
    with Trained(run_folder, fs=fs, **options) as run:
        run.train_slowly(4)

        def hang(*args: Any, **kwargs: Any) -> None:
            raise DeadlineError("a write took longer")

        with monkeypatch.context() as patched:
            patched.setattr(segment_queue, "write_shard", hang)
            before = len(fs.seen)
            run.train_slowly(2)
        ops = [op for op, path in fs.seen[before:] if shard_name(0, 0) in path.name]
        assert "unlink" not in ops[ops.index("reserve") :]
        left = Path(segment_dir(run_folder, 1, 4, 6))
        assert [path.name for path in left.iterdir()] == [shard_name(0, 0) + ".tmp"]
        run.train_slowly(10)
        assert isinstance(reported[0], DeadlineError)
        assert not left.exists()


def test_one_that_was_taken_over_is_left_to_whoever_did(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = HookedFileSystem()
    options: dict[str, Any] = {"log": ALL, "every": 8, "on_failure": lambda error: None}
    with Trained(run_folder, fs=fs, **options) as run:
        run.train_slowly(2)
        fs.hook = raising(full(), "rename", MARKER)
        with monkeypatch.context() as patched:
            patched.setattr(Fence, "newest_or_next", lambda self: 2)
            run.train_slowly(2)
        left = Path(segment_dir(run_folder, 1, 2, 4))
        assert shard_name(0, 0) in {path.name for path in left.iterdir()}


@pytest.mark.parametrize("name", [shard_name(0, 0) + ".tmp", shard_name(0, 0)])
def test_retention_takes_what_a_keeper_that_was_killed_has_left(
    run_folder: Path, name: str
) -> None:
    """Of its own timeline, too, where a later segment is whole: none is written before another."""
    log = LogOptions(to="disk", batch_steps=2, audit=False)
    with Trained(run_folder, log=log, every=8, keep=1) as run:
        run.train_slowly(2)
        left = leave(run_folder, 0, 1, name)
        run.train_slowly(8)
        assert not left.exists()


def test_what_may_be_being_written_stays(tmp_path: Path) -> None:
    names = shard_name(0, 0), marker_name(0)
    leave(tmp_path, 0, 2, *names)
    being_written = leave(tmp_path, 2, 4, shard_name(0, 0) + ".tmp")
    own: dict[str, Any] = {"own": 1}
    assert delete_segments(FILES, tmp_path, 1, lambda _: True, lambda: None, **own) == 1
    assert in_log(tmp_path) == [f"{being_written.name}/{shard_name(0, 0)}.tmp"]


def test_of_another_rank_a_later_one_says_nothing(tmp_path: Path) -> None:
    """They write to one folder, each at its own pace."""
    leave(tmp_path, 0, 2, shard_name(0, 0), shard_name(1, 0) + ".tmp")
    leave(tmp_path, 2, 4, shard_name(1, 0), marker_name(1))
    before = in_log(tmp_path)
    own: dict[str, Any] = {"own": 1, "rank": 0}
    delete_segments(FILES, tmp_path, 1, lambda span: span[1:] == (0, 2), lambda: None, **own)
    assert in_log(tmp_path) == before
    own = {"own": 1, "rank": 1}
    delete_segments(FILES, tmp_path, 1, lambda span: span[1:] == (0, 2), lambda: None, **own)
    assert in_log(tmp_path) == [name for name in before if ".tmp" not in name]
