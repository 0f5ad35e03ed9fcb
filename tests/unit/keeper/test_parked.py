"""Captures that stay in the keeper's memory: the newest whole one is what the next trainer gets,
and it becomes durable when nobody comes for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import KeeperError
from everstep.link.wire import error_to_wire
from everstep.seams import ManualClock
from tests.support.serving import Bench, Hand, bench, contents_of, oracle

BASE = 3 * 4096


@pytest.fixture
def b(run_folder: Path) -> Iterator[Bench]:
    """A server on a good disk."""
    with bench(run_folder) as made:
        yield made


def park(hand: Hand, number: int, step: int, *, slot: int = 0, whole: bool = True) -> None:
    """A capture that is to stay in memory, in one of the blocks of the arena."""
    say, said = hand.say, []
    hand.say = lambda kind, **fields: said.append((kind, fields))  # type: ignore[method-assign]
    hand.begin(number, step, offset=slot * BASE, word=slot, stream=False)
    hand.say = say  # type: ignore[method-assign]
    for kind, fields in said:
        say(kind, **fields, **({"parked": True} if kind == "begin" else {}))
    if whole:
        hand.fill(number)
        hand.captured(number)


def recalled(b: Bench) -> dict[str, bytes] | None:
    held = b.trainer(16).recall()
    assert held is None or not held.durable
    return None if held is None else contents_of(held)


def test_a_parked_capture_comes_back_and_is_on_no_disk(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.die()
    assert recalled(b) == oracle(one.plans[1])
    assert b.committed() == set()


def test_the_newest_whole_one_comes_back(b: Bench) -> None:
    """The one before is there until its successor is whole."""
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    park(one, 2, 6, slot=1)
    one.say("forget", number=1)
    park(one, 3, 7, whole=False)
    one.fill(3, 100)
    one.die()
    assert recalled(b) == oracle(one.plans[2])
    assert b.committed() == set()


def test_its_memory_written_over_it_is_gone(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    park(one, 2, 6, whole=False)
    one.die()
    assert recalled(b) is None


def test_asked_for_it_becomes_durable(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.say("persist", number=1)
    assert one.await_("durable")["number"] == 1
    assert one.await_("done")["number"] == 1
    assert b.committed() == {(1, 5)}
    park(one, 2, 6, slot=1)
    one.die()
    assert recalled(b) == oracle(one.plans[2])


def test_nobody_waits_for_it(b: Bench) -> None:
    """The next trainer is served at once."""
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.die()
    two = b.trainer(16)
    two.recall()
    two.serve(parent=None)
    two.take(1, 1)
    assert two.await_("done")["number"] == 1


def test_an_abandoned_one_is_reported_and_gone(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    park(one, 2, 6, slot=1, whole=False)
    one.say("abandon", number=2, error=error_to_wire(KeeperError("torn")))
    assert one.await_("failed")["number"] == 2
    assert "torn" in str(one.hear("error")[-1])
    one.die()
    assert recalled(b) == oracle(one.plans[1])


def test_when_nobody_comes_it_becomes_durable_before_the_keeper_ends(run_folder: Path) -> None:
    clock = ManualClock()
    with bench(run_folder, clock=clock, linger_s=10.0) as b:
        one = b.trainer()
        one.serve()
        park(one, 1, 5)
        one.die()
        b.turn()
        assert not b.server.is_over()
        clock.advance(11.0)
        assert not b.server.is_over()  # it has begun to write
        b.settled()
        assert b.server.is_over()
        assert b.committed() == {(1, 5)}


def test_everstep_stop_makes_it_durable(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    b.turn(5)
    b.server.end()
    assert not b.server.is_over()
    b.settled()
    assert b.server.is_over()
    assert b.committed() == {(1, 5)}


def test_one_of_a_timeline_that_is_over_is_not_written_by_another(b: Bench) -> None:
    """Only the process of the newest timeline commits (I11)."""
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.die()
    two = b.trainer(16)
    two.serve()
    two.die()
    b.server.end()
    b.settled()
    assert b.server.is_over()
    assert b.committed() == set()


def test_what_is_not_there_cannot_be_persisted(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    one.say("persist", number=7)
    b.turn(5)
    assert b.server.trainer is None


def test_nor_is_one_that_the_same_process_has_gone_back_from(b: Bench) -> None:
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.serve()
    one.die()
    b.server.end()
    b.settled()
    assert b.server.is_over()
    assert b.committed() == set()


def test_nor_is_one_that_lies_in_other_memory(b: Bench) -> None:
    """The same timeline, from a connection of its own: its arena has other bytes at that place."""
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.die()
    two = b.trainer(16)
    two.say("serve", timeline=one.timeline, keep={"newest": 3}, verified=None)
    two.die()
    b.server.end()
    b.settled()
    assert b.server.is_over()
    assert b.committed() == set()


def test_what_is_handed_over_while_it_looks_around_is_waited_for(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica may do so; copies of a base are begun when it is durable, not before."""
    one = b.trainer()
    one.serve()
    b.turn(2)
    keeper = b.server.duties.writer
    replicas = b.replicas
    assert keeper is not None

    def hands_over() -> bool:
        one.begin(1, 5)
        b.turn(3)
        return False

    monkeypatch.setattr(replicas, "finish", hands_over)
    b.server.end()
    b.server.duties.bases.stopping = False  # it is no new capture of training's
    assert not b.over()
    monkeypatch.undo()
    one.fill(1)
    one.captured(1)
    b.turn(3)
    b.until(lambda: not keeper.waiting, "the end of the base")
    assert b.over()
    assert b.committed() == {(1, 5)}


def test_what_is_over_may_be_said_again(b: Bench) -> None:
    """By a process that was interrupted as it said it, and does not know whether it has."""
    one = b.trainer()
    one.serve()
    park(one, 1, 5)
    one.say("persist", number=1)
    one.say("persist", number=1, again=True)
    one.await_("done")
    one.say("persist", number=1, again=True)
    b.turn(5)
    assert b.server.trainer is not None
    assert b.committed() == {(1, 5)}
