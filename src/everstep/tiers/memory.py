"""Files that are not on a disk: read from memory, by the same code."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MemoryFile"]


class MemoryFile:
    """A file in memory, for reading.

    Args:
        parts: its bytes, one after the other.
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
                buffer[done : done + take] = part[start : start + take]
                done += take
            first += part.nbytes
        return done

    def close(self) -> None:
        """Nothing to let go of: the memory is there as long as a part of it is in use. The
        same file may be read again, by a resume that chooses once more."""
