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
_SLACK = 8  # what is kept may be more than was lent at one time by this part of it


class ReusedMemory:
    """Page-aligned memory for one thread that asks; any thread may use it, and let go of it.

    What is lent comes back when the last view of it is gone, a tensor's included, and not before.
    It takes no more than was lent at one time, and an eighth: what would be too much, and is of no
    use for a request, is given back to the system before a new block is made. Without that eighth
    a small request would cost a large block that the next one needs.
    """

    def __init__(self) -> None:
        # Whoever lets go may be in the middle of anything: this queue, unlike a lock, is made so
        # that it may be.
        self._returned: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._free: list[Block] = []
        self._lent_bytes = self._most_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """What is lent now; to be asked by the thread that takes."""
        self._collect()
        return self._lent_bytes

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
            self._make_room(size_bytes)
            block = Block(size_bytes, touch=False)
        self._lent_bytes += block.size_bytes
        self._most_bytes = max(self._most_bytes, self._lent_bytes)
        lent = np.frombuffer(block.view, np.uint8)
        weakref.finalize(lent, self._returned.put, block).atexit = False
        return lent.data[:size_bytes]

    def _make_room(self, size_bytes: int) -> None:
        """Gives back what is free, the smallest first, as far as there would be too much."""
        taken_bytes = self._lent_bytes + size_bytes
        most_bytes = max(self._most_bytes, taken_bytes)
        kept_bytes = sum(block.size_bytes for block in self._free)
        self._free.sort(key=lambda block: block.size_bytes, reverse=True)
        while self._free and taken_bytes + kept_bytes > most_bytes + most_bytes // _SLACK:
            kept_bytes -= self._free.pop().size_bytes

    def _collect(self) -> None:
        while True:
            try:
                block = self._returned.get_nowait()
            except queue.Empty:
                return
            self._lent_bytes -= block.size_bytes
            self._free.append(block)
