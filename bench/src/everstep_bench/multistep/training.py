"""Steps of a given length, of real compute, with gradients of a given share of the state.

The state is AdamW's over float32 parameters: 12 bytes for each, and 4 of gradients. Parameters of
the same optimizer that are not trained make the share of gradients smaller. Forward and backward
make all gradients by autograd, and multiply matrices for the rest of their time; that part ends by
the clock, so that steps are equally long whatever else the machine does. What the library does in
its hooks comes on top.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from everstep.errors import OptionError
from everstep.plan.multistep import Pipeline

_ELEMENT_BYTES = 4  # of a parameter; with its moments
_STATE_BYTES = 12
_MATRIX = 128
_FORWARD = 1 / 3  # of a step without its update
_CALIBRATE = 5


@dataclass(frozen=True, slots=True)
class Lengths:
    """Seconds of the parts of a step; hooks of others belong to the update."""

    forward_s: float
    backward_s: float
    update_s: float

    @classmethod
    def of(cls, steps: list[Lengths]) -> Lengths:
        """In the middle."""
        return cls(
            statistics.median(step.forward_s for step in steps),
            statistics.median(step.backward_s for step in steps),
            statistics.median(step.update_s for step in steps),
        )

    @property
    def step_s(self) -> float:
        """Of all of it."""
        return self.forward_s + self.backward_s + self.update_s

    def pipeline(self, state_s: float, gradients_s: float) -> Pipeline:
        """With copies that take so long."""
        return Pipeline(state_s, gradients_s, self.forward_s, self.backward_s, self.update_s)


class TimedTraining:
    """Takes steps.

    Args:
        state_bytes: of parameters and moments, about.
        share: of gradients in it, at most 1/3.
        step_s: of a step.
        layers: trained parameters, all of one size.

    Attributes:
        state_bytes, gradient_bytes: exactly, but for counters of some bytes.
        tensors: number of those in the state.
        forward_s, backward_s: seconds of compute added to each.
        units: bytes of each parameter with its moments, in their order: none is cut.

    Raises:
        OptionError: steps cannot be as short as that here.
    """

    def __init__(
        self, state_bytes: int, share: float, step_s: float, *, layers: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        frozen = 1 / share - _STATE_BYTES / _ELEMENT_BYTES  # elements for each that is trained
        each = max(1, round(state_bytes / layers / (_STATE_BYTES + _ELEMENT_BYTES * frozen)))
        self._module = nn.Module()
        trained = []
        for number in range(layers):
            weight = nn.Parameter(torch.randn(each, generator=generator))
            self._module.register_parameter(f"layer{number:03}", weight)
            trained.append(weight)
            if round(each * frozen):
                still = torch.randn(round(each * frozen), generator=generator)
                fixed = nn.Parameter(still, requires_grad=False)
                self._module.register_parameter(f"layer{number:03}_fixed", fixed)
        self._trained = trained
        self._optimizer = AdamW(self._module.parameters(), lr=1e-4, fused=True)
        self._inputs = torch.randn(each, generator=generator)
        self._matrix = torch.randn(_MATRIX, _MATRIX, generator=generator)
        self.gradient_bytes = layers * each * _ELEMENT_BYTES
        self.forward_s = self.backward_s = 0.0
        self.step()  # makes the moments
        held: list[torch.Tensor] = list(self._module.parameters())
        held += [t for moments in self._optimizer.state.values() for t in moments.values()]
        self.state_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
        self.tensors = len(held)
        moments = self._optimizer.state
        self.units = tuple(
            sum(t.numel() * t.element_size() for t in (p, *moments.get(p, {}).values()))
            for p in self._module.parameters()
        )
        self._calibrate(step_s)

    def state(self) -> dict[str, Any]:
        """For a Checkpointer."""
        return {"model": self._module, "optimizer": self._optimizer}

    def step(self) -> Lengths:
        """Forward, backward, update."""
        begin_s = time.monotonic()
        loss = torch.stack([torch.dot(weight, self._inputs) for weight in self._trained]).sum()
        self._compute(self.forward_s)
        forward_s = time.monotonic()
        loss.backward()  # type: ignore[no-untyped-call]
        self._compute(self.backward_s)
        backward_s = time.monotonic()
        self._optimizer.step()
        self._optimizer.zero_grad()
        end_s = time.monotonic()
        return Lengths(forward_s - begin_s, backward_s - forward_s, end_s - backward_s)

    def _compute(self, seconds: float) -> None:
        """Multiplies matrices for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            torch.mm(self._matrix, self._matrix)

    def _calibrate(self, step_s: float) -> None:
        """As much beside autograd and the update as makes a step as long as it is to be."""
        own = Lengths.of([self.step() for _ in range(_CALIBRATE)])
        left_s = step_s - own.update_s
        self.forward_s = _FORWARD * left_s - own.forward_s
        self.backward_s = (1 - _FORWARD) * left_s - own.backward_s
        if min(self.forward_s, self.backward_s) < 0:
            raise OptionError(
                f"a step over {self.state_bytes / 1e6:.0f} MB takes {1e3 * own.step_s:.0f} ms here "
                f"without any compute, and cannot take {1e3 * step_s:g} ms",
                hint="a longer --step-ms, or a smaller --state-bytes",
            )
