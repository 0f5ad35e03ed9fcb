"""Blocks of host memory: reused, within the budget, with back-pressure (I10)."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena import Block, BlockPool
from everstep.arena.buffers import PAGE_BYTES
from everstep.errors import DeadlineError, OutOfSpaceError

TIMEOUT_S = 10.0


def test_a_block_is_page_aligned_and_one_memory() -> None:
    for touch in (True, False):
        block = Block(5000, touch=touch)
        assert block.size_bytes == 2 * PAGE_BYTES
        assert block.tensor.data_ptr() % PAGE_BYTES == 0
        block.view[4999] = 7
        assert block.tensor[4999] == 7


def test_released_blocks_are_used_again() -> None:
    pool = BlockPool(100 * PAGE_BYTES)
    first = pool.acquire(3 * PAGE_BYTES, timeout_s=0)
    pool.release(first)
    assert pool.acquire(2 * PAGE_BYTES, timeout_s=0) is first
    assert pool.total_bytes == 3 * PAGE_BYTES


def test_more_than_the_budget_is_refused_with_the_number() -> None:
    with pytest.raises(OutOfSpaceError, match=r"takes 8193 bytes.* budget is 8192"):
        BlockPool(8192).acquire(8193, timeout_s=0)


def test_a_full_pool_pushes_back_for_a_stated_time() -> None:
    pool = BlockPool(4 * PAGE_BYTES)
    pool.acquire(4 * PAGE_BYTES, timeout_s=0)
    with pytest.raises(DeadlineError, match=r"no host memory was released within 0.01 s"):
        pool.acquire(PAGE_BYTES, timeout_s=0.01)


def test_a_waiter_gets_what_is_released() -> None:
    pool = BlockPool(4 * PAGE_BYTES)
    held = pool.acquire(4 * PAGE_BYTES, timeout_s=0)
    got: list[Block] = []
    waiter = threading.Thread(
        target=lambda: got.append(pool.acquire(4 * PAGE_BYTES, timeout_s=TIMEOUT_S))
    )
    waiter.start()
    pool.release(held)
    waiter.join(TIMEOUT_S)
    assert got == [held]


def test_idle_blocks_make_room_for_larger_ones() -> None:
    pool = BlockPool(4 * PAGE_BYTES)
    pool.release(pool.acquire(PAGE_BYTES, timeout_s=0))
    assert pool.acquire(4 * PAGE_BYTES, timeout_s=0).size_bytes == 4 * PAGE_BYTES
    assert pool.total_bytes == 4 * PAGE_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_never_over_the_budget_and_never_shared(actions: list[tuple[bool, int]]) -> None:
    budget = 12 * PAGE_BYTES
    pool = BlockPool(budget)
    live: list[Block] = []
    for take, size in actions:
        if take:
            try:
                block = pool.acquire(size * PAGE_BYTES, timeout_s=0)
            except DeadlineError:
                in_use = sum(block.size_bytes for block in live)
                assert in_use + size * PAGE_BYTES > budget, "refused although there was room"
                continue
            assert block.size_bytes >= size * PAGE_BYTES
            assert all(block is not other for other in live)
            live.append(block)
        elif live:
            pool.release(live.pop(size % len(live)))
        assert sum(block.size_bytes for block in live) <= pool.total_bytes <= budget
