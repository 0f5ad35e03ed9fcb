"""The event log: lines of JSON in the run folder, read back even if the last one is torn."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path, PurePath

import pytest

from everstep.events import KINDS, Event, EventLog, read_events
from everstep.events.log import RETRY_S, EventFollower, event_file
from everstep.seams import PosixFileSystem, WriteFile


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


def test_files_of_an_earlier_run_are_no_obstacle(tmp_path: Path) -> None:
    for step in (1, 2):
        log = EventLog(PosixFileSystem(), tmp_path, 0)
        log(event(step))
        log.close()
    assert [one.step for one in read_events(tmp_path)] == [1, 2]


def test_a_run_without_a_log_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []


class Disk(PosixFileSystem):
    """A disk that may be full."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().create(path, direct=direct)


def test_a_full_disk_leaves_a_gap_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    now_s = [0.0]
    log = EventLog(disk, tmp_path, 0, now_s=lambda: now_s[0])
    log(event(1))
    disk.is_full = True
    with caplog.at_level(logging.WARNING, "everstep"):
        for step in range(2, 8):
            log(event(step, timeline=2))
            now_s[0] += RETRY_S / 2
    assert caplog.text.count("no space left on device") == 1
    disk.is_full = False
    now_s[0] += RETRY_S
    for step in (9, 10):
        log(event(step, timeline=2))
    log.close()
    assert [one.step for one in read_events(tmp_path)] == [1, 9, 10]


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0)
    log(event(1))
    shutil.rmtree(tmp_path / "events")
    log(event(2))
    assert read_events(tmp_path) == []
    log(event(3, kind="progress"))
    log(event(4))
    log.close()
    assert [one.step for one in read_events(tmp_path)] == [3, 4]


def test_a_clock_that_goes_back_changes_no_order(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0)
    for step, unix_s in ((1, 1000.0), (2, 400.0), (3, 500.0)):
        log(Event("notice", unix_s, 0, 1, step))
    log(Event("notice", 100.0, 0, 2, 4))
    log(Event("notice", 2000.0, 0, 1, 9))  # told late, of a timeline that was left
    log.close()
    assert [one.step for one in read_events(tmp_path)] == [1, 2, 3, 4]


HOSTILE = (
    b"[" * 100_000,
    b'{"event":"notice","unix_s":' + b"9" * 400 + b',"rank":0,"timeline":1,"step":1}',
    b'{"event":"notice","unix_s":1e300,"rank":0,"timeline":1,"step":1}',
    b'{"event":"notice","unix_s":"nan","rank":0,"timeline":1,"step":1}',
    b'{"event":"notice","unix_s":1,"rank":0,"timeline":1,"step":-1}',
    b'{"event":"notice","unix_s":1,"rank":0,"timeline":1,"step":"12"}',
    b'{"event":"notice","unix_s":1,"rank":7,"timeline":1,"step":1}',
    b'{"event":"notice","unix_s":1,"rank":0,"timeline":999999999,"step":1}',
    b'{"event":"notice","unix_s":1,"rank":true,"timeline":1,"step":1}',
    *(
        b'{"event":"progress","unix_s":1,"rank":0,"timeline":1,"step":1,' + field + b"}"
        for field in (
            b'"step_s":"1"',
            b'"step_s":[1]',
            b'"step_s":1e400',
            b'"stall_s":5',
            b'"stall_s":null',
            b'"stall_s":{"gate":"1"}',
            b'"stall_s":{"gate":{}}',
            b'"recoverable_from":[1]',
            b'"recoverable_from":{"peer":"1"}',
            b'"durable_step":"1"',
            b'"written_bytes":"1"',
            b'"forecast_bytes_per_day":"1"',
            b'"saves":"1"',
            b'"world":"2"',
            b'"seconds":{}',
        )
    ),
)


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_was_made_up_is_left_out(tmp_path: Path, line: bytes) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0)
    log(event(1))
    log.close()
    path = Path(event_file(tmp_path, 1, 0))
    path.write_bytes(path.read_bytes() + line + b"\n")
    assert [one.step for one in read_events(tmp_path)] == [1]


def test_files_that_are_none_are_left_out(tmp_path: Path) -> None:
    log = EventLog(PosixFileSystem(), tmp_path, 0)
    log(event(1))
    log.close()
    os.mkfifo(event_file(tmp_path, 1, 5))
    (tmp_path / "events" / "timeline-00009").write_text("x")
    Path(event_file(tmp_path, 1, 6)).symlink_to(event_file(tmp_path, 1, 0))
    assert [one.step for one in read_events(tmp_path)] == [1]


def test_each_kind_is_described() -> None:
    assert all(text and not text.endswith(".") for text in KINDS.values())
