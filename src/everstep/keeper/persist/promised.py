"""What ``history=`` promises of a batch of the log that is not on disk yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from everstep.config.options import History
from everstep.keeper.log.log import LogStore

__all__ = ["PromisedSteps"]


class PromisedSteps:
    """Of one timeline.

    Args:
        history: steps that can be gone back to (:meth:`everstep.config.options.History.parse`).
        keep: bases that retention keeps in any case.
    """

    def __init__(self, history: str, keep: int) -> None:
        self._kept = deque[int](maxlen=keep) if History.parse(history).is_more else None

    def before_base(
        self, step: int, log: LogStore | None, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        """A base is going to be durable. Retention looks at what of the log is on disk, and would
        delete the base that steps of an unfinished batch lead on from: these are written before.

        Args:
            alive: called as long as they are being written.

        Raises:
            DeadlineError: nothing of them was written for ``timeout_s``.
        """
        if self._kept is None or log is None:
            return
        self._kept.append(step)
        if len(self._kept) == self._kept.maxlen and (log.after or 0) + 1 < self._kept[0]:
            log.flush()
            log.settle(timeout_s, alive)
