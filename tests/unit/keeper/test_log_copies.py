"""The log in other tiers: whole steps or nothing, whatever fails; nothing behind the fence; and no
more objects than were asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.commit.lineage import BaseId
from everstep.errors import (
    EverstepError,
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
from everstep.keeper.ship import couriers as couriers_module
from everstep.keeper.ship import log_copies
from everstep.keeper.ship.courier import HOUR_S, ROOT, CopyPlace, Courier, ObjectRate
from everstep.keeper.ship.couriers import Couriers
from everstep.keeper.ship.log_copies import LogCopies
from everstep.link.messages import identity_to_wire
from everstep.restore.log import LogFound
from everstep.run.scan import Inventory
from everstep.run.segments import scan_log
from everstep.seams import ManualClock, Seams, failpoints
from everstep.state.ranks.writers import RankInfo
from everstep.testing.faultytier import FaultyTier, TierFault
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from everstep.tiers.options import PeerOptions, TierOptions, validate_tiers
from everstep.tiers.retry import RetryingTier
from everstep.trainer.attach.terms import KeeperTerms
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
    assert copying.rate.total == 2


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


@pytest.mark.slow
def test_a_cap_makes_segments_longer_and_leaves_objects_for_bases() -> None:
    copying = Copying(cap=16)  # six segments and four other objects
    for step in range(1, 1201):  # two hours
        copying.clock.advance(6.0)
        copying.log.step(step)
        copying.turn()
    segments = copying.there()
    assert [after for after, _ in segments[1:]] == [last for _, last in segments[:-1]]
    assert 11 <= len(segments) <= 12
    assert copying.rate.total <= 2 * 12


def test_the_last_steps_do_not_wait_for_the_cap_and_say_so() -> None:
    copying = Copying(cap=4)
    copying.train(1, 2)
    copying.rate.wrote(2)
    copying.log.step(3)
    with pytest.raises(StorageError, match="limit of objects per hour"):
        copying.turn(flush=True)
    assert copying.there() == [(0, 2)]


def test_the_last_steps_wait_for_no_pace_where_the_cap_has_room() -> None:
    copying = Copying(cap=8)
    copying.train(1, 2, 3)
    assert copying.there() == [(0, 2)], "the next segment has its time"
    copying.turn(flush=True)
    assert copying.there() == [(0, 2), (2, 3)]


@given(st.lists(st.tuples(st.integers(1, 1500), st.booleans()), min_size=20, max_size=60))
@settings(max_examples=60, deadline=None)
def test_in_no_hour_bases_and_log_are_more_objects_than_the_cap(
    turns: list[tuple[int, bool]],
) -> None:
    """Whoever copies a base asks for all of its objects, and writes them one by one, meanwhile."""
    cap, base_objects = 12, 5
    copying = Copying(cap=cap, batch_steps=1)
    rate, written, left, step = copying.rate, [], 0, 0
    for after_s, base in turns:
        copying.clock.advance(float(after_s))
        if left:
            rate.wrote(1)
            left -= 1
            if not left:
                rate.settled("base")
        elif base and rate.wait_s(base_objects, "base") == 0:
            left = base_objects
        before, step = rate.total, step + 1
        copying.train(step)
        assert rate.total - before in (0, 2)
        written.append((copying.clock.monotonic_s(), rate.total))
        hour = [total for at_s, total in written if at_s <= written[-1][0] - HOUR_S]
        assert rate.total - max(hour, default=0) <= cap
    copying.log.store.close()


class _Counting(MemoryTier):
    """Notes when each object was written."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock, self.written_s = clock, list[float]()

    def put(self, name: str, source: Any) -> None:
        self.written_s.append(self._clock.monotonic_s())
        super().put(name, source)

    def create(self, name: str, data: bytes) -> bool:
        self.written_s.append(self._clock.monotonic_s())
        return super().create(name, data)

    @property
    def most_in_an_hour(self) -> int:
        times = self.written_s
        return max(sum(end - HOUR_S < at <= end for at in times) for end in times)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> _Counting:
    """What keepers find under any place; their logs are copied by hand."""
    tier = _Counting(ManualClock())
    monkeypatch.setattr(couriers_module, "open_tier", lambda where, files, clock: tier)
    monkeypatch.setattr(LogCopies, "start", lambda self: None)
    monkeypatch.setattr(Courier, "start", lambda self, work, name: None)
    return tier


class Keeper:
    """The couriers of a rank's keeper, as its trainer has asked for them."""

    def __init__(self, tier: _Counting, options: TierOptions, rank: int, world: int) -> None:
        self.log, self._tier, self._rank, self._world = Log(), tier, rank, world
        self._options = options
        self.couriers = Couriers(Seams(clock=tier._clock), RUN)
        self.serve()

    def serve(self) -> None:
        """A trainer comes, perhaps again."""
        trainer: Any = object.__new__(KeeperTerms)
        trainer.in_process = True
        trainer.ranks = RankInfo(self._rank, self._world)
        trainer.copy_to([self._options])
        timeline: Any = SimpleNamespace(
            settings={
                "tiers": trainer._tiers,
                "identity": identity_to_wire(replace(IDENTITY, rank=self._rank, world=self._world)),
            },
            log=self.log.store,
            channel=SimpleNamespace(post=fail),
            timeout_s=20.0,
            link=None,
        )
        self.couriers.serve(timeline)

    def train(self, step: int) -> None:
        self.log.step(step)
        for one in self.couriers.logs:
            one.turn()


def fail(error: EverstepError) -> None:
    raise error


@pytest.mark.thinned(2)
@pytest.mark.parametrize("world", [1, 4])
def test_all_ranks_of_a_node_together_keep_to_the_cap(counting: _Counting, world: int) -> None:
    """Each writes segments of its own, longer ones the more ranks there are."""
    cap, options = 24, TierOptions("/place", log="whole", log_steps=1, objects_per_hour=24)
    ranks = [Keeper(counting, options, rank, world) for rank in range(world)]
    for step in range(1, 301):  # two and a half hours
        counting._clock.advance(30.0)
        for one in ranks:
            one.train(step)
    assert cap / 2 <= counting.most_in_an_hour <= cap
    for rank in range(world):
        found = scan_log(TierFileSystem(counting, RUN), RUN, [1], rank=rank)
        assert [one.after for one in found[1:]] == [one.last for one in found[:-1]]
        assert found[-1].last > 200


def test_trainers_that_come_back_within_an_hour_have_one_cap(counting: _Counting) -> None:
    options = TierOptions("/place", log="whole", log_steps=1, objects_per_hour=8)
    one = Keeper(counting, options, 0, 1)
    for step in range(1, 61):
        counting._clock.advance(60.0)
        one.serve()
        one.train(step)
    assert 4 <= counting.most_in_an_hour <= 8


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
    copying.clock.advance(HOUR_S)
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
    assert 'TierOptions(log="whole"), which copies records unchanged' in str(copying.posted[0])


@pytest.mark.parametrize(
    ("cap", "lossy", "said", "unsaid"),
    [
        (None, False, ['log="adaptive"', 'log="none"'], ["log_ratio", "objects_per_hour"]),
        (
            None,
            True,
            ["lower TierOptions.log_ratio", 'log="none"'],
            ['log="adaptive"', "objects_per_hour"],
        ),
        (1000, False, ['log="adaptive"', "objects_per_hour"], ["log_ratio"]),
        (1000, True, ["lower TierOptions.log_ratio", "objects_per_hour"], ['log="adaptive"']),
    ],
)
def test_the_way_out_of_missed_steps_is_one_that_is_left(
    cap: int | None, lossy: bool, said: list[str], unsaid: list[str]
) -> None:
    copying = Copying(cap=cap, lossy=replace if lossy else None)
    copying.log.step(1)
    copying.log.overwrite()
    copying.turn()
    (error,) = copying.posted
    assert error.hint is not None
    assert all(one in error.hint for one in said), error.hint
    assert not any(one in error.hint for one in unsaid), error.hint


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
    assert not [item for item in copying.tier.walk() if "rank-00001" in item.name]


class _Base:
    def __init__(self, identity: BaseId, status: str) -> None:
        self.id, self.status = identity, status


class _Inventory:
    def __init__(self, bases: list[_Base], timelines: dict[int, Any]) -> None:
        self.bases, self.timelines = bases, timelines


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
        ({"log": "whole", "objects_per_hour": 3}, "too low for a log"),
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


def test_a_cap_must_do_for_all_ranks() -> None:
    options = TierOptions("/place", log="whole", objects_per_hour=12)
    assert options.of_rank(3).objects_per_hour == 4
    with pytest.raises(OptionError, match="log of 4 rank"):
        options.of_rank(4)


_RUN_ID = "0" * 32


def test_the_log_of_a_new_timeline_waits_for_the_base_that_it_leads_on_from() -> None:
    """Training went back behind the newest copy; the base that it rests on is still on its way."""
    tier, clock, log, posted = MemoryTier(), ManualClock(), Log(), list[Any]()
    place = CopyPlace(tier, 2, ObjectRate(None, clock))
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
    copies = LogCopies(Courier(place, clock, posted.append), log.store, identity, batch_steps=5)
    copies.base_durable()  # as at the start of a timeline

    def there() -> list[str]:
        names = [item.name for item in tier.walk() if item.name.endswith("/rank-00000.done")]
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
