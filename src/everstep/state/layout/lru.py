"""Caches with a bounded size for data that is derived from a layout or from a set of gradients.

The set of gradients may differ in every step (layers dropped at random, experts without tokens).
Without a bound, a cache of everything computed for each set would grow during the whole training.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

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
