"""Start detached processes, watch processes that are not children, limits and processor cores.

Low-priority child processes for background work; they never outlive their parent.

Folder for sockets and locks of this user's processes on this machine: ``$EVERSTEP_RUNTIME_DIR``,
else ``$XDG_RUNTIME_DIR/everstep``, else ``everstep-<uid>`` in the folder for temporary files. It
must belong to this user and be private: anybody who can connect to a socket there can read weights
and gradients.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from everstep.errors import KeeperError

try:
    import resource
except ImportError:  # not a POSIX system; the command line refuses it first
    resource = None  # type: ignore[assignment]


_PROC = Path("/proc")
_LOOK_AGAIN_S = 0.05
_WAIT_S_MAX = 1000.0
_KILLED_TIMEOUT_S = 5.0
_INSTALLED = ("site-packages", "dist-packages")


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; it need not be a child.

    Return None if the kernel has no pidfd (before Linux 5.3, some sandboxes).

    Raises:
        ProcessLookupError: there is no such process.
    """
    if pid <= 0:
        raise ProcessLookupError(f"there is no process {pid}")
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # not this kernel, or forbidden
        return None


class PidWatch:
    """Watch one process, never a later one with the same number.

    A process counts as ended when it no longer runs, even if its parent has not reaped it yet.

    Args:
        pid: PID, not necessarily of a child. A missing process counts as ended.

    Attributes:
        pid: the given PID.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        self._started: str | None = None
        self._gone = False
        try:
            self._fd = open_pidfd(pid)
        except ProcessLookupError:
            self._gone = True
            return
        if self._fd is None:
            # Without a pidfd the start time tells a later process with the same number apart.
            self._started = _start_time(pid)
            self._gone = self._started is None

    def fileno(self) -> int | None:
        """Return a descriptor that is readable once the process has ended; None if unsupported."""
        return self._fd

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Return True if the process has ended, or ends within ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self._gone:
            left_s = min(max(0.0, deadline_s - time.monotonic()), _WAIT_S_MAX)
            if self._fd is not None:
                # Not select.select, which is limited to descriptors below 1024.
                poller = select.poll()
                poller.register(self._fd, select.POLLIN)
                self._gone = bool(poller.poll(math.ceil(1000 * left_s)))
            else:
                self._gone = _start_time(self.pid) != self._started
                if not self._gone:
                    time.sleep(min(left_s, _LOOK_AGAIN_S))
            if time.monotonic() >= deadline_s:
                break
        return self._gone

    def signal(self, number: int) -> bool:
        """Send a signal to exactly this process; return False if it has ended.

        Raises:
            PermissionError: the process belongs to another user.
        """
        if self.ended():
            return False
        try:
            if self._fd is not None:
                signal.pidfd_send_signal(self._fd, number)
            else:
                # The number may be reused between check and call: only a pidfd excludes that.
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """End the watch; the process continues."""
        fd = self._fd
        self._fd = None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> PidWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def process_ended(pid: int, timeout_s: float = 0.0) -> bool:
    """Return True if there is no process ``pid``, or it ends within ``timeout_s``."""
    with PidWatch(pid) as watch:
        return watch.ended(timeout_s)


def has_file_open(pid: int, path: PurePath, identity: tuple[int, int]) -> bool:
    """Return True if the process visibly has the file at ``path`` open.

    Args:
        pid: PID of the process.
        path: path of the file.
        identity: device and inode of the file.
    """
    folder = _PROC / str(pid) / "fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return False
    for name in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            # Stat only files of this name: stat of a file on a hung disk would hang.
            if PurePath(os.readlink(folder / name)).name != path.name:
                continue
            info = os.stat(folder / name)
            if (info.st_dev, info.st_ino) == identity:
                return True
    return False


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in kernel ticks; None if it has ended or is a zombie."""
    try:
        # The name of the program stands in parentheses and may contain spaces and parentheses:
        # split after the last one. State is field 3 and start time field 22 of proc(5).
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


# --- Descriptors ------------------------------------------------------------------------


def raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors as far as the hard one allows."""
    if resource is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- Starting ---------------------------------------------------------------------------


def start_detached(
    command: Sequence[str], *, output: int, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """Start a program that is no child of this process; it must call :func:`detach_from_parent`.

    It gets its own session (no signal of this terminal or process group reaches it), ``/`` as
    working directory, and only descriptors 0 (empty), 1 and 2 (``output``).

    Returns:
        Exit status of the intermediate process, 0 on success; None if the program has not detached
            itself within ``timeout_s``: everything is killed then.
    """
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        env=dict(environment),
        close_fds=True,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    except BaseException as error:
        # Also after an interrupt: a half-started program must not stay.
        with contextlib.suppress(ProcessLookupError):
            # The group of its own session, including a detached child.
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait(_KILLED_TIMEOUT_S)
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def portable_environment() -> dict[str, str]:
    """Return an environment in which a Python in any working directory finds this package."""
    found = dict(os.environ)
    paths = found["PYTHONPATH"].split(os.pathsep) if found.get("PYTHONPATH") else []
    # A notebook may have put the package on sys.path itself. A site-packages folder is found
    # anyway, and would shadow the standard library if it were on PYTHONPATH.
    home = Path(__file__).parents[3]
    if home.name not in _INSTALLED and str(home) not in paths:
        paths.insert(0, str(home))
    with contextlib.suppress(FileNotFoundError):  # our working directory is gone
        paths = [os.path.abspath(path) for path in paths]
    if paths:
        found["PYTHONPATH"] = os.pathsep.join(paths)
    found.pop("PYTHONINSPECT", None)  # would wait for input at the end
    return found


def detach_from_parent() -> None:
    """Continue in a child of this process; this process ends with status 0.

    The child's parent is then init (or the nearest subreaper). Call it first, while there is only
    one thread: threads do not survive a fork.
    """
    leads = os.getsid(0) == os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        # Not sys.exit(): what runs at exit would run in both processes.
        os._exit(0)
    if not leads:  # started by hand: start_detached has made a session before
        os.setsid()
    os.umask(0o077)
    # Signals that the parent blocked or ignored are inherited: restore the defaults.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


# --- Cores ------------------------------------------------------------------------------


def available_cores() -> list[int]:
    """Return the cores that this process may run on, or all if the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def configured_cores() -> int:
    """Return the number of cores of this machine, including those switched off."""
    try:
        return max(os.sysconf("SC_NPROCESSORS_CONF"), os.cpu_count() or 1)
    except (ValueError, OSError):
        return os.cpu_count() or 1


def set_affinity(cores: Iterable[int]) -> list[int]:
    """Bind the calling thread, and the threads it starts later, to ``cores``.

    Returns:
        Cores it may run on now. Cores that this machine (or container) lacks are left out; on a
            system without affinity nothing changes.

    Raises:
        ValueError: none of them is available.
    """
    wanted = set(cores)
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, wanted)
        except (OSError, ValueError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise ValueError(
                f"none of the cores {sorted(wanted)} is available; now: {available_cores()}"
            ) from error
    return available_cores()


_PR_SET_PDEATHSIG = 1
_NICEST = 19
_FIRST_TO_GO = b"1000"
# A CUDA context would take device memory from training.
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of a child process.

    Attributes:
        status: exit status; negative: minus the signal that ended it.
        output: bytes of standard output.
        words: text of standard error.
        cpu_s: processor time used, in seconds.
        late: True if it was killed at the timeout.
    """

    status: int
    output: bytes
    words: str
    cpu_s: float
    late: bool = False


class Child:
    """Python program run as a child; it must call :func:`yield_resources` first.

    The thread that creates the child must outlive it: the kernel kills the child at the death of
    that thread (PR_SET_PDEATHSIG).

    Args:
        module: module to run as ``python -m module``.
        arguments: further arguments.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        command = [os.path.abspath(sys.executable), "-m", module, *arguments]
        # The system adds up all children: a difference is right while one runs at a time.
        self._before_s = _children_s()
        self._process = subprocess.Popen(
            [*command, f"--parent={os.getpid()}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=portable_environment() | _NO_DEVICES,
            close_fds=True,
        )
        self.pid = self._process.pid

    def wait(self, timeout_s: float) -> Ended:
        """Wait until the child has ended; kill it after ``timeout_s``."""
        late = False
        try:
            output, words = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            self.kill()
            output, words = self._process.communicate()
        return Ended(
            status=self._process.returncode,
            output=output,
            words=words.decode(errors="replace").strip(),
            cpu_s=_children_s() - self._before_s,
            late=late,
        )

    def kill(self) -> None:
        """Kill the child if it is still running."""
        self._process.kill()


def yield_resources(parent: int) -> None:
    """Call in the child: end with the parent, use processor and disk only when idle, and be the
    first process to be killed when memory runs out.

    Args:
        parent: PID of the process that started this one. If that has ended already, exit.
    """
    with contextlib.suppress(AttributeError):  # not Linux: the child ends with its work
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before prctl took effect.
    if os.getppid() != parent:
        os._exit(1)
    os.nice(_NICEST)
    # SCHED_IDLE also puts the process into the disk's idle class.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_FIRST_TO_GO)


def _children_s() -> float:
    """Return the processor time of all ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


RUNTIME_DIR_VARIABLE = "EVERSTEP_RUNTIME_DIR"

_HINT = f"set {RUNTIME_DIR_VARIABLE} to a folder of your own, the same for all your programs"


def runtime_folder(*, create: bool = True) -> Path:
    """Return the folder. With ``create`` it is made if it is missing.

    Raises:
        KeeperError: it cannot be made, is a symbolic link, belongs to another user, or is open to
            others.
    """
    path = _chosen()
    try:
        if create:
            _make(path)
        # Check owner and mode on a descriptor: the name could be replaced between two calls.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if create:
            raise _refused(path, "cannot be made: its parent folder is missing") from None
        return path
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "is a symbolic link; it is not followed") from None
        raise _refused(path, f"cannot be used: {error.strerror}") from error
    try:
        info = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if info.st_uid != os.geteuid():
        raise _refused(path, f"belongs to another user (uid {info.st_uid})")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise KeeperError(
            f"the runtime folder {path} is open to other users",
            path=path,
            hint=f"chmod 700 {path}, if its contents are yours",
        )
    return path


def _chosen() -> Path:
    named = os.environ.get(RUNTIME_DIR_VARIABLE)
    if named:
        return Path(os.path.abspath(named))
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.path.isabs(session) and os.path.isdir(session):
        # After su or sudo the variable may still name the folder of another user.
        usable = os.access(session, os.W_OK | os.X_OK)
        if usable:
            return Path(session) / "everstep"
    return Path(tempfile.gettempdir()) / f"everstep-{os.geteuid()}"


def _make(path: Path) -> None:
    if os.environ.get(RUNTIME_DIR_VARIABLE):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def _refused(path: Path, why: str) -> KeeperError:
    return KeeperError(f"the runtime folder {path} {why}", path=path, hint=_HINT)


def refresh_times(paths: Iterable[PurePath]) -> None:
    """Update the times of files and folders, so that cleaners of temporary folders (systemd: ten
    days untouched) keep them. Missing ones are skipped.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
