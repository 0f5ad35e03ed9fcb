"""The log in other tiers: whole steps or nothing, whatever fails; nothing after the fence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from everstep.commit.lineage import BaseId
from everstep.commit.retention import KeepRules
from everstep.errors import (
    FencedError,
    FormatError,
    OptionError,
    StorageError,
    UnreachableError,
)
from everstep.format.digests import digest
from everstep.format.header import ShardIdentity
from everstep.format.log import LogRecord
from everstep.format.names import TIMELINE_RECORD, base_dir, timeline_dir
from everstep.format.records import FileRecord, Manifest, Marker, RunRecord, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.keeper.ship import log_copies
from everstep.keeper.ship.courier import ROOT, CopyPlace, Courier
from everstep.keeper.ship.log_copies import LogCopies
from everstep.restore.log import LogFound
from everstep.run.scan import Inventory
from everstep.run.segments import scan_log
from everstep.seams import ManualClock, failpoints
from everstep.testing.conformance import walk
from everstep.testing.faultytier import FaultyTier, TierFault
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from everstep.tiers.options import PeerOptions, TierOptions, validate_tiers
from everstep.tiers.retry import RetryingTier
from tests.support.ranks.copying import names_in
from tests.support.ranks.peer_logs import IDENTITY, RUN, Copying, Log, records_of_steps
from tests.support.ranks.peering import record_of


def test_steps_are_copied_batch_by_batch() -> None:
    copying = Copying()
    copying.train(1)
    assert copying.there() == []
    copying.train(2, 3, 4, 5)
    assert copying.there() == [(0, 2), (2, 4)]
    copying.turn(flush=True)
    assert copying.there() == [(0, 2), (2, 4), (4, 5)]
    assert (copying.stats.copied, copying.stats.step) == (5, 5)
    assert copying.there(rank=0) == [], "each rank's are its own"


def test_many_steps_that_have_waited_make_one_segment() -> None:
    copying = Copying()
    for step in range(1, 8):
        copying.log.step(step)
    copying.turn()
    assert copying.there() == [(0, 7)]
    assert len(names_in(copying.tier)) == 2


FAULTS = ["unavailable", "timeout", "lost_answer"]


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("at", range(1, 13))
def test_at_any_failure_what_is_there_is_whole_and_the_rest_follows(kind: Any, at: int) -> None:
    copying, failed = Copying(place := MemoryTier()), 0
    tier = FaultyTier(place, [TierFault(kind, at)])
    copying.copies = copying.again(tier, batch_steps=2)
    for step in range(1, 7):
        copying.log.step(step)
        try:
            copying.turn()
        except UnreachableError:
            failed += 1
        copying.there()  # compares
    copying.turn(flush=True)
    steps = [step for after, last in copying.there() for step in range(after + 1, last + 1)]
    assert steps == list(range(1, 7))
    assert failed <= 1


def test_whoever_dies_before_a_marker_leaves_nothing_that_is_read() -> None:
    copying = Copying()
    copying.train(1, 2)
    failpoints.arm("log_copy.before_marker", "raise")
    try:
        with pytest.raises(failpoints.FailpointError):
            copying.train(3, 4)
    finally:
        failpoints.disarm_all()
    assert copying.there() == [(0, 2)]
    copying.again(copying.tier, batch_steps=1).turn()
    assert copying.there() == [(0, 2), (0, 4)], "a keeper begins with what is in memory"


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_behind_retries_nobody_notices_faults(part: int) -> None:
    for seed in range(5 * part, 5 * part + 5):
        print("seed", seed)
        faulty = FaultyTier.seeded(MemoryTier(), seed)
        copying = Copying()
        copying.tier = RetryingTier(faulty, clock=copying.clock)
        copying.copies = copying.again(copying.tier, batch_steps=2)
        copying.train(*range(1, 9))
        assert copying.there() == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_whoever_is_fenced_off_copies_nothing() -> None:
    copying = Copying()
    copying.train(1, 2)
    name = (timeline_dir(ROOT, 2) / TIMELINE_RECORD).relative_to(ROOT).as_posix()
    copying.tier.create(name, record_of(2).encode())
    with pytest.raises(FencedError):
        copying.train(3, 4)
    assert copying.there() == [(0, 2)]


def test_memory_that_is_used_again_is_not_copied() -> None:
    """Nobody has said so yet; its digests do."""
    copying = Copying()
    copying.train(1, 2)
    copying.log.step(3)
    copying.log.step(4)
    copying.log.overwrite()
    copying.turn()
    assert copying.there() == [(0, 2)]
    assert (copying.stats.missed, len(copying.posted)) == (2, 1)
    assert "steps 3 to 4" in str(copying.posted[0])
    copying.train(5, 6)
    assert copying.there() == [(0, 2), (4, 6)]
    copying.log.step(7)
    copying.log.overwrite()
    copying.turn()
    assert copying.stats.missed == 3
    assert len(copying.posted) == 1, "once is enough"


def test_steps_before_a_durable_base_are_not_worth_a_word() -> None:
    copying = Copying()
    copying.log.step(1)
    copying.log.overwrite()
    copying.copies.base_durable(BaseId(1, 1))
    copying.turn()
    assert (copying.stats.missed, copying.posted) == (1, [])


def test_steps_that_were_never_recorded_are_not_missed() -> None:
    """Training has taken a base there, and would be told that the store is too slow."""
    copying = Copying()
    copying.train(1, 2, 5, 6)
    assert copying.there() == [(0, 2), (4, 6)]
    assert (copying.stats.missed, copying.posted) == (0, [])


def test_steps_before_a_base_that_is_being_told_of_are_not_worth_a_word() -> None:
    """Training lets go of them as soon as it hears of it, before retention is over."""
    copying = Copying()
    copying.train(1, 2)
    copying.log.step(3)
    copying.copies.base_known(BaseId(1, 3))
    copying.log.forget_all()
    copying.train(4, 5)
    assert (copying.stats.missed, copying.posted) == (1, [])


def test_what_was_let_go_is_missed_and_leaves_a_hole_between_segments() -> None:
    copying = Copying()
    copying.train(1, 2)
    copying.log.step(3)
    copying.log.forget_all()
    copying.train(4, 5)
    assert copying.there() == [(0, 2), (3, 5)]
    assert copying.stats.missed == 1


def test_a_segment_ends_before_a_hole() -> None:
    copying = Copying(batch_steps=10)
    copying.train(1, 2)
    copying.log.step(3)
    copying.log.forget_all()
    copying.train(4, 5)
    copying.turn(flush=True)
    assert copying.there() == [(0, 2), (3, 5)]


class _Calling(MemoryTier):
    """Calls back in each transfer."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def put(self, name: str, source: Any) -> None:
        self._call()
        super().put(name, source)


def test_a_keeper_that_is_about_to_end_begins_no_other_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But if training has died, it copies all that there is."""
    monkeypatch.setattr(log_copies, "_SEGMENT_BYTES", 1)
    copying = Copying(_Calling(lambda: copying.copies.pause()), batch_steps=1)
    for step in (1, 2, 3):
        copying.log.step(step)
    copying.turn()
    assert copying.there() == [(0, 1)]
    copying.turn()
    assert copying.there() == [(0, 1)]
    copying.copies.courier.wake()
    copying.turn()
    assert copying.there() == [(0, 1), (1, 2)], "it has not ended"
    copying.log.step(4)
    copying.turn(flush=True)
    assert copying.there() == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_whoever_is_shut_out_by_its_own_process_says_so_only_if_it_goes_on() -> None:
    copying = Copying(batch_steps=1)
    copying.train(1)
    name = (timeline_dir(ROOT, 2) / TIMELINE_RECORD).relative_to(ROOT).as_posix()
    copying.tier.create(name, record_of(2).encode())
    error = FencedError("shut out")
    copying.copies.pause()
    copying.copies.courier.fail(error, for_good=True)
    assert copying.posted == []
    copying.copies.courier.wake()
    copying.copies.courier.fail(error, for_good=True)
    assert copying.posted == [error]


def test_each_outage_is_told_of_once() -> None:
    """A thread's part of it, for any error; what lasts is in the log of the keeper."""
    copying, first, second = Copying(batch_steps=1), StorageError("one"), StorageError("another")
    copying.train(1)
    for error in (first, first):
        copying.copies.courier.fail(error)
    assert copying.posted == [first]
    copying.clock.advance(3600.0)
    copying.train(2)
    assert copying.there() == [(0, 1), (1, 2)]
    for error in (second, second):
        copying.copies.courier.fail(error)
    assert copying.posted == [first, second]
    assert copying.stats.failed == 4


def test_what_cannot_be_made_lossy_is_missed_and_said_and_not_tried_for_ever() -> None:
    def lossy(record: LogRecord) -> LogRecord:
        if record.head.step == 2:
            raise FormatError(f"{record.head} is no record of an update")
        return record

    copying = Copying(batch_steps=1, lossy=lossy)
    copying.train(1, 2, 3, 4)
    there = scan_log(TierFileSystem(copying.tier, RUN), RUN, [1], rank=1)
    assert [(one.after, one.last) for one in there] == [(0, 1), (2, 3), (3, 4)]
    assert copying.stats.missed == 1
    assert "is no record" in str(copying.posted)
    assert '"whole" copies every record unchanged' in str(copying.posted[0])


def _base(copying: Copying, step: int, *, whole: bool = True) -> None:
    """The name of a base in the place, as a listing shows it."""
    folder = f"timeline-00001/base/{step:012d}"
    copying.tier.create(f"{folder}/rank-00000.done", b"no marker")
    if whole:
        copying.tier.create(f"{folder}/manifest.json", b"no manifest")


def test_segments_go_when_no_base_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, other = Copying(), Copying()
    other.tier = copying.tier
    identity = replace(IDENTITY, rank=0)
    other.copies = other.again(copying.tier, identity=identity, batch_steps=2)
    bases: list[tuple[int, str]] = []

    def inventory(self: CopyPlace) -> Any:
        found = [_Base(BaseId(1, step), status) for step, status in bases]
        return _Inventory(found, {1: None})

    monkeypatch.setattr(CopyPlace, "inventory", inventory)
    copying.train(*range(1, 7))
    other.train(*range(1, 7))
    copying.copies.base_durable()
    copying.turn()
    assert copying.there() == [(0, 2), (2, 4), (4, 6)], "no base is seen: nothing goes"
    bases[:] = [(3, "committed"), (4, "incomplete")]
    copying.copies.base_durable()
    copying.turn()
    assert copying.there() == [(2, 4), (4, 6)], "step 4 is behind the base of step 3"
    assert copying.there(rank=0) == [(0, 2), (2, 4), (4, 6)], "another rank's are its own"
    bases[:] = [(6, "committed")]
    copying.turn()
    assert copying.there() == [(2, 4), (4, 6)], "only behind a new base"
    copying.copies.base_durable()
    copying.turn()
    assert copying.there() == []
    assert not [item for item in walk(copying.tier) if "rank-00001" in item.name]


class _Base:
    def __init__(self, identity: BaseId, status: str) -> None:
        self.id, self.status = identity, status
        self.annotations, self.is_pinned = None, False


class _Inventory:
    def __init__(self, bases: list[_Base], timelines: dict[int, Any]) -> None:
        self.bases, self.timelines = bases, timelines
        self.branches: dict[int, Any] = {}


def test_the_nearest_record_is_read_and_a_lossy_one_only_alone() -> None:
    """In memory, in a segment, in a lossy one: the same steps with other bytes in each."""

    def lossy(record: LogRecord) -> LogRecord:
        return replace(record, objects={"o": b"lossy"}, digest=_digest(record, {"o": b"lossy"}))

    exact = Copying(batch_steps=1)
    exact.train(1, 2)
    poor = Copying(exact.tier, batch_steps=1, lossy=lossy)
    poor.train(1, 2, 3)
    files = TierFileSystem(exact.tier, RUN)
    there = Inventory(RUN, timelines={1: record_of(1)})
    found = LogFound([], scan_log(files, RUN, [1], rank=1))
    ring = ChunkRing(3, 1)
    reader = found.reader(files, ring, 20.0)
    try:
        for step, wanted in ((1, "exact"), (2, "exact"), (3, "lossy")):
            for record in reader.records_of(1, step):
                told = "lossy" if record.objects["o"] == b"lossy" else "exact"
                assert told == wanted, record.head
        near = records_of_steps(2, 2)
        both = LogFound.of(files, replace(there, timelines={}), [], rank=1, lent=near)
        assert not both.reader(files, ring, 20.0).records_of(1, 1)
        both = LogFound.of(
            TierFileSystem(MemoryTier(), RUN),
            replace(there, timelines={}),
            [],
            rank=1,
            lent=near,
            copies=[(files, there)],
            bases=[BaseId(1, 2)],
        )
        assert not both.reader(files, ring, 20.0).records_of(1, 1), "no base needs it"
        assert both.reader(files, ring, 20.0).records_of(1, 2)[0] is near[0]
        assert len(both.reader(files, ring, 20.0).records_of(1, 3)) == 2
    finally:
        reader.close()
        ring.close()


def _digest(record: LogRecord, objects: dict[str, bytes]) -> str:
    from everstep.format.log import record_digest

    return record_digest(record.data, objects)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"log": "lossy"}, "log must be one of"),
        ({"log_ratio": 0}, "log_ratio"),
        ({"log_ratio": 1.5}, "log_ratio"),
        ({"log_steps": 0}, "log_steps"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        TierOptions("/place", **given)


def test_a_log_that_is_none_cannot_be_copied() -> None:
    for tiers, peers in (
        ([TierOptions("/place", log="whole")], None),
        ([], PeerOptions(log="adaptive")),
    ):
        with pytest.raises(OptionError, match="this method has no log"):
            validate_tiers(tiers, 1, peers)
        validate_tiers(tiers, 1, peers, logs=True)


_RUN_ID = "0" * 32


def test_the_log_of_a_new_timeline_waits_for_the_base_that_it_leads_on_from() -> None:
    """Training went back behind the newest copy; the base that it rests on is still on its way."""
    tier, clock, log, posted = MemoryTier(), ManualClock(), Log(), list[Any]()
    for number, parent, fork in ((1, None, 0), (2, 1, 50)):
        record = TimelineRecord(_RUN_ID, number, parent, fork, True, 1, {}, 0.0)
        tier.create(f"{timeline_dir(ROOT, number).name}/{TIMELINE_RECORD}", record.encode())
    data = b"x" * 96
    file = FileRecord("rank-00000.safetensors", len(data), 0, digest(b""), digest(data))

    def commit(timeline: int, step: int) -> None:
        marker = Marker(_RUN_ID, timeline, step, 200, 0, 1, True, (file,))
        base = base_dir(ROOT, timeline, step).relative_to(ROOT)
        tier.create(f"{base}/rank-00000.safetensors", data)
        tier.create(f"{base}/rank-00000.done", marker.encode())
        tier.create(f"{base}/manifest.json", Manifest((marker,)).encode())

    tier.create("run.json", RunRecord(_RUN_ID).encode())
    commit(1, 100)
    identity = ShardIdentity(_RUN_ID, 2, 0, 0, 0, 1, True)
    copies = LogCopies(
        Courier(tier, 2, clock, posted.append),
        log.store,
        identity,
        batch_steps=5,
        keep=KeepRules(1),
    )
    copies.base_durable()  # as at the start of a timeline

    def there() -> list[str]:
        names = [item.name for item in walk(tier) if item.name.endswith("/rank-00000.done")]
        return sorted(name.split("/")[2][7:12] for name in names if "/log/" in name)

    for step in range(51, 71):
        log.step(step, timeline=2)
        copies.turn()
    assert there() == ["00050", "00055", "00060", "00065"]
    commit(2, 65)
    copies.base_durable()
    for step in range(71, 76):
        log.step(step, timeline=2)
        copies.turn()
    assert there() == ["00065", "00070"]
    assert not posted
