"""Bases that several ranks capture over several steps: each its own part, all to the same step.

Where all of them end is agreed on when a base is due (:mod:`.multistep_together`). From then on
each rank goes by itself, and has its part of that very step whatever happens: what is void is taken
in one step, there.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from everstep.errors import DeadlineError, EverstepError
from everstep.format.header import ShardIdentity
from everstep.link.pool import CapturePool
from everstep.link.save import Save
from everstep.seams.processes.conditions import is_over
from everstep.state.survey.survey import Survey
from everstep.trainer.job.job import Job
from everstep.trainer.multistep.multistep import VOID_MAX, Multistep
from everstep.trainer.multistep.multistep_mark import AtMark
from everstep.trainer.multistep.multistep_plan import PartsPlan
from everstep.trainer.multistep.multistep_together import Here, Together
from everstep.trainer.multistep.multistep_window import Window

__all__ = ["RankMultistep"]

_log = logging.getLogger("everstep")


class RankMultistep(Multistep):
    """Takes one rank's part of them.

    Args:
        job: all ranks.
        about: as for :class:`.multistep.Multistep`.
    """

    def __init__(self, job: Job, *about: Any) -> None:
        super().__init__(*about)
        self._together = Together(job)
        self._asked: PartsPlan | None = None  # of the base that they have agreed on
        self._identity: ShardIdentity | None = None  # of the last mark

    def start(self, keeper: object, pool: CapturePool | None, timeline: int) -> None:
        """From now on bases go to ``keeper``, through the memory of ``pool``."""
        super().start(keeper, pool, timeline)
        self._asked = None

    # --- At step marks ------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """A base is due at the end of ``step``: finds out, together, where it ends. Every rank
        calls it at each such step, whatever fails there.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        if self._together.asks(step):
            with self._counted():
                parts = self._wanted()
            self._together.agree(step, parts)

    def take(self, identity: ShardIdentity, survey: Survey | None, *, sharp: bool) -> Save:
        """Takes this rank's part of a base: to the step that was agreed on, or (``sharp``, as all
        ranks do) of the step that has just ended.

        Raises:
            EverstepError: what failed, now or in the background, by the policy.
        """
        together = self._together
        if not sharp and together.step is not None and together.step > identity.step:
            if self._window is None:
                self._wait(identity)
            window = self._window
            return together.promised(identity.timeline) if window is None else window.save
        together.taken(identity.step)
        return super().take(identity, survey, sharp=True)

    def marked(self, identity: ShardIdentity) -> bool:
        """A step is over: goes on with what is under way.

        Returns:
            Whether, among all ranks, a base still is that was due before: no other can begin.
        """
        self._identity = identity
        if self._together.step is not None and self._together.step < identity.step:
            self._drop("the step at the end of which all ranks end it has passed")
        super().marked(identity)
        return self._together.is_under_way(identity.step)

    def finish(self) -> None:
        """No step will follow, for now: all ranks end at the last step mark what is under way, or
        none of them does. Every rank calls it, behind the same step, unless it leaves all.

        Raises:
            DeadlineError: another one does not.
        """
        if os.getpid() != self._pid:
            return
        try:
            if self._together.step is not None:
                self._finish_together()
        finally:
            self._drop("not all ranks can end it at the last step mark")
            super().finish()

    def _finish_together(self) -> None:
        together = self._together
        here = self._together.here
        try:
            if here is not None and (self._updates.under_way or not here.holds(self._state)):
                together.here = None
        except EverstepError as error:  # the others are waiting
            _log.warning("%s", error)
            together.here = None
        if together.all_here():
            assert here is not None
            self._end_here(here.identity)

    def leave(self) -> None:
        """Training ends, and not in order: what is under way is none of this rank's any more."""
        if os.getpid() == self._pid:
            self._drop("training has ended before it was whole")

    def make_good(self) -> bool:
        """What one rank has lost others have not, or all have: none takes it again by itself."""
        return False

    def drop(self, why: str) -> None:
        """All ranks go back to an earlier step: what is under way is of no use any more."""
        self._together.restarted()
        super().drop(why)

    def _drop(self, why: str) -> None:
        self._together.over()
        super().drop(why)

    # --- On the way ---------------------------------------------------------------------

    def _wanted(self) -> int:
        """Into how many parts this rank would cut the base that is due."""
        self._asked = None
        pool = self._pool
        void = self._void >= VOID_MAX
        if self._identity is None or pool is None or void or not self._opened.holds:
            self._void = 0
            return 1
        try:
            survey = self._state.survey()
            waits = self._updates.waits
            prepared = self._saver.prepare(survey, self._identity)
            self._asked = self._planner.next(prepared, survey.tensors, pool, waits=waits)
        except Exception as error:  # of which the base will say more: others are waiting
            _log.debug("the base that is due was not planned: %s", error)
            return 1
        return max(1, len(self._asked.parts))

    def _mark(self, identity: ShardIdentity, *, closing: bool) -> None:
        together = self._together
        if together.step == identity.step:
            self._end_here(identity)
        elif together.step is not None and self._window is None:
            self._wait(identity)
        else:
            super()._mark(identity, closing=closing)

    def _wait(self, identity: ShardIdentity) -> None:
        """All go on to the end of a base: this rank begins now, or later, or has lost what it had,
        and takes its part in one step."""
        with self._counted():
            survey = self._state.survey()
            prepared = self._saver.prepare(survey, identity)
            self._together.here = Here(identity, AtMark.of(survey, prepared.marked))
        plan = self._asked
        planned = plan is not None and plan.prepared is prepared and not self._keeper_is_lost
        if planned and identity.step == self._together.begins:
            self._begin(identity, survey, plan, self._together.begun(identity.timeline))

    def _take_part(self, window: Window, survey: Survey) -> None:
        super()._take_part(window, survey)
        assert window.at_mark is not None
        self._together.here = Here(window.identity, window.at_mark)

    def _end_here(self, identity: ShardIdentity) -> None:
        """All ranks end at this mark; what this one has not, or not as it was, it takes now."""
        window = self._window
        taken = None
        if window is not None:
            with self._counted():
                self._end_at(window, identity)
        try:
            if window is None or self._ended is not window:
                taken = self._last = self._saver.take(identity, show=False)
        finally:
            self._together.taken(identity.step, taken)

    def _end_at(self, window: Window, identity: ShardIdentity) -> None:
        """Behind a look at everything that was captured until now: that it is what its steps had is
        known before other ranks rely on it."""
        self._updates.held.gate()
        if not is_over(self._lane.run(lambda: None), self._options.progress_timeout_s):
            late = DeadlineError("copying the state hangs", step=identity.step)
            window.failed = window.failed or late
        super()._end_at(window, identity)

    def _take_again(self, why: str) -> None:
        """All ranks go on to the step that they have agreed on."""

    def _moved(self) -> None:
        super()._moved()
        self._together.here = None

    @property
    def _keeper_is_lost(self) -> bool:
        return self._keeper is None or self._keeper.lost is not None
