"""A process that takes over while the keeper's replica makes a base, or has just made one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

import everstep
from everstep.keeper.replica.replica import Replica
from everstep.seams.failpoints import arm
from tests.support.following import opened, run_steps, steps_on_disk, until, until_at
from tests.support.log.every_step import World
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def following(bench: Bench, world: World) -> everstep.Checkpointer:
    """A training at step 1, with which its replica begins."""
    ckpt = opened(bench.run, world)
    ckpt.resume()
    run_steps(ckpt, world, 1)
    ckpt.wait()
    until_at(bench, 1)
    return ckpt


def held_at_a_base(
    bench: Bench, world: World
) -> tuple[everstep.Checkpointer, dict[int, Any], Gate]:
    """A training at step 3, whose replica stands still right before it makes a base of that."""
    ckpt = following(bench, world)
    gate = Gate()
    arm("replica.before_persist", lambda name: gate.wait_at())
    states = run_steps(ckpt, world, 2)
    ckpt.save()
    assert gate.reached.wait(TIMEOUT_S)
    return ckpt, states, gate


def written_over(bench: Bench, ckpt: everstep.Checkpointer, gate: Gate) -> None:
    """The base becomes durable, and the memory of the records up to its step is used again, as
    the training process does it for the next ones."""
    log = bench.log
    assert log is not None
    log.settle(TIMEOUT_S)
    records = log.records()
    assert records[-1].head.step == 3
    gate.open()
    ckpt.wait()
    until(lambda: not log.records(), "the end of what nobody needs")
    for record in records:
        record.data[:] = b"\xff" * len(record.data)


def test_a_state_whose_base_is_durable_comes_back_from_memory(served: Bench) -> None:
    """Its records are not read again: they may be others by then."""
    world = World()
    ckpt, states, gate = held_at_a_base(served, world)
    written_over(served, ckpt, gate)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.source, recovery.replayed) == (3, "memory", 0)
    assert other.snapshot() == states[3]
    again.close()


def test_nothing_is_begun_behind_the_back_of_who_takes_over(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been told that nothing is under way; a base that began then would be one of an
    earlier timeline, in memory that it restores from, and its keeper would not serve it."""
    disk, freeze = Gate(), Replica.freeze

    def hook(op: str, path: PurePath) -> None:
        if op == "write" and "base" in path.parts and path.parent.name == f"{3:012d}":
            disk.wait_at()

    with serving(run_folder, filesystem=HookedFileSystem(hook)) as bench:
        ckpt, states, gate = held_at_a_base(bench, World())

        def freezes(self: Replica, at: int | None = None) -> Any:
            gate.open()
            return freeze(self, at)

        monkeypatch.setattr(Replica, "freeze", freezes)
        die(ckpt)
        other = World(seed=9)
        again = opened(bench.run, other)
        try:
            recovery = again.resume()
            assert (recovery.step, recovery.source) == (3, "memory")
            assert other.snapshot() == states[3]
            run_steps(again, other, 1)
            again.wait()
            assert again.stats().keeper_restarts == 0
            assert not disk.reached.is_set()
            assert steps_on_disk(bench.run) == [1]
        finally:
            disk.open()
        again.close()


def test_steps_behind_a_base_that_nobody_wants_any_more_are_applied(served: Bench) -> None:
    """They had come before the replica was at its step: nothing else will stir it."""
    world = World()
    ckpt, log = following(served, world), served.log
    assert log is not None
    gates = {name: Gate() for name in ("replica.before_apply", "replica.before_persist")}
    for name in gates:
        arm(name, lambda name: gates[name].wait_at())
    run_steps(ckpt, world, 1)
    ckpt.save()
    run_steps(ckpt, world, 2)
    first, second = gates.values()
    assert first.reached.wait(TIMEOUT_S)
    until(lambda: log.steps == (2, 4) and not log.arriving, "all steps")
    first.open()
    assert second.reached.wait(TIMEOUT_S)
    duties = served.server.duties
    over = threading.Event()
    lose = duties.lose

    def lost(trainer: Any) -> None:
        lose(trainer)
        over.set()

    duties.lose = lost  # type: ignore[method-assign]
    die(ckpt)
    assert over.wait(TIMEOUT_S), "what it had asked for is wanted until then"
    second.open()
    until_at(served, 4)
    assert steps_on_disk(served.run) == [1]
