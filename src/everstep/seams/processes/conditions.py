"""Conditions and futures that never stay locked after an interrupt.

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
import threading
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
