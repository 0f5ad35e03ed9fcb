"""An interrupt leaves no lock taken, wherever CPython looks for signals: where a function begins,
and behind each call. (Loops look, too, where they begin anew.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from everstep.format.writer import ChunkRing
from everstep.seams.processes.threads import Condition, Outcome
from tests.support.interrupts import interrupted_at

_MOST = 500  # places in any of these; more would be a loop


def is_free(condition: threading.Condition) -> bool:
    """Whether another thread can take the lock."""
    got: list[bool] = []

    def take() -> None:
        taken = condition.acquire(blocking=False)
        got.append(taken)
        if taken:
            condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got == [True]


def stuck_at(make: Callable[[], tuple[threading.Condition, Callable[[], Any]]]) -> list[int]:
    """Where an interrupt leaves the lock taken."""
    stuck: list[int] = []
    for count in range(_MOST):
        condition, call = make()
        if not interrupted_at(count, call):
            assert count > 5, "nothing was traced"
            return stuck
        if not is_free(condition):
            stuck.append(count)
    raise AssertionError("it does not end")


def block(kind: type[threading.Condition]) -> tuple[threading.Condition, Callable[[], Any]]:
    condition = kind()

    def call() -> None:
        with condition:
            condition.notify_all()

    return condition, call


def waiting(kind: type[threading.Condition]) -> tuple[threading.Condition, Callable[[], Any]]:
    condition = kind()

    def call() -> None:
        with condition:
            condition.wait_for(lambda: False, 0.0)

    return condition, call


def asked(kind: type[Future[int]]) -> tuple[threading.Condition, Callable[[], Any]]:
    future = kind()
    future.set_result(1)
    condition: threading.Condition = future._condition  # type: ignore[attr-defined]

    def call() -> None:
        assert future.done()
        assert future.result() == 1
        assert future.exception() is None
        future.add_done_callback(lambda _: None)

    return condition, call


def ring(_: object) -> tuple[threading.Condition, Callable[[], Any]]:
    chunks = ChunkRing(1, 1)
    chunks.give(chunks.take(1.0))

    def call() -> None:
        block = chunks.try_take()
        assert block is not None
        chunks.give(block)
        chunks.give(chunks.take(1.0))

    return chunks._changed, call


@pytest.mark.parametrize(
    ("make", "kind"),
    [(block, Condition), (waiting, Condition), (asked, Outcome), (ring, None)],
    ids=["block", "wait", "future", "chunks"],
)
def test_no_lock_stays_taken(make: Callable[[Any], Any], kind: Any) -> None:
    assert stuck_at(lambda: make(kind)) == []


@pytest.mark.parametrize(
    ("make", "kind"), [(block, threading.Condition), (asked, Future)], ids=["block", "future"]
)
def test_pythons_own_would(make: Callable[[Any], Any], kind: Any) -> None:
    """Or this test would find nothing, and theirs could be used."""
    assert stuck_at(lambda: make(kind))


def test_they_do_what_pythons_do() -> None:
    condition, order = Condition(), list[str]()
    with condition:
        with condition:  # as often as one likes
            order.append("in")
        assert not is_free(condition)
    assert is_free(condition)
    with pytest.raises(ZeroDivisionError), condition:
        raise ZeroDivisionError
    assert is_free(condition)
    outcome = Outcome[int]()

    def wait() -> None:
        with condition:
            order.append("waits")
            condition.notify_all()
            assert condition.wait_for(lambda: order[-1] == "go", 60.0)
        outcome.set_result(len(order))

    thread = threading.Thread(target=wait)
    thread.start()
    with condition:
        assert condition.wait_for(lambda: order[-1] == "waits", 60.0)
        order.append("go")
        condition.notify_all()
    assert outcome.result(60.0) == 3
    thread.join()
