"""Drive multi-step bases of several ranks: each rank's own part of each step, all ending at one
step (``docs/design/multistep.md``).

A base is complete only if every rank has its shard of the very same step. Each rank cuts its state
into as many parts as its own measurements suggest. So when a base is due, each proposes a number of
parts, and the largest one decides at which mark all of them end. Nothing else is agreed on: a rank
with fewer parts begins later, and one whose window becomes void captures its shard in one step, at
that mark. So no rank waits for a base that another one cannot finish, and no messages are exchanged
in between."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import PurePath

from everstep.capture.lanes.lane import Lane
from everstep.config.options import Options
from everstep.errors import DeadlineError, EverstepError, StateError
from everstep.format.header import ShardIdentity
from everstep.link.channel import BackgroundChannel
from everstep.link.save import Save, copy_outcome, fail
from everstep.seams import Clock
from everstep.seams.processes.conditions import wait_done
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Service
from everstep.trainer.base.mark_state import MarkSnapshot
from everstep.trainer.base.saver import Saver
from everstep.trainer.job.job import Job
from everstep.trainer.multistep.driver import VOID_MAX, MultistepDriver
from everstep.trainer.multistep.plan import WindowPlan
from everstep.trainer.multistep.window import Window

__all__ = [
    "EndAgreement",
    "RankMark",
    "RankMultistepDriver",
]


@dataclass(frozen=True, slots=True)
class RankMark:
    """Last step mark, and the state at it."""

    identity: ShardIdentity
    snapshot: MarkSnapshot

    def holds(self, state: State) -> bool:
        """Return True if the state is unchanged since the mark."""
        return self.snapshot.holds(state.survey())


class EndAgreement:
    """Step at which the ranks of a job end the base in progress.

    Args:
        job: all ranks.

    Attributes:
        step: step at whose mark all ranks end; None if no base is in progress.
        begins: step at whose mark this rank begins.
        last_mark: last step mark, until something is updated; None if no base is in progress.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._due_step = self._last = 0
        self._save: Save | None = None
        self.step: int | None = None
        self.begins = 0
        self.last_mark: RankMark | None = None

    def begins_at(self, step: int) -> bool:
        """Return True if a base due at the end of ``step`` begins there, on all ranks.

        It does not if one is in progress, or ends there, or if the ranks agreed at this step
        before.
        """
        free = self.step is None or self.step < step
        return free and step not in (self._due_step, self._last)

    def agree(self, step: int, parts: int) -> None:
        """Agree with all ranks on the step at which a base that is due ends.

        Args:
            step: step that has just ended.
            parts: number of parts this rank proposes; 1 to capture its shard in one step.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        self.over()
        self._due_step = step
        replies = self._job.exchange(f"end step {step}", {"parts": parts})
        self.step = step + max(one["parts"] for one in replies) - 1
        self.begins = self.step - parts + 1

    def is_in_progress(self, step: int) -> bool:
        """Return True if, at the end of ``step``, a base is in progress that was due before."""
        return self.step is not None and self._due_step < step

    def pending_save(self, timeline: int) -> Save:
        """Return the save of the base in progress, before this rank has begun."""
        assert self.step is not None
        self._save = self._save or Save(self.step, timeline)
        return self._save

    def begin_save(self, timeline: int) -> Save:
        """Return the save of the base in progress, which this rank begins now."""
        save = self.pending_save(timeline)
        self._save = None
        return save

    def all_at_same_mark(self) -> bool:
        """Return True if all ranks are at the same step mark and can end there.

        Raises:
            DeadlineError: another rank does not reply.
        """
        step = None if self.last_mark is None else self.last_mark.identity.step
        replies = self._job.exchange("call wait() or close()", {"step": step})
        return step is not None and all(one["step"] == step for one in replies)

    def taken(self, step: int, save: Save | None = None) -> None:
        """Note that this rank's shard is of ``step``, as are those of all others.

        Args:
            step: agreed step.
            save: base taken in one step in place of the pending one.
        """
        self.over(save)
        self._last = step

    def restart(self) -> None:
        """Forget everything: all ranks continue from another step."""
        self.over()
        self._due_step = self._last = 0

    def over(self, taken: Save | None = None) -> None:
        """Note that no base is in progress any more.

        Args:
            taken: base whose outcome the pending save takes over; None to fail the pending save.
        """
        save = self._save
        self._save = None
        self.step = None
        if save is not None and taken is not None:
            copy_outcome(save, taken)
        elif save is not None:
            why = StateError("no rank has begun to capture this base", step=save.step)
            fail(save.staged, why)
            fail(save.durable, why)


_log = logging.getLogger("everstep")


class RankMultistepDriver(MultistepDriver):
    """Take this rank's shards of multi-step bases.

    Args:
        job: all ranks.
        options, run, state, saver, lane, channel, clock: see :class:`.driver.MultistepDriver`.
    """

    def __init__(
        self,
        job: Job,
        options: Options,
        run: PurePath,
        state: State,
        saver: Saver,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
    ) -> None:
        super().__init__(options, run, state, saver, lane, channel, clock)
        self._agreement = EndAgreement(job)
        self._agreed_plan: WindowPlan | None = None  # of the base agreed on
        self._identity: ShardIdentity | None = None  # of the last step mark

    def start(self, service: Service) -> None:
        """Send bases to the keeper in service from now on."""
        super().start(service)
        self._agreed_plan = None

    # --- At step marks ------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """Agree with all ranks where a base that is due at the end of ``step`` ends.

        Every rank calls this at each such step, whatever has failed there.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        if self._agreement.begins_at(step):
            with self._counted():
                parts = self._wanted_parts()
            self._agreement.agree(step, parts)

    def take(self, identity: ShardIdentity, survey: Survey | None, *, single_step: bool) -> Save:
        """Take this rank's shard of a base: up to the agreed step, or (``single_step``, on all
        ranks) of the step that has just ended.

        Args:
            identity: step, timeline and rank.
            survey: survey of the current state, if one was taken.
            single_step: capture the base of this very step.

        Raises:
            EverstepError: this save, or an earlier one in the background, has failed and the
                failure policy raises.
        """
        agreement = self._agreement
        if not single_step and agreement.step is not None and agreement.step > identity.step:
            if self._window is None:
                self._await_window(identity)
            window = self._window
            return agreement.pending_save(identity.timeline) if window is None else window.save
        agreement.taken(identity.step)
        return super().take(identity, survey, single_step=True)

    def marked(self, identity: ShardIdentity) -> bool:
        """Continue the base in progress at a step mark.

        Returns:
            True if, among all ranks, a base is in progress that was due before: no other can begin.
        """
        self._identity = identity
        if self._agreement.step is not None and self._agreement.step < identity.step:
            self._abandon_agreed("the step at which all ranks end it has passed")
        super().marked(identity)
        return self._agreement.is_in_progress(identity.step)

    def finish_copies(self) -> None:
        """End the base in progress at the last step mark, on all ranks or on none: no step will
        follow.

        Every rank calls this after the same step, unless it leaves the job.

        Raises:
            DeadlineError: another rank does not call it.
        """
        if os.getpid() != self._pid:
            return
        try:
            if self._agreement.step is not None:
                self._end_together()
        finally:
            self._abandon_agreed("not all ranks can end it at the last step mark")
            super().finish_copies()

    def _end_together(self) -> None:
        agreement = self._agreement
        last = self._agreement.last_mark
        try:
            if last is not None and (self._updates.under_way or not last.holds(self._state)):
                agreement.last_mark = None
        except EverstepError as error:  # not raised: the other ranks wait for a reply
            _log.warning("%s", error)
            agreement.last_mark = None
        if agreement.all_at_same_mark():
            assert last is not None
            self._end_at_agreed_mark(last.identity)

    def leave(self) -> None:
        """Abandon this rank's shard of the base in progress: training has ended out of order."""
        if os.getpid() == self._pid:
            self._abandon_agreed("training ended before it was complete")

    def retake_lost_base(self) -> bool:
        """Return False: other ranks may have lost nothing, so no rank takes its shard again
        by itself."""
        return False

    def drop(self, why: str) -> None:
        """Abandon the base in progress: all ranks go back to an earlier step."""
        self._agreement.restart()
        super().drop(why)

    def _abandon_agreed(self, why: str) -> None:
        self._agreement.over()
        super().drop(why)

    # --- On the way ---------------------------------------------------------------------

    def _wanted_parts(self) -> int:
        """Return into how many parts this rank would cut the base that is due."""
        self._agreed_plan = None
        pool = self._pool
        too_many = self._voids_in_row >= VOID_MAX
        if self._identity is None or pool is None or too_many or not self._opened.holds:
            self._voids_in_row = 0
            return 1
        try:
            survey = self._state.survey()
            waits = self._updates.waits
            prepared = self._saver.prepare_base(survey, self._identity)
            self._agreed_plan = self._planner.next(prepared, survey.tensors, pool, waits=waits)
        except Exception as error:  # not raised: other ranks wait; the base will report it
            _log.debug("the base that is due was not planned: %s", error)
            return 1
        return max(1, len(self._agreed_plan.parts))

    def _advance(self, identity: ShardIdentity, *, closing: bool) -> None:
        agreement = self._agreement
        if agreement.step == identity.step:
            self._end_at_agreed_mark(identity)
        elif agreement.step is not None and self._window is None:
            self._await_window(identity)
        else:
            super()._advance(identity, closing=closing)

    def _await_window(self, identity: ShardIdentity) -> None:
        """Note the step mark while other ranks capture; begin this rank's window if it is its turn.

        A rank whose window has become void also waits here; it captures its shard in one step at
        the end.
        """
        with self._counted():
            survey = self._state.survey()
            prepared = self._saver.prepare_base(survey, identity)
            self._agreement.last_mark = RankMark(identity, MarkSnapshot.of(survey, prepared.marked))
        plan = self._agreed_plan
        planned = plan is not None and plan.prepared is prepared and not self._keeper_is_lost
        if planned and identity.step == self._agreement.begins:
            self._begin(identity, survey, plan, self._agreement.begin_save(identity.timeline))

    def _take_part(self, window: Window, survey: Survey) -> None:
        super()._take_part(window, survey)
        assert window.at_mark is not None
        self._agreement.last_mark = RankMark(window.identity, window.at_mark)

    def _end_at_agreed_mark(self, identity: ShardIdentity) -> None:
        """End at the mark all ranks agreed on; capture now what this rank lacks."""
        window = self._window
        taken = None
        if window is not None:
            with self._counted():
                self._end_at(window, identity)
        try:
            if window is None or self._ended is not window:
                taken = self._last = self._saver.take(identity, show=False)
        finally:
            self._agreement.taken(identity.step, taken)

    def _end_at(self, window: Window, identity: ShardIdentity) -> None:
        """End the window after all checks of its copies: other ranks must not rely on a torn
        part."""
        self._updates.held.gate()
        if not wait_done(self._lane.run(lambda: None), self._options.progress_timeout_s):
            late = DeadlineError("copying the state to host memory has hung", step=identity.step)
            window.failed = window.failed or late
        super()._end_at(window, identity)

    def _request_retake(self, why: str) -> None:
        """Do nothing: all ranks go on to the agreed step."""

    def _invalidate_mark(self) -> None:
        super()._invalidate_mark()
        self._agreement.last_mark = None

    @property
    def _keeper_is_lost(self) -> bool:
        return self._keeper is None or self._keeper.lost is not None
