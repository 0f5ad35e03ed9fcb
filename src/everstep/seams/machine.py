"""What this machine has: memory, and what it is, for fingerprints."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["cuda_in_use", "fingerprint", "memory_available_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def memory_available_bytes() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _text(_CGROUP / "memory.max"), _text(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found)


def cuda_in_use() -> bool:
    """Whether this process has CUDA devices in use; asking does not initialise any."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def fingerprint() -> dict[str, str]:
    """Versions and hardware that bit-for-bit results can depend on."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": str(torch.get_num_threads()),
    }
    if cuda_in_use():
        found["cuda"] = str(torch.version.cuda)
        found["device"] = torch.cuda.get_device_name()
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or not mounted: then the other figures bound
        return ""
