"""Daemon threads for I/O that keep working while the interpreter exits.

``ThreadPoolExecutor`` refuses work as soon as the main thread ends. At that moment the last base of
a script without ``close()`` is still being written.

Conditions and futures that never stay locked after an interrupt.

``with threading.Condition():`` runs Python code between taking the lock and entering the block, and
again between leaving the block and releasing the lock. A Ctrl-C in the training thread at that
point leaves the lock taken forever, and the next thread that needs it hangs. Here ``with`` finds
the lock's own methods, which are C code: signals are handled after them, when the block has begun
or is over.

Waits with a timeout count only the time during which this process runs
(:mod:`everstep.seams.clock`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.seams.clock import WaitBudget

_T = TypeVar("_T")


class Condition(threading.Condition):
    """Condition that the training thread may wait for."""

    # ``with`` looks these up on the class and binds them. Binding a property evaluates it, so the
    # method that is called is that of the lock, without Python code around it.
    if not TYPE_CHECKING:
        __enter__ = property(lambda self: self._lock.__enter__)
        __exit__ = property(lambda self: self._lock.__exit__)

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        if timeout is None:
            return super().wait_for(predicate)
        allowance = WaitBudget(timeout)
        while not (found := predicate()) and allowance.left_s:
            allowance.spend(self.wait)
        return found


class Outcome(Future[_T]):
    """Future that the training thread may wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()


def wait_done(future: Future[Any], timeout_s: float) -> bool:
    """Wait until the future is done, with a result or an exception; return False after
    ``timeout_s``.
    """
    return wait_all([future], timeout_s)


def wait_all(futures: Iterable[Future[Any]], timeout_s: float) -> bool:
    """Wait until all futures are done; return False after ``timeout_s`` in total."""
    allowance = WaitBudget(timeout_s)
    for future in futures:

        def wait(slice_s: float, future: Future[Any] = future) -> None:
            with contextlib.suppress(FutureTimeout, CancelledError):
                future.exception(slice_s)

        while not future.done():
            if not allowance.left_s:
                return False
            allowance.spend(wait)
    return True


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

    Attributes:
        running: threads started since construction or the last :meth:`close`.
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
        self.running: list[threading.Thread] = []
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
                self.running.append(thread)
                thread.start()
            self._started = True

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads after all submitted work; abandon a hung one after ``timeout_s``."""
        with self._lock:
            threads = self.running
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
