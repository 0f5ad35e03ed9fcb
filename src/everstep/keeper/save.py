"""What the user holds of a base under way."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = ["Save", "done", "failed"]

_T = TypeVar("_T")


@dataclass(slots=True)
class Save:
    """A base that was asked for.

    Attributes:
        step: the user's step that it holds.
        timeline: the timeline that it is written to.
        staged: done when the state has been captured: from then on training may change it.
        durable: done when the base is committed: it survives the machine. Its result is the
            base's size in bytes; it carries the exception if the base failed.
    """

    step: int
    timeline: int
    staged: Future[None] = field(default_factory=Future)
    durable: Future[int] = field(default_factory=Future)


def done(future: Future[_T], result: _T) -> None:
    """Sets a result, unless another thread was faster, or whoever asked has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def failed(future: Future[_T], error: BaseException) -> None:
    """Sets an exception, as :func:`done` sets a result."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
