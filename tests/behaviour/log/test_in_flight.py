"""Step marks that are on their way to the keeper when training goes on: a crash costs at most so
many steps more, and everything that relies on the last step waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import everstep
from everstep.errors import OptionError
from everstep.options import LogOptions
from everstep.seams.failpoints import arm
from everstep.testing import inspect
from tests.support.log.every_step import ON_DISK, World, opened, run_steps
from tests.support.ranks.together import bases
from tests.support.serving import Bench, die, serving
from tests.support.world import Gate, forget


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def test_a_step_ends_before_the_keeper_has_its_mark(served: Bench, gate: Gate) -> None:
    world = World()
    ckpt = opened(served.run, world, every=1000, log=LogOptions(in_flight_steps=1))
    ckpt.resume()
    states = run_steps(ckpt, world, 3)
    ckpt.wait()
    arm("log.before_record", lambda name: gate.wait_at(), hit=2)  # of the mark of step 4
    run_steps(ckpt, world, 1)
    assert gate.reached.wait(5.0)
    assert ckpt.stats().recoverable_step == 3
    # Training dies here, with that mark.
    remote = inspect(ckpt).keepers.pool.keeper
    remote.disconnect(5.0)
    gate.open()
    inspect(ckpt).release()
    other = World(seed=9)
    with opened(served.run, other) as again:
        recovery = again.resume()
        assert (recovery.step, recovery.exact) == (3, True), recovery.evidence
        assert other.snapshot() == states[3]


def test_waiting_includes_the_marks_in_flight(served: Bench, gate: Gate) -> None:
    world = World()
    ckpt = opened(served.run, world, every=1000, log=LogOptions(in_flight_steps=2))
    ckpt.resume()
    states = run_steps(ckpt, world, 5)
    ckpt.wait()
    assert ckpt.stats().recoverable_step == 5
    die(ckpt)
    other = World(seed=9)
    with opened(served.run, other) as again:
        assert (again.resume().step, other.snapshot()) == (5, states[5])


@pytest.mark.parametrize("in_flight_steps", [1, 3])
def test_every_step_can_be_gone_back_to_beside_bases(
    run_folder: Path, in_flight_steps: int
) -> None:
    """Bases that are taken while marks are in flight relieve the records before them only."""
    log = LogOptions(to="disk", batch_steps=2, history="all", in_flight_steps=in_flight_steps)
    world = World()
    with opened(run_folder, world, every=3, keep=20, log=log) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 11)
        assert ckpt.stats().log_holes == 0
    forget(run_folder)
    other = World(seed=9)
    with opened(run_folder, other, every=1000, keep=20, log=log) as ckpt:
        for step in (11, *range(1, 12)):
            recovery = ckpt.resume(step=step)
            assert (recovery.step, recovery.exact) == (step, True), recovery.evidence
            assert other.snapshot() == states[step]


def test_a_mark_that_is_lost_in_flight_makes_a_base_due(served: Bench) -> None:
    world = World()
    log = LogOptions(in_flight_steps=1)
    told = list[everstep.EverstepError]()
    ckpt = opened(served.run, world, every=1000, log=log, on_failure=told.append)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    ckpt.wait()
    arm("log.before_record", "raise", hit=2)
    states = run_steps(ckpt, world, 4)
    assert len(told) == 1
    assert (ckpt.stats().log_holes, ckpt.stats().saves) == (1, 2)
    ckpt.wait()
    assert ckpt.stats().recoverable_step == 7
    die(ckpt)
    other = World(seed=9)
    with opened(served.run, other) as again:
        assert (again.resume().step, other.snapshot()) == (7, states[7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"log": LogOptions(in_flight_steps=1), "method": "lowdiff_plus"}, "is not possible with"),
        ({"log": LogOptions(in_flight_steps=1), "lose_at_most": "1 step"}, "the promise decides"),
    ],
)
def test_where_no_mark_may_be_in_flight(
    run_folder: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        everstep.Checkpointer(run_folder, World().state, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="exclude each other"):
        LogOptions(to=ON_DISK.to, lag_steps=1, in_flight_steps=1)


def test_rewinding_waits_for_the_marks_in_flight(served: Bench) -> None:
    world = World()
    log = LogOptions(to="disk", batch_steps=1, history="all", in_flight_steps=2)
    with opened(served.run, world, every=1000, log=log) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 5)
        for step in (5, 4, 2):
            recovery = ckpt.rewind(step)
            assert (recovery.step, recovery.exact) == (step, True), recovery.evidence
            assert world.snapshot() == states[step]
            states |= run_steps(ckpt, world, 2)


def test_no_last_base_of_parameters_that_are_not_finite(
    served: Bench, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gradients of the last step are checked on their way to the keeper."""
    world = World(clip=False)
    log = LogOptions(watch=True, in_flight_steps=2)
    ckpt = opened(served.run, world, every=1000, log=log, on_failure=lambda error: None)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    ckpt.wait()
    arm("log.before_record", lambda name: gate.wait_at())
    world.model[0].weight.register_hook(lambda gradient: gradient * torch.nan)
    world.train()
    ckpt.step()
    threading.Timer(0.1, gate.open).start()
    ckpt.close()
    assert "no last base of step 4 is taken" in capsys.readouterr().err
    assert set(bases(served.run)) == {1}


def test_an_announced_change_of_a_declared_entry_is_no_error(run_folder: Path) -> None:
    world = World()
    average = torch.optim.swa_utils.AveragedModel(world.model)
    world.state["average"] = average
    declared = {"average/*": lambda: average.update_parameters(world.model)}
    log = LogOptions(in_flight_steps=1)
    with opened(run_folder, world, every=1000, log=log, declared=declared) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 3)
        gate = Gate()
        ckpt.wait()
        arm("log.before_record", lambda name: gate.wait_at(), hit=2)  # of the step mark
        run_steps(ckpt, world, 1)
        threading.Timer(0.1, gate.open).start()
        ckpt.before_update()
        with torch.no_grad():
            for value in average.parameters():
                value.mul_(0.5)
        ckpt.after_update()
        run_steps(ckpt, world, 2)
        ckpt.wait()
        assert ckpt.stats().log_holes == 1


def test_the_disk_has_what_was_recorded_before_its_log_stops(run_folder: Path, gate: Gate) -> None:
    """A daily budget may stop it; see ``Budget(write_bytes_per_day=)``."""
    log = LogOptions(to="disk", batch_steps=1, in_flight_steps=1)
    world = World()
    with opened(run_folder, world, every=1000, log=log) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 3)
        ckpt.wait()
        arm("log.before_record", lambda name: gate.wait_at(), hit=2)  # of the step mark
        run_steps(ckpt, world, 1)
        threading.Timer(0.1, gate.open).start()
        inspect(ckpt).recorder.stop_disk()
        run_steps(ckpt, world, 2)
        ckpt.wait()
        assert ckpt.stats().log_steps_in_memory == 2
