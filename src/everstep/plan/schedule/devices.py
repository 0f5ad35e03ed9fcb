"""Durations of operators on a device, from its data sheet: a roofline.

An operator takes as long as its arithmetic at the peak rate or its bytes at the memory's bandwidth,
whichever is longer. Real durations are longer; a plan states that its times are this bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from everstep.config import nearest
from everstep.errors import OptionError
from everstep.plan.schedule.steps import Operator, StepTrace

_HALF = (torch.float16, torch.bfloat16)


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
        rate = self.half_flops_per_s if operator.dtype in _HALF else self.flops_per_s
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
