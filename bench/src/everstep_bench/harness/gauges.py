"""Processor time and written bytes of processes, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

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
