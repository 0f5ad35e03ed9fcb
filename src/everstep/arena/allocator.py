"""Allocator of ranges in an arena: offsets and sizes only, no memory.

Blocks are freed in any order, because bases become durable in any order. Free space is a list of
holes. A ring buffer with a head and a tail would not do: DataStates-LLM's treats "head == tail" as
empty and hands out memory that is still in use when the buffer is full.
"""

from __future__ import annotations

from bisect import bisect_right

from everstep.errors import OptionError, StateError

__all__ = ["Allocator"]


class Allocator:
    """First-fit allocator of ranges ``[offset, offset + size)``.

    Live blocks never overlap; a freed block merges with adjacent holes. Not thread-safe: only the
    owner of the arena calls it.

    Args:
        size_bytes: size of the arena, rounded down to a multiple of ``alignment_bytes``.
        alignment_bytes: unit of allocation, a power of two; offsets and sizes are multiples of it.

    Raises:
        OptionError: if the arena is smaller than one unit.
    """

    def __init__(self, size_bytes: int, *, alignment_bytes: int = 4096) -> None:
        if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
            raise OptionError(f"blocks are aligned to a power of two, not to {alignment_bytes}")
        if size_bytes < alignment_bytes:
            raise OptionError(
                f"an arena of {size_bytes} bytes is smaller than a block of {alignment_bytes}"
            )
        self._alignment_bytes = alignment_bytes
        self._size_bytes = size_bytes - size_bytes % alignment_bytes
        self._live: dict[int, int] = {}
        self._used_bytes = 0
        # Half-open ranges, by offset; never empty ones, never two that touch.
        self._holes: list[tuple[int, int]] = [(0, self._size_bytes)]

    @property
    def size_bytes(self) -> int:
        """Size of the arena, rounded down to whole units."""
        return self._size_bytes

    @property
    def alignment_bytes(self) -> int:
        """Unit of allocation."""
        return self._alignment_bytes

    @property
    def used_bytes(self) -> int:
        """Total size of all live blocks, rounded up to units."""
        return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest block that can be allocated now; 0 in a full arena."""
        return max((stop - start for start, stop in self._holes), default=0)

    @property
    def live(self) -> dict[int, int]:
        """Copy of the live blocks: rounded size by offset."""
        return dict(sorted(self._live.items()))

    def rounded_bytes(self, size_bytes: int) -> int:
        """Round a block size up to whole units, at least one."""
        if size_bytes < 0:
            raise OptionError(f"a block cannot have {size_bytes} bytes")
        return -(-max(1, size_bytes) // self._alignment_bytes) * self._alignment_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """Allocate from the lowest hole that is large enough.

        Returns:
            The offset, or None when no hole is large enough.
        """
        need = self.rounded_bytes(size_bytes)
        for start, stop in self._holes:
            if stop - start >= need:
                self._take(start, need)
                return start
        return None

    def reserve(self, offset: int, size_bytes: int) -> None:
        """Mark a range as allocated that another process already uses.

        Raises:
            StateError: if the range is not aligned, lies outside the arena or overlaps a live
                block. The allocator is unchanged.
        """
        need = self.rounded_bytes(size_bytes)
        what = f"{size_bytes} bytes at offset {offset}"
        if offset % self._alignment_bytes:
            raise StateError(
                f"{what} of the arena cannot be reserved: blocks start at multiples of "
                f"{self._alignment_bytes}"
            )
        if offset < 0 or offset + need > self._size_bytes:
            raise StateError(
                f"{what} cannot be reserved: the arena has {self._size_bytes} bytes for blocks"
            )
        for start, size in self._live.items():
            if start < offset + need and offset < start + size:
                raise StateError(
                    f"{what} of the arena cannot be reserved: a live block of {size} bytes is at "
                    f"offset {start}"
                )
        self._take(offset, need)

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
        self._used_bytes -= size_bytes
        start = offset
        stop = offset + size_bytes
        index = bisect_right(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))

    def _take(self, offset: int, size_bytes: int) -> None:
        """Allocate a block inside the hole that contains it."""
        stop = offset + size_bytes
        index = bisect_right(self._holes, (offset, self._size_bytes)) - 1
        hole_start, hole_stop = self._holes[index]
        assert hole_start <= offset < stop <= hole_stop, "a block is cut out of one hole"
        rest = [(hole_start, offset), (stop, hole_stop)]
        self._holes[index : index + 1] = [hole for hole in rest if hole[0] < hole[1]]
        self._live[offset] = size_bytes
        self._used_bytes += size_bytes
