"""Layouts of records, of which a keeper is told once: from then on a number stands for each.

Both sides forget those that were not used for longest (:mod:`everstep.state.layout.lru`), and
their
numbers stand for others: messages of one connection arrive in their order, and what the keeper
holds of a record refers to its layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from everstep.arena import PAGE_BYTES
from everstep.format.log import layout_from_index, layout_to_index
from everstep.state.layout.lru import RecentLayouts
from everstep.state.layout.shards import ShardLayout

__all__ = [
    "RECORD_BYTES",
    "LogLayouts",
    "receive_layout",
    "record_memory_bytes",
]


class LogLayouts:
    """What one keeper has been told.

    Args:
        send: a message to it.
        numbers: that nothing has yet.

    Attributes:
        lock: held from :meth:`number` until the message with that number was sent: before, nobody
            may give it to another layout.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None],
        numbers: RecentLayouts[int] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self._send = send
        self._numbers = RecentLayouts[int]() if numbers is None else numbers
        self._free: list[int] = []

    def number(self, layout: ShardLayout) -> int:
        """Of a layout, of which the keeper has been told by then."""
        number = self._numbers.get(layout)
        if number is None:
            gone = self._numbers.make_room(layout)
            self._free += gone
            number = self._free.pop() if self._free else len(self._numbers)
            self._send(
                {
                    "kind": "log_layout",
                    "number": number,
                    "layout": layout_to_index(layout),
                    "gone": [other for other in gone if other != number],
                }
            )
            self._numbers.add(layout, number)
        return number


def receive_layout(known: dict[int, ShardLayout], message: dict[str, Any]) -> None:
    """The keeper's side of it.

    Raises:
        FormatError: what it is told of is no layout.
    """
    for number in message.get("gone", ()):
        known.pop(number, None)
    known[message["number"]] = layout_from_index(message["layout"])


RECORD_BYTES = 2048
"""What Python takes for a record besides its bytes: measured (CPython 3.11) about 1250 in the
keeper, and 400 in the training process."""


def record_memory_bytes(tensors_bytes: int, objects: Mapping[str, bytes]) -> int:
    """Of a record: whole pages of the arena, and what lies beside it."""
    pages = -(-max(1, tensors_bytes) // PAGE_BYTES)
    return pages * PAGE_BYTES + sum(map(len, objects.values())) + RECORD_BYTES
