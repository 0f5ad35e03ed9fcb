"""Memory as a tier, and files that are read from memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from everstep.seams import ReadFile
from everstep.seams.memory import copy_view
from everstep.tiers.contract import Item, Traits, check_name, read_whole


class MemoryFile:
    """A readable file in memory.

    Args:
        parts: its bytes, as consecutive slices.

    Attributes:
        parts: those that are not empty.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = [part for part in parts if part.nbytes]
        self._size_bytes = sum(part.nbytes for part in self.parts)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        first = done = 0
        for part in self.parts:
            # `first` is the offset of the part in the file, `start` the offset in the part of the
            # next byte to copy. A part before `offset` yields a `start` past its end.
            start = max(offset + done - first, 0)
            if start < part.nbytes and done < buffer.nbytes:
                take = min(part.nbytes - start, buffer.nbytes - done)
                # Copies without the interpreter lock, so that other threads verify meanwhile.
                copy_view(buffer[done : done + take], part[start : start + take])
                done += take
            first += part.nbytes
        return done

    def close(self) -> None:
        """Do nothing: the memory is freed with the last reference. A resume may read the same file
        again.
        """


class MemoryTier:
    """Objects in the memory of this process, for tests."""

    traits = Traits("memory", 0)
    url = "memory://"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, name: str, source: ReadFile) -> None:
        check_name(name)
        data = read_whole(source, name)
        with self._lock:
            self._objects[name] = (data, time.time())

    def create(self, name: str, data: bytes) -> bool:
        check_name(name)
        with self._lock:
            if name in self._objects:
                return self._objects[name][0] == data
            self._objects[name] = (bytes(data), time.time())
            return True

    def open(self, name: str) -> ReadFile:
        check_name(name)
        with self._lock:
            if name not in self._objects:
                raise FileNotFoundError(f"{self.url}{name}")
            return MemoryFile([memoryview(self._objects[name][0])])

    def scan(self, prefix: str = "") -> list[Item]:
        if prefix:
            check_name(prefix)
        under = f"{prefix}/" if prefix else ""
        found = {}
        with self._lock:
            for name, (data, modified_s) in self._objects.items():
                if name.startswith(under):
                    child = under + name.removeprefix(under).split("/")[0]
                    is_object = child == name
                    found[child] = (
                        Item(name, len(data), modified_s) if is_object else Item(child, None)
                    )
        return sorted(found.values())

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            self._objects.pop(name, None)

    def sweep(self, prefix: str) -> None:
        """Do nothing: there are no incomplete objects."""
        check_name(prefix)

    def check(self) -> None:
        """Do nothing: memory can always be read."""

    def refresh(self) -> None:
        """Do nothing: there are no credentials."""

    def close(self) -> None:
        """Do nothing: objects stay as long as this tier is referenced."""
