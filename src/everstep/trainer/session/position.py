"""Position of training: its step, its timeline, and the updates that its state has seen."""

from __future__ import annotations

from everstep.capture.update_hooks import UpdateHooks
from everstep.format.header import ShardIdentity
from everstep.state.training_state import State

__all__ = ["Position"]


class Position:
    """Position of this rank's training.

    Attributes:
        step: step that the last call of ``step()`` has ended.
        timeline: number of the timeline; 0 before the first.
    """

    def __init__(self, run_id: str, state: State, updates: UpdateHooks) -> None:
        self.step = 0
        self.timeline = 0
        self._run_id = run_id
        self._state = state
        self._updates = updates

    def identity(self, exact: bool = True) -> ShardIdentity:
        """Return the identity of a base of the current step."""
        state = self._state
        return ShardIdentity(
            self._run_id,
            self.timeline,
            self.step,
            self._updates.lsn,
            state.ranks.rank,
            state.ranks.world,
            exact and state.exact,
            inexact=state.why_inexact,
        )
