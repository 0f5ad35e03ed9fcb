"""Private blocks of host memory."""

from __future__ import annotations

import numpy as np

from everstep.arena import PAGE_BYTES, Block


def test_a_block_is_page_aligned_whole_pages() -> None:
    block = Block(5000)
    assert block.size_bytes == block.view.nbytes == 2 * PAGE_BYTES
    memory = np.frombuffer(block.view, np.uint8)
    assert memory.ctypes.data % PAGE_BYTES == 0
    block.view[4999] = 7
    assert memory[4999] == 7
