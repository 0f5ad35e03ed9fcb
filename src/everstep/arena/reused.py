"""A pool of private blocks, reused after the last view is released.

The system allocates fresh memory page by page, on a virtual machine perhaps from the host: there,
reading a file into fresh memory was up to ten times slower than into memory used before.
"""

from __future__ import annotations

import queue
import weakref

import numpy as np

from everstep.arena.buffers import Block

_WASTE = 2  # a block serves requests of at least 1/2 of its size
_SLACK = 8  # the pool may exceed the peak of lent bytes by 1/8


class ReusedMemory:
    """Pool of page-aligned blocks. One thread calls it; any thread may use and release the memory.

    A block returns to the pool when its last view is released, including views by tensors. The pool
    holds at most 9/8 of the peak of lent bytes: before a new block is allocated, free blocks beyond
    that are returned to the system. Without the extra eighth a small request would discard a large
    block that the next request needs.
    """

    def __init__(self) -> None:
        # Finalizers run at arbitrary points, even while a lock is held: SimpleQueue is reentrant.
        self._returned: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._free: list[Block] = []
        self._lent_bytes = self._most_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes lent now; called by the thread that takes."""
        self._collect()
        return self._lent_bytes

    def take(self, size_bytes: int) -> memoryview:
        """Lend ``size_bytes`` of uninitialized memory."""
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
            self._discard_excess(size_bytes)
            block = Block(size_bytes, touch=False)
        self._lent_bytes += block.size_bytes
        self._most_bytes = max(self._most_bytes, self._lent_bytes)
        lent = np.frombuffer(block.view, np.uint8)
        # All views of the lent memory refer to this array, so it is finalized after the last of
        # them. Not at exit: threads may still copy.
        weakref.finalize(lent, self._returned.put, block).atexit = False
        return lent.data[:size_bytes]

    def _discard_excess(self, size_bytes: int) -> None:
        """Discard free blocks, smallest first, until a new block fits under the limit."""
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
