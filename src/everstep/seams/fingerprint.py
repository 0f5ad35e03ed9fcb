"""What bit-for-bit results can depend on, besides the program."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

import torch
from torch.optim import Optimizer

from everstep.seams.machine import processor_model

__all__ = [
    "Opened",
    "changeable",
    "computed_on",
    "cuda_in_use",
    "device_types",
    "fingerprint",
    "fingerprint_of_all",
]

_computed_on: ContextVar[tuple[str, ...]] = ContextVar("computed_on", default=())
_DENORMAL = 1e-40  # in float32; torch has a setter for what becomes of it, and no getter
_SMALLEST_NORMAL, _HALF = sys.float_info.min, 0.5  # names, or Python multiplies them once


def cuda_in_use() -> bool:
    """Whether this process has CUDA devices in use; asking does not initialise any."""
    # In this order: whether any is available takes long to say.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


def device_types(optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
    """Where their parameters lie, and so where updates are computed: ``("cpu",)``, say."""
    parameters = (p for one in optimizers for group in one.param_groups for p in group["params"])
    return tuple(sorted({parameter.device.type for parameter in parameters}))


@contextlib.contextmanager
def computed_on(types: tuple[str, ...]) -> Iterator[None]:
    """What is taken within is the :func:`fingerprint` of a training that updates there: a process
    that has a GPU in use may train on the CPU."""
    token = _computed_on.set(types)
    try:
        yield
    finally:
        _computed_on.reset(token)


def fingerprint() -> dict[str, str]:
    """Versions and hardware that bit-for-bit results can depend on."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "processor": f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}",
        "system": platform.system(),
        "threads": str(torch.get_num_threads()),
    }
    if _flushes_denormals():
        found["denormals"] = "flushed"
    if cuda_in_use():
        found["cuda"] = str(torch.version.cuda)
        found["device"] = torch.cuda.get_device_name()
    if (types := _computed_on.get()) not in ((), ("cpu",)):
        found["parameters"] = ", ".join(types)
    return found


def changeable() -> tuple[int, bool, bool]:
    """What of :func:`fingerprint` a program changes while it trains, by one call: torch's threads,
    whether CUDA is in use, and whether this thread flushes denormals (so do some libraries when
    they are imported). Asked with each record, so not whether a device is available, which is a
    call of the driver, nor by way of a tensor."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return torch.get_num_threads(), in_use, _SMALLEST_NORMAL * _HALF == 0.0


class Opened:
    """Whether :func:`changeable`, and where updates are computed, is what the record of a timeline
    says, which is written when that is opened.

    Args:
        optimizers: those of the training.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._timeline, self._then = 0, changeable()
        self._on: tuple[str, ...] = ()

    def began(self, timeline: int) -> None:
        """``timeline`` is opened; or a keeper of it comes into service, which is no new record."""
        if timeline != self._timeline:
            self._timeline, self._then = timeline, changeable()
            self._on = device_types(self._optimizers.values())

    @property
    def holds(self) -> bool:
        """Whether all is as it was when the timeline was opened."""
        now = changeable()
        if now != self._then:
            return False
        in_use = now[1]  # without a GPU parameters lie where they lay
        return not in_use or device_types(self._optimizers.values()) == self._on


def fingerprint_of_all(found: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """That of several processes: where they differ it is that of none of them, so no replay by one
    of them is taken for the same (I9).

    Args:
        found: of each.
    """
    keys = sorted({key for one in found for key in one})
    values = {key: sorted({one.get(key, "none") for one in found}) for key in keys}
    return {key: ", ".join(each) for key, each in values.items()}


def _flushes_denormals() -> bool:
    """Whether ``torch.set_flush_denormal(True)`` is in force in this thread."""
    small = torch.full((8,), _DENORMAL, dtype=torch.float32, device="cpu")
    return bool((small * 1.0 == 0).all())
