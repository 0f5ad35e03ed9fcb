"""Placement of threads and processes on cores.

Training is kept on one core. Every other thread of this process, whoever has made it, and
every process that it has started are kept on the others, so that no library has less room
than another. Without a free core all of them share the one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

_PROC = Path("/proc")
_TRAINING = "pt_autograd"  # threads that run the backward pass of a device


class Placement:
    """One core for training, the others for everything else.

    Args:
        free_core: whether there is to be one; a machine with a single core has none.

    Attributes:
        training: the core.
        others: where everything else runs: the same core if none is free.
        free: whether ``others`` are other cores.
    """

    def __init__(self, *, free_core: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.training = cores[0]
        self.free = free_core and len(cores) > 1
        self.others = tuple(cores[1:]) if self.free else (cores[0],)
        self._before = set(cores)
        self._own = threading.get_native_id()
        self._placed: set[int] = set()

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Keeps the calling thread on its core, and gives all threads theirs back at the end."""
        os.sched_setaffinity(0, {self.training})
        try:
            yield
        finally:
            for thread in _threads(os.getpid()):
                _keep(thread, self._before)

    def spread(self) -> None:
        """Put threads of this process where they belong; quick if none is new.

        A thread starts on the core of the one that has made it, which is training's.
        """
        threads = set(_threads(os.getpid()))
        for thread in threads - self._placed - {self._own}:
            of_training = _name(thread).startswith(_TRAINING)
            _keep(thread, (self.training,) if of_training else self.others)
        self._placed = threads

    def place(self, pid: int) -> None:
        """Puts all threads of another process on the other cores."""
        for thread in _threads(pid):
            _keep(thread, self.others)


def descendants() -> set[int]:
    """Processes that this one has started, and those that they have; as far as one may see."""
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        for thread in _threads(pid):
            try:
                text = (_PROC / str(pid) / "task" / str(thread) / "children").read_text()
            except OSError:  # ended, or a kernel that does not tell
                continue
            new = {int(word) for word in text.split()} - found
            found |= new
            waiting += new
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC / str(pid) / "task")]
    except OSError:  # it has ended
        return []


def _name(thread: int) -> str:
    try:
        return (_PROC / "self" / "task" / str(thread) / "comm").read_text().strip()
    except OSError:
        return ""


def _keep(thread: int, cores: Iterable[int]) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.sched_setaffinity(thread, cores)
