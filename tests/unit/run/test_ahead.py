"""Items made ahead in a thread: in order, bounded, errors where they belong, nothing left over."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import FormatError
from everstep.run.log_reads import Prefetch
from tests.support.world import TIMEOUT_S


def threads() -> int:
    return sum(thread.name == "everstep-ahead" for thread in threading.enumerate())


class Source:
    """Says how many items it has made, and whether it was closed."""

    def __init__(self, count: int, *, fails_at: int | None = None) -> None:
        self.count, self.fails_at = count, fails_at
        self.made = 0
        self.closed = False
        self.moved = threading.Condition()

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(self.count):
                if number == self.fails_at:
                    raise FormatError(f"item {number}")
                with self.moved:
                    self.made += 1
                    self.moved.notify_all()
                yield number
        finally:
            self.closed = True

    def wait_until(self, made: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: self.made >= made, TIMEOUT_S)


@settings(max_examples=60)
@given(
    total=st.integers(0, 12),
    count=st.integers(1, 6),
    size=st.integers(0, 3),
    limit=st.integers(0, 8),
    fails_at=st.none() | st.integers(0, 12),
    stop_at=st.none() | st.integers(0, 12),
)
def test_the_same_items_in_the_same_order(
    total: int, count: int, size: int, limit: int, fails_at: int | None, stop_at: int | None
) -> None:
    source = Source(total, fails_at=fails_at)
    found: list[int] = []
    failed = ""
    with Prefetch(
        source.items(), count=count, size_bytes=lambda _: size, limit_bytes=limit
    ) as items:
        try:
            for item in items:
                if item == stop_at:
                    break
                found.append(item)
        except FormatError as error:
            failed = error.message
    ends = [total, *(end for end in (fails_at, stop_at) if end is not None)]
    assert found == list(range(min(ends)))
    reached = fails_at is not None and fails_at < total
    reached = reached and (stop_at is None or stop_at >= (fails_at or 0))
    assert failed == (f"item {fails_at}" if reached else "")
    assert source.closed
    assert threads() == 0


@pytest.mark.parametrize(("count", "limit", "most"), [(3, 100, 4), (10, 20, 2), (10, 5, 1)])
def test_no_more_wait_than_there_is_room_for(count: int, limit: int, most: int) -> None:
    """Items of 10 bytes: one is in use, so many wait, and one more has been made."""
    source = Source(30)
    with Prefetch(source.items(), count=count, size_bytes=lambda _: 10, limit_bytes=limit) as items:
        for taken, _ in enumerate(items, 1):
            if taken + most <= 30:
                source.wait_until(taken + most - 1)
            assert source.made <= taken + most
    assert source.made == 30


def test_work_goes_on_while_the_caller_is_busy() -> None:
    """The second item is made before the caller has asked for it."""
    source = Source(2)
    with Prefetch(source.items(), count=1) as items:
        assert next(items) == 0
        source.wait_until(2)
        assert next(items) == 1


def test_an_interrupt_in_the_thread_reaches_the_caller() -> None:
    def items() -> Generator[int, None, None]:
        yield 1
        raise KeyboardInterrupt

    with Prefetch(items(), count=2) as ahead:
        assert next(ahead) == 1
        with pytest.raises(KeyboardInterrupt):
            next(ahead)


def test_an_error_of_the_caller_leaves_no_thread() -> None:
    source = Source(1000)
    with suppress(RuntimeError), Prefetch(source.items(), count=1):
        raise RuntimeError
    assert source.closed
    assert source.made < 1000
    assert threads() == 0


def test_ready_says_whether_anybody_would_wait() -> None:
    go_on = threading.Event()

    def items() -> Generator[int, None, None]:
        yield 1
        assert go_on.wait(30)
        yield 2

    with Prefetch(items(), count=2, limit_bytes=10) as found:
        assert next(found) == 1
        assert not found.ready  # the second one is being made
        go_on.set()
        assert next(found) == 2
        assert list(found) == []
        assert found.ready
