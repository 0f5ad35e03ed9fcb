"""Compressed training with a log of what it consumes (LowDiff): small, and exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.compress.training import Compressor
from everstep.errors import OptionError
from tests.unit.serving import Bench, die, serving
from tests.unit.test_log import World, opened, run_steps


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def compressed(seed: int, **options: Any) -> World:
    world = World(seed=seed)
    options = {"ratio": 0.1, "dense_below": 30} | options
    world.state["compressor"] = Compressor(world.optimizer, **options)
    return world


@pytest.mark.parametrize("kind", ["topk", "threshold", "int8", "adaptive"])
@pytest.mark.parametrize("feedback", [True, False])
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(
    served: Bench, kind: str, feedback: bool
) -> None:
    """Residuals of error feedback are state: with them, the steps that follow are the same."""
    world = compressed(1, kind=kind, error_feedback=feedback)
    ckpt = opened(served.run, world, every=100, method="lowdiff")
    ckpt.resume()
    states = run_steps(ckpt, world, 6)
    ckpt._saver.finish_captures()
    rng = torch.get_rng_state()
    die(ckpt)
    further = []
    for _ in range(3):  # as it would have gone on
        world.train()
        further.append(world.snapshot())
    torch.set_rng_state(rng)
    other = compressed(9, kind=kind, error_feedback=feedback)
    again = opened(served.run, other, method="lowdiff")
    recovery = again.resume()
    assert (recovery.step, recovery.replayed, recovery.exact) == (6, 5, True)
    assert other.snapshot() == states[6]
    assert [state for _, state in sorted(run_steps(again, other, 3).items())] == further
    again.close()


def test_without_error_feedback_the_log_is_small(run_folder: Path) -> None:
    sizes = {}
    for name, world, method in (
        ("dense", World(), "logged"),
        ("topk", compressed(1, ratio=0.02, error_feedback=False), "lowdiff"),
    ):
        with opened(run_folder / name, world, method=method, every=100) as ckpt:
            ckpt.resume()
            run_steps(ckpt, world, 2)
            before = ckpt._recorder.stats.record_bytes  # type: ignore[union-attr]
            run_steps(ckpt, world, 1)
            sizes[name] = ckpt._recorder.stats.record_bytes - before  # type: ignore[union-attr]
    rng = 5056 + 5157 + 2000  # of torch and Python, and objects: the same in both
    assert sizes["topk"] - rng < (sizes["dense"] - rng) / 2, sizes


def test_a_gradient_changed_behind_the_compressor_is_not_recorded(run_folder: Path) -> None:
    world = compressed(1)
    with opened(run_folder, world, method="lowdiff", every=100, on_failure="warn") as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)

        def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for p in world.model.parameters():
                if p.grad is not None:
                    p.grad.mul_(2)

        handle = world.optimizer.register_step_pre_hook(spoil)
        with pytest.warns(RuntimeWarning, match="was changed after it was compressed"):
            run_steps(ckpt, world, 2)
        handle.remove()
        assert ckpt._recorder.stats.holes > 0  # type: ignore[union-attr]


def test_lowdiff_needs_a_compressor(run_folder: Path) -> None:
    with pytest.raises(OptionError, match=r"no Compressor of \['optimizer'\]"):
        opened(run_folder, World(), method="lowdiff")
    other = World()
    world = World()
    world.state["compressor"] = Compressor(other.optimizer)
    with pytest.raises(OptionError, match="not in the state"):
        opened(run_folder, world, method="lowdiff")
    assert everstep.presets["lowdiff"].log == "topk"
