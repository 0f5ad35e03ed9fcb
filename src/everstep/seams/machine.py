"""Properties of this machine: memory, limits, names, paths, the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from pathlib import Path, PurePath

try:
    import resource
except ImportError:  # not a POSIX system; the command line says so before anything else
    resource = None  # type: ignore[assignment]


_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
# The first core is enough: the whole file is long, and slow to read.
_CPUINFO_BYTES = 4096
_CPUINFO_KEYS = (
    *("vendor_id", "cpu family", "model"),
    *("CPU implementer", "CPU architecture", "CPU part"),  # of ARM's
)


def memory_available_bytes() -> int:
    """Return the bytes that this process may still allocate: the machine's, or its cgroup's if
    less.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    # cgroup v2, as a container sees its own group. Without a limit the text is "max".
    limit = _text(_CGROUP / "memory.max")
    used = _text(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found)


def limit_of(name: str) -> int | None:
    """Return a limit of this process by its name in :mod:`resource`; None if there is no limit.

    ``RLIMIT_FSIZE`` (``ulimit -f``) also limits shared memory.
    """
    if resource is None:
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def machine_name() -> str:
    """Return a name for this machine as a failure domain: the same in all containers on it,
    different on every other machine.
    """
    return _text(Path("/proc/sys/kernel/random/boot_id")) or platform.node()


def launcher() -> str:
    """Return the number of the launcher that started this process (torchrun's ``GROUP_RANK``);
    empty if unknown.
    """
    return os.environ.get("GROUP_RANK", "")


@functools.cache
def processor_model() -> str:
    """Return vendor and model of the processor, e.g. ``"GenuineIntel 6 143"``, without speed or
    number of cores.
    """
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
    """Return the path with links followed; it need not exist."""
    return PurePath(os.path.realpath(path))


def real_path(path: str) -> PurePath:
    """Return a user's path as an absolute path with links followed, so that each directory has one
    name; a leading ``~`` stands for the home folder, as in a shell.

    Dangling links are kept as they are: their target may be a disk that is not mounted, and nothing
    must be created in its place.

    Raises:
        FileNotFoundError: it is relative to a working directory that was removed.
    """
    path = os.path.expanduser(path)
    # The working directory is read only for relative paths: it may have been removed.
    whole = PurePath(path) if os.path.isabs(path) else PurePath(os.getcwd(), path)
    for at in (whole, *whole.parents):
        if os.path.lexists(at):
            return PurePath(
                os.path.realpath(whole) if os.path.exists(at) else os.path.abspath(whole)
            )
    return PurePath(os.path.abspath(whole))


def first_missing(path: PurePath) -> PurePath | None:
    """Return the first directory on the way to ``path`` that does not exist, or ``path`` itself if
    it is a dangling link; None if all exist.
    """
    found = path if os.path.islink(path) and not os.path.exists(path) else None
    for at in path.parents:
        if os.path.exists(at):
            break
        found = at
    return found


def namespaces() -> str:
    """Return the PID and network namespaces of this process; "" if unknown.

    Two processes of one machine can reach each other's keepers if their values are equal.
    """
    try:
        return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    except OSError:  # not Linux, or not mounted
        return ""


def is_local_device(path: PurePath) -> bool:
    """Return True if a path is on a block device of this machine. False on every network file
    system, and also on some local ones (tmpfs, overlay, Btrfs, ZFS).
    """
    try:
        return os.major(os.stat(path).st_dev) != 0
    except OSError:
        return False


_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "gpfs", "beegfs", "glusterfs")
_IN_MEMORY = ("tmpfs", "ramfs")


def mounted_as(place: PurePath) -> str | None:
    """Return the type of the file system of ``place``; None if the system does not tell."""
    real = PurePath(os.path.realpath(place))
    best: tuple[int, str] | None = None
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split()
        if not dash or len(fields) < 5 or not after.split():
            continue
        point = PurePath(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        # Of several mounts at one point the last one covers the others.
        if real.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), after.split()[0])
    return None if best is None else best[1]


def is_on_network(kind: str | None) -> bool:
    """Return True if file systems of this type are known to be those of other machines."""
    return kind in _NETWORK


def is_in_memory(kind: str | None) -> bool:
    """Return True if file systems of this type lose their files when the machine restarts."""
    return kind in _IN_MEMORY


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not Linux, or not mounted: the other limits apply
        return ""


_DRIVER = "libcuda.so.1"
# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: unsafe calls fail only for captures of the same thread.
_THREAD_LOCAL = 1


def use_thread_local_captures() -> bool:
    """Exclude this thread from CUDA graph captures of other threads
    (``cuThreadExchangeStreamCaptureMode``, which torch does not expose). Return False if the driver
    lacks the call.
    """
    try:
        exchange = ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
    return True
