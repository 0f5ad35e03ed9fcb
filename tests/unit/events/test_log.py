"""The event log: lines of JSON in the run folder, read back even if the last one is torn."""

from __future__ import annotations

import errno
import logging
from pathlib import Path, PurePath

import pytest

from everstep.events import KINDS, Event, EventLog, EventStream, read_events
from everstep.events.log import EventFollower, event_file
from everstep.seams import ManualClock, PosixFileSystem, WriteFile


def event(step: int, *, timeline: int = 1, rank: int = 0, kind: str = "base_begun") -> Event:
    return Event(kind, 1000.0 + step, rank, timeline, step, {"seconds": 0.25, "of": {"a": None}})


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0)
    written = [event(0, timeline=0), event(1), event(2), event(3, timeline=2)]
    for one in written:
        log(one)
    log.close()
    assert read_events(tmp_path) == written
    # Those before the first timeline are in the file of the first.
    assert len(event_file(tmp_path, 1, 0).parts) == len(tmp_path.parts) + 3
    lines = Path(event_file(tmp_path, 1, 0)).read_text().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith('{"event":"base_begun","unix_s":1001.0,"rank":0,"timeline":1,')


def test_ranks_are_merged_by_time(tmp_path: Path) -> None:
    for rank, steps in ((0, (1, 4)), (1, (2, 3))):
        log = EventLog(PosixFileSystem(), tmp_path, rank)
        for step in steps:
            log(event(step, rank=rank))
        log.close()
    assert [one.step for one in read_events(tmp_path)] == [1, 2, 3, 4]
    assert [one.step for one in read_events(tmp_path, rank=1)] == [2, 3]


def test_a_file_that_has_grown_is_followed_by_a_new_one(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0, bytes_max=1000)
    for step in range(100):
        log(event(step))
    log.close()
    sizes = [file.stat().st_size for file in event_file_dir(tmp_path).iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 1200
    steps = [one.step for one in read_events(tmp_path)]
    assert steps == list(range(steps[0], 100))


def event_file_dir(run: Path) -> Path:
    return Path(event_file(run, 1, 0)).parent


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0)
    log(event(1))
    log(event(2))
    log.close()
    path = Path(event_file(tmp_path, 1, 0))
    content = path.read_bytes()
    no_events = b"\n\xff\n{}\n" + b'{"event":"x","unix_s":"y"}\n'
    path.write_bytes(b"[1]\n" + content[:-20] + no_events + content[:20])
    assert [one.step for one in read_events(tmp_path)] == [1]
    (path.parent / "other.txt").write_bytes(content)
    assert len(read_events(tmp_path)) == 1


def test_events_are_followed_while_they_are_written(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0, bytes_max=1000)
    follower = EventFollower(tmp_path)
    assert follower.read() == []
    followed: list[int] = []
    for step in range(40):
        log(event(step))
        if step % 3 == 0:
            followed += [one.step for one in follower.read()]
    path = Path(event_file(tmp_path, 1, 0))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])  # a line that is being written
    followed += [one.step for one in follower.read()]
    path.write_bytes(whole)
    followed += [one.step for one in follower.read()]
    assert followed == list(range(40))


def test_a_folder_left_behind_is_no_obstacle(tmp_path: Path) -> None:
    for step in (1, 2):
        log = EventLog(PosixFileSystem(), tmp_path, 0)
        log(event(step))
        log.close()
    assert [one.step for one in read_events(tmp_path)] == [1, 2]


def test_a_run_without_a_log_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


class Full(PosixFileSystem):
    """A disk on which nothing more can be written."""

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        raise OSError(errno.ENOSPC, "no space left on device")


def test_a_full_disk_ends_the_log_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventStream(ManualClock(), 0, [EventLog(Full(), tmp_path, 0)])
    events.timeline = 1
    with caplog.at_level(logging.WARNING, "everstep"):
        for step in range(10):
            events.emit("base_begun", step)
        events.close()
    assert "no space left on device" in caplog.text
    assert "it is called no more" in caplog.text


def test_each_kind_is_described() -> None:
    assert all(text and not text.endswith(".") for text in KINDS.values())
