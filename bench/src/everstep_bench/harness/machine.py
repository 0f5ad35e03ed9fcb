"""Facts about this machine and its file system; pages out of the cache.

Processor time and written bytes of processes, as the kernel counts them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from everstep.errors import OptionError, PermissionDeniedError
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


_PROC = Path("/proc")
_STAT = Path("/proc/stat")
_IDLE_COLUMNS = (3, 4)  # idle, iowait
_GUEST_COLUMNS = 8  # guest times are counted in user time already


def written_bytes(pid: int) -> int | None:
    """Bytes that a process has sent on their way to storage so far; None if that is secret.

    What goes through the page cache counts when it is written there.
    """
    try:
        for line in (_PROC / str(pid) / "io").read_text().splitlines():
            if line.startswith("write_bytes:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, all threads, those that have ended included; 0 if
    it is gone."""
    if pid == os.getpid():
        return time.process_time()
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of it
    return 0.0


def busy_s() -> float:
    """Seconds that all cores together have worked since boot; 0 where it cannot be known."""
    try:
        columns = [int(text) for text in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0
    worked = [c for i, c in enumerate(columns[:_GUEST_COLUMNS]) if i not in _IDLE_COLUMNS]
    return sum(worked) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment.

    Attributes:
        wall_s: seconds, from an arbitrary origin.
        cpu_s: user and system time of this process so far, all threads.
        busy_s: of all cores and processes together.
    """

    wall_s: float
    cpu_s: float
    busy_s: float


def now() -> Instant:
    """This moment."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Instant(time.perf_counter(), used.ru_utime + used.ru_stime, busy_s())


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run of an arm.

    Attributes:
        seconds: from live tensors to durable, or from file to live tensors.
        cpu_s: CPU time of this process in that time, all threads.
        others_cores: cores that other processes kept busy meanwhile, on average.
        after_s: seconds that the call went on after the state was durable.
    """

    seconds: float
    cpu_s: float
    others_cores: float = 0.0
    after_s: float = 0.0

    @classmethod
    def between(cls, begin: Instant, end: Instant, returned: Instant | None = None) -> Sample:
        """Return the costs between two moments; ``returned``: the return of the call, if later."""
        seconds = max(end.wall_s - begin.wall_s, 1e-9)
        cpu_s = end.cpu_s - begin.cpu_s
        others_s = end.busy_s - begin.busy_s - cpu_s
        after_s = 0.0 if returned is None else returned.wall_s - end.wall_s
        return cls(seconds, cpu_s, max(0.0, others_s / seconds), after_s)
