"""What this machine has."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path, PurePath

__all__ = [
    "file_bytes_max",
    "first_missing",
    "is_local_device",
    "launcher",
    "machine_name",
    "memory_available_bytes",
    "processor_model",
    "real_path",
    "resolve_path",
    "use_thread_local_captures",
    "with_home",
]

try:
    import resource
except ImportError:  # not a POSIX system; the command line says so before anything else
    resource = None  # type: ignore[assignment]


_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_CPUINFO_BYTES = 4096  # of the first core; the whole file is long, and slow to come
_CPUINFO_KEYS = (
    *("vendor_id", "cpu family", "model"),
    *("CPU implementer", "CPU architecture", "CPU part"),  # of ARM's
)


def memory_available_bytes() -> int:
    """Bytes that this process may still take: the machine's, or its control group's if less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit = _text(_CGROUP / "memory.max")
    used = _text(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found)


def file_bytes_max() -> int | None:
    """Return the size that a file of this process may have (``ulimit -f``), which counts for
    shared memory, too; None: there is no limit."""
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def with_home(path: str) -> str:
    """A path with ``~`` at its beginning replaced by the home folder, as a shell does."""
    return os.path.expanduser(path)


def machine_name() -> str:
    """What this machine is called as a thing that fails as a whole: the same in all containers on
    it, and another one on every other machine."""
    return _text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()


def launcher() -> str:
    """Which of the job's launchers has started this process, where it says so (torchrun does)."""
    return os.environ.get("GROUP_RANK", "")


@functools.cache
def processor_model() -> str:
    """Whose processor this is, and which: ``"GenuineIntel 6 143"``; not its speed, nor how many
    cores there are."""
    try:
        with _CPUINFO.open("rb") as file:
            text = file.read(_CPUINFO_BYTES).decode("ascii", "replace")
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in text.splitlines())
    found: dict[str, str] = {}
    for key, _, value in lines:
        found.setdefault(key.strip(), value.strip())
    return " ".join(found[key] for key in _CPUINFO_KEYS if key in found) or platform.machine()


def resolve_path(path: PurePath) -> PurePath:
    """Where a path leads here, links followed, whether anything is there or not."""
    return PurePath(os.path.realpath(path))


def real_path(path: str) -> PurePath:
    """Where a path that a user has given leads, from the root on: all names of a directory are one.

    Links that lead nowhere are left as they are: what they mean may be a disk that is not mounted,
    and nothing is to be made in its place.

    Raises:
        FileNotFoundError: it is relative to a working directory that was removed.
    """
    # The working directory is asked for only where it matters: it may have been removed.
    whole = PurePath(path) if os.path.isabs(path) else PurePath(os.getcwd(), path)
    for at in (whole, *whole.parents):
        if os.path.lexists(at):
            return PurePath(
                os.path.realpath(whole) if os.path.exists(at) else os.path.abspath(whole)
            )
    return PurePath(os.path.abspath(whole))


def first_missing(path: PurePath) -> PurePath | None:
    """The first directory on the way to ``path`` that is not there, or the link that leads nowhere;
    None: all are there. It says nothing of ``path`` itself, unless that is such a link."""
    found = path if os.path.islink(path) and not os.path.exists(path) else None
    for at in path.parents:
        if os.path.exists(at):
            break
        found = at
    return found


def is_local_device(path: PurePath) -> bool:
    """Whether a path leads to a block device of this machine: no network file system does, and
    some that are no network's do not either (tmpfs, overlay, Btrfs, ZFS)."""
    try:
        return os.major(os.stat(path).st_dev) != 0
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or not mounted: then the other figures bound
        return ""


_DRIVER = "libcuda.so.1"
_THREAD_LOCAL = 1  # of CUstreamCaptureMode: what other threads capture is no concern of this one


def use_thread_local_captures() -> bool:
    """Tells CUDA that this thread has nothing to do with graphs that other threads capture
    (``cuThreadExchangeStreamCaptureMode``); whether there is such a call."""
    try:
        exchange = ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
    return True
