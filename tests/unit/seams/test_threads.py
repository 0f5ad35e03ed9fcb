"""Threads for I/O: what was submitted is done, whatever becomes of who has submitted it."""

from __future__ import annotations

import gc
import queue
import threading
from functools import partial
from typing import Any

import pytest

from everstep.seams.processes.threads import IoThreads
from tests.support.interrupts import interrupted_at

TIMEOUT_S = 10.0


def test_they_end_with_what_has_made_them() -> None:
    """Nobody closes what an interrupted start has made."""
    threads, gate = IoThreads(3, "everstep-test"), threading.Event()
    done = [threads.submit(gate.wait, TIMEOUT_S) for _ in range(4)]
    running = list(threads.running)
    del threads
    gc.collect()
    gate.set()
    assert all(one.result(TIMEOUT_S) for one in done)
    for thread in running:
        thread.join(TIMEOUT_S)
    assert len(running) == 3
    assert not any(thread.is_alive() for thread in running)


def test_they_start_again_behind_a_close() -> None:
    threads = IoThreads(2, "everstep-test")
    for number in range(3):
        assert threads.submit(int, number).result(TIMEOUT_S) == number
        running = list(threads.running)
        threads.close()
        assert len(running) == 2
        assert not any(thread.is_alive() for thread in running)


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_start_is_made_up_for(count: int) -> None:
    """By as many threads as there are to be: two where there is to be one would do in any order
    what is submitted in one."""
    for place in range(1000):
        threads, gate, order = IoThreads(count, "everstep-test"), threading.Event(), list[int]()
        busy: queue.SimpleQueue[int] = queue.SimpleQueue()

        def hold(busy: Any = busy, gate: threading.Event = gate) -> None:
            busy.put(threading.get_ident())
            gate.wait(TIMEOUT_S)

        interrupted = interrupted_at(place, partial(threads.submit, order.append, -1))
        held = [threads.submit(hold) for _ in range(count)]
        at_work = {busy.get(timeout=TIMEOUT_S) for _ in held}
        rest = [threads.submit(order.append, number) for number in range(3)]
        for thread in threads.running:
            if thread.is_alive() and thread.ident not in at_work:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive(), "too many threads"
        assert not any(one.done() for one in rest)
        gate.set()
        for one in [*held, *rest]:
            one.result(TIMEOUT_S)
        assert order in ([0, 1, 2], [-1, 0, 1, 2]) or count > 1
        assert {0, 1, 2} <= set(order)
        threads.close()
        if not interrupted:
            assert place > 10, "nothing was interrupted"
            return
    raise AssertionError("it does not end")
