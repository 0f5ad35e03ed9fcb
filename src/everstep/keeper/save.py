"""What the user holds of a base under way."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["Save"]


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
