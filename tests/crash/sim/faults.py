"""Faults at an operation, and the journal that numbers the operations."""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, NamedTuple

__all__ = ["Fault", "Journal", "Moment", "Operation", "SimulatedCrash", "os_error"]

Moment = Literal["before", "after"]

_READS = frozenset({"open", "read", "scan", "free_bytes"})
_SYNCS = frozenset({"sync", "sync_dir"})


class SimulatedCrash(BaseException):
    """The process has died here; nothing it does from now on reaches the disk."""


class Operation(NamedTuple):
    """One call: its number (from 1), what it was, on what, and with what."""

    number: int
    op: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.number:4d} {self.op:10s} {self.path} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at an operation.

    Attributes:
        action: ``"crash_before"``; ``"crash_partly"`` (a write lands in part; any other
            operation not at all); ``"crash_after"``; ``"error"``: raises ``OSError(errno)``,
            a write having landed in part and a sync having lost what was pending;
            ``"lie"``: a sync reports success and does nothing.
        at: the first operation number that it may act on (reads have numbers of their own).
        persistent: acts on every match, not only on the first.
        ops: names of operations it acts on; None for every mutating one (a lie: every sync).
        path: shell pattern for the path; None for all.
    """

    action: Literal["crash_before", "crash_partly", "crash_after", "error", "lie"]
    at: int = 1
    errno: int = errno.EIO
    persistent: bool = False
    ops: frozenset[str] | None = None
    path: str | None = None

    def matches(self, operation: Operation) -> bool:
        """Return True if it acts on ``operation``."""
        ops = self.ops or (_SYNCS if self.action == "lie" else None)
        wanted = operation.op in ops if ops else operation.op not in _READS
        named = self.path is None or fnmatch.fnmatchcase(operation.path, self.path)
        return wanted and named and operation.number >= self.at


class Journal:
    """Numbers and logs the operations of one simulated process and lets its faults happen.

    Attributes:
        writes: every mutating operation, numbered from 1.
        reads: every other operation, numbered apart.
        read_only: every mutating operation raises EROFS.
        crashed: the process is dead; every operation raises :class:`SimulatedCrash`.
        lock: held during each operation.
        watcher: called with the lock held, before and after each mutating operation.
    """

    def __init__(self, *, read_only: bool) -> None:
        self.writes: list[Operation] = []
        self.reads: list[Operation] = []
        self.read_only = read_only
        self.crashed = False
        self.lock = threading.RLock()
        self.watcher: Callable[[Operation, Moment], None] | None = None
        self._faults: list[Fault] = []

    def inject(self, fault: Fault) -> None:
        """Lets ``fault`` happen."""
        with self.lock:
            self._faults.append(fault)

    @contextmanager
    def operation(self, op: str, path: PurePath, detail: str = "") -> Iterator[str]:
        """One numbered operation; yields ``"do"``, ``"part"`` or ``"lie"``."""
        with self.lock:
            self._check_alive()
            operation = Operation(len(self.writes) + 1, op, str(path), detail)
            self.writes.append(operation)
            self._show(operation, "before")
            if self.read_only:
                raise os_error(errno.EROFS, path)
            fault = self._fault(operation)
            action = fault.action if fault else "none"
            if action == "crash_before" or (action == "crash_partly" and op != "write"):
                self._crash(operation)
            # A failing write lands in part; any other failing operation does nothing.
            if fault and action == "error" and op not in ("write", "sync"):
                raise os_error(fault.errno, path)
            try:
                yield {"lie": "lie", "error": "part", "crash_partly": "part"}.get(action, "do")
            finally:
                self._show(operation, "after")
                if action.startswith("crash"):
                    self._crash(operation)
            if fault and action == "error":
                raise os_error(fault.errno, path)

    @contextmanager
    def reading(self, op: str, path: PurePath, detail: str = "") -> Iterator[None]:
        with self.lock:
            self._check_alive()
            operation = Operation(len(self.reads) + 1, op, str(path), detail)
            self.reads.append(operation)
            fault = self._fault(operation)
            if fault and fault.action.startswith("crash"):
                self._crash(operation)
            if fault and fault.action == "error":
                raise os_error(fault.errno, path)
            yield

    def _show(self, operation: Operation, moment: Moment) -> None:
        if self.watcher is not None:
            self.watcher(operation, moment)

    def _fault(self, operation: Operation) -> Fault | None:
        for fault in self._faults:
            if fault.matches(operation):
                if not fault.persistent:
                    self._faults.remove(fault)
                return fault
        return None

    def _check_alive(self) -> None:
        if self.crashed:
            raise SimulatedCrash("the process has crashed before")

    def _crash(self, operation: Operation) -> None:
        self.crashed = True
        raise SimulatedCrash(str(operation))


def os_error(code: int, path: PurePath) -> OSError:
    """The error that the operating system would raise."""
    return OSError(code, os.strerror(code), str(path))
