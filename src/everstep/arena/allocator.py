"""Allocator of ranges in an arena: offsets and sizes only, no memory.

Blocks are freed in any order, because bases become durable in any order. Free space is a list of
holes. A ring buffer with a head and a tail would not do: DataStates-LLM's treats "head == tail" as
empty and hands out memory that is still in use when the buffer is full.
"""

from __future__ import annotations

from bisect import bisect_right

from everstep.arena.buffers import PAGE_BYTES
from everstep.errors import OptionError, StateError


class Allocator:
    """First-fit allocator of ranges ``[offset, offset + size)``.

    Live blocks never overlap; a freed block merges with adjacent holes. Not thread-safe: only the
    owner of the arena calls it.

    Args:
        size_bytes: size of the arena, a multiple of the page size.

    Attributes:
        size_bytes: as given.
        used_bytes: total size of all live blocks, rounded up to pages.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._live: dict[int, int] = {}
        # Half-open ranges, by offset; never empty ones, never two that touch.
        self._holes: list[tuple[int, int]] = [(0, size_bytes)]

    def rounded_bytes(self, size_bytes: int) -> int:
        """Round a block size up to full pages, at least one."""
        if size_bytes < 0:
            raise OptionError(f"a block cannot have {size_bytes} bytes")
        return -(-max(1, size_bytes) // PAGE_BYTES) * PAGE_BYTES

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate from the lowest hole that is large enough.

        Returns:
            The offset, or None when no hole is large enough.
        """
        need = self.rounded_bytes(size_bytes)
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= need:
                rest = [(start + need, stop)] if stop - start > need else []
                self._holes[index : index + 1] = rest
                self._live[start] = need
                self.used_bytes += need
                return start
        return None

    def free(self, offset: int) -> None:
        """Free a block; blocks may be freed in any order.

        Raises:
            StateError: if no live block starts at ``offset``, e.g. if it was freed before.
        """
        if offset not in self._live:
            raise StateError(
                f"no live block of the arena starts at offset {offset}: it was freed before, or "
                "never taken"
            )
        size_bytes = self._live.pop(offset)
        self.used_bytes -= size_bytes
        start = offset
        stop = offset + size_bytes
        # Merge with the hole after and the one before: of two holes that touch, none would fit a
        # block of their joint size.
        index = bisect_right(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))
