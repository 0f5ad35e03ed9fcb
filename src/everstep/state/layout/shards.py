"""Where each entry lies in a rank's files: no holes, every entry naturally aligned.

Entries are ordered widest dtype first. As the data begins at a multiple of 4096 and every
group of equal width is a multiple of that width long, each entry is aligned to its own
element size without a byte of padding. Objects, whose size is known only once they are
encoded, follow the tensors (DataStates-LLM section V: fixed offsets for tensors,
log-structured append for the rest). The memory that a base is captured into mirrors the
file: offset for offset the same bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from everstep.state.layout.entries import DTYPE_BYTES, Entry

__all__ = [
    "HEADER_BYTES_MAX",
    "PIECE_BYTES",
    "Body",
    "Placed",
    "Seen",
    "ShardLayout",
    "append_objects",
    "at_lsn",
    "overlaps",
    "pieces",
    "plan_shards",
]

HEADER_BYTES_MAX = 8 << 20
"""A rank's entries are split over several files long before safetensors' limit of 100 MB."""

_ENTRY_HEADER_BYTES = 512  # generous: what one entry adds to a header besides its name and shape


@dataclass(frozen=True, slots=True)
class Placed:
    """An entry and its half-open byte range ``[begin, end)``, counted from the first data byte."""

    entry: Entry
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One file of one rank: its entries in file order."""

    placed: tuple[Placed, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of data, without the header."""
        return self.placed[-1].end if self.placed else 0


def plan_shards(
    entries: Sequence[Entry], *, header_bytes_max: int = HEADER_BYTES_MAX
) -> tuple[ShardLayout, ...]:
    """Lays ``entries`` out in as few files as the header limit allows; at least one."""
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
    """The layout with one ``U8`` entry per object, as of update ``lsn``, after the tensors."""
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
    """The layout with every entry as of update ``lsn``.

    Args:
        others: by name, those that are of another update.
    """

    def of(entry: Entry) -> Entry:
        return replace(entry, lsn=others.get(entry.name, lsn))

    return ShardLayout(tuple(replace(place, entry=of(place.entry)) for place in layout.placed))


def overlaps(
    placed: Sequence[Placed], ends: Sequence[int], begin: int, size: int
) -> Iterator[tuple[Placed, int, int]]:
    """Entries that have bytes in ``[begin, begin + size)``, each with the range of those bytes.

    Args:
        placed: entries that are not empty, in file order; ``ends`` are their ends.
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
"""Bytes that are copied and digested in one go: source and copy together stay in the
second-level cache."""

Seen = Callable[[memoryview], None]


class Body(Protocol):
    """The data bytes of one shard: tensors in file order, then objects."""

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        """Puts data bytes ``[begin, begin + len(chunk))`` into ``chunk``, and shows them to
        ``seen`` in order, while they are in the cache."""
        ...

    def held(self, begin: int, end: int) -> memoryview | None:
        """Data bytes ``[begin, end)`` where they already lie, if they do; begins at a page if
        ``begin`` is a multiple of one. Waits for bytes that are still being captured. Bytes
        behind ``end`` up to the next page are there, and of no meaning."""
        ...

    def objects_bytes(self) -> Mapping[str, int]:
        """Sizes of the objects that follow the tensors, by entry name; waits until they are
        known. Asked for after all whole chunks of tensors."""
        ...


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """``memory`` in pieces of at most :data:`PIECE_BYTES`."""
    for begin in range(0, memory.nbytes, PIECE_BYTES):
        yield memory[begin : begin + PIECE_BYTES]
