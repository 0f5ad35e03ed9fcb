"""The keeper's replica: bit for bit the state that training has, in bases and in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from everstep.options import KeeperOptions
from everstep.seams.failpoints import arm
from tests.support.following import (
    Odd,
    base_of,
    opened,
    run_steps,
    steps_on_disk,
    taken_here,
)
from tests.support.matrix import CASES, LOOPS
from tests.support.matrix import World as MatrixWorld
from tests.support.serving import serving

STEPS = 6


def bases_as_training_takes_them(run: Path, make: Callable[[], Any]) -> None:
    """Trains, and takes a lazy base of each step."""
    keeper = KeeperOptions(process=False)
    with opened(run, world := make(), method="lazy", every=1, keeper=keeper) as ckpt:
        run_steps(ckpt, world, STEPS)


def check_bases(
    folder: Path,
    make: Callable[[], Any],
    steps: tuple[int, ...] = (2, 5, 6),
    *,
    own: int = 1,
) -> None:
    """Bases of the replica are what the training process would have taken.

    Args:
        own: bases that it has to take itself, because what the state consists of changes.
    """
    bases_as_training_takes_them(folder / "lazy", make)
    with serving(folder / "run") as bench:
        world = make()
        ckpt = opened(bench.run, world)
        for step in range(1, STEPS + 1):
            run_steps(ckpt, world, 1)
            if step == 1:
                ckpt.wait()
            if step in steps:
                ckpt.save()
        ckpt.close()
        assert taken_here(ckpt) == own
    assert set(steps_on_disk(bench.run)) >= {1, STEPS, *steps}
    for step in steps:
        with base_of(bench.run, step) as found, base_of(folder / "lazy", step) as wanted:
            assert found.marker.exact, step
            assert (found.lsn, found.shape) == (wanted.lsn, wanted.shape)
            mine, theirs = found.digests(), wanted.digests()
            assert list(mine) == list(theirs)
            assert not [name for name in mine if mine[name] != theirs[name]], step
            assert found.objects == wanted.objects
            assert found.entries.keys() == wanted.entries.keys()


def own_bases(case: str, loop: str) -> int:
    """A part that begins to learn late brings new state with it, where there is such state and it
    is not there from the start."""
    found = CASES[case]
    makes_state = found.optimizer != "Adagrad" and (
        found.optimizer != "SGD" or "momentum" in found.options
    )
    return 2 if LOOPS[loop].frozen and found.late and makes_state else 1


@pytest.mark.thinned(12)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_base_of_the_replica_is_what_a_lazy_base_is(tmp_path: Path, loop: str) -> None:
    case = "AdamW-foreach"
    make = lambda: MatrixWorld(CASES[case], LOOPS[loop])  # noqa: E731
    check_bases(tmp_path, make, own=own_bases(case, loop))


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "case", ["SGD-momentum-for-loop", "Adam-fused", "AdamW-fused", "RMSprop-for-loop"]
)
def test_whatever_the_optimizer(tmp_path: Path, case: str) -> None:
    make = lambda: MatrixWorld(CASES[case], LOOPS["all"])  # noqa: E731
    check_bases(tmp_path, make, (5,), own=own_bases(case, "all"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_row_of_the_matrix(tmp_path: Path, case: str) -> None:
    make = lambda: MatrixWorld(CASES[case], LOOPS["all"])  # noqa: E731
    check_bases(tmp_path, make, own=own_bases(case, "all"))


def test_a_base_that_was_asked_for_is_made_before_the_state_changes(tmp_path: Path) -> None:
    """By the replica, which a base of the training process's own begins anew: that waits."""
    stepped, before = threading.Event(), []
    world = MatrixWorld(CASES["AdamW-foreach"], LOOPS["plain"])
    head = world.state["head"] = nn.Linear(3, 3)
    with serving(tmp_path / "run") as bench, opened(bench.run, world) as ckpt:
        run_steps(ckpt, world, 1)
        ckpt.wait()
        arm("replica.before_apply", lambda name: before.append(not stepped.wait(0.5)))
        run_steps(ckpt, world, 1)
        asked = ckpt.save()
        world.optimizer.add_param_group({"params": head.parameters()})
        run_steps(ckpt, world, 1)
        stepped.set()
        ckpt.wait()
    assert before == [True]
    assert asked.durable.exception() is None
    assert {2, 3} <= set(steps_on_disk(bench.run))


def test_parameters_of_all_kinds_and_two_optimizers(tmp_path: Path) -> None:
    check_bases(tmp_path, Odd)
