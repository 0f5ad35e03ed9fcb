"""Facts about this machine and its file system; pages out of the cache."""

from __future__ import annotations

import errno
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.processes import available_cores

__all__ = ["Machine", "direct_works", "drop_cache", "look_at", "sync_folder"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Description of the machine.

    Attributes:
        load: processes that wanted a core in the last minute, before the first arm.
        direct: whether the file system takes O_DIRECT.
    """

    cpu: str
    cores: int
    memory_available_bytes: int
    torch: str
    python: str
    system: str
    file_system: str
    device: str
    free_bytes: int
    load: float
    direct: bool

    def as_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        return asdict(self)


def look_at(folder: Path) -> Machine:
    """The facts about this machine, and the file system of ``folder``."""
    info = os.statvfs(folder)
    file_system, device = _mount_of(folder)
    return Machine(
        cpu=_cpu(),
        cores=len(available_cores()),
        memory_available_bytes=memory_available_bytes(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        file_system=file_system,
        device=device,
        free_bytes=info.f_bavail * info.f_frsize,
        load=os.getloadavg()[0],
        direct=direct_works(folder),
    )


def direct_works(folder: Path) -> bool:
    """Return True if files in ``folder`` can be opened with O_DIRECT."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def drop_cache(path: Path) -> None:
    """Takes the pages of a file, or of all files below a folder, out of the page cache.

    The files must be durable: pages that are not yet written stay.
    """
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mount_of(folder: Path) -> tuple[str, str]:
    """Type and options, and device, of the file system that holds ``folder``."""
    best = ("", "unknown", "unknown")
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return best[1:]
    whole = folder.resolve()
    for line in lines:
        device, point, kind, options = line.split()[:4]
        point = point.replace("\\040", " ")
        if whole.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, f"{kind} ({options})", device)
    return best[1:]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
