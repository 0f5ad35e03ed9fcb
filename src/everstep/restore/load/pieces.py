"""Read the pieces of sharded entries into memory, each piece once and verified.

A digest covers a complete piece. So if only some of a piece is needed, the piece is read completely
and the rest is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from everstep.errors import FormatError
from everstep.format.header import ShardHeader
from everstep.restore.load.saved_ranks import Piece, SavedRanks
from everstep.state.layout import Box
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.state.layout.shards import overlaps


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Copy of some elements of a piece into memory.

    Attributes:
        overlap: box of the elements, in the full tensor.
        box: box of the full tensor that ``memory`` holds, row-major.
    """

    piece: Piece
    overlap: Box
    box: Box
    memory: memoryview

    @property
    def run(self) -> tuple[int, int, int] | None:
        """``(begin, end, at)``: byte range of the piece that is contiguous both there and in
        the memory, where it starts at ``at``; None if it is not contiguous."""
        mine = self.overlap.shape[1:]
        theirs = self.piece.box
        # Only rows of full width are contiguous on both sides.
        if not mine == theirs.shape[1:] == self.box.shape[1:]:
            return None
        row = math.prod(mine) * DTYPE_BYTES[self.piece.entry.dtype]
        if not self.overlap.shape:
            return 0, row, 0
        first = self.overlap.offset[0]
        rows = self.overlap.shape[0]
        begin = (first - theirs.offset[0]) * row
        return begin, begin + rows * row, (first - self.box.offset[0]) * row

    def copy(self, data: bytearray | memoryview) -> None:
        """Copy the elements from the bytes of the complete piece."""
        # Unsigned integers of the same width: NumPy has no bfloat16 or float8, and all bits are
        # kept.
        dtype = np.dtype(f"u{DTYPE_BYTES[self.piece.entry.dtype]}")
        source = np.frombuffer(data, dtype).reshape(self.piece.box.shape)
        target = np.frombuffer(self.memory, dtype).reshape(self.box.shape)
        target[self.overlap.slices_in(self.box)] = source[self.overlap.slices_in(self.piece.box)]


def fills(pieces: Iterable[Piece], box: Box, memory: memoryview) -> tuple[list[Fill], int]:
    """Return the copies from ``pieces`` into ``memory``, which holds ``box``, and the number of
    elements that no piece has.

    Raises:
        FormatError: two pieces overlap.
    """
    found: list[Fill] = []
    for piece in pieces:
        overlap = box.meet(piece.box)
        if overlap is None or not box.size:
            continue
        # The number of missing elements below is a difference of sums: an overlap would hide a
        # hole.
        if any(overlap.meet(other.overlap) for other in found):
            raise FormatError(f"shards of {piece.entry.name!r} overlap")
        found.append(Fill(piece, overlap, box, memory))
    return found, box.size - sum(fill.overlap.size for fill in found)


def fills_by_file(
    saved: SavedRanks, wanted: Iterable[tuple[str, Iterable[Piece], Box, memoryview]]
) -> dict[int, list[Fill]]:
    """Return the copies to make, by file number.

    Args:
        wanted: for each tensor its name, its pieces, the box to read, and the memory for it.

    Raises:
        HoleError: elements are in no file; lists them.
        FormatError: two pieces overlap.
    """
    files: dict[int, list[Fill]] = {}
    holes: dict[str, str] = {}
    for name, pieces, box, memory in wanted:
        found, missing = fills(pieces, box, memory)
        if missing:
            holes[name] = f"{missing} of {box.size} elements at {list(box.offset)}"
        for fill in found:
            files.setdefault(fill.piece.file, []).append(fill)
    if holes:
        raise saved.hole(holes)
    return files


class PieceReads:
    """Copies the pieces of one file to their destinations as the bytes arrive.

    Args:
        fills: copies from pieces of this file.
    """

    def __init__(self, header: ShardHeader, fills: Sequence[Fill]) -> None:
        self._placed = header.placed
        self._fills: dict[int, list[Fill]] = {}
        for fill in fills:
            self._fills.setdefault(fill.piece.index, []).append(fill)
        self.wanted = sorted(self._fills)
        self._staged: dict[int, bytearray] = {}
        places = [(index, self._placed[index]) for index in self.wanted]
        # An empty entry begins where the next one does, and would take its key in ``_index``.
        filled = [(index, place) for index, place in places if place.end > place.begin]
        self._index = {place.begin: index for index, place in filled}
        self._some = [place for _, place in filled]
        self._ends = [place.end for place in self._some]

    def sink(self, begin: int, piece: memoryview) -> None:
        """Consume the next bytes of the body."""
        for place, start, stop in overlaps(self._some, self._ends, begin, piece.nbytes):
            index = self._index[place.begin]
            data = piece[start - begin : stop - begin]
            self._put(index, start - place.begin, data, place.end - place.begin)

    def entry_done(self, index: int) -> None:
        """Finish an entry that has arrived completely and was verified."""
        data = self._staged.pop(index, None)
        if data is not None:
            for fill in self._fills[index]:
                if fill.run is None:
                    fill.copy(data)

    def _put(self, index: int, at: int, data: memoryview, size_bytes: int) -> None:
        end = at + data.nbytes
        for fill in self._fills[index]:
            run = fill.run
            # Rows are not contiguous in the destination: collect the complete piece, and copy it
            # when verified.
            if run is None:
                staged = self._staged.get(index)
                if staged is None:
                    staged = self._staged[index] = bytearray(size_bytes)
                staged[at:end] = data
                continue
            # Written before the entry is verified: if it proves damaged, the caller restores
            # another base over it (``adr/006``).
            begin = max(at, run[0])
            stop = min(end, run[1])
            if begin < stop:
                to = begin - run[0] + run[2]
                fill.memory[to : to + stop - begin] = data[begin - at : stop - at]
