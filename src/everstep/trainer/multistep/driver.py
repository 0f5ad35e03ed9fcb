"""Take bases over several steps, one window after the other; runs in the training process.

A window begins at a step mark, when a base is due. In each of its steps one part of the state is
copied during forward and backward, and the update waits for it (I1). From then on the gradients
that this part consumes are copied, too, and the keeper replays them (I2). At the last step mark
everything is copied that no optimizer replays. From there on the base is a capture like any other,
except that the keeper brings all parts to that step before it writes them (I3).

Copies are made in the order in which they are due: the gradients of a step before the part of the
next. Where a window ends, and what follows one that is void, is decided by :mod:`.window`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from everstep.capture.cuda import moment_of
from everstep.errors import AuditError, EverstepError, StateError
from everstep.format import ShardIdentity
from everstep.link import Save, as_everstep_error, fail, failing_save
from everstep.link.pool import CapturePool
from everstep.seams import failpoint
from everstep.seams.fingerprint import FingerprintWatch
from everstep.state.survey import Survey
from everstep.trainer.attach.keeper import Service
from everstep.trainer.base import MarkSnapshot, Saver
from everstep.trainer.log import LogMemory
from everstep.trainer.multistep.copies import WindowCopies
from everstep.trainer.multistep.measurements import MultistepStats
from everstep.trainer.multistep.partition import Partitioner
from everstep.trainer.multistep.plan import WindowPlan, WindowPlanner, redo_bytes
from everstep.trainer.multistep.window import (
    VOID_MAX,
    BaseInProgress,
    EndAlone,
    Handover,
    StepMark,
    Window,
    WindowVoid,
)
from everstep.trainer.participant import BaseRequest, Mark, Participant, TrainingContext

_log = logging.getLogger("everstep")


class MultistepDriver(Participant):
    """Take bases over several steps, one at a time.

    Args:
        saver: takes bases of one step, and captures the remaining entries at the last mark of a
            window.
        end: decides where windows end, and what follows a void one.
        log: records of the gradient log, which serve the windows; None without a log.

    Attributes:
        end: decides where windows end.
        window: window in progress; None if there is none.
        ended: window that ended at the last step mark; None after an update.
        last: save of the last window that was begun with the current keeper.
        stats: statistics of all windows.
        copies: copies of parts and gradients.
        planner: plans windows.
    """

    follows_updates = True

    def __init__(
        self,
        context: TrainingContext,
        saver: Saver,
        end: EndAlone,
        log: LogMemory | None = None,
    ) -> None:
        options = context.options
        state = context.state
        self._fuzzy = options.leaves_bases_fuzzy
        self._context = context
        self._saver = saver
        # A forked child inherits the hooks, but not the lane or the keeper: it must not end or
        # abandon a window of its parent.
        self._pid = os.getpid()
        self._service: Service | None = None
        self._identity: ShardIdentity | None = None  # of the last step mark
        self._opened = FingerprintWatch(state.optimizers)
        self.end = end
        self.window: Window | None = None
        self.ended: Window | None = None
        self.last: Save | None = None
        self.stats = MultistepStats(context.clock, saver.stall_s)
        moment = partial(moment_of, state.optimizers.values())
        partitioner = Partitioner(options, context.clock, self.stats, moment)
        self.copies = WindowCopies(context, saver, partitioner, log)
        explicit = isinstance(options.method.parts, int)
        consumption = self.copies.consumption
        self.planner = WindowPlanner(
            state,
            context.lane,
            partitioner,
            consumption,
            explicit=explicit,
            logged=log is not None,
        )

    @property
    def needs_base(self) -> bool:
        """True if another base is due after one became void."""
        return self.end.again is not None

    @property
    def is_busy(self) -> bool:
        """True if, among all ranks, a base is in progress that was due before the last mark."""
        base = self.end.in_progress
        return base is not None and self._identity is not None and base.due < self._identity.step

    def base_deferred(self) -> None:
        """Count a base that was due while another one was in progress."""
        self.stats.deferred += 1

    def go_back(self) -> None:
        """Abandon the base in progress, on all ranks: its steps are undone."""
        self.end.restart()
        self._drop_window("training goes back")

    def figures(self) -> Mapping[str, Any]:
        """Return the statistics of all windows."""
        return {"multistep": self.stats.report()}

    def start(self, service: Service) -> None:
        """Send bases to the keeper in service from now on."""
        self._opened.began(service.timeline)
        self._drop_window("its keeper is no longer in service")  # other ranks go on
        self._service = service
        self.last = None
        if self.end.base is not None:
            self.end.base.plan = None  # its layout is unknown to this keeper
        self.planner.start()

    # --- At step marks ------------------------------------------------------------------

    def base_is_needed(self, step: int) -> None:
        """End the base in progress at ``step``, on all ranks: a log cannot wait for it."""
        base = self.end.in_progress
        if self.end.shared and base is not None:
            base.end = step

    @property
    def replaced_base(self) -> Save | None:
        """Base of one step that was taken at the last mark in place of a void window."""
        return self.end.replaced

    def base_is_due(self, step: int) -> None:
        """Agree with all ranks where a base that is due at the end of ``step`` ends.

        Every rank calls this at each such step, whatever has failed there.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        if self.end.can_begin(step):
            self.end.begin(step, self._plan(self._identity))

    def take(self, request: BaseRequest) -> Save:
        """Take a base: over the next steps, or of the step that has just ended, on all ranks, if
        the program asks for it or a log cannot wait for it.

        Raises:
            EverstepError: this save, or an earlier one in the background, has failed and the
                failure policy raises.
        """
        identity = request.identity
        survey = request.survey
        # Several ranks must decide alike, and so by what all of them know.
        urgent = request.needed if self.end.shared else request.captured
        single_step = request.show or urgent
        end = self.end
        end.again = None
        if not single_step and (save := self._take_over_steps(identity, survey)) is not None:
            return save
        if self.window is not None:
            self._end_window(self.window, identity)
            end.again = None  # if that one became void, the base taken now replaces it
        base = end.in_progress
        # Read before finish(), which drops the plan.
        times_link = not single_step and base is not None and base.plan is not None
        end.finish(identity.step)
        # The window that has just ended, or an earlier call of this step, may be that base already.
        if self.last is not None and self._is_taken(identity):
            return self.last
        self.ended = None
        # Void windows count only in a row, which the base of one step interrupts.
        end.voids_in_row = 0
        return self._take_single_step(identity, survey, times_link=times_link)

    def _take_over_steps(self, identity: ShardIdentity, survey: Survey | None) -> Save | None:
        """Begin or continue a base that ends at a later step; return None if there is none."""
        end = self.end
        # Several ranks agree in base_is_due(): not here, which some of them may not reach.
        if not end.shared and end.can_begin(identity.step) and not self._is_taken(identity):
            with contextlib.suppress(EverstepError):  # the base of one step reports it
                survey = survey or self._context.state.survey()
            end.begin(identity.step, self._plan(identity, survey))
        base = end.in_progress
        if base is None or base.end <= identity.step:
            return None
        if self.window is None:
            self._await_window(base, identity, survey)
            self._context.channel.check()
        return base.save(identity.timeline)

    def mark(self, mark: Mark) -> bool:
        """Continue the base in progress at a step mark."""
        end = self.end
        self._identity = identity = mark.identity
        self.end.replaced = None
        self._invalidate_mark()
        self.copies.partitioner.steps.marked(self.stats.stalled_s)
        closing = self.stats.closing is not None  # the previous mark was the last one of a window
        self.stats.close()
        self.copies.prune()
        if self.window is None:
            # Each guard costs time in zero_grad() and in backward, so they go once nothing is in
            # flight.
            self.copies.held.settle()
        base = end.in_progress
        if base is not None and base.end < identity.step and end.shared:
            self._abandon_base("the step at which all ranks end it has passed")
            base = None
        with self._saver.stalled("capture"):
            if base is None:
                if not (self.planner.is_ahead or closing or self.planner.is_timing):
                    self._plan_ahead(identity)
            elif base.end <= identity.step:
                self._end_base(identity)
            elif self.window is None:
                self._await_window(base, identity)
            else:
                self._continue_window(self.window, identity)
        return False

    def finish_copies(self) -> None:
        """End the base in progress at the last step mark, on all ranks or on none: no step will
        follow. Remove everything that holds training up.

        Every rank calls this after the same step, unless it leaves the job.

        Raises:
            DeadlineError: another rank does not call it.
        """
        if os.getpid() != self._pid:
            return
        try:
            if self.end.in_progress is not None:
                self._end_at_last_mark()
        finally:
            # No effect if it has ended above. Otherwise all ranks abandon it, since it needs a
            # shard of each.
            if self.end.shared:
                self._abandon_base("not all ranks can end it at the last step mark")
            self.copies.held.release()

    def leave(self) -> None:
        """Abandon this rank's shard of a shared base: training has ended out of order."""
        if self.end.shared and os.getpid() == self._pid:
            self._abandon_base("training ended before it was complete")

    def retake_lost_base(self) -> bool:
        """Take a base of one step in place of a lost final window, if the state still is that of
        its mark.

        A window may turn out to be torn, or not to replay to its last step, only when the keeper
        rebuilds it, after training has ended. Other ranks may have lost nothing, so with several
        ranks none takes its shard again by itself.

        Returns:
            True if a base was taken.
        """
        window = self.ended
        mark = self.end.mark
        self.ended = None
        if self.end.shared or window is None or not window.is_void:
            return False
        if mark is None or not mark.snapshot.holds(self._context.state.survey()):
            return False
        self.end.again = None
        self._saver.take(BaseRequest(mark.identity, None, False))
        return True

    def handles_torn_base(self, error: AuditError) -> bool:
        """Return True for a torn gradient: the user was warned of it already."""
        return error is self.copies.reported

    # --- At updates ---------------------------------------------------------------------

    def gate_update(self, optimizer: str | None) -> None:
        """Block an update until the parts it will change have been copied (I1).

        Args:
            optimizer: key of the optimizer about to update; None if anything may be updated.
        """
        # None does not mean that something changes: finish_captures() waits for all copies this
        # way, and retake_lost_base() needs the mark after it.
        if optimizer is not None:
            self._invalidate_mark()
        quiet = not (self._saver.copying or self.window is not None or self.copies.open)
        self.copies.partitioner.steps.gated(self.stats.stalled_s, quiet=quiet)
        self.copies.gate(optimizer)

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """Begin to copy the gradients an optimizer is about to consume; see
        :meth:`.copies.WindowCopies.consumed`."""
        window = self.window
        if window is None:
            return
        with self._saver.stalled("capture"), self._voiding(step):
            # Checked again here: the gate may just have given up waiting for a copy.
            if window.failed is not None:
                raise window.failed
            if not over:  # after the update its own writes would be found
                window.parts.check(key)
            if not self._opened.holds:  # the keeper rebuilds with the settings of the timeline
                raise WindowVoid(
                    "the settings of update arithmetic changed after the timeline was opened"
                )
            self.copies.consumed(window, key, lsn, step, over=over)

    def applied(self, key: str) -> None:
        """Account for an update, which has ended."""
        window = self.window
        if window is None or os.getpid() != self._pid:
            return
        with self._saver.stalled("capture"), self._voiding(window.identity.step + 1):
            self.copies.applied(window)
            window.parts.applied(key, window.identity.step)

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """Account for a registered function, which has run; its entries are captured at the
        last mark only."""
        self._invalidate_mark()
        if self.window is not None:
            with self._voiding(step):
                self.window.account(lsn)

    def skipped(self, why: str) -> None:
        """Abandon the window: something changed optimizer-owned tensors in a way replay
        cannot repeat."""
        self._invalidate_mark()
        if self.window is not None and os.getpid() == self._pid:
            self._abandon(why)

    def _invalidate_mark(self) -> None:
        """Note that the state is no longer that of the last step mark."""
        self.ended = self.end.mark = None

    # --- Before a window ----------------------------------------------------------------

    def _plan(
        self, identity: ShardIdentity | None, survey: Survey | None = None
    ) -> WindowPlan | None:
        """Plan the base that is due; return None to capture it in one step."""
        end = self.end
        pool = self._pool
        too_many = end.voids_in_row >= VOID_MAX or self._context.refusals.is_over
        # A keeper that rebuilds does so with the settings recorded when the timeline was opened.
        if identity is None or pool is None or too_many or not self._opened.holds:
            end.voids_in_row = 0
            return None
        try:
            with self._saver.stalled("capture"):
                survey = survey or self._context.state.survey()
                prepared = self._saver.prepare_base(survey, identity)
                waits = self.copies.waits
                return self.planner.next(prepared, survey.tensors, pool, waits=waits)
        except Exception as error:
            # Not raised: other ranks wait for this one's proposal. The base of one step, which is
            # taken instead, reports the same error.
            _log.debug("the base that is due was not planned: %s", error)
            return None

    def _plan_ahead(self, identity: ShardIdentity) -> None:
        """Plan the next base after a step in which nothing was captured."""
        pool = self._pool
        if pool is None:
            return
        self.planner.is_ahead = True  # even if it fails: it is tried once
        try:
            survey = self._context.state.survey()
            prepared = self._saver.prepare_base(survey, identity)
            self.planner.next(prepared, survey.tensors, pool, waits=self.copies.waits, ahead=True)
        except EverstepError as error:  # the base will report it
            _log.debug("the next base was not planned ahead: %s", error)

    @property
    def _pool(self) -> CapturePool | None:
        return None if self._service is None else self._service.pool

    def _is_taken(self, identity: ShardIdentity) -> bool:
        """Return True if the last window is of this step, and not lost."""
        last = self.last
        return last is not None and last.is_of(identity) and not last.is_lost

    def _take_single_step(
        self, identity: ShardIdentity, survey: Survey | None = None, *, times_link: bool = False
    ) -> Save:
        """Take a base of the step that has just ended.

        Args:
            identity: identity of the step mark.
            survey: survey of the state, if one was taken.
            times_link: the base was planned in one part; measure its copy.
        """
        pool = self._pool
        if not times_link or pool is None:
            return self._saver.take(BaseRequest(identity, survey, False))
        survey = survey or self._context.state.survey()
        size_bytes = self._saver.prepare_base(survey, identity).size_bytes
        self.stats.parts = 1
        with self.planner.timing_link(size_bytes, survey.tensors, pool):
            return self._saver.take(BaseRequest(identity, survey, False))

    # --- A window -----------------------------------------------------------------------

    def _await_window(
        self, base: BaseInProgress, identity: ShardIdentity, survey: Survey | None = None
    ) -> None:
        """Begin this rank's window if it is its turn; else note the mark, at which training may
        end.

        A rank whose window has become void also waits here; it captures its shard in one step at
        the end.
        """
        service = self._service
        keeper = None if service is None else service.process
        with self._saver.stalled("capture"):
            survey = survey or self._context.state.survey()
            prepared = self._saver.prepare_base(survey, identity)
            plan = base.plan if identity.step == base.begin else None
            # One rank of several takes its shard with the next keeper; one alone fails at once.
            serves = keeper is not None and (keeper.lost is None or not self.end.shared)
            # The parts were planned for this very layout. If the state has another shape by now,
            # this rank takes its shard in one step at the end.
            if plan is not None and plan.prepared is prepared and serves:
                self._begin_window(base, plan, identity, survey)
            if self.window is None:
                snapshot = MarkSnapshot.of(survey, prepared.marked)
                self.end.mark = StepMark(identity, snapshot)

    def _begin_window(
        self, base: BaseInProgress, plan: WindowPlan, identity: ShardIdentity, survey: Survey
    ) -> None:
        assert self._service is not None
        keeper = self._service.process
        pool = self._service.pool
        assert keeper is not None
        assert pool is not None
        prepared = self._saver.request_base(survey, identity)
        self.last = save = base.save(identity.timeline)
        # From here on the window completes the save, or failing_save() below; finish() must not.
        base.begun = True
        costs = self.stats.begin(len(plan.parts))
        window = None
        with failing_save(save, self._saver.post):
            gradient_bytes = redo_bytes(plan.cut) if self._fuzzy else 0
            self._saver.check_disk(prepared.plan(identity), gradient_bytes)
            self.window = window = Window(
                save,
                identity,
                plan,
                survey.shape,
                self.planner.digest_of(survey.shape),
                survey.tensors,
                keeper,
                pool,
                self._saver.acquire(prepared, survey),
                identity.lsn,
                costs,
                self.copies.hold_records(),
            )
        if window is None:
            if not self.end.shared:
                self.end.finish()
            return
        self.stats.windows += 1
        self.stats.parts = len(plan.parts)
        with self._voiding(identity.step):
            self._take_part(window, survey)

    def _continue_window(self, window: Window, identity: ShardIdentity) -> None:
        with self._voiding(identity.step):
            survey = self._context.state.survey()
            self._check(window, identity, survey)
            window.identity = identity
            window.tensors = survey.tensors
            self._take_part(window, survey)

    def _take_part(self, window: Window, survey: Survey) -> None:
        """Begin to copy the next part."""
        window.next += 1
        part = window.plan.parts[window.next]
        copies = window.plan.copies(part.entries, survey.tensors)
        self.copies.submit_part(window, copies, part.size_bytes)
        # The part holds the values before the next update, so that update is the first one to
        # replay.
        window.seen.append((window.identity.lsn, part))
        for key, names in part.parameters.items():
            window.captured[key] = window.captured.get(key, frozenset()) | names
        owned = window.plan.owned(part.entries, survey.tensors)
        looks = self._fuzzy
        window.parts.add(owned, window.identity.step, looks=looks)
        self._note_mark(window, survey)
        failpoint("window.after_part")

    def _note_mark(self, window: Window, survey: Survey) -> None:
        """Note this step mark of the window, at which training may end."""
        snapshot = MarkSnapshot.of(survey, window.plan.prepared.marked)
        self.end.mark = StepMark(window.identity, snapshot)

    # --- The end of a window ------------------------------------------------------------

    def _end_base(self, identity: ShardIdentity) -> None:
        """End the base in progress at this step mark; of a shared one, capture now what this rank
        lacks."""
        window = self.window
        closed = window is not None and self._end_window(window, identity)
        taken = None
        try:
            if not closed and self.end.shared:
                taken = self.end.replaced = self._take_single_step(identity)
        finally:
            # Also if the capture has failed: callers of take() may wait for the save of this base.
            self.end.finish(identity.step, taken)

    def _end_at_last_mark(self) -> None:
        """End the base in progress at the last step mark if the state, on all ranks, still is that
        of the mark."""
        mark = self.end.mark
        try:
            if self.copies.update_under_way:
                mark = None
            if mark is not None and not mark.snapshot.holds(self._context.state.survey()):
                mark = None
        except EverstepError as error:  # not raised: the other ranks wait for a reply
            _log.warning("%s", error)
            mark = None
        step = None if mark is None else mark.identity.step
        if self.end.can_end(step):
            assert mark is not None
            self._end_base(mark.identity)
        elif self.window is not None and not self.end.shared:
            why = "the state has changed since the last step mark"
            self._abandon(why, self.window.failed)

    def _end_window(self, window: Window, identity: ShardIdentity) -> bool:
        """End the window at this step mark; return False if it is void."""
        if self.end.shared:
            self.copies.await_checks(window)  # other ranks must not rely on a torn part
        with self._saver.stalled("capture"), self._voiding(identity.step):
            self.ended = window
            survey = self._context.state.survey()
            self._check(window, identity, survey)
            self._close_window(window, identity, survey)
            return True
        return False

    def _close_window(self, window: Window, identity: ShardIdentity, survey: Survey) -> None:
        """Capture the remaining entries at this step mark, whose step becomes that of the base."""
        save = window.save
        prepared = window.plan.prepared
        window.identity = identity
        # The window may end before its planned step, at save(), close() or a preemption.
        save.step = identity.step
        self.last = save
        begin = window.next + 1
        last = window.plan.last(begin)
        copies = window.plan.copies(last.entries, survey.tensors)
        self.stats.finishing(window.costs, identity.step)
        # Made in the training thread: it samples the live tensors, which the next update changes.
        handover = Handover(window, begin, survey, fuzzy=self._fuzzy)

        def ended(_: object) -> None:
            handover.ended()
            if not save.is_lost:
                self.end.voids_in_row = 0
            else:  # torn, not rebuilt, or not durable
                self.end.voided("the last base over several steps has failed")

        # Before fill(), which may complete the save in another thread.
        save.durable.add_done_callback(ended)
        window.costs.state_bytes = prepared.size_bytes
        self._note_mark(window, survey)
        plan = prepared.plan(identity)
        timed = self.copies.partitioner.timed(last.size_bytes)
        notify = partial(handover.notify, timed)
        # Cleared first: an interrupt within fill() must not leave a window that is filled twice.
        self.window = None
        try:
            with failing_save(save, self._saver.post):
                self._saver.fill(prepared, plan, survey, save, window.room, copies, notify)
        finally:
            # Also after a failure, but on the lane: until its copies end they write into the memory
            # that this releases.
            self.copies.run(handover.copies_ended)

    @contextlib.contextmanager
    def _voiding(self, step: int) -> Iterator[None]:
        """Abandon the window if the block finds it void, or has failed: that must not make
        training fail.

        An interrupt may have left a part half submitted; it abandons the window, too, and is
        raised.
        """
        try:
            yield
        except WindowVoid as void:
            self._abandon(str(void))
        except Exception as error:
            ours = as_everstep_error(error, step)
            self._abandon(ours.message, ours)
        except BaseException:
            self._abandon("a window was interrupted")
            raise

    def _abandon(self, why: str, error: EverstepError | None = None) -> None:
        """Abandon the open window, and release its memory.

        Args:
            why: reason, in words.
            error: error to report; None to log a warning only.
        """
        window = self.window
        self.window = None
        self.copies.forget_update()
        if window is None:
            if error is not None:
                self._context.refusals.post(error)
            return
        self.stats.abandoned += 1
        self.end.voided(why)
        if not self.end.shared:
            self.end.finish()
        ours = error or StateError(f"a base over several steps was abandoned: {why}")
        fail(window.save.staged, ours)
        fail(window.save.durable, ours)
        # A torn gradient was posted as a notice before; it must not be raised in addition.
        if error is not None and error is not self.copies.reported:
            self._context.refusals.post(error)
        else:
            _log.warning("%s", ours)
        self.copies.abandon(window)

    def _abandon_base(self, why: str) -> None:
        """Abandon the base in progress, which other ranks do not rely on."""
        self.end.finish()
        self._drop_window(why)

    def _drop_window(self, why: str) -> None:
        """Abandon the open window, which is of no use any more; no other base becomes due
        because of it."""
        self._invalidate_mark()
        if self.window is not None:
            self._abandon(why)
            self.end.voids_in_row = 0
            self.end.again = None

    def _check(self, window: Window, identity: ShardIdentity, survey: Survey) -> None:
        """Check that the window can end at this step mark.

        Raises:
            WindowVoid: it cannot.
            EverstepError: a copy has failed.
        """
        window.check(identity, survey)
        if not self.copies.consumption.grouped_as_before():
            raise WindowVoid("parameters moved to other parameter groups")
