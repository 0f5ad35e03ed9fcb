"""Daemon threads for I/O that go on working while the interpreter exits.

``ThreadPoolExecutor`` refuses work as soon as the main thread ends, which is exactly when
the last base of a script that forgot ``close()`` is still being written.
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

__all__ = ["IoThreads"]

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class IoThreads:
    """A fixed number of threads, started when they are first needed. They end with this object,
    too: nobody closes what an interrupted start has made. One that was interrupted is made up for
    by the next: there are as many seats as threads, and whoever finds none ends at once.

    Args:
        count: number of threads.
        name: for people who look at a process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._lock = threading.Lock()
        self._ended = [0]
        self._begin()

    @property
    def ended(self) -> int:
        """Changes with each job that is over."""
        return self._ended[0]

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._seats = deque(range(self._count))
        self._threads: list[threading.Thread] = []
        self._let_go: weakref.finalize[..., Any] | None = None
        self._started = False

    def submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Runs ``function(*args)`` in one of the threads."""
        if not self._started:
            self._start()
        future = Outcome[_T]()
        self._jobs.put((future, function, args))
        return future

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            if self._let_go is None:
                self._let_go = weakref.finalize(self, _end, self._jobs, self._count)
                self._let_go.atexit = False  # what they have to do then, they do
            for number in list(self._seats):
                thread = threading.Thread(
                    target=_work,
                    args=(self._jobs, self._seats, self._ended),
                    name=f"{self._name}-{number}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()
            self._started = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after the work that was submitted; a hung one is left behind."""
        with self._lock:
            threads = self._threads
            jobs = self._jobs
            let_go = self._let_go
            self._begin()
        if let_go is not None:
            let_go.detach()
            _end(jobs, self._count)
        for thread in threads:
            if thread.is_alive():
                thread.join(timeout_s)


def _end(jobs: queue.SimpleQueue[_Job | None], count: int) -> None:
    """Ends so many threads, behind what they have to do."""
    for _ in range(count):
        jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None], seats: deque[int], ended: list[int]) -> None:
    try:
        seats.popleft()
    except IndexError:
        return
    while (job := jobs.get()) is not None:
        future, function, args = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*args))
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)
        ended[0] += 1  # of two at once perhaps one: it has changed all the same
        del job, future, function, args  # or this thread would keep the last buffer alive
