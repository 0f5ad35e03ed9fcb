"""Steps of a log in the memory of other nodes lead their rank on, and nobody else's do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import msgpack
import pytest

from everstep.arena import Arena
from everstep.commit.job.offers import BaseOffer, Offer, Piece, choose
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import run_of
from everstep.keeper.held.newest_capture import log_to_wire, recalled_from_wire
from everstep.restore.fetch import peers, start_channel
from everstep.restore.fetch.held import FetchedLog, PeerCopy, PeerLog, pack_steps, unpack_steps
from everstep.restore.fetch.peer_plan import LogOffer
from everstep.restore.fetch.peers import FetchResult, OfferExtras, fetch_from_peers, fetch_plan
from everstep.run.scan import Inventory
from everstep.seams import SystemClock
from tests.support.ranks.boxes import Box, channel, offer, own, told
from tests.support.ranks.peer_logs import heads_of_step, log_of, records_of_steps
from tests.support.ranks.peering import copy_of, piece, record_of
from tests.support.ranks.together import on_all

A, B = BaseId(1, 10), BaseId(1, 20)


def run(first: int, last: int, *, timeline: int = 1) -> LogRun:
    """Steps with one update each, as the bases that are made up have it."""
    steps = range(first, last + 1)
    return run_of([h for step in steps for h in heads_of_step(step, timeline=timeline, updates=1)])


def offers(*logs: LogRun | None, empty: int | None = None) -> list[Offer]:
    """Ranks with base A, and a log each; one of them has lost its disk."""
    found = []
    for rank, log in enumerate(logs):
        mine = offer(rank) if rank == empty else offer(rank, A)
        found.append(replace(mine, log=() if log is None else (log,)))
    return found


def held(holder: int, source: int, steps: LogRun, session: str = "s") -> LogOffer:
    record = record_of(steps.timeline, session).encode()
    return LogOffer(holder, source, record, steps, 100, 10, "0")


def test_a_rank_that_has_lost_its_log_fetches_base_and_steps() -> None:
    base, log = told(0, piece(1, A)), held(0, 1, run(11, 14))
    assert fetch_plan(offers(run(11, 15), None, empty=1), [base], own, None, [log])[0] == {
        1: [base, log]
    }


def test_steps_that_a_rank_has_itself_are_not_fetched() -> None:
    early, late = held(0, 1, run(11, 12)), held(0, 1, run(13, 14))
    assert fetch_plan(offers(run(11, 15), run(11, 12)), [], own, None, [early, late])[0] == {
        1: [late]
    }
    assert fetch_plan(offers(run(11, 15), run(11, 14)), [], own, None, [early, late])[0] == {}


def test_steps_that_not_all_ranks_can_match_are_not_fetched() -> None:
    near, far = held(0, 1, run(11, 12)), held(0, 1, run(13, 14))
    assert fetch_plan(offers(run(11, 12), None), [], own, None, [near, far])[0] == {1: [near]}


def test_a_hole_is_the_end_for_all() -> None:
    parts = [held(0, 1, run(11, 11)), held(0, 1, run(13, 14))]
    assert fetch_plan(offers(run(11, 15), None), [], own, None, parts)[0] == {1: [parts[0]]}


def test_each_rank_gets_its_own_steps_only() -> None:
    """Both have lost theirs; the ring has four ranks on four nodes."""
    record = replace(record_of(1), world=4)
    steps = [
        replace(log, record=record.encode())
        for log in (held(1, 0, run(11, 13)), held(3, 2, run(11, 14)))
    ]
    four = offers(None, run(11, 15), None, run(11, 15))
    assert fetch_plan(_of_four(four), [], own, None, steps)[0] == {0: [steps[0]], 2: [steps[1]]}


def _of_four(found: list[Offer]) -> list[Offer]:
    bases = [{A: BaseOffer({one.rank: Piece(piece(one.rank, A, world=4).marker)})} for one in found]
    timelines: dict[int, Any] = {1: replace(record_of(1), world=4)}
    return [
        replace(one, bases=mine, timelines=timelines)
        for one, mine in zip(found, bases, strict=True)
    ]


def test_steps_of_another_timeline_of_the_same_number_are_never_taken() -> None:
    """Two starts that saw nothing of each other may both have opened it (I7)."""
    log = held(0, 1, run(11, 14), session="another start")
    assert fetch_plan(offers(run(11, 15), None), [], own, None, [log])[0] == {}
    base = told(0, piece(1, A))
    lost = offers(run(11, 15), None, empty=1)  # the rank itself cannot tell any more
    assert fetch_plan(lost, [base], own, None, [log])[0] == {1: [base]}


def test_what_has_come_counts_only_where_its_timeline_is_known_or_unknown() -> None:
    log = log_of(1, 11, 12)
    lent = FetchedLog(record_of(1), log.steps, tuple(unpack_steps(log.steps)))
    inventory = Inventory(PurePath("run"))
    assert lent.is_of(inventory)
    inventory.timelines[1] = record_of(1)
    assert lent.is_of(inventory)
    inventory.timelines[1] = record_of(1, "another start")
    assert not lent.is_of(inventory)


def test_the_ranks_agree_on_what_the_plan_was_for() -> None:
    """With what was fetched the agreement chooses the same step: neither more nor less."""
    log = held(0, 1, run(11, 14))
    before = offers(run(11, 15), None)
    after = [before[0], replace(before[1], log=(log.run,))]
    choice = choose(after, needs=own, fetch=False)
    assert choice.reach is not None
    assert (choice.base, choice.reach.end) == (A, BaseId(1, 14))


@pytest.mark.parametrize("second", [0, 1])
def test_a_second_loss_before_a_base_is_with_all_peers_again(second: int) -> None:
    """Node 2 of three is lost and replaced; all go on at step 14, in timeline 2, whose first base
    is not whole with all peers yet. What node 2 held of rank 1 is not sent again: if that log is
    lost now, all are back at the base, and it is said whose log was the end; not so another one.
    """
    records: dict[int, Any] = {
        1: replace(record_of(1), world=3),
        2: replace(record_of(2, parent=1), world=3, fork_step=14),
    }
    held_of = {0: [run(11, 14), run(15, 16, timeline=2)], 1: [run(15, 16, timeline=2)]}
    found, lent = [], []
    for rank in range(3):
        # Rank 2 fetched its steps from node 0 at the start: they are in its own keeper.
        logs = () if rank == second else (run(11, 14), run(15, 16, timeline=2))
        bases = {A: BaseOffer({rank: Piece(piece(rank, A, world=3).marker)})}
        mine = replace(offer(rank, A), timelines=records, bases=bases, next_timeline=3, log=logs)
        found.append(mine)
    for steps in held_of[second]:
        record = records[steps.timeline].encode()
        lent.append(LogOffer(second + 1, second, record, steps, 100, 10, "0"))
    plan, _ = fetch_plan(found, [], own, None, lent)
    fetched = [one.run for one in plan.get(second, []) if isinstance(one, LogOffer)]
    found[second] = replace(found[second], log=tuple(fetched))
    choice = choose(found, needs=own, fetch=False)
    if second == 0:
        assert fetched == held_of[0]
        assert choice.reach is not None
        assert (choice.base, choice.reach.end) == (A, BaseId(2, 16))
        return
    assert (choice.base, choice.reach, choice.end) == (A, None, A)
    (why,) = [why for _, why in choice.skipped]
    assert why == "log: the log of rank 1 ends before; others reach 16"


# --- Fetching --------------------------------------------------------------------------------


def brought(
    found: Sequence[Offer], copies: list[list[PeerCopy]], logs: list[list[PeerLog]]
) -> list[FetchResult]:
    """What each rank gets."""
    world = len(found)
    barrier, said = threading.Barrier(world, timeout=60.0), dict[int, dict[str, Any]]()
    boxes: list[Box] = []
    boxes += [Box(rank, boxes, lambda message: False) for rank in range(world)]

    def say(rank: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        barrier.wait()
        said[rank] = mine
        barrier.wait()
        all_said = [said[other] for other in range(world)]
        barrier.wait()
        return all_said

    def one(rank: int) -> FetchResult:
        return fetch_from_peers(
            channel(rank, world, boxes[rank], SystemClock()),
            SystemClock(),
            lambda what, mine: say(rank, mine),
            found[rank],
            copies[rank],
            own,
            extras=OfferExtras(lambda choice: None),
            step=None,
            logs=logs[rank],
        )

    return on_all(*(lambda rank=rank: one(rank) for rank in range(world)))  # type: ignore[misc]


def log_from(first: int, last: int) -> PeerLog:
    """Steps with one update each."""
    records = []
    for step in range(first, last + 1):
        update, _, mark = records_of_steps(step, step)
        records.append(replace(update, head=replace(update.head, lsn=step)))
        records.append(replace(mark, head=replace(mark.head, lsn=step)))
    return PeerLog(1, record_of(1).encode(), pack_steps(records))


def test_a_keeper_hands_over_what_it_holds_as_it_was() -> None:
    """Runs are compared and are keys: the numbers of their updates are no list."""
    log = log_from(11, 12)
    with contextlib.closing(Arena.anonymous(1 << 16)) as arena:
        arena.view[64 : 64 + log.steps.memory.nbytes] = log.steps.memory
        blobs = {0: msgpack.packb([log_to_wire(log, 64)])}
        told = {"base": None, "blobs": blobs, "logs": [], "copies": [], "peer_logs": [(0, 0)]}
        (found,) = recalled_from_wire(told, [arena]).logs
        assert (found.source, found.record) == (log.source, log.record)
        assert found.steps.run == log.steps.run
        assert hash(found.steps.run) == hash(log.steps.run)
        assert bytes(found.steps.memory) == bytes(log.steps.memory)
        del found


def test_steps_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peers, start_channel):
        monkeypatch.setattr(module, "CHUNK_BYTES", 700)
    logs = [log_from(11, 12), log_from(13, 14)]
    first, second = brought(offers(run(11, 14), None), [[], []], [logs, []])
    assert (first.bases, first.logs, second.bases) == ([], [], [])
    assert [one.steps.run for one in second.logs] == [run(11, 12), run(13, 14)]
    for one, other in zip(second.logs, logs, strict=True):
        assert bytes(one.steps.memory) == bytes(other.steps.memory)
        assert one.record == record_of(1)
        assert len(one.records) == 4


def test_base_and_steps_come_together() -> None:
    lost = offers(run(11, 12), None, empty=1)
    _, second = brought(lost, [[copy_of(piece(1, A))], []], [[log_from(11, 12)], []])
    assert [one.held.id for one in second.bases] == [A]
    assert [one.steps.run for one in second.logs] == [run(11, 12)]


@pytest.mark.parametrize("at", [0, 100, -1])
def test_damaged_steps_are_named_and_the_ranks_go_less_far(at: int) -> None:
    good, bad = log_from(11, 12), log_from(13, 14)
    bad.steps.memory[at] ^= 1
    _, second = brought(offers(run(11, 14), None), [[], []], [[good, bad], []])
    assert [one.steps.run for one in second.logs] == [run(11, 12)]


def test_another_holder_is_asked_when_one_has_damaged_steps() -> None:
    """A ring that has changed may leave the same steps in two places."""
    bad, good = log_from(11, 12), log_from(11, 12)
    bad.steps.memory[0] ^= 1
    _, second = brought(offers(run(11, 12), None), [[], []], [[bad], [good]])
    assert [one.steps.run for one in second.logs] == [run(11, 12)]
    assert bytes(second.logs[0].steps.memory) == bytes(good.steps.memory)
