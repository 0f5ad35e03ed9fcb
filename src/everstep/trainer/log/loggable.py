"""Finds out whether the updates of a training loop could be logged, for ``method="auto"``.

A log refuses some updates only when they happen: sparse gradients, gradients that share memory. A
start without a log therefore lets the first updates of each optimizer pass through the checks of
the log, and emits the result. Only a loop that has passed them is logged by a later start.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.errors import EverstepError
from everstep.state.training_state import State
from everstep.trainer.log.update_inputs import InputReader
from everstep.trainer.participant import Mark, Participant

_UPDATES = 3  # of each optimizer
_STEPS = 5


class LoggableUpdates(Participant):
    """Check the first updates.

    Args:
        report: called once, with the reason why an update cannot be logged; empty if all can.
    """

    follows_updates = True

    def __init__(self, state: State, report: Callable[[str], None]) -> None:
        self._state = state
        self._report = report
        self._checked: dict[str, int] = {}
        self._steps = 0
        self._is_over = False

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """Check the gradients of an update."""
        count = self._checked.get(key, 0)
        if self._is_over or count == _UPDATES:
            return
        self._checked[key] = count + 1
        try:
            InputReader(self._state).look(key)
        except EverstepError as error:
            self._end(error.message.splitlines()[0])

    def mark(self, mark: Mark) -> bool:
        """End the check once enough steps were seen."""
        self._steps += 1
        if self._steps == _STEPS and not self._is_over:
            self._end("" if self._checked else "no update of an optimizer was seen")
        return False

    def _end(self, why_not: str) -> None:
        self._is_over = True
        self._report(why_not)
