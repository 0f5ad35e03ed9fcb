"""A simulated cluster that goes through one story, in place of a schedule of faults."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.crash.sim.cluster import SimCluster, SimViolationError, _records_once

__all__ = ["Story"]


class Story(SimCluster, ABC):
    """What happens, and what has to be true then, a subclass says."""

    def run_through(self) -> None:
        """All of it.

        Raises:
            SimViolationError: a promise was broken.
        """
        try:
            with _records_once():
                self._run_through()
        except AssertionError as error:
            raise SimViolationError(self.plan, str(error), self.trace) from error

    @abstractmethod
    def _run_through(self) -> None:
        """Raises AssertionError where a promise was broken."""
