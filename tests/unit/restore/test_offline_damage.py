"""A spoiled log: every flipped bit is noticed and named, and replay stops before it (I3, I4)."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.commit.lineage import BaseId
from everstep.errors import DamageError, FormatError, OptionError, RecoveryError
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.names import segment_dir
from everstep.format.writer import ChunkRing
from everstep.restore.offline.rebuild import Rebuilder
from everstep.restore.offline.run_log import RunLog
from everstep.run.scan import scan_run
from everstep.run.segments import _disorder, read_segment, scan_log, validated
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import plan_shards
from tests.support.logged import (
    World,
    edit_base,
    invoke,
    rebuilder_of,
    record,
    rewrite_segment,
    segments_of,
    train,
    write_segment,
)
from tests.support.world import TIMEOUT_S, base_folder, flip

RUN = "0" * 32


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base 1, and segments of steps 1-2, 3-4, 5-6, 7-8."""
    run = tmp_path_factory.mktemp("damage") / "run"
    train(run, World(), 8, every=1000)
    for base in (run / "timeline-00001" / "base").iterdir():
        if int(base.name) > 1:
            shutil.rmtree(base)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def newest(run: Path) -> int:
    """The last step that base and log give, by really building it."""
    with rebuilder_of(run) as rebuilder:
        steps = {1} | {step for _, step in rebuilder.log.replayable()}
        for step in sorted(steps, reverse=True):
            try:
                assert rebuilder.state_at(step).step == step
                return step
            except RecoveryError:
                continue
    raise AssertionError("not even the base")


def problems(run: Path) -> list[str]:
    with rebuilder_of(run) as rebuilder:
        return [one.problem for one in rebuilder.log.segments if one.problem is not None]


# --- Every byte -------------------------------------------------------------------------


def small_record(kind: Any, step: int, lsn: int) -> LogRecord:
    entries = [Entry.whole("gradient/w", "F32", (3,)), Entry.whole("gradient/b", "BF16", (2,))]
    (layout,) = plan_shards(entries)
    data = memoryview(bytearray(range(step, step + layout.size_bytes)))
    objects = {"update": b"\x81\x01\x02"}
    head = RecordHead(kind, 1, step, lsn, "shape")
    return LogRecord(head, layout, objects, data, record_digest(data, objects))


def small_segment(folder: Path) -> list[LogRecord]:
    records = [small_record("update", 1, 1), small_record("mark", 1, 1)]
    (folder / "timeline-00001").mkdir(parents=True)
    ring = ChunkRing(2, 1)
    try:
        write_segment(folder, RUN, records, 0, ring)
    finally:
        ring.close()
    return records


def test_a_flipped_bit_at_every_byte_is_noticed_and_named(tmpfs_folder: Path) -> None:
    """The header with its padding, the tensors, the index; and the marker."""
    filesystem, ring = PosixFileSystem(), ChunkRing(2, 1)
    records = small_segment(tmpfs_folder)
    (whole,) = segments_of(tmpfs_folder)
    found = read_segment(filesystem, whole, ring, timeout_s=TIMEOUT_S)
    assert [one.head for one in found] == [one.head for one in records]
    assert [bytes(one.data) for one in found] == [bytes(one.data) for one in records]
    unnoticed = []
    try:
        for name in ("rank-00000.safetensors", "rank-00000.done"):
            path = Path(whole.path) / name
            data = path.read_bytes()
            for at in range(len(data)):
                path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
                (segment,) = (validated(one, RUN) for one in segments_of(tmpfs_folder))
                said = segment.problem
                if said is None:
                    try:
                        read_segment(filesystem, segment, ring, timeout_s=TIMEOUT_S)
                    except (DamageError, FormatError) as error:
                        said = error.message
                if said is None or str(whole.path) not in said:
                    unnoticed.append((name, at, said))
            path.write_bytes(data)
    finally:
        ring.close()
    assert unnoticed == []


@settings(max_examples=20)
@given(data=st.data())
def test_a_flipped_bit_anywhere_stops_replay_before_it(
    data: st.DataObject, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("flip") / "run"
    shutil.copytree(template, run)
    segment = data.draw(st.sampled_from(segments_of(run)))
    name = data.draw(st.sampled_from(["rank-00000.safetensors", "rank-00000.done"]))
    path = Path(segment.path) / name
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7)))
    reached = newest(run)
    if reached == 8:  # base 1 makes what the first segment holds of step 1 superfluous
        assert segment.after == 0
    else:  # segments are read record by record: what comes before the damage is of use
        assert max(1, segment.after) <= reached < segment.last
    with rebuilder_of(run) as damaged, rebuilder_of(template) as whole:
        found, wanted = (
            damaged.state_at(reached).state.tensors,
            whole.state_at(reached).state.tensors,
        )
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), key
    result = invoke("verify", run)
    assert result.exit_code == 1
    assert segment.path.name in result.stdout


@settings(max_examples=15)
@given(data=st.data())
def test_a_torn_tail(
    data: st.DataObject, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("torn") / "run"
    shutil.copytree(template, run)
    segment = data.draw(st.sampled_from(segments_of(run)))
    path = Path(segment.path) / "rank-00000.safetensors"
    keep = data.draw(st.integers(0, path.stat().st_size - 1))
    path.write_bytes(path.read_bytes()[:keep])
    assert newest(run) == max(1, segment.after)
    (said,) = problems(run)
    assert f"{keep} bytes, but" in said
    with rebuilder_of(run) as rebuilder, pytest.raises((OptionError, RecoveryError)) as caught:
        rebuilder.state_at(segment.last)
    assert str(segment.path) in str(caught.value)


# --- Missing, foreign, out of order -----------------------------------------------------


def test_a_missing_marker(run: Path) -> None:
    """A segment without one was never finished."""
    segment = segments_of(run)[2]
    (Path(segment.path) / "rank-00000.done").unlink()
    assert newest(run) == 4
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.log.reaches()[1].stopped == "step 5 has no mark"
        with pytest.raises(OptionError) as caught:
            rebuilder.state_at(5)
        assert caught.value.hint == "existing steps: 1 to 4"
        with pytest.raises(RecoveryError, match="not lead to step 7: step 5 has no mark"):
            rebuilder.state_at(7)


def verified(run: Path, status: int) -> str:
    """What ``everstep verify`` says, its lines joined."""
    result = invoke("verify", run)
    assert result.exit_code == status, result.stdout
    return " ".join(result.stdout.split())


def test_verify_tells_of_steps_after_a_hole_that_no_base_covers(run: Path) -> None:
    verified(run, 0)
    last = segments_of(run)[3]
    (Path(last.path) / "rank-00000.done").rename(last.path / "aside")
    verified(run, 0)  # nothing was recorded after it: it was never finished
    (Path(last.path) / "aside").rename(last.path / "rank-00000.done")
    (Path(segments_of(run)[2].path) / "rank-00000.done").unlink()
    told = verified(run, 1)
    assert "timeline-00001/log" in told
    assert "up to step 8, cannot be restored: step 5 has no mark" in told
    assert "1 damage" in told


def test_verify_of_a_hole_before_a_newer_base(tmp_path: Path) -> None:
    """Where something could not be recorded, training takes a new base: that is no damage. One
    that is committed while the log is being looked at counts, too."""
    run = tmp_path / "run"
    train(run, World(), 8)
    (Path(segments_of(run)[2].path) / "rank-00000.done").unlink()
    verified(run, 0)
    newest_base, aside = base_folder(run, 8), tmp_path / "aside"
    newest_base.rename(aside)
    filesystem = PosixFileSystem()
    before = scan_run(filesystem, PurePath(run))
    log = RunLog.of(filesystem, before)
    cut = log.cut_off(before)
    assert cut is not None
    assert cut[0] == BaseId(1, 5)
    aside.rename(newest_base)
    assert log.cut_off(scan_run(filesystem, PurePath(run))) is None


def test_without_a_base_before_it(run: Path) -> None:
    shutil.rmtree(run / "timeline-00001" / "base" / "000000000001")
    with (
        rebuilder_of(run) as rebuilder,
        pytest.raises(
            RecoveryError, match="does not lead to step 5: no base before it exists any more"
        ),
    ):
        rebuilder.state_at(5)


def test_a_missing_file(run: Path) -> None:
    segment = segments_of(run)[2]
    (Path(segment.path) / "rank-00000.safetensors").unlink()
    with rebuilder_of(run) as rebuilder:
        assert [one.last for one in rebuilder.log.segments if one.problem] == [6]
    assert newest(run) == 4
    assert segment.path.name in invoke("verify", run).stdout


def test_a_segment_of_another_timeline(run: Path) -> None:
    """A folder that somebody has copied; and records that claim to be of another."""
    segment = segments_of(run)[2]
    shutil.copytree(run / "timeline-00001" / "log", run / "timeline-00002" / "log")
    found = [validated(one, None) for one in scan_log(PosixFileSystem(), PurePath(run), [2])]
    assert all("belongs to another segment" in (one.problem or "") for one in found)
    assert len(found) == 4
    heads = tuple(dataclasses.replace(head, timeline=2) for head in segment.heads)
    odd = validated(dataclasses.replace(segment, heads=heads), None)
    assert "record 0 belongs to timeline 2" in (odd.problem or "")
    assert odd.heads == ()


def test_a_segment_of_another_run(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    train(other, World(seed=5), 8, every=1000)
    theirs = segments_of(other)[2]
    mine = segments_of(run)[2]
    shutil.rmtree(mine.path)
    shutil.copytree(theirs.path, mine.path)
    assert newest(run) == 4
    (said,) = problems(run)
    assert "belongs to another run" in said


Spoil = Callable[[list[LogRecord]], list[LogRecord]]

DISORDER: dict[str, tuple[Spoil, str]] = {
    "steps swapped": (lambda r: [*r[2:], *r[:2]], "is out of order"),
    "mark before its update": (lambda r: [r[1], r[0], r[2], r[3]], "is out of order"),
    "an update twice": (lambda r: [r[0], r[0], *r[1:]], "is out of order"),
    "a mark twice": (lambda r: [r[0], r[1], r[1], *r[2:]], "is out of order"),
    "an update of an earlier step": (
        lambda r: [r[0], r[1], record(r[2], step=5), r[3]],
        "is out of order",
    ),
    "a mark of an earlier update": (
        lambda r: [*r[:3], record(r[3], lsn=5)],
        "is out of order",
    ),
}


@pytest.mark.parametrize("name", DISORDER)
def test_records_out_of_order(name: str, run: Path) -> None:
    spoil, told = DISORDER[name]
    segment = segments_of(run)[2]
    rewrite_segment(run, segment, spoil)
    moved = segments_of(run)
    if name == "steps swapped":  # ends with step 5 then: so it says
        assert [one.last for one in moved] == [2, 4, 5, 8]
    (said,) = problems(run)
    assert told in said
    assert newest(run) == 4


def test_a_segment_ends_with_the_mark_of_its_last_step() -> None:
    head = RecordHead("mark", 1, 2, 1, "s")
    assert _disorder([], 1, 2) == "does not end with the mark of step 2"
    assert _disorder([head], 1, 3) == "does not end with the mark of step 3"
    assert _disorder([head], 1, 2) is None


HOLES: dict[str, tuple[Spoil, int, str]] = {
    "an update": (lambda r: [r[1], r[2], r[3]], 4, "update 5 of step 5 is missing"),
    "the second update": (lambda r: [r[0], r[1], r[3]], 5, "update 6 of step 6 is missing"),
    "a mark": (lambda r: [r[0], r[2], r[3]], 4, "step 5 has no mark"),
    "another shape": (
        lambda r: [r[0], r[1], r[2], record(r[3], shape="x")],
        5,
        "at step 6 the state has another composition",
    ),
}


@pytest.mark.parametrize("name", HOLES)
def test_holes(name: str, run: Path) -> None:
    """Segments that are whole, but of records that are not all of them."""
    spoil, last, told = HOLES[name]
    rewrite_segment(run, segments_of(run)[2], spoil)
    assert problems(run) == []
    assert newest(run) == last
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.log.reaches()[1].stopped == told


def test_a_record_whose_own_digest_is_wrong(run: Path) -> None:
    """The segment vouches for its bytes, but they are not those that arrived."""
    segment = segments_of(run)[2]

    def spoil(records: list[LogRecord]) -> list[LogRecord]:
        data = memoryview(bytearray(records[2].data))
        data[0] ^= 1
        return [*records[:2], dataclasses.replace(records[2], data=data), records[3]]

    rewrite_segment(run, segment, spoil)
    assert newest(run) == 5  # step 5 lies before it, in the same segment
    with rebuilder_of(run) as rebuilder, pytest.raises(RecoveryError) as caught:
        rebuilder.state_at(6)
    assert "update 6 of step 6, timeline 1 is damaged" in caught.value.message


def test_a_mark_that_does_not_fit_the_base(run: Path) -> None:
    """It claims the shape of the base, but has an entry that the base has not."""

    def spoil(records: list[LogRecord]) -> list[LogRecord]:
        mark = records[3]
        first, *rest = mark.layout.placed
        entry = dataclasses.replace(first.entry, name="nobody/knows")
        layout = dataclasses.replace(
            mark.layout, placed=(dataclasses.replace(first, entry=entry), *rest)
        )
        return [*records[:3], dataclasses.replace(mark, layout=layout)]

    rewrite_segment(run, segments_of(run)[2], spoil)
    with rebuilder_of(run) as rebuilder, pytest.raises(RecoveryError) as caught:
        rebuilder.state_at(6)
    assert "shape or dtype of 'nobody/knows' differs from the base" in caught.value.message


def test_a_damaged_base_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    states = train(run, World(), 8, every=4)
    with rebuilder_of(run) as rebuilder:
        assert rebuilder.state_at(6).base.step == 4
    flip(run / "timeline-00001/base/000000000004/rank-00000.safetensors", -9)
    with rebuilder_of(run) as rebuilder:
        rebuilt = rebuilder.state_at(6)
    assert (rebuilt.base.step, rebuilt.replayed, rebuilt.exact) == (1, 5, True)
    assert bytes(rebuilt.state.bytes_of("model/0.weight")) == states[6]["0.weight"]
    (skipped,) = rebuilt.skipped
    assert (skipped.step, "its digest does not match" in skipped.reason) == (4, True)


def test_a_base_of_another_shape_is_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    states = train(run, World(), 8, every=4)
    edit_base(run, 4, lambda state: state.aliases.update({"an/alias": "model/0.weight"}))
    with rebuilder_of(run) as rebuilder:
        rebuilt = rebuilder.state_at(6)
    assert rebuilt.base.step == 1
    assert bytes(rebuilt.state.bytes_of("model/0.weight")) == states[6]["0.weight"]
    assert "belongs to a state of another composition" in rebuilt.skipped[0].reason


def test_segments_that_vanish_while_they_are_read(run: Path) -> None:
    """A process at work deletes segments that nobody needs."""
    filesystem, ring = PosixFileSystem(), ChunkRing(2, 1)
    try:
        log = RunLog.of(filesystem, scan_run(filesystem, PurePath(run)))
        shutil.rmtree(segment_dir(PurePath(run), 1, 4, 6))
        with pytest.raises(RecoveryError, match="No such file"):
            Rebuilder(filesystem, log, ring, timeout_s=TIMEOUT_S).state_at(6)
    finally:
        ring.close()
