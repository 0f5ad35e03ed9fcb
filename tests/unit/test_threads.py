"""Threads for I/O: what was submitted is done, whatever becomes of who has submitted it."""

from __future__ import annotations

import gc
import threading

from everstep.seams.threads import IoThreads

TIMEOUT_S = 10.0


def test_they_end_with_what_has_made_them() -> None:
    """Nobody closes what an interrupted start has made."""
    threads, gate = IoThreads(3, "everstep-test"), threading.Event()
    done = [threads.submit(gate.wait, TIMEOUT_S) for _ in range(4)]
    running = list(threads._threads)
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
        running = list(threads._threads)
        threads.close()
        assert len(running) == 2
        assert not any(thread.is_alive() for thread in running)
