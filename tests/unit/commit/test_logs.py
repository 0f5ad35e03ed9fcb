"""How far the logs of all ranks lead together: the newest step that each of them reaches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.commit.job.messages import decode_choice, decode_offer, encode_choice, encode_offer
from everstep.commit.job.offers import BaseOffer, Choice, Excluded, Offer, Piece, choose
from everstep.commit.lineage import BaseId, Branch, branches_of
from everstep.commit.log_reach import LogRun, common_reach, log_path, runs_of, steps_reached
from everstep.errors import RecoveryError
from everstep.format.log import RecordHead
from everstep.format.records import FileRecord, Marker, TimelineRecord

RUN, SHAPE = "0123", "a"


@dataclass
class Log:
    """What one rank's log has, before anything is lost of it."""

    marks: dict[tuple[int, int], RecordHead] = field(default_factory=dict)
    updates: set[tuple[int, int]] = field(default_factory=set)
    lsn: int = 0

    def step(self, timeline: int, step: int, updates: int = 1, shape: str = SHAPE) -> None:
        for _ in range(updates):
            self.lsn += 1
            self.updates.add((timeline, self.lsn))
        self.marks[timeline, step] = RecordHead("mark", timeline, step, self.lsn, shape, True)

    @property
    def runs(self) -> tuple[LogRun, ...]:
        return runs_of(self.marks, self.updates)


def log(*steps: int, timeline: int = 1, updates: int = 1, lsn: int = 0) -> Log:
    made = Log(lsn=lsn)
    for step in steps:
        made.step(timeline, step, updates)
    return made


def record(
    timeline: int,
    parent: int | None = None,
    fork_step: int = 0,
    world: int = 2,
    base: tuple[int, int] | None = None,
) -> TimelineRecord:
    return TimelineRecord(RUN, timeline, parent, fork_step, True, world, {}, 0.0, base)


def marker(base: BaseId, rank: int, lsn: int, world: int = 2) -> Marker:
    file = FileRecord(f"rank-{rank:05d}.safetensors", 10, 10, "0" * 32, "0" * 32)
    return Marker(RUN, base.timeline, base.step, lsn, rank, world, True, (file,))


def offer(
    rank: int,
    made: Log | tuple[LogRun, ...],
    bases: dict[BaseId, int],
    timelines: dict[int, TimelineRecord | None] | None = None,
    world: int = 2,
) -> Offer:
    """Of a rank that sees all files.

    Args:
        bases: with the LSN of each.
        world: that has saved them.
    """
    found = {
        base: BaseOffer({r: Piece(marker(base, r, lsn, world)) for r in range(world)})
        for base, lsn in bases.items()
    }
    known = {1: record(1)} if timelines is None else timelines
    runs = made.runs if isinstance(made, Log) else made
    return Offer(rank, "disk", RUN, max(known) + 1, known, found, log=runs)


def chosen(*logs: Log, lsn: int = 10, **options: object) -> Choice:
    """What two ranks choose with a base of step 10 behind which these logs were written."""
    offers = [offer(rank, one, {BaseId(1, 10): lsn}) for rank, one in enumerate(logs)]
    return choose(offers, **options)  # type: ignore[arg-type]


def end(choice: Choice) -> int:
    assert choice.end is not None
    return choice.end.step


def behind(count: int) -> Log:
    return log(*range(11, 11 + count), lsn=10)


def test_all_go_to_the_newest_step_that_each_of_them_reaches() -> None:
    choice = chosen(behind(5), behind(3))
    assert choice.base == BaseId(1, 10)
    assert choice.reach is not None
    assert (choice.reach.step, choice.reach.lsn, choice.reach.count) == (13, 13, 3)
    assert choice.skipped == (
        (BaseId(1, 14), "log: the log of rank 1 ends before; others reach 15"),
    )


def test_a_hole_in_all_of_them_is_said() -> None:
    """The state consisted of something else, for all of them at once, and no base came in time."""
    made = [behind(2), behind(2)]
    for one in made:
        one.step(1, 13, shape="b")
        one.step(1, 14, shape="b")
    choice = chosen(*made)
    assert end(choice) == 12
    ((at, why),) = choice.skipped
    assert at == BaseId(1, 13)
    assert why.startswith("log: no rank reaches step 13: the state changed there")
    assert why.endswith("records up to step 14 cannot be used")
    assert chosen(behind(5), behind(5)).skipped == ()
    assert chosen(*made, step=12).skipped == (), "as it was asked for"


def test_a_rank_without_a_log_takes_all_back_to_the_base() -> None:
    choice = chosen(behind(5), Log())
    assert (choice.end, choice.reach) == (BaseId(1, 10), None)
    assert "the log of rank 1 ends before" in choice.skipped[0][1]


def test_a_hole_ends_the_log_before_it() -> None:
    holes = behind(5)
    del holes.marks[1, 13]
    assert end(chosen(behind(5), holes)) == 12
    gap = behind(5)
    gap.updates.remove((1, 13))
    assert end(chosen(behind(5), gap)) == 12


def test_a_log_that_begins_behind_another_update_than_the_base_does_not_follow_it() -> None:
    assert end(chosen(behind(3), behind(3), lsn=9)) == 10
    assert end(chosen(behind(3), behind(3), lsn=12)) == 10


def test_no_step_counts_in_which_one_rank_has_made_another_number_of_updates() -> None:
    """No base of such a step would be whole either."""
    more = behind(2)
    more.step(1, 13, 2)
    more.step(1, 14)
    assert end(chosen(behind(5), more)) == 12


def test_a_log_of_another_state_is_another_log() -> None:
    other = behind(2)
    other.step(1, 13, shape="b")
    assert end(chosen(behind(5), other)) == 12


def test_what_turned_out_to_be_of_no_use_is_passed_over() -> None:
    assert end(chosen(behind(5), behind(5), excluded=Excluded(log={(1, 1, 14)}))) == 13
    assert end(chosen(behind(5), behind(5), excluded=Excluded(log={(0, 1, 11), (1, 1, 14)}))) == 10


def test_a_step_that_is_asked_for_is_reached_by_base_and_log() -> None:
    assert end(chosen(behind(5), behind(4), step=12)) == 12
    with pytest.raises(RecoveryError, match="no base of step 15"):
        chosen(behind(5), behind(4), step=15)


OTHERS: dict[int, TimelineRecord | None] = {1: record(1, world=3)}


def of_others(*found: dict[int, Log], step: int | None = None, **more: Any) -> Choice:
    """Of a job of as many ranks as ``found``, which read these logs of the three that were before,
    behind a base of step 10.

    Args:
        found: by rank: the logs that it reads, by the rank that wrote each.
    """
    bases = {BaseId(1, 10): 10}
    offers = [
        replace(offer(rank, (), bases, OTHERS, 3), others={r: log.runs for r, log in own.items()})
        for rank, own in enumerate(found)
    ]
    assert [decode_offer(encode_offer(one)) for one in offers] == offers
    choice = choose(offers, step=step, **more)
    assert decode_choice(encode_choice(choice)) == choice
    return choice


def test_the_logs_of_another_number_of_ranks_lead_on() -> None:
    choice = of_others({0: behind(3), 1: behind(3)}, {2: behind(3)})
    assert choice.end == BaseId(1, 13)
    assert [tuple(one) for one in choice.readers] == [
        (0, 1, 11, 13, 0),
        (1, 1, 11, 13, 0),
        (2, 1, 11, 13, 1),
    ]


def test_a_log_that_two_can_read_is_read_by_the_nearest() -> None:
    every = dict.fromkeys(range(3), behind(2))
    choice = of_others(every, every)
    assert [one.rank for one in choice.readers] == [0, 0, 1]


def test_of_a_log_that_lies_in_two_places_each_step_has_a_reader() -> None:
    late = log(12, 13, lsn=11)
    choice = of_others({0: behind(3), 1: behind(3), 2: behind(1)}, {2: late})
    assert choice.end == BaseId(1, 13)
    assert [tuple(one) for one in choice.readers if one.source == 2] == [
        (2, 1, 11, 11, 0),
        (2, 1, 12, 13, 1),
    ]


def test_a_hole_in_one_of_them_is_the_end_for_all_and_is_said() -> None:
    choice = of_others({0: behind(3), 1: behind(1)}, {2: behind(3)})
    assert choice.end == BaseId(1, 11)
    why = "log: the log of rank 1 of 3 that wrote it ends before; others reach 13"
    assert (BaseId(1, 12), why) in choice.skipped


def test_a_log_that_nobody_reads_takes_all_to_the_base() -> None:
    choice = of_others({0: behind(3)}, {2: behind(3)})
    assert (choice.end, choice.reach, choice.readers) == (BaseId(1, 10), None, ())
    assert any("rank 1 of 3" in why for _, why in choice.skipped)


def test_no_step_counts_in_which_one_of_them_has_counted_other_updates() -> None:
    odd = log(11, lsn=10)
    odd.step(1, 12, updates=2)
    choice = of_others({0: behind(3), 1: odd}, {2: behind(3)})
    assert choice.end == BaseId(1, 11)


def test_what_is_of_no_use_to_one_rank_is_of_use_to_none() -> None:
    every = dict.fromkeys(range(3), behind(3))
    choice = of_others(every, every, every, every, excluded=Excluded(log={(3, 1, 12)}))
    assert choice.end == BaseId(1, 11)


def test_a_step_of_theirs_can_be_asked_for() -> None:
    every = dict.fromkeys(range(3), behind(3))
    assert of_others(every, every, step=12).end == BaseId(1, 12)


def of_another_layout(*timelines: int) -> Choice:
    """Of two ranks, as many as before, of which each sees both logs."""
    both = dict.fromkeys(range(2), behind(3).runs)
    known = {1: record(1, world=2)}
    offers = [
        replace(offer(rank, behind(3 - rank), {BaseId(1, 10): 10}, known), others=both)
        for rank in (0, 1)
    ]
    return choose(offers, excluded=Excluded(relaid=set(timelines)))


def test_as_many_ranks_replay_their_own_logs_until_one_says_they_are_of_another_layout() -> None:
    choice = of_another_layout()
    assert (choice.end, choice.readers) == (BaseId(1, 12), ())
    choice = of_another_layout(1)
    assert choice.end == BaseId(1, 13)
    assert [tuple(one) for one in choice.readers] == [(0, 1, 11, 13, 0), (1, 1, 11, 13, 1)]
    assert of_another_layout(2).readers == (), "it is said of the timeline of a base"


def test_behind_a_base_of_other_ranks_a_log_is_refused_and_that_is_said() -> None:
    """Three ranks wrote base and log, and two went on: their log has no base of its own."""
    known = {**OTHERS, 2: record(2, 1, 13, base=(1, 10))}
    made = log(14, 15, timeline=2, lsn=13)
    others = dict.fromkeys(range(3), behind(3).runs)
    offers = [
        replace(offer(rank, made, {BaseId(1, 10): 10}, known, 3), others=others) for rank in (0, 1)
    ]
    choice = choose(offers)
    assert choice.end == BaseId(1, 13)
    why = "log: written by 2 rank(s), but the base before it by 3"
    assert (BaseId(2, 15), why) in choice.skipped


def test_the_newest_step_is_taken_and_not_the_newest_base() -> None:
    """Behind the newer base the log does not go on, as updates were counted otherwise."""
    bases = {BaseId(1, 10): 10, BaseId(1, 12): 12}
    whole = behind(5)
    late = [offer(0, whole, bases), offer(1, whole, bases)]
    assert choose(late).base == BaseId(1, 12)
    bases = {BaseId(1, 10): 10, BaseId(1, 12): 99}
    choice = choose([offer(0, whole, bases), offer(1, whole, bases)])
    assert (choice.base, end(choice)) == (BaseId(1, 10), 15)


def test_a_log_goes_on_behind_a_fork_with_what_the_younger_timeline_has() -> None:
    made = behind(5)
    made.lsn = 13
    made.step(2, 14)
    made.step(2, 15)
    known: dict[int, TimelineRecord | None] = {1: record(1), 2: record(2, 1, 13, base=(1, 10))}
    bases = {BaseId(1, 10): 10}
    choice = choose([offer(rank, made, bases, known) for rank in range(2)])
    assert choice.end == BaseId(2, 15)
    # Nobody has trained on it: its fork says where the history goes on from.
    choice = choose([offer(rank, behind(5), bases, known) for rank in range(2)])
    assert choice.end == BaseId(1, 13)


def test_a_log_is_not_followed_past_a_record_that_cannot_be_read() -> None:
    branches = {1: Branch(1, None, 0), 2: Branch(2, 1, None), 3: Branch(3, 2, 20)}
    assert log_path(branches, {3}) == [(3, None), (2, 20)]
    assert log_path(branches, set()) == [(3, None), (2, 20)]


def test_offers_and_choices_with_a_log_survive_the_wire() -> None:
    mine = offer(1, behind(4), {BaseId(1, 10): 10})
    assert decode_offer(encode_offer(mine)) == mine
    choice = chosen(behind(5), behind(3))
    assert decode_choice(encode_choice(choice)) == choice


# --- Against an oracle ------------------------------------------------------------------

STEPS = 12


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Log], dict[BaseId, int], dict[int, TimelineRecord]]:
    """Logs of a job that forked now and then, with what was lost of each rank's."""
    world = draw(st.integers(1, 3))
    logs = [Log() for _ in range(world)]
    records, bases = {1: record(1, world=world)}, dict[BaseId, int]()
    lsns: dict[tuple[int, int], list[int]] = {(1, 0): [0] * world}
    timeline, step, first = 1, 0, BaseId(1, 1)
    for _ in range(draw(st.integers(1, STEPS))):
        if step and len(records) < 4 and draw(st.integers(0, 4)) == 0:  # goes back, and forks
            parent, step = draw(st.sampled_from(sorted(key for key in lsns if key[1])))
            timeline, before = len(records) + 1, lsns[parent, step]
            records[timeline] = record(timeline, parent, step, world, (1, 1))
            for one, lsn in zip(logs, before, strict=True):
                one.lsn = lsn
            lsns[timeline, step] = before
        step += 1
        updates, shape = draw(st.integers(0, 2)), draw(st.sampled_from("aaaab"))
        for one in logs:
            one.step(timeline, step, updates + (draw(st.integers(0, 9)) == 0), shape)
        lsns[timeline, step] = found = [one.lsn for one in logs]
        if len(set(found)) == 1 and (draw(st.integers(0, 3)) == 0 or first not in bases):
            bases[BaseId(timeline, step)] = found[0]
    for one in logs:
        for key in draw(st.lists(st.sampled_from(sorted(one.marks)), max_size=2)):
            one.marks.pop(key, None)
        if one.updates:
            for key in draw(st.lists(st.sampled_from(sorted(one.updates)), max_size=2)):
                one.updates.discard(key)
    return logs, bases, records


def reachable(
    one: Log, lsn: int, path: list[tuple[int, int]], shape: str | None = None
) -> set[tuple[int, int]]:
    """Every timeline and step that a log leads to, record by record.

    Args:
        path: timeline and step of each step of the history, behind the base.
    """
    found = set()
    for timeline, step in path:
        mark = one.marks.get((timeline, step))
        if mark is None or mark.lsn < lsn or mark.shape != (shape or mark.shape):
            break
        if any((timeline, number) not in one.updates for number in range(lsn + 1, mark.lsn + 1)):
            break
        lsn, shape = mark.lsn, mark.shape
        found.add((timeline, step))
    return found


def history_of(records: dict[int, TimelineRecord]) -> list[tuple[int, int]]:
    """Timeline and step of each step of the newest timeline's history, oldest first."""
    steps: dict[int, int] = {}
    timeline: int | None = max(records)
    limit = 2 * STEPS
    while timeline is not None:
        for step in range(1, limit + 1):
            steps[step] = timeline
        limit = min(limit, records[timeline].fork_step)
        timeline = records[timeline].parent
    return [(steps[step], step) for step in sorted(steps)]


@given(jobs())
def test_all_reach_what_is_chosen_and_nothing_newer(
    job: tuple[list[Log], dict[BaseId, int], dict[int, TimelineRecord]],
) -> None:
    logs, bases, records = job
    path = history_of(records)
    common: dict[BaseId, set[tuple[int, int]]] = {}
    for base, lsn in bases.items():
        if (base.timeline, base.step) in path:
            rest = path[path.index((base.timeline, base.step)) + 1 :]
            each = [reachable(one, lsn, rest) for one in logs]
            all_have = rest[: min(map(len, each))]
            alike = [len({one.marks[at].lsn for one in logs}) == 1 for at in all_have]
            count = (*alike, False).index(False)
            common[base] = {(base.timeline, base.step), *rest[:count]}
    known: dict[int, TimelineRecord | None] = dict(records)
    world = len(logs)
    offers = [offer(rank, one, bases, known, world) for rank, one in enumerate(logs)]
    if not common:
        with pytest.raises(RecoveryError):
            choose(offers)
        return
    choice = choose(offers)
    assert choice.base is not None
    assert choice.end is not None
    newest = max(max(steps) for steps in common.values())
    assert (choice.end.timeline, choice.end.step) == newest
    assert newest in common[choice.base]
    if choice.reach is not None:
        assert all(choice.reach.lsn == one.marks[newest].lsn for one in logs)


@given(jobs(), st.data())
def test_whatever_turns_out_to_be_spoilt_is_never_passed(
    job: tuple[list[Log], dict[BaseId, int], dict[int, TimelineRecord]], data: st.DataObject
) -> None:
    logs, bases, records = job
    assume(bases)
    path = log_path(branches_of(records, set(bases)), {t for one in logs for t, _ in one.marks})
    base = data.draw(st.sampled_from(sorted(bases)))
    runs = [one.runs for one in logs]
    before = common_reach(runs, base, bases[base], path)
    step = data.draw(st.integers(1, STEPS))
    bad = {(0, timeline, step) for timeline in records}
    after = common_reach(runs, base, bases[base], path, unusable=bad)
    expected = min(before.count, step - base.step - 1) if step > base.step else before.count
    assert after.count == expected
    if after.count:
        alone = [steps_reached(one, base, bases[base], path) for one in runs]
        assert all(chain[after.count - 1][:2] == (after.timeline, after.step) for chain in alone)


def test_a_run_is_entered_only_from_the_state_that_it_follows() -> None:
    run = LogRun(1, 11, 8, (12, 14), SHAPE)
    assert [lsn for lsn in range(20) if run.follows(11, lsn)] == [8, 9, 10, 11, 12]
    assert [lsn for lsn in range(20) if run.follows(12, lsn)] == [12]
    assert not run.follows(13, 14)
    assert replace(run, lsns=(12,)).last == 11
