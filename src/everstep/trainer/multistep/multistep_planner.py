"""What the next base over several steps is planned as, and that before it is due.

A cut that is used for the first time has to be planned: what is copied for each part, where its
bytes lie in memory, and how the gradients of each step are laid out. That takes as long as several
steps of a base otherwise take the training thread, so it is done behind a step in which nothing
is captured, for what has been measured by then. A base looks at the state again when it begins:
what has changed since is planned anew.

Gradients of several steps may be more than all that was copied before. Where a device copies, their
memory is made ready behind that step, too (:mod:`everstep.capture.lanes.pinned`), which may take
longer
than until the next base is due. Bases are planned for what is ready, as long as that is not enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from everstep.capture.lanes.lane import Lane
from everstep.capture.multistep import Unit
from everstep.link.pool import CapturePool
from everstep.state.training_state import State
from everstep.trainer.base.prepared import Prepared
from everstep.trainer.log.consumed import Consumption
from everstep.trainer.multistep.multistep_choice import Choice
from everstep.trainer.multistep.multistep_fuzzy import redo_bytes
from everstep.trainer.multistep.multistep_plan import PartsPlan, units_of

__all__ = ["Planner"]


class Planner:
    """Of one training process.

    Args:
        lane: what it copies into is made ready ahead.
        choice: into which parts.
        consumption: whose layouts are made ahead, too.
        explicit: the number of parts was asked for, and does not wait for memory.

    Attributes:
        is_ahead: nothing has happened since everything was planned.
    """

    def __init__(
        self,
        state: State,
        lane: Lane,
        choice: Choice,
        consumption: Consumption,
        *,
        explicit: bool,
    ) -> None:
        self._state = state
        self._lane = lane
        self._choice = choice
        self._consumption = consumption
        self._explicit = explicit
        self._plan: PartsPlan | None = None
        self.is_ahead = False

    def start(self) -> None:
        """There is another keeper, which knows no layout: plans are of no use any more."""
        self._plan = None
        self.is_ahead = False

    def next(
        self,
        prepared: Prepared,
        tensors: Mapping[str, torch.Tensor],
        pool: CapturePool,
        *,
        waits: bool,
    ) -> PartsPlan:
        """That of the base that begins now.

        Args:
            prepared: what a base of the state is like.
            tensors: live ones, by entry name.
            pool: host memory for it, and for gradients.
            waits: updates wait for the copies of their gradients.
        """
        return self._planned(prepared, tensors, pool, waits=waits, ahead=False)

    def ahead(
        self,
        prepared: Prepared,
        tensors: Mapping[str, torch.Tensor],
        pool: CapturePool,
        *,
        waits: bool,
    ) -> None:
        """Plans the base that would begin now, and all of it; arguments as for :meth:`next`."""
        plan = self._planned(prepared, tensors, pool, waits=waits, ahead=True)
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

    def _planned(
        self,
        prepared: Prepared,
        tensors: Mapping[str, torch.Tensor],
        pool: CapturePool,
        *,
        waits: bool,
        ahead: bool,
    ) -> PartsPlan:
        """For all memory, if what that needs is ready or parts were asked for by number; or for
        what is ready, beside the base before."""
        self.is_ahead = False
        plan = self._plan
        if plan is not None and plan.prepared is not prepared:
            plan = None
        units = units_of(self._state, prepared.shape) if plan is None else plan.units
        now = None if plan is None else plan.cut

        def cut_for(memory_bytes: int) -> Sequence[Sequence[Unit]]:
            size_bytes = prepared.size_bytes
            about = {"waits": waits, "tell": not ahead}  # where memory does not suffice
            return self._choice.cut(units, size_bytes, memory_bytes, now=now, **about)

        plain_bytes = prepared.objects_bytes
        cut = cut_for(pool.arena.size_bytes - plain_bytes)
        if len(cut) > 1:
            base_bytes = pool.rounded_bytes(prepared.size_bytes)
            most_bytes = max(0, pool.arena.size_bytes - 2 * plain_bytes)
            wanted_bytes = min(2 * base_bytes + redo_bytes(cut), most_bytes)
            ready_bytes = self._lane.ready_bytes(tensors.values(), pool.whole)
            if ready_bytes < wanted_bytes:
                if ahead:
                    self._lane.warm(tensors.values(), pool.whole[:wanted_bytes], pool.warm)
                if not self._explicit:
                    cut = cut_for(max(0, ready_bytes - base_bytes))
        if plan is None or plan.cut is not cut:
            plan = self._plan = PartsPlan(prepared, cut, self._choice.chunk_bytes)
        plan.copy_in(self._choice.chunk_bytes)
        return plan
