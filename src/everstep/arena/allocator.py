"""Which ranges of an arena are taken: offsets and sizes only, no memory.

Blocks are freed in any order, since bases become durable in any order. What is free is
written down as a list of holes and never worked out from a head and a tail: a ring buffer
that takes "head == tail" for empty hands out memory that is still in use when it is full, as
that of DataStates-LLM does.
"""

from __future__ import annotations

from bisect import bisect_right

from everstep.errors import OptionError, StateError

__all__ = ["Allocator"]


class Allocator:
    """Ranges ``[offset, offset + size)`` of an arena, lowest offset first.

    No two live blocks overlap; a freed block merges with the holes beside it. Not safe for
    threads: whoever owns the arena asks.

    Args:
        size_bytes: of the arena; what does not fill a last unit is not used.
        alignment_bytes: the unit; offsets and sizes of blocks are multiples of it.

    Raises:
        OptionError: when there is not room for one unit.
    """

    def __init__(self, size_bytes: int, *, alignment_bytes: int = 4096) -> None:
        if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
            raise OptionError(f"blocks are aligned to a power of two, not to {alignment_bytes}")
        if size_bytes < alignment_bytes:
            raise OptionError(
                f"an arena of {size_bytes} bytes has no room for a block of {alignment_bytes}"
            )
        self._alignment_bytes = alignment_bytes
        self._size_bytes = size_bytes - size_bytes % alignment_bytes
        self._live: dict[int, int] = {}
        self._used_bytes = 0
        # Half-open ranges, by offset; never empty ones, never two that touch.
        self._holes: list[tuple[int, int]] = [(0, self._size_bytes)]

    @property
    def size_bytes(self) -> int:
        """Bytes that blocks can take: the arena's, rounded down to whole units."""
        return self._size_bytes

    @property
    def alignment_bytes(self) -> int:
        """The unit."""
        return self._alignment_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all live blocks, as rounded."""
        return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest block that can be had now; 0 in a full arena."""
        return max((stop - start for start, stop in self._holes), default=0)

    @property
    def live(self) -> dict[int, int]:
        """Size, as rounded, of each live block, by offset; a copy."""
        return dict(sorted(self._live.items()))

    def rounded_bytes(self, size_bytes: int) -> int:
        """What a block of ``size_bytes`` takes: whole units, one at least."""
        if size_bytes < 0:
            raise OptionError(f"a block cannot have {size_bytes} bytes")
        return -(-max(1, size_bytes) // self._alignment_bytes) * self._alignment_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """Takes the lowest hole that is large enough.

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
        """Marks a range that somebody already holds.

        Raises:
            StateError: for a range that is not aligned, lies outside the arena or overlaps a
                live block. Nothing has changed then.
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
        """Gives a block back, whatever the order in which blocks were taken.

        Raises:
            StateError: when no live block starts there, as when one is freed twice.
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
        """Cuts a block out of the hole that holds all of it."""
        stop = offset + size_bytes
        index = bisect_right(self._holes, (offset, self._size_bytes)) - 1
        hole_start, hole_stop = self._holes[index]
        assert hole_start <= offset < stop <= hole_stop, "a block is cut out of one hole"
        rest = [(hole_start, offset), (stop, hole_stop)]
        self._holes[index : index + 1] = [hole for hole in rest if hole[0] < hole[1]]
        self._live[offset] = size_bytes
        self._used_bytes += size_bytes
