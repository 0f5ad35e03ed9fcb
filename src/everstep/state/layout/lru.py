"""What was found out for each form that a step may have, as far as it was used lately: steps may go
on to have new ones for ever (layers that are dropped at random, experts that get no tokens)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from everstep.state.layout.shards import ShardLayout

__all__ = ["COUNT_MAX", "ENTRIES_MAX", "LRUCache", "LayoutCache"]

COUNT_MAX = 256
ENTRIES_MAX = 1 << 17
"""Of all patterns together: what is remembered of each parameter takes a few hundred bytes."""

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LRUCache(Generic[_K, _V]):
    """Values by key; of too many, those go that nobody has used for longest.

    Args:
        count_max: values, at most; None: :data:`COUNT_MAX`.
        weight_max: of all of them, but for the last one, which stays whatever it weighs; None:
            :data:`ENTRIES_MAX`.
    """

    def __init__(self, count_max: int | None = None, weight_max: int | None = None) -> None:
        self._count_max = COUNT_MAX if count_max is None else count_max
        self._weight_max = ENTRIES_MAX if weight_max is None else weight_max
        self._values: OrderedDict[_K, tuple[_V, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: _K) -> _V | None:
        """The value of a key, which is used by that; None: there is none."""
        known = self._values.get(key)
        if known is None:
            return None
        self._values.move_to_end(key)
        return known[0]

    def evict_for(self, weight: int) -> list[_V]:
        """Lets go of what is in the way of one more value; returns what has gone."""
        gone = []
        while self._values and (
            len(self._values) >= self._count_max or self._weight + weight > self._weight_max
        ):
            _, (value, lighter) = self._values.popitem(last=False)
            self._weight -= lighter
            gone.append(value)
        return gone

    def add(self, key: _K, value: _V, weight: int) -> None:
        """A value for a key that may have none."""
        _, before = self._values.pop(key, (None, 0))
        self._weight -= before
        self.evict_for(weight)
        self._values[key] = value, weight
        self._weight += weight


class LayoutCache(Generic[_V]):
    """:class:`LRUCache` by layout: the very one, as comparing them takes long."""

    def __init__(self, count_max: int | None = None, weight_max: int | None = None) -> None:
        # With the layout itself: no other one has its id meanwhile.
        self._found = LRUCache[int, tuple[ShardLayout, _V]](count_max, weight_max)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, layout: ShardLayout) -> _V | None:
        """As for :class:`LRUCache`."""
        known = self._found.get(id(layout))
        return None if known is None else known[1]

    def evict_for(self, layout: ShardLayout) -> list[_V]:
        """As for :class:`LRUCache`."""
        return [value for _, value in self._found.evict_for(len(layout.placed))]

    def add(self, layout: ShardLayout, value: _V) -> None:
        """As for :class:`LRUCache`."""
        self._found.add(id(layout), (layout, value), len(layout.placed))
