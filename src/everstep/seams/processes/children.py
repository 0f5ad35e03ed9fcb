"""Low-priority child processes for background work; they never outlive their parent."""

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
