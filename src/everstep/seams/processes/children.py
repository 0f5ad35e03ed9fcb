"""Child processes for what can wait: they yield to everybody, and never outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.seams.processes.processes import portable_environment

__all__ = ["Child", "Ended", "yield_resources"]

_PR_SET_PDEATHSIG = 1
_NICEST = 19
_FIRST_TO_GO = b"1000"
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child has ended.

    Attributes:
        status: its exit status; negative: minus the signal that ended it.
        output, words: what it wrote to standard output, and to standard error.
        cpu_s: processor time that it took.
        late: whether it was killed because its time was over.
    """

    status: int
    output: bytes
    words: str
    cpu_s: float
    late: bool = False


class Child:
    """A Python program beside this process; it must call :func:`yield_resources` first of all.

    The thread that makes one must live as long as it does: to the kernel that thread is the
    parent whose death ends it.

    Args:
        module: run as ``python -m module``.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        command = [os.path.abspath(sys.executable), "-m", module, *arguments]
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
        """Returns when it has ended; it is killed after ``timeout_s``."""
        late = False
        try:
            output, words = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            self.kill()
            output, words = self._process.communicate()
        said = words.decode(errors="replace").strip()
        took_s = _children_s() - self._before_s
        return Ended(self._process.returncode, output, said, took_s, late)

    def kill(self) -> None:
        """Ends it at once, if it has not ended yet."""
        self._process.kill()


def yield_resources(parent: int) -> None:
    """In the child: ends with its parent; takes processor and disk only when nobody else wants
    them, and is the first to go when memory runs out.

    Args:
        parent: number of the process that started this one. If that is gone already, so is this.
    """
    with contextlib.suppress(AttributeError):  # not Linux: it ends with its work
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(_NICEST)
    with contextlib.suppress(AttributeError, OSError):  # SCHED_IDLE: the disk's idle class, too
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_FIRST_TO_GO)


def _children_s() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
