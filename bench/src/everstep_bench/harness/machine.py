"""Facts about this machine and its file system; pages out of the cache."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from everstep.errors import OptionError, OutOfSpaceError, PermissionDeniedError
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.processes import available_cores


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
        direct=direct_takes(folder),
    )


def direct_takes(folder: Path, data: bytes = b"") -> bool:
    """Return True if files in ``folder`` can be opened with O_DIRECT, and take ``data``."""
    path = folder / "direct"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            return not data or os.write(descriptor, data) > 0
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)


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


def sync_file(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """Make a file, or all files and folders below a folder, and the name itself durable."""
    for found in sorted(path.rglob("*")) if path.is_dir() else ():
        sync_file(found)
    sync_file(path)
    sync_file(path.parent)


def refuse_without_room(
    machine: Machine, folder: Path, *, disk_bytes: int, memory_bytes: int, hint: str
) -> None:
    """Looks whether so much is free.

    Args:
        folder: of the benchmark, on the file system that it writes to.
        hint: what takes less.

    Raises:
        OutOfSpaceError: when disk or memory would not do.
    """
    if machine.free_bytes < disk_bytes:
        raise OutOfSpaceError(
            f"the benchmark writes up to {disk_bytes / 2**30:.1f} GiB at a time, "
            f"{machine.free_bytes / 2**30:.1f} GiB are free",
            tier="disk",
            path=folder.parent,
            hint=f"{hint}, or --dir on another file system",
        )
    if machine.memory_available_bytes < memory_bytes:
        raise OutOfSpaceError(
            f"the benchmark takes up to {memory_bytes / 2**30:.1f} GiB of memory, "
            f"{machine.memory_available_bytes / 2**30:.1f} GiB are available",
            tier="memory",
            hint=hint,
        )


@contextlib.contextmanager
def workspace(where: Path | None) -> Iterator[Path]:
    """A folder of its own, gone afterwards.

    Raises:
        OptionError: there is no such folder to make it in.
        PermissionDeniedError: it may not be written.
    """
    parent = Path.cwd() if where is None else where.absolute()
    if not parent.is_dir():
        raise OptionError(f"there is no folder {parent}", hint="make it first, or name another")
    try:
        folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=parent))
    except OSError as error:
        raise PermissionDeniedError(
            f"cannot write into {parent}: {error.strerror}",
            path=parent,
            hint="--dir: a folder that this user may write, on the file system to be measured",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


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
