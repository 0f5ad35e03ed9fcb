"""Daemon threads for I/O that go on working while the interpreter exits.

``ThreadPoolExecutor`` refuses work as soon as the main thread ends, which is exactly when
the last base of a script that forgot ``close()`` is still being written.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["IoThreads"]

_T = TypeVar("_T")
_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class IoThreads:
    """A fixed number of threads, started when they are first needed.

    Args:
        count: number of threads.
        name: for people who look at a process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        """Runs ``function(*args)`` in one of the threads."""
        if not self._threads:
            self._start()
        future: Future[_T] = Future()
        self._jobs.put((future, function, args))
        return future

    def _start(self) -> None:
        with self._lock:
            for number in range(len(self._threads), self._count):
                thread = threading.Thread(
                    target=_work, args=(self._jobs,), name=f"{self._name}-{number}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after the work that was submitted; a hung one is left behind."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(timeout_s)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, function, args = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(*args))
        except BaseException as error:  # handed to whoever waits for the future
            future.set_exception(error)
        del job, future, function, args  # or this thread would keep the last buffer alive
