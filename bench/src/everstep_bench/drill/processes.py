"""Processes of a drill: each inherits a mark in its environment, and is ended by its id.

Agents, trainers, keepers and whatever these start are in sessions of their own, and not all are
children of the drill. The mark holds a random word, so nobody else's process can have it; between
the look at it and the signal a process is held by a descriptor, so its number cannot have become
another's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import EverstepError
from everstep.seams.processes.processes import PidWatch

MARK = "EVERSTEP_DRILL"
_PROC = Path("/proc")
_KILL_S = 20.0
_LOOK_AGAIN_S = 0.02
_EXEC_TRIES = 5
_EXEC_S = 0.002


class DrillError(EverstepError):
    """A host, or a process on it, did something else than the drill says."""


@dataclass(frozen=True, slots=True)
class Marked:
    """A process of a drill.

    Attributes:
        command: its command line, with spaces.
    """

    pid: int
    command: str

    @property
    def is_keeper(self) -> bool:
        """True if it is a keeper."""
        return "everstep.keeper" in self.command


def mark_of(drill: str, host: int) -> str:
    """The mark of a host's processes.

    Args:
        drill: random word.
    """
    return f"{drill}.{host}"


def find_marked(drill: str, host: int | None = None) -> list[Marked]:
    """The living processes of a drill, or of one of its hosts."""
    wanted = f"{MARK}={drill}." if host is None else f"{MARK}={mark_of(drill, host)}"
    found = []
    for name in os.listdir(_PROC):
        if name.isdigit() and int(name) != os.getpid() and _has(int(name), wanted, host is None):
            found.append(Marked(int(name), _command(int(name))))
    return found


def end_marked(
    drill: str,
    host: int | None = None,
    *,
    timeout_s: float = _KILL_S,
    find: Callable[[str, int | None], list[Marked]] = find_marked,
    end: Callable[[str, int | None, Marked], None] | None = None,
) -> int:
    """Kills (SIGKILL) all processes of a drill, or of one host, also those that they start
    meanwhile; returns how many.

    Args:
        find, end: find them, and kill one of them.

    Raises:
        DrillError: some are still there after ``timeout_s``.
    """
    kill = end or _kill
    seen: set[int] = set()
    deadline_s = time.monotonic() + timeout_s
    while True:
        left = find(drill, host)
        if not left:
            return len(seen)
        if time.monotonic() >= deadline_s:
            listed = ", ".join(f"{item.pid} ({item.command[:60]})" for item in left)
            raise DrillError(
                f"{len(left)} process(es) are still there {timeout_s:g} s after SIGKILL: {listed}",
                hint="they wait for a disk that hangs, perhaps (ps -o pid,stat,wchan)",
            )
        for item in left:
            seen.add(item.pid)
            kill(drill, host, item)
        time.sleep(_LOOK_AGAIN_S)


def _kill(drill: str, host: int | None, item: Marked) -> None:
    wanted = f"{MARK}={drill}." if host is None else f"{MARK}={mark_of(drill, host)}"
    with PidWatch(item.pid) as watch:
        if _has(item.pid, wanted, host is None):  # with the descriptor in hand: still that process
            watch.signal(signal.SIGKILL)


def _has(pid: int, wanted: str, prefix: bool) -> bool:
    """Return True if a process has the mark; False if it has ended or belongs to another user."""
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
        for _ in range(_EXEC_TRIES):
            if data or not os.readlink(_PROC / str(pid) / "exe"):
                break
            time.sleep(_EXEC_S)  # a program has none for a moment, while it is being started
            data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # or it is the kernel's, or a zombie
        return False
    words = data.decode("utf-8", "surrogateescape").split("\0")
    return any(word.startswith(wanted) if prefix else word == wanted for word in words)


def _command(pid: int) -> str:
    try:
        data = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return data.decode("utf-8", "replace").replace("\0", " ").strip()
