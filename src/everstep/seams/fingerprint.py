"""What bit-for-bit results can depend on, besides the program."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

import torch

from everstep.seams.machine import processor_model

__all__ = ["changeable", "cuda_in_use", "fingerprint", "fingerprint_of_all"]

_DENORMAL = 1e-40  # in float32; torch has a setter for what becomes of it, and no getter


def cuda_in_use() -> bool:
    """Whether this process has CUDA devices in use; asking does not initialise any."""
    # In this order: whether any is available takes long to say.
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_available()  # type: ignore[no-untyped-call]


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
    return found


def changeable() -> tuple[int, bool]:
    """What of :func:`fingerprint` a program changes while it trains, by one call: torch's threads,
    and whether CUDA is in use. Asked with each record, so not whether a device is available, which
    is a call of the driver."""
    return torch.get_num_threads(), bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


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
