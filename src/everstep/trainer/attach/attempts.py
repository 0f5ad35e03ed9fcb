"""Attempts to put another keeper in the place of one that is gone, and what they come to."""

from __future__ import annotations

from everstep.errors import EverstepError
from everstep.seams import Clock

__all__ = ["Attempts"]

_AGAIN_S = 30.0  # to start a keeper may take long, and training waits for it
_SHARE = 4  # one that hangs takes no more than a fifth of training's time


class Attempts:
    """When the next one is due.

    Attributes:
        why_not: why the last one came to nothing; None: it did not, or there was none.
        failed: how many came to nothing.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_s = self._again_s = 0.0
        self.why_not: EverstepError | None = None
        self.failed = 0

    @property
    def is_due(self) -> bool:
        """Whether nothing was tried in vain a short while ago."""
        return self.why_not is None or self._clock.monotonic_s() >= self._again_s

    def begin(self) -> None:
        """One begins."""
        self.why_not, self._begun_s = None, self._clock.monotonic_s()

    def fail(self, why: EverstepError) -> None:
        """It came to nothing."""
        now_s = self._clock.monotonic_s()
        self.why_not = why
        self.failed = self.failed + 1
        self._again_s = now_s + max(_AGAIN_S, _SHARE * (now_s - self._begun_s))
