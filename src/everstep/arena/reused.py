"""Memory that is used again as soon as nobody looks at it any more.

Fresh memory comes from the system page by page, and on a virtual machine perhaps from the machine
below it: on one of those, reading a file into it was up to ten times slower than into memory that
had been used before.
"""

from __future__ import annotations

import queue
import weakref

import numpy as np

from everstep.arena.buffers import Block

__all__ = ["ReusedMemory"]

_WASTE = 2  # a block serves requests down to this part of its size


class ReusedMemory:
    """Page-aligned memory for one thread that asks; any thread may use it, and let go of it.

    What is lent comes back when the last view of it is gone, a tensor's included, and not before.
    It takes no more than was lent at one time: blocks that are of no use for a request are given
    back to the system before a new one is made.
    """

    def __init__(self) -> None:
        # Whoever lets go may be in the middle of anything: this queue, unlike a lock, is made so
        # that it may be.
        self._returned: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._free: list[Block] = []

    def take(self, size_bytes: int) -> memoryview:
        """So many bytes, which hold anything."""
        self._collect()
        fitting = [
            block
            for block in self._free
            if size_bytes <= block.size_bytes <= _WASTE * max(1, size_bytes)
        ]
        if fitting:
            block = min(fitting, key=lambda block: block.size_bytes)
            self._free.remove(block)
        else:
            self._free.clear()
            block = Block(size_bytes, touch=False)
        lent = np.frombuffer(block.view, np.uint8)
        weakref.finalize(lent, self._returned.put, block).atexit = False
        return lent.data[:size_bytes]

    def _collect(self) -> None:
        while True:
            try:
                self._free.append(self._returned.get_nowait())
            except queue.Empty:
                return
