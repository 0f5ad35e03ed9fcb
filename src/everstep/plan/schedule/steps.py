"""Data types of a traced step: its operators in order, and the lifetime of all memory.

This is the input of a capture plan (Checkflow section III-A): bytes and lifetime of every tensor,
and the deadline of each tensor of the state, which is the operator that first writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

import torch

Phase = Literal["forward", "backward", "update"]
Kind = Literal["parameter", "state", "buffer", "gradient", "activation"]

WAIT = "c10d::wait"
"""Name of the operator that stands for the wait for a collective."""

_CHECKPOINTED = ("parameter", "state", "buffer")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the step.

    Attributes:
        name: name, like ``"aten::mm"``.
        flops: floating-point operations, where a multiplication and an addition are two; 0 for
            operators that are bound by memory.
        moved_bytes: bytes read and written.
        dtype: dtype of its result.
        seconds: measured duration; None on the meta device.
        shapes: shapes of its inputs and outputs.
        sent_bytes: of a collective, bytes that each rank sends. It runs beside the operators that
            follow.
        waits_for: number of the collective whose end it waits for.
    """

    name: str
    phase: Phase
    flops: int
    moved_bytes: int
    dtype: torch.dtype
    seconds: float | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    sent_bytes: int | None = None
    waits_for: int | None = None

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        return f"{self.name} of {shapes or 'nothing'} ({self.phase})"


@dataclass(slots=True)
class Traced:
    """One piece of memory (a storage: views share it).

    Attributes:
        names: names of the state's tensors in it; empty for other memory.
        begin: number of the operator that allocates it; -1 if it exists before the step.
        end: number of the last operator before it is freed; the last one of the step if it
            survives the step.
        first_write: number of the first operator after ``begin`` that writes to it; None if none
            does. If other memory takes its place in the state, its end counts as a write.
    """

    kind: Kind
    names: tuple[str, ...]
    size_bytes: int
    begin: int
    end: int
    first_write: int | None = None

    @property
    def name(self) -> str:
        """Its first name, or ``""``."""
        return self.names[0] if self.names else ""

    @property
    def checkpointed(self) -> bool:
        """True if it belongs to the state."""
        return self.kind in _CHECKPOINTED


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Trace of one step.

    Attributes:
        operators: operators in the order in which they run.
        tensors: all memory that lives during the step.
        device: device on which it was traced.
        step_s: duration of an unobserved step; None on the meta device.
        notes: remarks for the user.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[Traced, ...]
    device: str
    step_s: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> tuple[Traced, ...]:
        """Tensors of a checkpoint."""
        return tuple(tensor for tensor in self.tensors if tensor.checkpointed)

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint."""
        return sum(tensor.size_bytes for tensor in self.state)

    def live_bytes(self) -> list[int]:
        """Bytes that are allocated while each operator runs."""
        change = [0] * (len(self.operators) + 1)
        for tensor in self.tensors:
            change[max(0, tensor.begin)] += tensor.size_bytes
            change[tensor.end + 1] -= tensor.size_bytes
        found = []
        now = 0
        for step in change[:-1]:
            now += step
            found.append(now)
        return found


def difference(first: StepTrace, second: StepTrace) -> str | None:
    """Describe the first difference of two steps; None if the same plan fits both."""
    pairs = zip_longest(first.operators, second.operators)
    for number, (one, other) in enumerate(pairs):
        if one is None or other is None:
            longer, extra = ("second", other) if one is None else ("first", one)
            return f"operator {number}: only the {longer} step has {extra}"
        if replace(one, seconds=None) != replace(other, seconds=None):
            return f"operator {number}: {one} in the first step, {other} in the second"
    for one, other in zip_longest(first.tensors, second.tensors):
        if one != other:
            known = one or other
            assert known is not None
            what = repr(known.name) if known.name else f"one of {known.size_bytes} bytes"
            return f"a tensor has another lifetime: {what} of operator {known.begin}"
    return None
