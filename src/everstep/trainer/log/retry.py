"""A base that the log needs, and that has failed, is taken again before it is its turn."""

from __future__ import annotations

import threading

__all__ = ["Retry"]

_RETRY_STEPS_MAX = 64


class Retry:
    """When a base is taken again: at the next step, then after 2, 4, 8, and so on to 64 more, until
    one is durable. Each that fails is reported, by whoever has tried to write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times = 0
        self._why: str | None = None
        self._from_step = 0

    def ended(self, step: int, why: str | None, *, fine: bool) -> None:
        """A base has ended; in any thread.

        Args:
            why: it was needed; None: it was only its turn.
        """
        with self._lock:
            if fine:
                self._times = 0
                self._why = None
            elif why is not None:
                self._why = why
                self._from_step = step + min(1 << self._times, _RETRY_STEPS_MAX)
                self._times += 1

    def due(self, step: int) -> str | None:
        """Why a base is due, if one is."""
        with self._lock:
            why = self._why if step >= self._from_step else None
            self._why = None if why else self._why
        return why
