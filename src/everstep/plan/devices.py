"""How long operators take on a device, from its data sheet: a roofline.

An operator takes as long as its arithmetic at the peak rate or its bytes at the memory's bandwidth,
whichever is longer. Real ones take longer: plans say that their times are this bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from everstep.errors import OptionError
from everstep.options import nearest
from everstep.plan.trace import Operator

__all__ = ["DEVICES", "Device", "device", "seconds_of"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator.

    Attributes:
        flops_per_s: peak rate in float32, without tensor cores.
        half_flops_per_s: peak rate of tensor cores in 16-bit floats, sums in float32, dense.
        memory_bytes_per_s: bandwidth of its memory.
        link_bytes_per_s: of its interface to the host, one way.
        source: of these figures.
    """

    name: str
    flops_per_s: float
    half_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str

    def seconds(self, operator: Operator) -> float:
        """At least so long, by the roofline."""
        rate = self.half_flops_per_s if operator.dtype in _HALF else self.flops_per_s
        return max(operator.flops / rate, operator.moved_bytes / self.memory_bytes_per_s)


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
"""By name."""


def device(name: str) -> Device:
    """The device of that name.

    Raises:
        OptionError: with the nearest name that there is.
    """
    if name not in DEVICES:
        guess = nearest(name, DEVICES)
        raise OptionError(
            f"no device {name!r}; there are: {', '.join(DEVICES)}",
            hint=f"did you mean {guess!r}?" if guess else None,
        )
    return DEVICES[name]


def seconds_of(operators: Sequence[Operator], on: Device | None) -> list[float]:
    """Seconds of each operator: by a device's roofline, or as measured.

    Args:
        on: None: as measured in the trace.

    Raises:
        OptionError: nothing was measured.
    """
    if on is not None:
        return [on.seconds(operator) for operator in operators]
    found = [operator.seconds for operator in operators if operator.seconds is not None]
    if len(found) != len(operators):
        raise OptionError("this step was traced without times", hint="name a device")
    return found
