"""Reads the pieces of sharded entries into memory, each piece once and verified.

A digest is over a whole piece. So a piece of which a part is needed is read as a whole, and what
is not needed of it is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from everstep.errors import FormatError
from everstep.format.header import ShardHeader
from everstep.restore.load.reshard import Piece, SavedRanks
from everstep.state.layout.entries import DTYPE_BYTES
from everstep.state.layout.placement import Box
from everstep.state.layout.shards import overlaps

__all__ = ["Fill", "PieceReads", "fills", "fills_by_file"]


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """Bytes of one piece that go into some memory.

    Attributes:
        part: of the whole tensor.
        box: of the whole tensor that ``memory`` holds, row-major.
    """

    piece: Piece
    part: Box
    box: Box
    memory: memoryview

    @property
    def run(self) -> tuple[int, int, int] | None:
        """``(begin, end, at)``: bytes of the piece that are one run there and in the memory, from
        ``at`` on; None where they are not."""
        mine = self.part.shape[1:]
        theirs = self.piece.box
        if not mine == theirs.shape[1:] == self.box.shape[1:]:
            return None
        row = math.prod(mine) * DTYPE_BYTES[self.piece.entry.dtype]
        if not self.part.shape:
            return 0, row, 0
        first = self.part.offset[0]
        rows = self.part.shape[0]
        begin = (first - theirs.offset[0]) * row
        return begin, begin + rows * row, (first - self.box.offset[0]) * row

    def copy(self, data: bytearray | memoryview) -> None:
        """Takes the part from the bytes of the whole piece."""
        dtype = np.dtype(f"u{DTYPE_BYTES[self.piece.entry.dtype]}")
        source = np.frombuffer(data, dtype).reshape(self.piece.box.shape)
        target = np.frombuffer(self.memory, dtype).reshape(self.box.shape)
        target[self.part.slices_in(self.box)] = source[self.part.slices_in(self.piece.box)]


def fills(pieces: Iterable[Piece], box: Box, memory: memoryview) -> tuple[list[Fill], int]:
    """What of ``pieces`` goes into ``memory``, which holds ``box``, and how many elements of it
    nobody has.

    Raises:
        FormatError: two pieces overlap.
    """
    found: list[Fill] = []
    for piece in pieces:
        part = box.meet(piece.box)
        if part is None or not box.size:
            continue
        if any(part.meet(other.part) for other in found):
            raise FormatError(f"parts of {piece.entry.name!r} overlap")
        found.append(Fill(piece, part, box, memory))
    return found, box.size - sum(fill.part.size for fill in found)


def fills_by_file(
    saved: SavedRanks, wanted: Iterable[tuple[str, Iterable[Piece], Box, memoryview]]
) -> dict[int, list[Fill]]:
    """What to read, by file.

    Args:
        wanted: names, the pieces of each, and the memory that goes full of them, which holds the
            box.

    Raises:
        HoleError: listing what nobody has written.
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
    """Puts the pieces of one file where they belong.

    Args:
        fills: of pieces of this file.
        came: is shown what came of a wanted entry, by its index, while it lies in the cache.
    """

    def __init__(
        self,
        header: ShardHeader,
        fills: Sequence[Fill],
        came: Callable[[int, memoryview], None] = lambda index, data: None,
    ) -> None:
        self._placed = header.placed
        self._came = came
        self._fills: dict[int, list[Fill]] = {}
        for fill in fills:
            self._fills.setdefault(fill.piece.index, []).append(fill)
        self.wanted = sorted(self._fills)
        self._staged: dict[int, bytearray] = {}
        places = [(index, self._placed[index]) for index in self.wanted]
        filled = [(index, place) for index, place in places if place.end > place.begin]
        self._index = {place.begin: index for index, place in filled}
        self._some = [place for _, place in filled]
        self._ends = [place.end for place in self._some]

    def sink(self, begin: int, piece: memoryview) -> None:
        """Takes the next bytes of the body."""
        for place, start, stop in overlaps(self._some, self._ends, begin, piece.nbytes):
            index = self._index[place.begin]
            data = piece[start - begin : stop - begin]
            self._put(index, start - place.begin, data, place.end - place.begin)
            self._came(index, data)

    def entry_done(self, index: int) -> None:
        """All of an entry has come, and it is good."""
        data = self._staged.pop(index, None)
        if data is not None:
            for fill in self._fills[index]:
                if fill.run is None:
                    fill.copy(data)

    def _put(self, index: int, at: int, data: memoryview, size_bytes: int) -> None:
        end = at + data.nbytes
        for fill in self._fills[index]:
            run = fill.run
            if run is None:
                staged = self._staged.get(index)
                if staged is None:
                    staged = self._staged[index] = bytearray(size_bytes)
                staged[at:end] = data
                continue
            begin = max(at, run[0])
            stop = min(end, run[1])
            if begin < stop:
                to = begin - run[0] + run[2]
                fill.memory[to : to + stop - begin] = data[begin - at : stop - at]
