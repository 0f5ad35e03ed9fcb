"""A traced step: its operators in order, their durations, and the lifetime of all memory.

This is the input of a capture plan (Checkflow section III-A): bytes and lifetime of every tensor,
and the deadline of each tensor of the state, which is the operator that first writes to it.

Durations of operators are measured, or computed from the data sheet of a device (a roofline). An
operator takes as long as its arithmetic at the peak rate or its bytes at the memory's bandwidth,
whichever is longer. Real durations are longer; a plan states that its times are this bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

import torch

from everstep.config import nearest
from everstep.errors import OptionError

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
        events: name and first operator of each event that hooks see in a running step
            (:class:`everstep.capture.step_events.StepEvents`).
        updates: event at which each optimizer updates first, by its name.
        owners: name of the optimizer that updates a parameter, by the parameter's name.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[Traced, ...]
    device: str
    step_s: float | None = None
    notes: tuple[str, ...] = ()
    events: tuple[tuple[str, int], ...] = ()
    updates: Mapping[str, int] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)

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


# --- Durations ----------------------------------------------------------------------------

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator.

    Attributes:
        flops_per_s: peak rate in float32, without tensor cores.
        half_flops_per_s: peak rate of tensor cores in 16-bit floats, sums in float32, dense.
        memory_bytes_per_s: bandwidth of its memory.
        link_bytes_per_s: bandwidth of its interface to the host, one way.
        source: source of these figures.
    """

    name: str
    flops_per_s: float
    half_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str

    def seconds(self, operator: Operator) -> float:
        """Return the minimum duration of an operator, by the roofline."""
        rate = self.half_flops_per_s if operator.dtype in HALF else self.flops_per_s
        return max(operator.flops / rate, operator.moved_bytes / self.memory_bytes_per_s)

    def with_figures(self, **figures: float) -> Device:
        """Return a copy with these figures replaced, by attribute name."""
        source = f"{self.source}; given: {', '.join(sorted(figures))}"
        changed: dict[str, Any] = {**figures, "source": source}
        return replace(self, **changed)


DEVICES = {
    found.name: found
    for found in (
        Device(
            "rtx3090", 35.6e12, 71e12, 936e9, 31.5e9,
            "NVIDIA Ampere GA102 whitepaper v2, table 2; PCIe 4.0 x16",
        ),
        Device(
            "v100", 15.7e12, 125e12, 900e9, 15.75e9,
            "NVIDIA V100 data sheet 2020, SXM2; PCIe 3.0 x16",
        ),
        Device(
            "a100", 19.5e12, 312e12, 2039e9, 31.5e9,
            "NVIDIA A100 data sheet 2021, 80 GB SXM; PCIe 4.0 x16",
        ),
        Device(
            "h100", 66.9e12, 989.4e12, 3352e9, 63e9,
            "NVIDIA H100 whitepaper v1.04, SXM5; PCIe 5.0 x16",
        ),
        Device(
            "h200", 66.9e12, 989.4e12, 4800e9, 63e9,
            "NVIDIA H200 data sheet 2024, SXM; PCIe 5.0 x16",
        ),
    )
}  # fmt: skip
"""Devices by name."""


def device(name: str) -> Device:
    """Return the device of a name.

    Raises:
        OptionError: the name is unknown; the hint has the nearest one.
    """
    if name not in DEVICES:
        guess = nearest(name, DEVICES)
        raise OptionError(
            f"no device {name!r}; there are: {', '.join(DEVICES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return DEVICES[name]


def seconds_of(
    operators: Sequence[Operator], on: Device | None, network_bytes_per_s: float | None = None
) -> list[float]:
    """Return the duration of each operator: by a device's roofline, or as measured.

    Collectives run beside the operators that follow, one at a time, as with
    DistributedDataParallel. A collective takes no time at its launch; the operator that waits for
    it takes the rest of its time.

    Args:
        on: device; None: as measured in the trace.
        network_bytes_per_s: bandwidth at which a rank sends, for collectives; None: as measured.

    Raises:
        OptionError: the trace has no times.
    """
    now_s = network_free_s = 0.0
    ends_s: dict[int, float] = {}
    found = []
    for number, operator in enumerate(operators):
        if operator.waits_for is not None:
            seconds = max(0.0, ends_s[operator.waits_for] - now_s)
        elif operator.sent_bytes is not None:
            seconds = 0.0
            network_free_s = max(now_s, network_free_s)
            network_free_s += _network_s(operator, operator.sent_bytes, network_bytes_per_s)
            ends_s[number] = network_free_s
        elif on is not None:
            seconds = on.seconds(operator)
        else:
            seconds = _measured_s(operator, "name a device")
        found.append(seconds)
        now_s += seconds
    return found


def times_of(
    trace: StepTrace, on: Device | None, network_bytes_per_s: float | None = None
) -> tuple[list[float], str]:
    """Return the duration of each operator (:func:`seconds_of`), and a description of their source.

    Operators that are measured one by one take longer than in a normal step, where each is launched
    while another runs. So measured times are scaled down if their sum exceeds an unobserved step.
    """
    found = seconds_of(trace.operators, on, network_bytes_per_s)
    if on is not None:
        return found, f"roofline of {on.name} ({on.source})"
    words = f"measured on {trace.device}, each operator by itself"
    total_s = sum(found)
    if trace.step_s is not None and total_s > trace.step_s:
        share = trace.step_s / total_s
        found = [seconds * share for seconds in found]
        words += f", times {share:.2f}: a step as a whole takes no longer"
    return found, words


def _network_s(operator: Operator, sent_bytes: int, network_bytes_per_s: float | None) -> float:
    if network_bytes_per_s is not None:
        return sent_bytes / network_bytes_per_s
    return _measured_s(operator, "give the bandwidth of the network between ranks")


def _measured_s(operator: Operator, hint: str) -> float:
    if operator.seconds is None:
        raise OptionError(f"the trace has no time of {operator.name}", hint=hint)
    return operator.seconds
