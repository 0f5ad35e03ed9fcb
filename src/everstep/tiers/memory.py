"""Memory as a tier, and files that are read from memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from everstep.errors import OutOfSpaceError
from everstep.seams.clock import Clock, SystemClock
from everstep.seams.files.filesystem import ReadFile
from everstep.seams.memory import copy_view
from everstep.tiers.contract import Item, Loss, Traits, check_name
from everstep.tiers.streams import read_whole

__all__ = ["MemoryFile", "MemoryTier"]


class MemoryFile:
    """A readable file in memory.

    Args:
        parts: its bytes, as consecutive slices.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part for part in parts if part.nbytes]
        self._size_bytes = sum(part.nbytes for part in self._parts)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        first = done = 0
        for part in self._parts:
            start = max(offset + done - first, 0)
            if start < part.nbytes and done < buffer.nbytes:
                take = min(part.nbytes - start, buffer.nbytes - done)
                copy_view(buffer[done : done + take], part[start : start + take])
                done += take
            first += part.nbytes
        return done

    def close(self) -> None:
        """Do nothing: the memory is freed with the last reference. A resume may read the same file
        again.
        """


class MemoryTier:
    """Objects in the memory of this process, within a budget.

    Args:
        budget_bytes: maximum bytes of all objects; None: no limit.
        kind: ``"memory"``, or ``"peer"`` for objects held for another node.
        survives: losses that its contents survive.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        *,
        kind: str = "memory",
        survives: frozenset[Loss] = frozenset(),
        cost: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._used_bytes = 0
        self.traits = Traits(kind, survives, cost)

    @property
    def url(self) -> str:
        return f"{self.traits.kind}://"

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects."""
        return self._used_bytes

    def put(self, name: str, source: ReadFile) -> None:
        check_name(name)
        # Before reading: the data itself would exceed the budget.
        self._check_budget(name, source.size_bytes)
        data = read_whole(source, name)
        with self._lock:
            self._store(name, data)

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)
        with self._lock:
            if name in self._objects:
                return self._objects[name][0] == data
            self._store(name, bytes(data))
            return True

    def open(self, name: str) -> ReadFile:
        check_name(name)
        with self._lock:
            if name not in self._objects:
                raise FileNotFoundError(f"{self.url}{name}")
            return MemoryFile([memoryview(self._objects[name][0])])

    def scan(self, prefix: str = "") -> list[Item]:
        found = {}
        for item in self.walk(prefix):
            rest = item.name[len(prefix) + 1 if prefix else 0 :]
            name = item.name[: len(item.name) - len(rest)] + rest.split("/")[0]
            found[name] = item if name == item.name else Item(name, None)
        return sorted(found.values())

    def walk(self, prefix: str = "") -> list[Item]:
        if prefix:
            check_name(prefix)
        under = f"{prefix}/" if prefix else ""
        with self._lock:
            return sorted(
                Item(name, len(data), modified_s)
                for name, (data, modified_s) in self._objects.items()
                if name.startswith(under)
            )

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            data, _ = self._objects.pop(name, (b"", 0.0))
            self._used_bytes -= len(data)

    def sweep(self, prefix: str) -> None:
        """Do nothing: there are no incomplete objects."""
        check_name(prefix)

    def check(self) -> None:
        """Do nothing: memory can always be read."""

    def refresh(self) -> None:
        """Do nothing: there are no credentials."""

    def close(self) -> None:
        """Do nothing: objects stay as long as this tier is referenced."""

    def _store(self, name: str, data: bytes) -> None:
        self._check_budget(name, len(data))
        before, _ = self._objects.get(name, (b"", 0.0))
        self._objects[name] = (data, self._clock.unix_s())
        self._used_bytes += len(data) - len(before)

    def _check_budget(self, name: str, size_bytes: int) -> None:
        before, _ = self._objects.get(name, (b"", 0.0))
        needed = self._used_bytes - len(before) + size_bytes
        if self._budget_bytes is not None and needed > self._budget_bytes:
            raise OutOfSpaceError(
                f"{needed} bytes exceed the memory budget of {self._budget_bytes} bytes",
                tier=self.traits.kind,
                path=f"{self.url}{name}",
                hint="raise the budget, or keep fewer bases in memory",
            )
