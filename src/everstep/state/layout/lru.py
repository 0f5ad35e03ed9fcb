"""Caches with a bounded size for data that is derived from a layout or from a set of gradients.

The set of gradients may differ in every step (layers dropped at random, experts without tokens).
Without a bound, a cache of everything computed for each set would grow during the whole training.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from everstep.state.layout.shards import ShardLayout

__all__ = ["COUNT_MAX", "ENTRIES_MAX", "LRUCache", "LayoutCache"]

COUNT_MAX = 256
ENTRIES_MAX = 1 << 17
"""Entries of all cached values together: each of them costs a few hundred bytes."""

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LRUCache(Generic[_K, _V]):
    """Mapping that evicts the least recently used values.

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


class LayoutCache(Generic[_V]):
    """:class:`LRUCache` keyed by the identity of a layout, since comparing layouts takes long."""

    def __init__(self, count_max: int | None = None, weight_max: int | None = None) -> None:
        # The layout is kept with the value, so that no other object can get its id meanwhile.
        self._found = LRUCache[int, tuple[ShardLayout, _V]](count_max, weight_max)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, layout: ShardLayout) -> _V | None:
        """Return the value of a layout; see :class:`LRUCache`."""
        known = self._found.get(id(layout))
        return None if known is None else known[1]

    def evict_for(self, layout: ShardLayout) -> list[_V]:
        """Evict values until one for ``layout`` fits; see :class:`LRUCache`."""
        return [value for _, value in self._found.evict_for(len(layout.placed))]

    def add(self, layout: ShardLayout, value: _V) -> None:
        """Store the value of a layout; see :class:`LRUCache`."""
        self._found.add(id(layout), (layout, value), len(layout.placed))
