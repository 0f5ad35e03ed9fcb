"""Records of the gradient log on their way to the keeper: numbers of layouts, memory of records.

A layout is sent once; later records refer to it by number. Both sides forget the layouts that were
unused for longest (:mod:`everstep.state.layout.lru`), and reuse their numbers. That is safe, as
messages of a connection arrive in order, and a record that the keeper holds refers to its layout
itself. No torch is needed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.arena import PAGE_BYTES
from everstep.format.log import layout_from_index, layout_to_index
from everstep.state.layout.lru import LRUCache
from everstep.state.layout.shards import ShardLayout

ENDED = 1 << 62
"""Sent instead of the number of the last record on disk: a segment failed, none will follow."""


class LogLayouts:
    """Layouts that one keeper has received.

    Args:
        send: sends a message to the keeper.
        numbers: layouts with a number; None for none.

    Attributes:
        lock: to be held from the call of :meth:`number` until the message with that number was
            sent:
            otherwise another thread could give the number to another layout first.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        numbers: LRUCache[int, tuple[ShardLayout, int]] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self._send = send
        self._numbers = LRUCache() if numbers is None else numbers
        self._free: list[int] = []

    def number(self, layout: ShardLayout) -> int:
        """Return the number of a layout, after sending the layout if the keeper does not have
        it."""
        # id() is a safe key only because the cached value refers to the layout: while the entry
        # exists, no other object can get the same id.
        known = self._numbers.get(id(layout))
        if known is not None:
            return known[1]
        self._free += [other for _, other in self._numbers.evict_for(len(layout.placed))]
        number = self._free[-1] if self._free else len(self._numbers)
        self._send(
            {
                "kind": "log_layout",
                "number": number,
                "layout": layout_to_index(layout),
                "gone": self._free[:-1],
            }
        )
        # After the send: if that fails, the keeper does not have the layout; the number stays free.
        del self._free[-1:]
        self._numbers.add(id(layout), (layout, number), len(layout.placed))
        return number


def receive_layout(known: dict[int, ShardLayout], message: dict[str, Any]) -> None:
    """Store a layout that the trainer has sent (keeper side).

    Raises:
        FormatError: the message holds an invalid layout.
    """
    # Before the new layout is stored: it may reuse one of these numbers.
    for number in message.get("gone", ()):
        known.pop(number, None)
    known[message["number"]] = layout_from_index(message["layout"])


RECORD_BYTES = 2048
"""Python objects of one record, in bytes: measured (CPython 3.11) about 1250 in the keeper and 400
in the training process."""


def record_memory_bytes(tensors_bytes: int, objects: Mapping[str, bytes]) -> int:
    """Return the memory of a record in bytes: whole pages of the arena, and Python objects."""
    pages = -(-max(1, tensors_bytes) // PAGE_BYTES)
    return pages * PAGE_BYTES + sum(map(len, objects.values())) + RECORD_BYTES
