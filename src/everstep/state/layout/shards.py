"""Layout of a rank's files: the offset of each entry, and the protocol that supplies the bytes.

There are no holes, and every entry is naturally aligned. Entries are ordered widest dtype first.
Since the data begins at a multiple of 4096 and every group of equal width is a multiple of that
width long, each entry is aligned to its element size without a byte of padding. Objects, whose size
is known only once they are encoded, follow the tensors (DataStates-LLM section V: fixed offsets for
tensors, log-structured append for the rest). The memory that a base is captured into mirrors the
file: the same bytes at the same offsets.

Caches with a bounded size for data that is derived from a layout or from a set of gradients. The
set of gradients may differ in every step (layers dropped at random, experts without tokens).
Without a bound, a cache of everything computed for each set would grow during the whole training.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

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
    return tuple(
        ShardLayout(in_sequence(sorted(group, key=lambda entry: -DTYPE_BYTES[entry.dtype])))
        for group in groups
    )


def append_objects(
    layout: ShardLayout, objects_bytes: Mapping[str, int], *, lsn: int = 0
) -> ShardLayout:
    """Return the layout with one ``U8`` entry per object, at ``lsn``, appended to the tensors."""
    objects = [Entry.whole(name, "U8", (n,), lsn=lsn) for name, n in objects_bytes.items()]
    return ShardLayout((*layout.placed, *in_sequence(objects, layout.size_bytes)))


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


def in_sequence(entries: Iterable[Entry], position: int = 0) -> tuple[Placed, ...]:
    """Place entries one after the other, from ``position`` on."""
    placed = []
    for entry in entries:
        placed.append(Placed(entry, position, position + entry.size_bytes))
        position += entry.size_bytes
    return tuple(placed)


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


COUNT_MAX = 256
ENTRIES_MAX = 1 << 17
"""Entries of all cached values together: each of them costs a few hundred bytes."""

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LRUCache(Generic[_K, _V]):
    """Mapping that evicts the least recently used values.

    A layout is found by its ``id()``, since comparing layouts takes long. Its value holds the
    layout itself, so that no other object can get that id meanwhile.

    Args:
        count_max: maximum number of values; None: :data:`COUNT_MAX`.
        weight_max: maximum weight of all values together; the newest value stays regardless of its
            weight. None: :data:`ENTRIES_MAX`.
    """

    def __init__(self, count_max: int | None = None, weight_max: int | None = None) -> None:
        self._count_max = COUNT_MAX if count_max is None else count_max
        self._weight_max = ENTRIES_MAX if weight_max is None else weight_max
        self._values: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _K) -> _V | None:
        """Return the value of a key and mark it as used; None if there is none."""
        known = self._values.get(key)
        if known is None:
            return None
        self._values.move_to_end(key)
        return known[0]

    def evict_for(self, weight: int) -> list[_V]:
        """Evict values until one of ``weight`` fits; return the evicted values."""
        evicted = []
        while self._values and (
            len(self._values) >= self._count_max or self._weight + weight > self._weight_max
        ):
            _, (value, lighter) = self._values.popitem(last=False)
            self._weight -= lighter
            evicted.append(value)
        return evicted

    def add(self, key: _K, value: _V, weight: int) -> None:
        """Store the value of a key, in place of an older one."""
        _, before = self._values.pop(key, (None, 0))
        self._weight -= before
        self.evict_for(weight)
        self._values[key] = value, weight
        self._weight += weight
