"""What may go wrong with the keeper's replica, and what comes back then."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    OptionError,
    OutOfSpaceError,
    RecoveryError,
    UnsupportedStateError,
)
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.replica.replica import BaseRequest, _PendingRequests
from everstep.replay.exactness import declare
from everstep.restore.offline.memory import HostMemory
from everstep.seams.failpoints import arm
from everstep.seams.progress import progress
from everstep.testing import inspect
from everstep.trainer.log import untracked_writes as untold
from tests.support.following import (
    base_of,
    opened,
    run_steps,
    steps_on_disk,
    taken_here,
    until,
    until_at,
)
from tests.support.log.every_step import World
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, raising


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def start(bench: Bench, world: Any, **options: Any) -> everstep.Checkpointer:
    """After one step, of which a base is durable: the replica begins with it."""
    ckpt = opened(bench.run, world, **options)
    ckpt.resume()
    run_steps(ckpt, world, 1)
    ckpt.wait()
    until_at(bench, ckpt.stats().step)
    return ckpt


@contextmanager
def held_up(run: Path) -> Iterator[tuple[Gate, Bench]]:
    """A keeper whose disk stops at the first file of a base that is not the first one."""
    gate = Gate()

    def hook(op: str, path: PurePath) -> None:
        if op == "write" and "base" in path.parts and path.parent.name != f"{1:012d}":
            gate.wait_at()

    with serving(run, filesystem=HookedFileSystem(hook)) as bench:
        try:
            yield gate, bench
        finally:
            gate.open()


# --- A trainer that is killed -----------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
def test_a_killed_trainer_comes_back_from_the_replica(served: Bench, steps: int) -> None:
    world = World()
    ckpt = start(served, world, every=3)
    states = {1: world.snapshot()} | run_steps(ckpt, world, steps)
    until_at(served, 1 + steps)
    world.train()  # an update without a step mark
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.source, recovery.replayed) == (1 + steps, "memory", 0)
    assert other.snapshot() == states[1 + steps]
    assert recovery.exact, recovery.evidence
    further, wanted = run_steps(again, other, 3), World()
    for _ in range(4 + steps):
        wanted.train()
    assert further[4 + steps] == wanted.snapshot(), "training goes on as if nothing had been"
    again.close()


def test_what_the_replica_has_not_applied_is_replayed(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 2)
    until_at(served, 3)
    monkeypatch.setattr(LogStore, "steps_after", lambda *_: [])  # it stands still
    states |= run_steps(ckpt, world, 4)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.base_step, recovery.replayed) == (7, 3, 4)
    assert other.snapshot() == states[7]
    assert recovery.exact
    monkeypatch.undo()
    again.close()


def test_killed_twice_before_it_takes_a_base_of_its_own(served: Bench) -> None:
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 3)
    until_at(served, 4)
    die(ckpt)
    for seed in (5, 6, 7):
        other = World(seed=seed)
        again = opened(served.run, other)
        assert again.resume().step == 4
        assert other.snapshot() == states[4]
        die(again)


def test_a_step_whose_mark_never_came_is_not_applied(served: Bench) -> None:
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 1)
    world.train()
    log = served.log
    assert log is not None
    until(lambda: [r.head.lsn for r in log.records()][-1:] == [3], "the update of step 3")
    until_at(served, 2)
    assert not log.steps_after(2, 2, 4)
    frozen = served.replicas.replica.freeze()  # type: ignore[union-attr]
    assert frozen is not None
    assert frozen.plan.identity.lsn == 2
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    assert again.resume().step == 2
    assert other.snapshot() == states[2]
    again.close()


def test_nobody_comes_back_the_last_step_becomes_durable(served: Bench) -> None:
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 3)
    until_at(served, 4)
    die(ckpt)
    served.server.end()
    until(lambda: steps_on_disk(served.run) == [1, 4], "the last base")
    with base_of(served.run, 4) as found:
        assert bytes(found.bytes_of("model/0.weight")) == states[4]["0.weight"]


def test_what_has_arrived_is_applied_before_it_ends(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    ckpt = start(served, world)
    run_steps(ckpt, world, 2)
    until_at(served, 3)
    monkeypatch.setattr(LogStore, "steps_after", lambda *_: [])  # it cannot follow
    states = run_steps(ckpt, world, 4)
    until(lambda: served.log.steps[1] == 7)  # type: ignore[index]
    die(ckpt)
    monkeypatch.undo()
    served.server.end()
    until(lambda: steps_on_disk(served.run) == [1, 7], "the last base")
    with base_of(served.run, 7) as found:
        assert bytes(found.bytes_of("model/0.weight")) == states[7]["0.weight"]


def test_where_the_log_does_not_lead_it_ends_with_what_it_has(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    ckpt = start(served, world)
    run_steps(ckpt, world, 2)
    until_at(served, 3)
    monkeypatch.setattr(LogStore, "steps_after", lambda *_: [])  # as if there were a hole
    run_steps(ckpt, world, 2)
    until(lambda: served.log.steps[1] == 5)  # type: ignore[index]
    die(ckpt)
    served.server.end()
    until(lambda: steps_on_disk(served.run) == [1, 3], "the last base")


def test_a_keeper_that_is_told_to_end_before_its_trainer_is_gone_loses_no_step(
    served: Bench,
) -> None:
    """``everstep stop``, or SIGTERM to both at once: the end has begun when the trainer dies."""
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 2)
    until_at(served, 3)
    replica = served.replicas.replica
    assert replica is not None
    with replica.access.exclusive():  # it writes nothing meanwhile
        served.server.end()
        until(lambda: replica.target == 3, "the beginning of the end")
        die(ckpt)
        until(lambda: served.server.trainer is None, "the death of the trainer")
    until(lambda: steps_on_disk(served.run) == [1, 3], "the last base")
    with base_of(served.run, 3) as found:
        assert bytes(found.bytes_of("model/0.weight")) == states[3]["0.weight"]


# --- The disk ---------------------------------------------------------------------------


def test_steps_wait_while_a_base_is_written(run_folder: Path) -> None:
    with held_up(run_folder) as (gate, bench):
        world = World()
        ckpt = start(bench, world)
        states = run_steps(ckpt, world, 2)
        save = ckpt.save()
        assert gate.reached.wait(20)
        states |= run_steps(ckpt, world, 4)
        until(lambda: bench.log.steps[1] == 7)  # type: ignore[index]
        assert bench.replicas.step == 3
        assert not save.durable.done()
        gate.open()
        until_at(bench, 7)
        assert save.durable.result(20) > 0
        ckpt.close()
        assert taken_here(ckpt) == 1
    for step in (3, 7):
        with base_of(run_folder, step) as found:
            assert bytes(found.bytes_of("model/0.weight")) == states[step]["0.weight"]


def test_what_is_due_meanwhile_is_taken_once_behind_it(run_folder: Path) -> None:
    with held_up(run_folder) as (gate, bench):
        world = World()
        ckpt = start(bench, world, every=1)
        run_steps(ckpt, world, 1)
        assert gate.reached.wait(20)
        until(lambda: inspect(ckpt).keeper.replica_applied > 0, "word that it follows")
        run_steps(ckpt, world, 5)
        replica = bench.replicas.replica
        assert replica is not None
        until(lambda: 7 in replica.requested_steps, "the last of them")
        gate.open()
        ckpt.wait()
        assert steps_on_disk(run_folder) == [1, 2, 7]
        ckpt.close()


def test_a_killed_trainer_comes_back_while_a_base_is_written(run_folder: Path) -> None:
    with held_up(run_folder) as (gate, bench):
        world = World()
        ckpt = start(bench, world, every=4)
        states = run_steps(ckpt, world, 3)
        assert gate.reached.wait(20)
        states |= run_steps(ckpt, world, 2)
        die(ckpt)
        gate.open()
        other = World(seed=9)
        again = opened(bench.run, other)
        recovery = again.resume()
        assert recovery.step == 6
        assert other.snapshot() == states[6]
        assert recovery.exact
        again.close()


def test_a_full_disk_is_reported_and_the_replica_goes_on(run_folder: Path) -> None:
    filesystem = HookedFileSystem()
    with serving(run_folder, filesystem=filesystem) as bench:
        world = World()
        ckpt = start(bench, world)
        run_steps(ckpt, world, 2)
        full = OSError(errno.ENOSPC, "No space left on device")
        filesystem.hook = raising(full, "write", "*/base/*")
        save = ckpt.save()
        with pytest.raises(OutOfSpaceError):
            ckpt.wait()
        assert isinstance(save.durable.exception(20), OutOfSpaceError)
        states = run_steps(ckpt, world, 2)
        until_at(bench, 5)
        ckpt.save()
        ckpt.wait()
        assert steps_on_disk(run_folder) == [1, 5]
        assert taken_here(ckpt) == 1
        with base_of(run_folder, 5) as found:
            assert bytes(found.bytes_of("model/0.weight")) == states[5]["0.weight"]
        ckpt.close()


# --- The log ----------------------------------------------------------------------------


def test_a_damaged_record_is_not_applied_and_a_new_base_is_taken(run_folder: Path) -> None:
    reported: list[EverstepError] = []
    with held_up(run_folder) as (gate, bench):
        world = World()
        ckpt = start(bench, world, on_failure=reported.append)
        run_steps(ckpt, world, 2)
        ckpt.save()
        assert gate.reached.wait(20)
        states = run_steps(ckpt, world, 3)
        log = bench.log
        assert log is not None
        until(lambda: log.steps == (2, 6) and not log.arriving, "all steps")
        (update,) = [r for r in log.records() if r.head.kind == "update" and r.head.step == 5]
        update.data[100] ^= 1
        gate.open()
        until(lambda: inspect(ckpt).replica.lost is not None, "the damage")
        assert bench.replicas.step == 4, "what it has is good"
        states |= run_steps(ckpt, world, 1)
        ckpt.wait()
        assert taken_here(ckpt) == 2
        until_at(bench, 7)
        states |= run_steps(ckpt, world, 1)
        until_at(bench, 8)
        assert any(isinstance(error, DamageError) for error in reported)
        die(ckpt)
        other = World(seed=9)
        again = opened(bench.run, other)
        assert again.resume().step == 8
        assert other.snapshot() == states[8]
        again.close()


def test_a_hole_in_the_log_takes_a_new_base(run_folder: Path) -> None:
    with held_up(run_folder) as (gate, bench):
        world = World()
        ckpt = start(bench, world)
        ckpt.before_update()
        with torch.no_grad():
            world.model[0].weight.mul_(0.5)
        ckpt.after_update()
        states = run_steps(ckpt, world, 1)
        log = bench.log
        assert log is not None
        assert gate.reached.wait(20)
        log.settle(20)
        assert log.steps == (2, 2)
        assert not log.steps_after(1, 1, 4)
        gate.open()
        ckpt.wait()
        assert taken_here(ckpt) == 2
        until_at(bench, 2)
        states |= run_steps(ckpt, world, 2)
        until_at(bench, 4)
        die(ckpt)
        other = World(seed=9)
        again = opened(bench.run, other)
        assert again.resume().step == 4
        assert other.snapshot() == states[4]
        again.close()


def test_another_shape_takes_a_new_base(served: Bench) -> None:
    world = World()
    late = world.model[0].late = torch.nn.Linear(2, 2)
    ckpt = start(served, world)
    world.optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.1})
    world.scheduler.base_lrs.append(0.1)
    states = run_steps(ckpt, world, 1)
    ckpt.wait()
    assert taken_here(ckpt) == 2
    states |= run_steps(ckpt, world, 3)
    until_at(served, 5)
    ckpt.save()
    ckpt.close()
    with base_of(served.run, 5) as found:
        assert bytes(found.bytes_of("model/0.weight")) == states[5]["0.weight"]


def test_who_waits_for_it_is_told_so(served: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with seconds of imports, and no byte of a base comes meanwhile."""
    said: list[str] = []

    def shown(label: str, total: int) -> Any:
        said.append(label)
        return progress(label, total)

    world = World()
    ckpt = start(served, world)
    monkeypatch.setattr("everstep.trainer.attach.remote.progress", shown)
    run_steps(ckpt, world, 1)
    ckpt.save()
    ckpt.wait()
    assert "which loads torch first" in said[-1]
    ckpt.close()


def test_its_memory_is_counted(served: Bench) -> None:
    """By the training process, and by a keeper that has lost it."""
    world = World()
    ckpt = start(served, world)
    size_bytes = inspect(ckpt).saver.layouts.current.size_bytes
    touched_bytes = inspect(ckpt).keepers.pool.touched_bytes
    ckpt.save().durable.result(20)
    assert ckpt.stats().host_bytes >= touched_bytes + size_bytes
    before = served.server.status()["arena_bytes"]
    assert before >= touched_bytes + size_bytes
    die(ckpt)
    until(lambda: served.server.status()["trainer"] is None)
    assert served.server.status()["arena_bytes"] == before


@pytest.mark.parametrize("by", ["marks", "asks"])
def test_a_change_behind_the_optimizers_back_is_found(
    served: Bench, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The replica goes by the log alone; samples of the live state tell the two apart: those in
    each mark, and if they did not, those that come with each base that is asked for (I8)."""
    monkeypatch.setattr(untold, "SAMPLED_FIRST_STEPS", 0)  # or training would find it itself
    if by == "asks":
        monkeypatch.setattr(HostMemory, "first_difference", lambda *_: None)
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, on_failure=reported.append)
    run_steps(ckpt, world, 1)
    world.model[0].weight.data.mul_(0.5)
    states = run_steps(ckpt, world, 1)
    if by == "asks":
        assert isinstance(ckpt.save().durable.exception(20), AuditError)
    # The keeper may say so within the step that it has found out of: then that has the base.
    until(lambda: inspect(ckpt).replica.lost is not None or taken_here(ckpt) == 2)
    due_at = 3 if taken_here(ckpt) == 2 else 4
    states |= run_steps(ckpt, world, 1)
    ckpt.wait()
    assert [type(error) for error in reported] == [AuditError]
    assert "model/0.weight" in str(reported[0])
    assert taken_here(ckpt) == 2
    assert steps_on_disk(served.run) == [1, due_at]
    states |= run_steps(ckpt, world, 2)
    until_at(served, 6)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    assert again.resume().step == 6
    assert other.snapshot() == states[6]
    again.close()


# --- Where it cannot follow -------------------------------------------------------------


def test_a_replica_that_cannot_keep_up_is_given_up_and_said_once(run_folder: Path) -> None:
    reported: list[EverstepError] = []
    with held_up(run_folder) as (gate, bench):
        world = World()
        ckpt = start(bench, world, on_failure=reported.append)
        # A replica that the keeper has not reported yet is not given up.
        until(lambda: ckpt.stats().replica_step is not None, "the report of the replica")
        states = run_steps(ckpt, world, 1)
        replica = inspect(ckpt).replica
        inspect(ckpt).recorder.memory.bytes_max = 120_000
        ckpt.save()
        assert gate.reached.wait(20)

        def train() -> None:
            while replica.follows:
                states.update(run_steps(ckpt, world, 1))

        # The step that gives the replica up may need a base, which waits for the one at the gate.
        training = threading.Thread(target=train)
        training.start()
        until(lambda: not replica.follows, "the end of the replica")
        gate.open()
        training.join(TIMEOUT_S)
        ckpt.wait()
        assert "does not keep up" in reported[0].message
        assert inspect(ckpt).replica is not None
        assert not inspect(ckpt).replica.follows
        assert bench.replicas.step is None
        last = ckpt.stats().step
        states |= run_steps(ckpt, world, 3)
        ckpt.wait()
        assert taken_here(ckpt) >= 2, "bases are taken as without a replica"
        states |= run_steps(ckpt, world, 2)
        die(ckpt)
        assert [error for error in reported if "does not keep up" in error.message] == reported
        other = World(seed=9)
        again = opened(bench.run, other)
        recovery = again.resume()
        assert recovery.step == last + 5
        assert other.snapshot() == states[last + 5]
        assert recovery.exact
        again.close()


def test_records_that_were_applied_make_room_for_others(served: Bench) -> None:
    world = World()
    ckpt = start(served, world)
    inspect(ckpt).recorder.memory.bytes_max = 120_000
    states: dict[int, Any] = {}
    for step in range(2, 22):
        states |= run_steps(ckpt, world, 1)
        until(lambda at=step: ckpt.stats().replica_step == at)  # type: ignore[misc]
    assert ckpt.stats().log_holes == 0
    assert taken_here(ckpt) == 1
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.source) == (21, "memory")
    assert other.snapshot() == states[21]
    again.close()


def test_the_newest_step_stays_in_the_log_until_the_replica_is_done_with_it(served: Bench) -> None:
    """Its mark is read once more, when a base is made of the replica."""
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 5)
    until(lambda: ckpt.stats().replica_step == 6)
    inspect(ckpt).recorder.memory.bytes_max = 400_000
    for _ in range(20):  # updates of a step that has no end, over whatever was let go
        world.train()
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    assert again.resume().step == 6
    assert other.snapshot() == states[6]
    again.close()


class Own(torch.optim.SGD):
    """Declared by its user: a keeper does not have it."""


def test_what_a_keeper_cannot_run_is_refused_at_once(run_folder: Path) -> None:
    declare(Own, elementwise=True)
    with pytest.raises(UnsupportedStateError, match="does not know the class"):
        opened(run_folder, World(lambda p: Own(p, lr=0.1)))
    if hasattr(torch.optim, "Adafactor"):
        with pytest.raises(UnsupportedStateError, match="each element on its own"):
            opened(run_folder, World(lambda p: torch.optim.Adafactor(p)))


def test_a_replica_needs_a_log_a_process_and_memory(run_folder: Path) -> None:
    with pytest.raises(OptionError, match="a log to apply"):
        everstep.Method(apply="replica")
    with pytest.raises(OptionError, match="separate keeper process"):
        opened(run_folder, World(), keeper=everstep.KeeperOptions(process=False))
    with pytest.raises(OutOfSpaceError, match="host memory") as caught:
        opened(run_folder, World(), budget=everstep.Budget(host_bytes=40_000))
    assert caught.value.hint is not None
    needed = int(caught.value.hint.split("=")[1].split(")")[0])
    opened(run_folder, World(), budget=everstep.Budget(host_bytes=needed)).close()


def test_an_error_in_a_replica_is_told_and_recovery_goes_on_without(served: Bench) -> None:
    reported: list[EverstepError] = []
    world = World()
    ckpt = start(served, world, on_failure=reported.append)
    arm("replica.before_apply", "raise")
    states = run_steps(ckpt, world, 1)
    # Training may have heard of it in that very step, and have taken a base already.
    until(lambda: inspect(ckpt).replica.lost is not None or taken_here(ckpt) == 2)
    states |= run_steps(ckpt, world, 2)
    ckpt.wait()
    assert ["internal error in the replica" in error.message for error in reported] == [True]
    assert taken_here(ckpt) == 2
    assert served.replicas.step is None
    states |= run_steps(ckpt, world, 2)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert recovery.step == 6
    assert recovery.replayed > 0
    assert other.snapshot() == states[6]
    again.close()


def test_training_that_was_elsewhere_is_followed_but_never_exact(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "everstep.keeper.replica.replica_state.replay_conditions",
        lambda records: (None, "trained on a GPU, replayed on the CPU"),
    )
    world = World()
    ckpt = start(served, world)
    run_steps(ckpt, world, 2)
    ckpt.save()
    ckpt.wait()
    with base_of(served.run, 3) as found:
        assert not found.marker.exact
    run_steps(ckpt, world, 1)
    until_at(served, 4)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    assert not again.resume().exact
    again.close()


# --- In one process ---------------------------------------------------------------------


def test_rewind_starts_the_replica_anew(served: Bench) -> None:
    world = World()
    ckpt = start(served, world)
    states = run_steps(ckpt, world, 6)
    until_at(served, 7)
    with pytest.raises(RecoveryError):
        ckpt.rewind(99)
    states |= run_steps(ckpt, world, 1)
    until_at(served, 8)  # it goes on
    recovery = ckpt.rewind(5)
    assert recovery.step == 5
    assert world.snapshot() == states[5]
    again = run_steps(ckpt, world, 2)
    ckpt.wait()
    assert again[6] == states[6]
    until_at(served, 7)
    ckpt.save()
    ckpt.close()
    with base_of(served.run, 7, timeline=2) as found:
        assert found.marker.exact
        assert bytes(found.bytes_of("model/0.weight")) == states[7]["0.weight"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("then", ["save", "close"])
def test_a_rewind_that_is_refused_holds_nothing_up(served: Bench, then: str) -> None:
    """The replica was to stay as it was for it."""
    world = World()
    ckpt = start(served, world)
    wanted = run_steps(ckpt, world, 6)[7]
    until_at(served, 7)
    with pytest.raises(RecoveryError):
        ckpt.rewind(99)
    if then == "save":
        ckpt.save()
        ckpt.wait(TIMEOUT_S)
    ending = threading.Thread(target=ckpt.close, daemon=True)
    ending.start()
    ending.join(TIMEOUT_S)
    assert not ending.is_alive()
    with base_of(served.run, 7) as found:
        assert bytes(found.bytes_of("model/0.weight")) == wanted["0.weight"]


def test_a_base_is_due_at_the_newest_step_once_one_is_written() -> None:
    """CheckFreq's rule, and what was asked for exactly."""

    wanted = _PendingRequests([BaseRequest(1, 3, exact=False), BaseRequest(2, 4, exact=False)])
    wanted.aim(9)
    assert wanted.target == 9
    assert [ask.number for ask in wanted.take(9)] == [1, 2]
    wanted.requests = [
        BaseRequest(3, 10, exact=False),
        BaseRequest(4, 12, exact=True),
        BaseRequest(5, 13, exact=True),
    ]
    wanted.aim(15)
    assert wanted.target == 12
    assert [ask.number for ask in wanted.take(12)] == [3, 4]
    wanted.aim(15)
    assert wanted.target == 13


@pytest.mark.thinned(4)
@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("why", ["its base fails", "it has stopped"])
def test_closing_takes_what_no_replica_can_make(why: str, steps: int, run_folder: Path) -> None:
    """Asked for before training has heard of it: nothing would answer, for ever."""
    gate, told = Gate(), list[EverstepError]()

    def full_once(op: str, path: PurePath) -> None:
        if op == "write" and "base" in path.parts:
            gate.wait_at()
            if why == "its base fails" and path.parent.name == f"{1:012d}":
                raise OSError(errno.ENOSPC, "No space left on device")

    with serving(run_folder, filesystem=HookedFileSystem(full_once)) as served:
        world = World()
        ckpt = opened(served.run, world, every=2, on_failure=told.append)
        ckpt.resume()
        states = run_steps(ckpt, world, 1)
        if why == "it has stopped":
            gate.open()
            ckpt.wait()
            until_at(served, 1)
            server: Any = served.server
            replica = server.duties.replicas.replica
            with replica.access.exclusive():
                replica.reset()  # as where a state differs
        states |= run_steps(ckpt, world, steps - 1)
        assert not told
        gate.open()
        ending = threading.Thread(target=ckpt.close, daemon=True)
        ending.start()
        ending.join(TIMEOUT_S)
        assert not ending.is_alive()
        assert [type(error) for error in told] == [OutOfSpaceError] * (why == "its base fails")
        with base_of(served.run, steps) as found:
            assert found.marker.exact
            assert bytes(found.bytes_of("model/0.weight")) == states[steps]["0.weight"]
