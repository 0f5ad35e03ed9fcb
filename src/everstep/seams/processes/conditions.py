"""Conditions and futures of which an interrupt leaves no lock taken.

``with threading.Condition():`` runs Python code between taking the lock and entering the block,
and again between leaving it and letting go. A Ctrl-C in the training thread that arrives there
leaves the lock taken for ever, and a thread that needs it next hangs. Here ``with`` finds the
lock's own methods, which are C code: signals are looked for behind them, where the block has
begun, or is over.

Whoever waits here for a stated time waits as long as this process runs (:mod:`.running`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.seams.clock import WaitBudget

__all__ = ["Condition", "Outcome", "wait_all", "wait_done"]

_T = TypeVar("_T")


class Condition(threading.Condition):
    """A condition for which the training thread may wait."""

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
    """A future that the training thread may ask."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()


def wait_done(future: Future[Any], timeout_s: float) -> bool:
    """Waits until it has ended, well or badly; False: it has not within ``timeout_s``."""
    return wait_all([future], timeout_s)


def wait_all(futures: Iterable[Future[Any]], timeout_s: float) -> bool:
    """The same of all of them together."""
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
