"""The inventory of a run folder is of what lies there now, however often it was looked at."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

import pytest

from everstep.format.names import (
    BASE_DIR,
    LOG_DIR,
    RUN_RECORD,
    TIMELINE_RECORD,
    marker_name,
    segment_dir,
    timeline_dir,
)
from everstep.format.records import RunRecord, TimelineRecord
from everstep.run.scan import TimelineCache, scan_run
from everstep.seams import PosixFileSystem
from tests.support.world import HookedFileSystem

FS = PosixFileSystem()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / RUN_RECORD).write_bytes(RunRecord(tmp_path.name).encode())
    for number in range(1, 6):
        parent = number - 1 or None
        record = TimelineRecord(tmp_path.name, number, parent, 0, True, 1, {}, 0.0)
        path = Path(timeline_dir(tmp_path, number))
        path.mkdir()
        (path / TIMELINE_RECORD).write_bytes(record.encode())
    return tmp_path


def record_of(run: Path, timeline: int) -> Path:
    return Path(timeline_dir(run, timeline) / TIMELINE_RECORD)


@pytest.mark.parametrize("known", [None, TimelineCache()], ids=["at once", "in one process"])
def test_what_has_changed_since_is_noticed(run: Path, known: TimelineCache | None) -> None:
    for number in range(1, 6):  # else what is changed at once may have the same time
        os.utime(record_of(run, number), (1e9, 1e9))
    assert not scan_run(FS, run, known).problems
    path = record_of(run, 2)
    data = bytearray(path.read_bytes())
    data[data.index(b"true")] ^= 1
    path.write_bytes(data)
    for _ in range(2):  # what was refused is not taken for good the next time
        found = scan_run(FS, run, known)
        assert [place for place, _ in found.problems] == [path]
        assert found.timelines[2] is None
        assert found.timelines[3] is not None


def test_one_process_reads_each_record_once(run: Path) -> None:
    fs, known = HookedFileSystem(), TimelineCache()
    first = scan_run(fs, run, known)
    assert scan_run(fs, run, known) == first
    read = [path for op, path in fs.seen if op == "open" and path.name == TIMELINE_RECORD]
    assert read == [record_of(run, number) for number in range(1, 6)]


@pytest.mark.parametrize("by", ["another", "nothing", "a shorter one", "a link"])
def test_a_record_whose_place_is_taken_counts_no_more(run: Path, by: str) -> None:
    """As in a folder that is put back as it was once, and resumed again."""
    known, path = TimelineCache(), record_of(run, 5)
    assert scan_run(FS, run, known).branches[5].parent == 4
    other = TimelineRecord(run.name, 5, 1, 0, True, 1, {}, 0.0).encode()
    path.unlink()
    if by == "a link":
        (run / "aside").write_bytes(other)
        path.symlink_to(run / "aside")
    elif by != "nothing":
        path.write_bytes(other[:-1] if by == "a shorter one" else other)
        os.utime(path, (1e9, 1e9))
    found = scan_run(FS, run, known)
    assert found == scan_run(FS, run)
    if by == "another":
        assert found.branches[5].parent == 1
    else:
        assert found.timelines.get(5) is None


def test_what_a_timeline_that_was_left_may_hold(run: Path) -> None:
    Path(timeline_dir(run, 2) / LOG_DIR).mkdir()
    found = scan_run(FS, run)
    held = {number for number in range(1, 7) if found.may_hold(number, LOG_DIR)}
    assert held == {2, 5, 6}  # the newest is being written, and of the last nothing is known


def test_the_same_bytes_elsewhere_are_judged_by_where_they_are(run: Path) -> None:
    scan_run(FS, run)
    record_of(run, 4).write_bytes(record_of(run, 2).read_bytes())
    found = scan_run(FS, run)
    assert found.problems == [(record_of(run, 4), "belongs to another timeline")]


def test_the_same_damage_in_two_places_is_told_of_both(run: Path) -> None:
    for number in (2, 3):
        record_of(run, number).write_bytes(b"{}")
    found = scan_run(FS, run)
    assert [place for place, _ in found.problems] == [record_of(run, 2), record_of(run, 3)]
    assert all(why == "timeline.json: not a timeline record" for _, why in found.problems)


def test_bytes_of_another_kind_of_record_are_no_record_of_this_one(run: Path) -> None:
    scan_run(FS, run)
    record_of(run, 5).write_bytes((run / RUN_RECORD).read_bytes())
    found = scan_run(FS, run)
    assert found.problems == [(record_of(run, 5), "timeline.json: not a timeline record")]


@pytest.mark.parametrize("lossy", [False, True])
def test_a_timeline_with_a_log_and_without_bases_was_trained_on(run: Path, lossy: bool) -> None:
    """As a start takes it: one that rests on nothing is skipped by those behind it."""
    assert scan_run(FS, run).branches[5].parent == 4
    segment = Path(segment_dir(run, 3, 0, 8, lossy=lossy))
    segment.mkdir(parents=True)
    assert scan_run(FS, run).logged == set()  # not finished
    (segment / marker_name(1)).touch()
    found = scan_run(FS, run)
    assert found.logged == {3}
    parents = {number: branch.parent for number, branch in found.branches.items()}
    assert parents == {1: None, 2: 1, 3: 2, 4: 3, 5: 3}
    assert found.branches[3].fork_step == 0


@pytest.mark.parametrize("folder", [LOG_DIR, BASE_DIR])
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_listed_folder_that_is_missing(run: Path, folder: str, comes_back: bool) -> None:
    """Missing once, another process is at work, and the run is read again. Missing for good, it is
    an empty folder of a place for copies: the run has nothing there."""
    missing = Path(timeline_dir(run, 5)) / folder
    missing.mkdir()
    passes: list[PurePath] = []

    def refuse(op: str, path: PurePath) -> None:
        if op == "scan" and path == run:
            passes.append(path)
        if op == "scan" and path == missing and not (comes_back and len(passes) > 1):
            raise FileNotFoundError(path)

    found = scan_run(HookedFileSystem(refuse), run)
    assert set(found.timelines) == {1, 2, 3, 4, 5}
    assert not found.bases
    assert (len(passes) == 2) == comes_back
    assert len(passes) > 1
