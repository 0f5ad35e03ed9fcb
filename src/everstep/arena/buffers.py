"""Blocks of host memory that are allocated once and reused.

Copying into fresh pages is 6 to 9 times slower than into pages that are already mapped (on a Zen 4
machine: 1.4 to 2.2 GB/s against 13 to 18 GB/s). Blocks are therefore faulted in at construction and
kept for reuse.
"""

from __future__ import annotations

import contextlib
import mmap

PAGE_BYTES = 4096
# Linux's numbers: Python names some of them only where it was built against a recent C library.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


class Block:
    """Page-aligned host memory.

    Args:
        touch: fault in all pages now instead of at the first write.

    Attributes:
        view: the memory as bytes.
    """

    def __init__(self, size_bytes: int, *, touch: bool = True) -> None:
        self.size_bytes = -(-max(1, size_bytes) // PAGE_BYTES) * PAGE_BYTES
        memory = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(memory)
        # Direct I/O pins pages: with huge ones reads are 1.6 times faster, measured.
        with contextlib.suppress(OSError, ValueError):
            memory.madvise(_MADV_HUGEPAGE)
        if not touch:
            return
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError):  # older kernels: touch by writing
            memory.write(bytes(self.size_bytes))
