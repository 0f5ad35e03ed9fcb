"""What the next base over several steps is planned as, and that before it is due.

A cut that is used for the first time has to be planned: what is copied for each part, where its
bytes lie in memory, and how the gradients of each step are laid out. That takes as long as several
steps of a base otherwise take the training thread, so it is done behind a step in which nothing
is captured, for what has been measured by then. A base looks at the state again when it begins:
what has changed since is planned anew.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from everstep.keeper.consumed import Consumption
from everstep.keeper.multistep_choice import Choice
from everstep.keeper.multistep_plan import PartsPlan, units_of
from everstep.keeper.prepared import Prepared
from everstep.state.image import State

__all__ = ["Planner"]


class Planner:
    """Of one training process.

    Args:
        choice: into which parts.
        consumption: whose layouts are made ahead, too.

    Attributes:
        is_ahead: nothing has happened since everything was planned.
    """

    def __init__(self, state: State, choice: Choice, consumption: Consumption) -> None:
        self._state = state
        self._choice = choice
        self._consumption = consumption
        self._plan: PartsPlan | None = None
        self.is_ahead = False

    def start(self) -> None:
        """There is another keeper, which knows no layout: plans are of no use any more."""
        self._plan, self.is_ahead = None, False

    def next(
        self, prepared: Prepared, arena_bytes: int, *, waits: bool, tell: bool = True
    ) -> PartsPlan:
        """That of the base that begins now.

        Args:
            prepared: what a base of the state is like.
            arena_bytes: host memory for it, and for gradients.
            waits: updates wait for the copies of their gradients.
            tell: warn where memory does not suffice.
        """
        self.is_ahead = False
        plan = self._plan
        if plan is not None and plan.prepared is not prepared:
            plan = None
        units = units_of(self._state, prepared.shape) if plan is None else plan.units
        cut = self._choice.cut(
            units,
            prepared.size_bytes,
            arena_bytes,
            waits=waits,
            now=None if plan is None else plan.cut,
            tell=tell,
        )
        if plan is None or plan.cut is not cut:
            plan = self._plan = PartsPlan(prepared, cut, self._choice.chunk_bytes)
        plan.copy_in(self._choice.chunk_bytes)
        return plan

    def ahead(
        self,
        prepared: Prepared,
        tensors: Mapping[str, torch.Tensor],
        arena_bytes: int,
        *,
        waits: bool,
    ) -> None:
        """Plans the base that would begin now, and all of it; other arguments as for :meth:`next`.

        Args:
            tensors: live ones, by entry name.
        """
        plan = self.next(prepared, arena_bytes, waits=waits, tell=False)
        self.is_ahead = True
        prepared.marked_batches(tensors)
        if len(plan.parts) <= 1:
            prepared.copies(tensors)
            return
        plan.plan_all(tensors)
        captured: dict[str, frozenset[str]] = {}
        for part in plan.parts[:-1]:
            for key, names in part.parameters.items():
                captured[key] = captured.get(key, frozenset()) | names
                self._consumption.expect(key, captured[key])
