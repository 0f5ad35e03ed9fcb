"""Conditions and futures of which an interrupt leaves no lock taken.

``with threading.Condition():`` runs Python code between taking the lock and entering the block,
and again between leaving it and letting go. A Ctrl-C in the training thread that arrives there
leaves the lock taken for ever, and a thread that needs it next hangs. Here ``with`` finds the
lock's own methods, which are C code: signals are looked for behind them, where the block has
begun, or is over.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["Condition", "Outcome"]

_T = TypeVar("_T")


class Condition(threading.Condition):
    """A condition for which the training thread may wait."""

    if not TYPE_CHECKING:
        __enter__ = property(lambda self: self._lock.__enter__)
        __exit__ = property(lambda self: self._lock.__exit__)


class Outcome(Future[_T]):
    """A future that the training thread may ask."""

    def __init__(self) -> None:
        super().__init__()
        self._condition: Any = Condition()
