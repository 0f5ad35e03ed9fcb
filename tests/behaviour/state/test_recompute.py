"""Gradients of sampled steps are computed twice; a computation that was wrong is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import AuditError, OptionError

STEPS = 6


class Training:
    """Forward and backward with dropout, batch norm and accumulation over two microbatches.

    Args:
        fault: called with each computation's number and the model, after backward.
    """

    def __init__(self, fault: Callable[[int, nn.Module], None] | None = None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.computed = 0
        self.fault = fault

    def compute(self, batch: torch.Tensor) -> float:
        noise = torch.randn(()) + random.random()
        loss = (self.model(batch) + noise).square().mean()
        loss.backward()
        self.computed += 1
        if self.fault is not None:
            self.fault(self.computed, self.model)
        return float(loss.detach())

    def run(
        self, ckpt: everstep.Checkpointer, fraction: float | None, steps: int = STEPS
    ) -> list[float]:
        losses = []
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            for _ in range(2):
                batch = torch.randn(6, 4, generator=generator)
                if fraction is None:
                    losses.append(self.compute(batch))
                else:
                    call = lambda batch=batch: self.compute(batch)  # noqa: E731
                    losses.append(ckpt.audited(call, fraction=fraction))
            self.optimizer.step()
            self.optimizer.zero_grad()
            ckpt.step()
        return losses

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def bits(training: Training) -> list[torch.Tensor]:
    moments = [
        value
        for state in training.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [one.clone() for one in [*training.model.state_dict().values(), *moments]]


def trained(
    run: Path,
    fraction: float | None,
    fault: Callable[[int, nn.Module], None] | None = None,
    **options: Any,
) -> tuple[Training, list[float]]:
    training = Training(fault)
    with everstep.Checkpointer(run, training.state, every=None, **options) as ckpt:
        ckpt.resume()
        return training, training.run(ckpt, fraction)


def flip(number: int, name: str = "3.weight") -> Callable[[int, nn.Module], None]:
    """A fault that flips the lowest bit of one element, in one computation."""

    def fault(computed: int, model: nn.Module) -> None:
        if computed == number:
            gradient = dict(model.named_parameters())[name].grad
            assert gradient is not None
            gradient.view(torch.int32).view(-1)[3] ^= 1

    return fault


@pytest.mark.parametrize("method", ["lazy", "logged", "gockpt_o"])
def test_an_audit_changes_nothing(tmp_path: Path, method: str) -> None:
    plain, losses = trained(tmp_path / "plain", None, method=method)
    audited, found = trained(tmp_path / "audited", 1.0, method=method)
    assert found == losses
    assert (plain.computed, audited.computed) == (2 * STEPS, 4 * STEPS)
    assert all(map(torch.equal, bits(plain), bits(audited)))


def test_the_same_steps_of_a_run_are_sampled_whoever_asks(tmp_path: Path) -> None:
    training, _ = trained(tmp_path / "none", 0.0)
    assert training.computed == 2 * STEPS
    training = Training()
    with everstep.Checkpointer(tmp_path / "run", training.state, every=None) as ckpt:
        ckpt.resume()
        training.run(ckpt, 0.1, steps=200)
    # Both microbatches of a sampled step.
    sampled = (training.computed - 400) / 2
    assert sampled == int(sampled)
    assert 5 <= sampled <= 40


@pytest.mark.parametrize(
    ("number", "which"),
    [(5, "training computed"), (6, "the second computation computed")],
)
def test_a_flipped_bit_is_found_and_training_goes_on_without_it(
    tmp_path: Path, number: int, which: str
) -> None:
    """Of step 2 the first microbatch is computed as number 5, and again as 6."""
    right, _ = trained(tmp_path / "right", None)
    seen: list[Any] = []
    found, _ = trained(tmp_path / "run", 1.0, flip(number), on_failure=seen.append)
    (error,) = seen
    assert isinstance(error, AuditError)
    assert (error.step, error.rank) == (2, 0)
    assert which in str(error)
    assert "model/3.weight" in str(error)
    assert "model/0.weight" not in str(error)
    assert all(map(torch.equal, bits(right), bits(found)))


def test_a_difference_is_raised_before_it_is_consumed(tmp_path: Path) -> None:
    training = Training(flip(1))
    with everstep.Checkpointer(tmp_path / "run", training.state, every=None) as ckpt:
        ckpt.resume()
        before = [parameter.clone() for parameter in training.model.parameters()]
        with pytest.raises(AuditError, match="take it out of service"):
            ckpt.audited(lambda: training.compute(torch.ones(6, 4)), fraction=1.0)
        assert all(map(torch.equal, before, training.model.parameters()))
        # Those of the second and third computation, which agree: an optimizer may consume them.
        good = Training()
        good.compute(torch.ones(6, 4))
        expected = [parameter.grad for parameter in good.model.parameters()]
        found = [parameter.grad for parameter in training.model.parameters()]
        assert all(map(torch.equal, expected, found))  # type: ignore[arg-type]


def test_a_program_that_is_not_deterministic_is_not_audited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def drifts(computed: int, model: nn.Module) -> None:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.add_(computed * 1e-3)

    training, _ = trained(tmp_path / "run", 1.0, drifts)
    assert training.computed == 2 * STEPS + 2  # three times once, then once each
    assert "three results" in caplog.text


def test_nan_is_no_difference(tmp_path: Path) -> None:
    def spoils(computed: int, model: nn.Module) -> None:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.fill_(torch.nan)

    training, _ = trained(tmp_path / "run", 1.0, spoils)
    assert training.computed == 4 * STEPS


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "all", True])
def test_what_is_no_fraction(tmp_path: Path, fraction: Any) -> None:
    training = Training()
    with everstep.Checkpointer(tmp_path / "run", training.state) as ckpt:
        ckpt.resume()
        with pytest.raises(OptionError, match="fraction"):
            ckpt.audited(lambda: 0, fraction=fraction)
        assert training.computed == 0


def test_without_checkpoints_it_only_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_DISABLE", "1")
    training, _ = trained(tmp_path / "run", 1.0)
    assert training.computed == 2 * STEPS
