"""Blocks of the arena: within the budget, with back-pressure, kept only as long as there is
room (I10)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena import PAGE_BYTES, PROGRESS_WORDS, Arena
from everstep.errors import DeadlineError, OutOfSpaceError, StateError
from everstep.link.pool import Block, CapturePool
from everstep.seams.processes import Condition

TIMEOUT_S = 10.0


def pool_of(pages: int) -> CapturePool:
    return CapturePool(Arena.anonymous(pages * PAGE_BYTES))


def test_a_released_block_is_used_again() -> None:
    pool = pool_of(100)
    first = pool.acquire(3 * PAGE_BYTES, timeout_s=0)
    pool.release(first)
    assert pool.acquire(2 * PAGE_BYTES, timeout_s=0).offset == first.offset
    assert pool.touched_bytes == 3 * PAGE_BYTES


def test_more_than_the_budget_is_refused_with_the_number() -> None:
    with pytest.raises(OutOfSpaceError, match=r"takes 8193 bytes.* budget is 8192"):
        pool_of(2).acquire(8193, timeout_s=0)


def test_a_full_pool_pushes_back_for_a_stated_time() -> None:
    pool = pool_of(4)
    pool.acquire(4 * PAGE_BYTES, timeout_s=0)
    with pytest.raises(DeadlineError, match=r"no host memory was released within 0.01 s"):
        pool.acquire(PAGE_BYTES, timeout_s=0.01)


@pytest.mark.parametrize("ends", ["released", "kept"])
def test_who_has_waited_in_vain_waits_again_when_something_has_come(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a keeper that hangs each base would hold training up for the whole time."""
    pool, waited = pool_of(4), list[float]()
    wait_for = Condition.wait_for

    def seen(
        condition: Condition, predicate: Callable[[], bool], timeout: float | None = None
    ) -> bool:
        assert timeout is not None
        waited.append(timeout)
        return wait_for(condition, predicate, min(timeout, 0.01))

    monkeypatch.setattr(Condition, "wait_for", seen)
    first, second = (pool.acquire(2 * PAGE_BYTES, timeout_s=60.0) for _ in range(2))
    for why in ("within 60 s", "since the last base was lost", "since the last base was lost"):
        with pytest.raises(DeadlineError, match=f"no host memory was released {why}") as caught:
            pool.acquire(4 * PAGE_BYTES, timeout_s=60.0)
        assert "everstep ps" in str(caught.value.hint)
    assert waited[2:] == [60.0, 0.0, 0.0]
    if ends == "released":
        pool.release(first)
    else:
        pool.keep(first, lambda: None)
    with pytest.raises(DeadlineError, match="within 60 s"):
        pool.acquire(4 * PAGE_BYTES, timeout_s=60.0)
    pool.release(second)
    pool.acquire(2 * PAGE_BYTES, timeout_s=60.0)
    assert waited[5:] == [60.0, 60.0]


def test_a_waiter_gets_what_is_released() -> None:
    pool = pool_of(4)
    held = pool.acquire(4 * PAGE_BYTES, timeout_s=0)
    got: list[Block] = []
    waiter = threading.Thread(
        target=lambda: got.append(pool.acquire(4 * PAGE_BYTES, timeout_s=TIMEOUT_S))
    )
    waiter.start()
    pool.release(held)
    waiter.join(TIMEOUT_S)
    assert [room.offset for room in got] == [0]


def test_kept_blocks_go_when_memory_is_needed_and_the_keeper_is_told_before() -> None:
    pool = pool_of(4)
    told: list[str] = []
    room = pool.acquire(3 * PAGE_BYTES, timeout_s=0)
    pool.keep(room, lambda: told.append("first"))
    small = pool.acquire(PAGE_BYTES, timeout_s=0)
    assert told == []
    pool.keep(small, lambda: told.append("second"))
    assert pool.acquire(3 * PAGE_BYTES, timeout_s=0).offset == 0
    assert told == ["first"]
    assert pool.acquire(PAGE_BYTES, timeout_s=0).offset == 3 * PAGE_BYTES
    assert told == ["first", "second"]


def test_kept_blocks_go_when_a_newer_one_is_there() -> None:
    pool = pool_of(4)
    told: list[str] = []
    pool.keep(pool.acquire(PAGE_BYTES, timeout_s=0), lambda: told.append("x"))
    pool.drop_kept()
    assert told == ["x"]
    assert pool.used_bytes == 0


def test_progress_words_start_at_zero_and_never_run_out_of_order() -> None:
    pool = pool_of(PROGRESS_WORDS + 8)
    rooms = [pool.acquire(PAGE_BYTES, timeout_s=0) for _ in range(PROGRESS_WORDS)]
    assert len({room.word for room in rooms}) == PROGRESS_WORDS
    with pytest.raises(DeadlineError):  # room there is, but no word
        pool.acquire(PAGE_BYTES, timeout_s=0)
    pool.arena.set_progress(rooms[3].word, 77)
    pool.release(rooms[3])
    again = pool.acquire(PAGE_BYTES, timeout_s=0)
    assert again.word == rooms[3].word
    assert pool.arena.progress(again.word) == 0


@pytest.mark.parametrize("durable", [True, False])
def test_memory_goes_with_the_last_capture_that_is_under_way(durable: bool) -> None:
    pool = pool_of(4)
    room = pool.acquire(PAGE_BYTES, timeout_s=0)
    pool.close(later=True)
    assert pool.arena.view.nbytes == 4 * PAGE_BYTES
    if durable:
        pool.keep(room, lambda: None)
    else:
        pool.release(room)
    with pytest.raises(StateError, match="closed"):
        _ = pool.arena.view


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40))
def test_live_blocks_never_overlap(actions: list[tuple[int, int]]) -> None:
    pool = pool_of(12)
    live: list[Block] = []
    forgotten: list[Block] = []
    kept: list[Block] = []
    for action, size in actions:
        if action == 0:
            try:
                room = pool.acquire(size * PAGE_BYTES, timeout_s=0)
            except DeadlineError:
                continue
            still = live + [k for k in kept if k not in forgotten]
            for other in still:
                apart = (
                    room.offset + room.size_bytes <= other.offset
                    or other.offset + other.size_bytes <= room.offset
                )
                assert apart, "two live blocks overlap"
            live.append(room)
        elif live:
            room = live.pop(size % len(live))
            if action == 1:
                pool.release(room)
            else:
                kept.append(room)
                pool.keep(room, lambda room=room: forgotten.append(room))  # type: ignore[misc]
    for room in live:
        pool.release(room)
    pool.drop_kept()
    assert pool.used_bytes == 0, "something leaked"
