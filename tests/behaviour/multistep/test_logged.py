"""Bases over several steps beside a gradient log: the records of the log bring the parts to one
step, so that gradients are captured once, and every step can be recovered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.keeper.replica import replica_state
from everstep.seams.failpoints import arm
from everstep.testing import inspect
from tests.support.following import Odd, opened, run_steps, steps_on_disk
from tests.support.lost_keepers import cut
from tests.support.multistep.rows import ROWS, STEPS, matrix, over, restored
from tests.support.multistep.world import World, report_of, start
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, Gate

ON_DISK = everstep.LogOptions(to="disk", history="all")


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def logged(parts: int | str, log: str = "dense") -> everstep.Method:
    return replace(over(parts), log=log)


class Compressed(World):
    """Training consumes a tenth of the gradients of the large tensors."""

    def __init__(self, *, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.state["compressor"] = everstep.compress.Compressor(
            self.optimizer, ratio=0.1, dense_below=100
        )


def check_every_step(
    bench: Bench, make: Any, method: everstep.Method, *, every: int = 4
) -> everstep.Checkpointer:
    """Train, and compare every step, from bases and log, with the state that it had."""
    world = make(seed=1)
    ckpt = opened(bench.run, world, method=method, every=every, log=ON_DISK)
    ckpt.resume()
    states = run_steps(ckpt, world, STEPS)
    ckpt.close()
    # A base of one step begins the log, and any that has an entry that was not there before.
    ends = [min(due + int(method.parts) - 1, STEPS) for due in (8, 12)]
    found = steps_on_disk(bench.run)
    assert (found[0], found[-2:]) == (1, ends)
    report = report_of(ckpt)
    assert (report.windows >= 2, report.abandoned) == (True, 0)
    assert {base.gradient_bytes for base in report.bases} == {0}
    for step in range(1, STEPS + 1):
        assert restored(bench.run, make(seed=9), step) == states[step], step
    return ckpt


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", ROWS)
def test_every_step_comes_back(case: str, served: Bench) -> None:
    check_every_step(served, matrix(case, "all"), logged(3))


def test_parameters_of_all_kinds_and_two_optimizers(served: Bench) -> None:
    check_every_step(served, Odd, logged(4))


def test_gradients_that_training_consumes_compressed(served: Bench) -> None:
    check_every_step(served, Compressed, logged(3, "topk"))


@pytest.mark.parametrize("killed_at", range(2, 8))
def test_no_step_is_lost_whenever_it_dies(killed_at: int, served: Bench) -> None:
    """The window begins at step 2 and ends at step 5; the log is in the keeper's memory."""
    world = World()
    ckpt = start(served, world, logged(4))
    states = run_steps(ckpt, world, killed_at - 2)
    states[ckpt.stats().step] = world.snapshot()
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other, method=logged(4))
    recovery = again.resume()
    assert (recovery.step, recovery.exact) == (killed_at, True)
    assert other.snapshot() == states[killed_at]
    again.close()


@pytest.mark.parametrize("lacks", ["change", "record"])
def test_a_step_that_the_log_lacks_ends_the_window(lacks: str, served: Bench) -> None:
    """A base of that very step follows: neither log nor window leads beyond it."""
    world = World()
    ckpt = start(served, world, logged(4), on_failure="warn")
    states = run_steps(ckpt, world, 1)
    if lacks == "record":
        arm("log.before_record", "raise")
    else:
        ckpt.before_update()
        with torch.no_grad():
            world.model[0].weight.mul_(0.5)
        ckpt.after_update()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states |= run_steps(ckpt, world, 4)
    ckpt.close()
    assert report_of(ckpt).abandoned == 1
    assert 4 in steps_on_disk(served.run)
    assert 5 not in steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), 4) == states[4]


def test_records_stay_until_the_window_is_rebuilt(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a newer base is durable before, which makes them superfluous for the log."""
    gate = Gate()
    rebuild = replica_state.rebuild

    def slow(*given: Any, **options: Any) -> Any:
        gate.wait_at()
        return rebuild(*given, **options)

    monkeypatch.setattr(replica_state, "rebuild", slow)
    world = World()
    ckpt = start(served, world, logged(3))
    window = inspect(ckpt).multistep.last
    assert window is not None
    states = run_steps(ckpt, world, 2)
    assert gate.reached.wait(TIMEOUT_S)
    states[4] = world.snapshot()
    world.train()
    ckpt.step()
    ckpt.save().durable.result(TIMEOUT_S)
    run_steps(ckpt, world, 20)  # they would take the memory of released records
    gate.open()
    window.durable.result(TIMEOUT_S)
    ckpt.close()
    assert restored(served.run, World(seed=9), 4) == states[4]


def test_a_log_that_fills_up_takes_bases(served: Bench) -> None:
    """It has memory for a few steps: whether its bases take one step or two, each is right."""
    world = World()
    ckpt = opened(served.run, world, method=logged(2), budget=everstep.Budget(host_bytes=200_000))
    ckpt.resume()
    states = run_steps(ckpt, world, 40)
    ckpt.close()
    assert ckpt.stats().saves > 2
    for step in steps_on_disk(served.run):
        assert restored(served.run, World(seed=9), step) == states[step], step


def test_a_keeper_that_is_lost_with_a_window_takes_no_memory_along(served: Bench) -> None:
    """It is lost after the last mark, before all parts were handed over: the log goes on."""
    world = World()
    budget = everstep.Budget(host_bytes=1_000_000)
    ckpt = start(served, world, logged(3), on_failure="warn", budget=budget, every=10)
    arm("window.before_assemble", lambda name: cut(ckpt) and None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_steps(ckpt, world, 12)
        ckpt.wait(TIMEOUT_S)
        before = ckpt.stats().log_holes
        for _ in range(8):
            run_steps(ckpt, world, 10)
            ckpt.wait(TIMEOUT_S)
    assert ckpt.stats().keeper_restarts == 1
    assert ckpt.stats().log_holes == before
    ckpt.close()
