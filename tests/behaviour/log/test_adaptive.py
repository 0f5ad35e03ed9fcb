"""A log of lossy copies of gradients (TierCheck): small, approximate, and never called exact."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.compress.lossy import lossy_copies, restored_values
from everstep.compress.sparse import Sparse
from everstep.errors import OptionError
from everstep.options import LogOptions
from everstep.testing import inspect
from tests.support.log.every_step import World, opened, run_steps
from tests.support.logged import invoke
from tests.support.serving import Bench, die, serving
from tests.support.world import inventory_of

ADAPTIVE = everstep.Method(base="lazy", log="adaptive")
RATIO = 0.05


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


class Wide(World):
    """With one tensor that is large (100,000 elements and more) and small ones.

    Attributes:
        gradients: of each step, as the optimizer consumed them.
    """

    def __init__(self, seed: int = 1, *, spoil_at: int | None = None) -> None:
        super().__init__(seed=seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 320), nn.Linear(320, 320), nn.Linear(320, 2))
        self.optimizer = self.make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.state |= {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }
        self.gradients: list[list[torch.Tensor]] = []
        self.spoil_at = spoil_at

    def train(self) -> None:
        self.model(torch.randn(6, 8)).square().mean().backward()
        if len(self.gradients) == self.spoil_at:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad[0] = math.nan
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state["plain"]["seen"] += 1


def lossy(gradient: torch.Tensor) -> torch.Tensor:
    """What replay consumes in the place of ``gradient``."""
    found = lossy_copies({0: gradient}, RATIO)
    if 0 not in found:
        return gradient
    form = found[0].form
    if isinstance(form, Sparse):
        values = restored_values(form.values, gradient.dtype, found[0].exponent)
        dense = torch.zeros(form.numel).index_copy_(0, form.positions(), values)
    else:
        dense = form.dense()
    return dense.view(gradient.shape)


def approximation(begin: Wide, gradients: list[list[torch.Tensor]]) -> nn.Module:
    """The model of ``begin``, trained on by lossy gradients."""
    for step in gradients:
        for parameter, gradient in zip(begin.model.parameters(), step, strict=True):
            parameter.grad = lossy(gradient)
        begin.optimizer.step()
        begin.scheduler.step()
    return begin.model


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def test_what_a_killed_trainer_comes_back_with(served: Bench) -> None:
    """The last step: an approximation, the very one that the optimizer makes of the copies, and
    never called exact, now or later."""
    world = Wide()
    options: dict[str, Any] = {"method": ADAPTIVE, "every": 100, "log": LogOptions(ratio=RATIO)}
    ckpt = opened(served.run, world, **options)
    ckpt.resume()
    run_steps(ckpt, world, 1)  # the base
    ckpt.wait()
    base = copy.deepcopy(world)
    run_steps(ckpt, world, 4)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = Wide(seed=9)
    again = opened(served.run, other, **options)
    recovery = again.resume()
    assert (recovery.step, recovery.base_step, recovery.replayed) == (5, 1, 4)
    assert not recovery.exact
    assert "not exact: the log holds lossy copies of the gradients" in recovery.evidence
    expected = parameters_of(approximation(base, world.gradients[1:]))
    found, trained = parameters_of(other.model), parameters_of(world.model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found, trained, strict=True))
    assert other.scheduler.state_dict() == world.scheduler.state_dict()  # not of an optimizer
    assert other.state["plain"] == {"seen": 5}
    run_steps(again, other, 1)
    again.close()
    # A base of what was trained on from there is whole, and still not exact.
    last = Wide(seed=9)
    with opened(served.run, last, **options) as third:
        recovery = third.resume()
        assert (recovery.step, recovery.replayed, recovery.exact) == (6, 0, False)
    markers = [base.manifest.markers[0] for base in inventory_of(served.run).bases]
    assert {(m.step, m.exact) for m in markers} >= {(1, True), (6, False)}


def test_a_base_without_replay_is_exact(run_folder: Path) -> None:
    world = Wide()
    with opened(run_folder, world, method=ADAPTIVE, every=2) as ckpt:
        ckpt.resume()
        state = run_steps(ckpt, world, 4)[4]
    other = Wide(seed=9)
    with opened(run_folder, other, method=ADAPTIVE) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.replayed, recovery.exact) == (4, 0, True)
        assert other.snapshot() == state


def test_it_is_small(run_folder: Path) -> None:
    sizes = {}
    for name in ("dense", "adaptive"):
        world = Wide()
        method = everstep.Method(base="lazy", log=name)
        with opened(run_folder / name, world, method=method, every=100) as ckpt:
            ckpt.resume()
            run_steps(ckpt, world, 3)
            assert inspect(ckpt).recorder is not None
            sizes[name] = inspect(ckpt).recorder.stats.record_bytes
    assert sizes["adaptive"] < 0.15 * sizes["dense"], sizes


def test_gradients_that_are_not_finite_are_there_as_they_were(served: Bench) -> None:
    """Where a forward goes wrong, the log does not hide it."""
    world = Wide(spoil_at=2)
    ckpt = opened(served.run, world, method=ADAPTIVE, every=100)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = Wide(seed=9)
    again = opened(served.run, other, method=ADAPTIVE)
    assert again.resume().step == 3
    for mine, theirs in zip(other.model.parameters(), world.model.parameters(), strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert mine.isnan().any()
    again.rewind(2)
    assert all(p.isfinite().all() for p in other.model.parameters())
    again.close()


def test_tools_say_that_it_is_an_approximation(run_folder: Path) -> None:
    world = Wide()
    log = LogOptions(to="disk", batch_steps=1, history="all")
    with opened(run_folder, world, method=ADAPTIVE, every=3, log=log) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 6)
    result = invoke("verify", str(run_folder), "--replay")
    assert result.exit_code == 0, result.output
    assert "lossy copies" in " ".join(result.output.split())


@pytest.mark.parametrize("ratio", [0, -1, 1.5, "1 %", float("nan")])
def test_ratios_that_cannot_be(ratio: Any) -> None:
    with pytest.raises(OptionError, match=r"LogOptions.ratio must be in \(0, 1\]"):
        LogOptions(ratio=ratio)


def test_what_needs_the_gradients_themselves(run_folder: Path) -> None:
    with pytest.raises(OptionError, match="would drift from the state"):
        everstep.Method(base="lazy", log="adaptive", apply="replica")
    with pytest.raises(OptionError, match="ratio needs log='adaptive', not log='dense'"):
        opened(run_folder, Wide(), log=LogOptions(ratio=0.1))
    log = LogOptions(to="disk", audit=True)
    with pytest.raises(OptionError, match="lossy log does not give the same base"):
        opened(run_folder, Wide(), method=ADAPTIVE, log=log, keep=3)
