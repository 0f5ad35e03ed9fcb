"""Daemon threads for I/O that keep working while the interpreter exits.

``ThreadPoolExecutor`` refuses work as soon as the main thread ends. At that moment the last base of
a script without ``close()`` is still being written.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from everstep.seams.processes.conditions import Outcome

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class IoThreads:
    """Fixed number of threads, started on first use.

    The threads also end when this object is garbage-collected, because nobody closes the objects of
    an interrupted start. If an interrupt hits the start of the threads, the next call starts the
    missing ones: each thread takes one of ``count`` slots, and a surplus thread finds none and
    ends.

    Args:
        count: number of threads.
        name: prefix of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        # A list that the threads share. With a reference to this object they would keep it from
        # being garbage-collected.
        self._ended = [0]
        self._begin()

    @property
    def ended(self) -> int:
        """Counter that changes with each finished job."""
        return self._ended[0]

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slots = deque(range(self._count))
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._started = False

    def submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Run ``function(*args)`` in one of the threads."""
        if not self._started:
            self._start()
        future = Outcome[_T]()
        self._jobs.put((future, function, args))
        return future

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            if self._finalizer is None:
                self._finalizer = weakref.finalize(self, _end, self._jobs, self._count)
                # At exit the threads must finish their work, not end.
                self._finalizer.atexit = False
            for number in list(self._slots):
                thread = threading.Thread(
                    target=_work,
                    args=(self._jobs, self._slots, self._ended),
                    name=f"{self._name}-{number}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()
            self._started = True

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads after all submitted work; abandon a hung one after ``timeout_s``."""
        with self._lock:
            threads = self._threads
            jobs = self._jobs
            finalizer = self._finalizer
            self._begin()
        if finalizer is not None:
            finalizer.detach()
            _end(jobs, self._count)
        for thread in threads:
            if thread.is_alive():
                thread.join(timeout_s)


def _end(jobs: queue.SimpleQueue[_Job | None], count: int) -> None:
    """End ``count`` threads after the work already queued."""
    for _ in range(count):
        jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None], slots: deque[int], ended: list[int]) -> None:
    try:
        slots.popleft()
    except IndexError:
        return
    while (job := jobs.get()) is not None:
        future, function, args = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised again where the future is read
            future.set_exception(error)
        # Concurrent increments may be lost: it only has to change.
        ended[0] += 1
        # Otherwise this thread would keep the last buffer alive while it waits.
        del job, future, function, args
