"""Layout of a rank's files: the offset of each entry, and the protocol that supplies the bytes.

There are no holes, and every entry is naturally aligned. Entries are ordered widest dtype first.
Since the data begins at a multiple of 4096 and every group of equal width is a multiple of that
width long, each entry is aligned to its element size without a byte of padding. Objects, whose size
is known only once they are encoded, follow the tensors (DataStates-LLM section V: fixed offsets for
tensors, log-structured append for the rest). The memory that a base is captured into mirrors the
file: the same bytes at the same offsets.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from everstep.state.layout.entries import DTYPE_BYTES, Entry

HEADER_BYTES_MAX = 8 << 20
"""Maximum header of a file; larger sets of entries are split over several files, far below
safetensors' limit of 100 MB."""

_ENTRY_HEADER_BYTES = 512  # upper estimate for one entry, besides its name and shape


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and its half-open byte range ``[begin, end)``, counted from the first data byte."""

    entry: Entry
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Layout of one file of one rank: its entries in file order."""

    placed: tuple[Placed, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of data, without the header."""
        return self.placed[-1].end if self.placed else 0


def plan_shards(
    entries: Sequence[Entry], *, header_bytes_max: int = HEADER_BYTES_MAX
) -> tuple[ShardLayout, ...]:
    """Lay out ``entries`` in as few files as the header limit allows; at least one."""
    groups: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        cost = _ENTRY_HEADER_BYTES + 4 * len(entry.name) + 100 * len(entry.shape)
        if groups[-1] and used + cost > header_bytes_max:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += cost
    return tuple(_lay_out(group) for group in groups)


def append_objects(
    layout: ShardLayout, objects_bytes: Mapping[str, int], *, lsn: int = 0
) -> ShardLayout:
    """Return the layout with one ``U8`` entry per object, at ``lsn``, appended to the tensors."""
    placed = list(layout.placed)
    position = layout.size_bytes
    for name, size in objects_bytes.items():
        entry = Entry.whole(name, "U8", (size,), lsn=lsn)
        placed.append(Placed(entry, position, position + size))
        position += size
    return ShardLayout(tuple(placed))


def at_lsn(
    layout: ShardLayout, lsn: int, others: Mapping[str, int] = MappingProxyType({})
) -> ShardLayout:
    """Return the layout with every entry at ``lsn``.

    Args:
        others: LSNs of the entries that differ, by name.
    """

    def of(entry: Entry) -> Entry:
        return replace(entry, lsn=others.get(entry.name, lsn))

    return ShardLayout(tuple(replace(place, entry=of(place.entry)) for place in layout.placed))


def overlaps(
    placed: Sequence[Placed], ends: Sequence[int], begin: int, size: int
) -> Iterator[tuple[Placed, int, int]]:
    """Yield the entries that have bytes in ``[begin, begin + size)``, each with the range of these
    bytes.

    Args:
        placed: entries that are not empty, in file order.
        ends: their end offsets.
    """
    end = begin + size
    for index in range(bisect.bisect_right(ends, begin), len(placed)):
        place = placed[index]
        if place.begin >= end:
            return
        yield place, max(begin, place.begin), min(end, place.end)


def _lay_out(entries: Sequence[Entry]) -> ShardLayout:
    placed = []
    position = 0
    for entry in sorted(entries, key=lambda entry: -DTYPE_BYTES[entry.dtype]):
        placed.append(Placed(entry, position, position + entry.size_bytes))
        position += entry.size_bytes
    return ShardLayout(tuple(placed))


PIECE_BYTES = 512 << 10
"""Bytes to copy and digest in one go: source and copy together fit in the second-level cache."""

Seen = Callable[[memoryview], None]


class Body(Protocol):
    """Source of the data bytes of one file: tensors in file order, then objects."""

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        """Write data bytes ``[begin, begin + len(chunk))`` into ``chunk``.

        ``seen`` gets the same bytes in order, while they are in the cache.
        """
        ...

    def held(self, begin: int, end: int) -> memoryview | None:
        """Return data bytes ``[begin, end)`` without a copy, if they already lie in memory.

        The view begins at a page boundary if ``begin`` is a multiple of the page size. Waits for
        bytes that are still being captured. Bytes after ``end`` up to the next page are readable,
        with undefined contents.
        """
        ...

    def objects_bytes(self) -> Mapping[str, int]:
        """Return the sizes of the objects that follow the tensors, by entry name.

        Waits until they are known. Called after all complete chunks of tensors were taken.
        """
        ...


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """Yield ``memory`` in pieces of at most :data:`PIECE_BYTES`."""
    for begin in range(0, memory.nbytes, PIECE_BYTES):
        yield memory[begin : begin + PIECE_BYTES]
