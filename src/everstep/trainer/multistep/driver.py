"""Drive the windows of multi-step bases (GoCkpt, section 4) in the training process.

A window begins at a step mark, when a base is due. In each of its steps one part of the state is
copied during forward and backward, and the update waits for it (I1). From then on the gradients
that this part consumes are copied, too, and the keeper replays them (I2). At the last step mark
everything is copied that no optimizer replays. From there on the base is a capture like any other,
except that the keeper brings all parts to that step before it writes them (I3).

Copies are made in the order in which they are due: the gradients of a step before the part of the
next. A window whose parts cannot be brought to the last step is void, and a new one begins.

Several ranks end their windows at one step: see :mod:`.rank_driver`."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import PurePath

from everstep.capture.lanes.lane import Lane
from everstep.config.options import Options
from everstep.errors import AuditError, EverstepError, StateError
from everstep.format.header import ShardIdentity
from everstep.link.channel import BackgroundChannel
from everstep.link.pool import Block, CapturePool
from everstep.link.recordable import state_digest
from everstep.link.save import Save, as_everstep_error, fail, failing_save
from everstep.seams import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.fingerprint import FingerprintWatch
from everstep.state.survey.survey import Shape, Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.mark_state import MarkSnapshot
from everstep.trainer.base.saver import Saver, SaverExtension
from everstep.trainer.budget.disk import check_disk_budget
from everstep.trainer.multistep.copies import PartCopies, UpdateCopies
from everstep.trainer.multistep.measurements import MultistepStats, WindowCosts, device_event
from everstep.trainer.multistep.partition import Partitioner
from everstep.trainer.multistep.plan import WindowPlan, WindowPlanner, redo_bytes
from everstep.trainer.multistep.window import Handover, Window, written

__all__ = ["VOID_MAX", "MultistepDriver"]

_log = logging.getLogger("everstep")
VOID_MAX = 2
"""Number of consecutive void windows after which a base is captured in one step."""


class MultistepDriver(SaverExtension):
    """Take bases over several steps, one at a time.

    Args:
        options: options of the Checkpointer.
        run: run folder.
        state: state to capture.
        saver: takes bases of one step, and captures the remaining entries at the last mark of a
            window.
        lane: makes the copies.
        channel: reports errors to the training thread.
        clock: measures time.

    Attributes:
        again: reason why another base is due after one became void; None if none is.
        stats: statistics of all windows.
    """

    def __init__(
        self,
        options: Options,
        run: PurePath,
        state: State,
        saver: Saver,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
    ) -> None:
        self._options = options
        self._run = run
        self._state = state
        self._saver = saver
        self._lane = lane
        self._channel = channel
        self._clock = clock
        self._pid = os.getpid()
        self._keeper: RemoteKeeper | None = None
        self._pool: CapturePool | None = None
        self._window: Window | None = None
        self._ended: Window | None = None  # ended at the last mark; None after an update
        self._last: Save | None = None
        self._single_step: Save | None = None  # the last base of one step
        self._timed: Future[None] | None = None  # done when the first base has measured the link
        self._digest: tuple[object, str] = (None, "")
        self._voids_in_row = 0  # consecutive void windows
        self._opened = FingerprintWatch(state.optimizers)
        self.stats = MultistepStats()
        self._partitioner = Partitioner(options, clock, self.stats, partial(device_event, state))
        self._parts = PartCopies(
            options,
            lane,
            clock,
            partitioner=self._partitioner,
            stall_s=saver.stall_s,
            on_late=self._abandon_late,
        )
        self._updates = UpdateCopies(
            options,
            state,
            lane,
            clock,
            partitioner=self._partitioner,
            stall_s=saver.stall_s,
            abandon=self._abandon,
            warn=channel.post_notice,
        )
        explicit = isinstance(options.method.parts, int)
        consumption = self._updates.consumption
        self._planner = WindowPlanner(
            state, lane, self._partitioner, consumption, explicit=explicit
        )
        self.again: str | None = None
        saver.extend(self)

    @property
    def open(self) -> bool:
        """Return True while a window is open."""
        return self._window is not None

    def start(self, service: Service) -> None:
        """Send bases to the keeper in service from now on."""
        self._opened.began(service.timeline)
        MultistepDriver.drop(self, "its keeper is no longer in service")  # other ranks go on
        self._keeper = service.process
        self._pool = service.pool
        self._last = None
        self._planner.start()

    # --- At step marks ------------------------------------------------------------------

    def take(self, identity: ShardIdentity, survey: Survey | None, *, single_step: bool) -> Save:
        """Take a base: over the next steps, or (``single_step``) of the step that has just ended.

        Args:
            identity: step, timeline and rank.
            survey: survey of the current state, if one was taken.
            single_step: capture the base of this very step.

        Raises:
            EverstepError: this save, or an earlier one in the background, has failed and the
                failure policy raises.
        """
        window = self._window
        self.again = None
        if window is not None:
            if not single_step:
                return window.save
            with self._counted():
                self._end_at(window, identity)
            self.again = None  # if that one became void, the base taken now replaces it
        last = self._last
        base = (identity.timeline, identity.step)
        if last is not None and (last.timeline, last.step) == base and not last.is_lost:
            return last
        self._ended = None
        begins = not single_step and self._voids_in_row < VOID_MAX and self._opened.holds
        with contextlib.suppress(EverstepError):  # the base of one step reports the same error
            survey = self._state.survey() if begins and survey is None else survey
        if begins and survey is not None:
            return self._begin(identity, survey)
        self._voids_in_row = 0
        self._single_step = taken = self._saver.take(identity, show=single_step, survey=survey)
        return taken

    def marked(self, identity: ShardIdentity) -> bool:
        """Continue the open window at a step mark.

        Returns:
            True if a window is still open: no other base can begin.
        """
        self._invalidate_mark()
        self._partitioner.steps.marked(sum(self._saver.stall_s.values()))
        closing = self.stats.closing is not None
        self.stats.close(self._saver.stall_s)
        self._parts.prune()
        if self._window is None:
            self._updates.held.settle()
        self._advance(identity, closing=closing)
        return self.open

    def _advance(self, identity: ShardIdentity, *, closing: bool) -> None:
        """Continue the open window, or plan the next one.

        Args:
            identity: identity of the step mark.
            closing: the previous step mark was the last one of a window.
        """
        with self._counted():
            if self._window is not None:
                self._continue_window(self._window, identity)
            elif not (self._planner.is_ahead or closing or self._is_timing):
                self._plan_ahead(identity)

    def _continue_window(self, window: Window, identity: ShardIdentity) -> None:
        try:
            survey = self._state.survey()
            if (why := self._why_invalid(window, identity, survey)) is not None:
                self._abandon(why, window.failed)
            elif window.next + 2 >= len(window.plan.parts):
                self._close_window(window, identity, survey)
            else:
                window.identity = identity
                window.tensors = survey.tensors
                self._take_part(window, survey)
        except Exception as error:
            ours = as_everstep_error(error, identity.step)
            self._abandon(ours.message, ours)
        except BaseException:  # an interrupt may have left a part half submitted
            self._abandon("a window was interrupted")
            raise

    def finish_copies(self) -> None:
        """End the open window at the last step mark, if the state is still that of the mark: no
        step will follow. Remove everything that holds training up."""
        if os.getpid() != self._pid:
            return
        if self._window is not None:
            self._end_at_last_mark(self._window)
        self._updates.held.release()

    def _end_at_last_mark(self, window: Window) -> None:
        if window.lsn != window.identity.lsn or self._updates.under_way:
            self._abandon("training ended in the middle of a step", window.failed)
        elif window.at_mark is None or not window.at_mark.holds(self._state.survey()):
            self._abandon("the state has changed since the last step mark", window.failed)
        else:
            self._end_at(window, window.identity)
            self._ended = window  # it may be void

    def retake_lost_base(self) -> bool:
        """Take a base of one step in place of a lost final window, if the state still is that of
        its mark.

        A window may turn out to be torn, or not to replay to its last step, only when the keeper
        rebuilds it, after training has ended.

        Returns:
            True if a base was taken.
        """
        window = self._ended
        self._ended = None
        if window is None or not window.is_void or window.at_mark is None:
            return False
        if not window.at_mark.holds(self._state.survey()):
            return False
        self.again = None
        self._saver.take(window.identity, show=False)
        return True

    def handles_torn_base(self, error: AuditError) -> bool:
        """Return True for a torn gradient: the user was warned of it already."""
        return error is self._updates.reported

    def drop(self, why: str) -> None:
        """Abandon the open window, which is of no use any more; no other base becomes due
        because of it."""
        self._invalidate_mark()
        if self._window is not None:
            self._abandon(why)
            self._voids_in_row = 0
            self.again = None

    # --- At updates ---------------------------------------------------------------------

    def gate_update(self, optimizer: str | None) -> None:
        """Block an update until the parts it will change have been copied (I1).

        Args:
            optimizer: key of the optimizer about to update; None if anything may be updated.
        """
        if optimizer is not None:
            self._invalidate_mark()
        single_step = self._single_step is not None and not self._single_step.staged.done()
        copies = (
            single_step or self._window is not None or self._parts.open or self._updates.held.open
        )
        self._partitioner.steps.gated(sum(self._saver.stall_s.values()), quiet=not copies)
        self._parts.gate(optimizer)
        kept = 0 if optimizer is None else self._options.method.held_steps - 1
        self._updates.held.gate(optimizer, keep=kept)

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """Begin to copy the gradients an optimizer is about to consume; see
        :meth:`.copies.UpdateCopies.consumed`."""
        window = self._window
        if window is None:
            return
        with self._counted():
            # After the update its own writes would be found: only compare before it.
            if not over and (name := window.parts.written(key)) is not None:
                self._abandon(written(name))
            elif not self._opened.holds:  # the keeper rebuilds with the settings of the timeline
                self._abandon(
                    "the settings of update arithmetic changed after the timeline was opened"
                )
            else:
                self._updates.consumed(window, key, lsn, step, over=over)

    def applied(self, key: str) -> None:
        """Account for an update, which has ended."""
        window = self._window
        if window is None or os.getpid() != self._pid:
            return
        with self._counted():
            try:
                if not self._updates.applied(window, key):
                    self._abandon("an update was missed by the hooks")
                window.parts.applied(key, window.identity.step)
            except Exception as error:  # must not make training fail
                ours = as_everstep_error(error, window.identity.step + 1)
                self._abandon(ours.message, ours)

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """Account for a registered function, which has run; its entries are captured at the
        last mark only."""
        self._invalidate_mark()
        if self._window is not None and not self._window.account(lsn):
            self._abandon("an update was missed by the hooks")

    def skipped(self, why: str) -> None:
        """Abandon the window: something changed optimizer-owned tensors in a way replay
        cannot repeat."""
        self._invalidate_mark()
        if self._window is not None and os.getpid() == self._pid:
            self._abandon(why)

    def _plan_ahead(self, identity: ShardIdentity) -> None:
        """Plan the next base after a step in which nothing was captured."""
        pool = self._pool
        if pool is None:
            return
        self._planner.is_ahead = True  # even if it fails: it is tried once
        try:
            survey = self._state.survey()
            prepared = self._saver.prepare_base(survey, identity)
            self._digest_of(survey.shape)
            self._planner.ahead(prepared, survey.tensors, pool, waits=self._updates.waits)
        except EverstepError as error:  # the base will report it
            _log.debug("the next base was not planned ahead: %s", error)

    @property
    def _is_timing(self) -> bool:
        """Return True until the first base has measured the link; plans made before would
        not be used."""
        waits = self._timed is not None and not self._timed.done()
        return waits and self.stats.link_bytes_per_s is None

    def _invalidate_mark(self) -> None:
        """Note that the state is no longer that of the last step mark."""
        self._ended = None

    # --- A window -----------------------------------------------------------------------

    def _begin(
        self,
        identity: ShardIdentity,
        survey: Survey,
        plan: WindowPlan | None = None,
        save: Save | None = None,
    ) -> Save:
        """Begin a window at this step mark.

        Args:
            identity: identity of the mark.
            survey: survey of the state.
            plan: plan of the parts; None to plan them now.
            save: save to fulfil; None to make one.

        Returns:
            The save; of one step if the plan has a single part.
        """
        keeper = self._keeper
        pool = self._pool
        assert keeper is not None
        assert pool is not None
        prepared = self._saver.request_base(survey, identity)
        plan = plan or self._planner.next(prepared, survey.tensors, pool, waits=self._updates.waits)
        if len(plan.parts) <= 1:
            self._saver.saves -= 1
            ready_bytes = self._lane.ready_bytes(survey.tensors.values(), pool.whole)
            timed = self._partitioner.timed("base", prepared.size_bytes)
            save = self._single_step = self._saver.take(identity, show=False, survey=survey)
            # Otherwise the copy would measure how fast memory is touched, not the link.
            if ready_bytes >= prepared.size_bytes:
                self._timed = self._lane.run(timed.ended)
            self.stats.parts = 1
            return save
        save = save or Save(identity.step + len(plan.parts) - 1, identity.timeline)
        self._last = save
        watch = WindowCosts(len(plan.parts), dict(self._saver.stall_s), self._clock.monotonic_s())
        room: Block | None = None
        with failing_save(save, self._saver.post):
            size_bytes = prepared.plan(identity).size_bytes
            if self._options.leaves_bases_fuzzy:
                size_bytes += redo_bytes(plan.cut)
            check_disk_budget(self._options, self._run, size_bytes)
            room = self._saver.acquire(prepared, survey)
        if room is None:
            self._channel.check()
            return save
        self._window = window = Window(
            save,
            identity,
            plan,
            survey.shape,
            self._digest_of(survey.shape),
            survey.tensors,
            keeper,
            pool,
            room,
            identity.lsn,
            watch,
            next=-1,
        )
        self.stats.windows += 1
        self.stats.parts = len(plan.parts)
        with self._counted():
            try:
                self._take_part(window, survey)
            except Exception as error:
                ours = as_everstep_error(error, identity.step)
                self._abandon(ours.message, ours)
            except BaseException:
                self._abandon("a window was interrupted")
                raise
        self._channel.check()
        return save

    def _take_part(self, window: Window, survey: Survey) -> None:
        """Begin to copy the next part."""
        window.next += 1
        part = window.plan.parts[window.next]
        copies = window.plan.copies(part.entries, survey.tensors)
        self._parts.submit(window, copies, part.size_bytes)
        window.seen.append((window.identity.lsn, part.entries))
        for key, names in part.parameters.items():
            window.captured[key] = window.captured.get(key, frozenset()) | names
        owned = window.plan.owned(part.entries, survey.tensors)
        looks = self._options.leaves_bases_fuzzy
        window.parts.add(owned, window.identity.step, looks=looks)
        window.at_mark = MarkSnapshot.of(survey, window.plan.prepared.marked)
        failpoint("window.after_part")

    def _close_window(self, window: Window, identity: ShardIdentity, survey: Survey) -> None:
        """Capture the remaining entries at this step mark, whose step becomes that of the base."""
        save = window.save
        prepared = window.plan.prepared
        window.identity = identity
        save.step = identity.step
        self._last = save
        begin = window.next + 1
        last = window.plan.last(begin)
        copies = window.plan.copies(last.entries, survey.tensors)
        self.stats.finishing(window.watch, identity.step, self._clock.monotonic_s())
        handover = Handover(window, begin, survey, fuzzy=self._options.leaves_bases_fuzzy)

        def ended(_: object) -> None:
            handover.ended()
            if not save.is_lost:
                self._voids_in_row = 0
            else:  # torn, not rebuilt, or not durable
                self._voids_in_row += 1
                self._request_retake("the last base over several steps has failed")

        save.durable.add_done_callback(ended)
        window.watch.state_bytes = prepared.size_bytes
        window.at_mark = MarkSnapshot.of(survey, prepared.marked)
        plan = prepared.plan(identity)
        notify = partial(handover.notify, self._partitioner.timed("part", last.size_bytes))
        self._window = None
        self._ended = window
        try:
            with failing_save(save, self._saver.post):
                self._saver.fill(prepared, plan, survey, save, window.room, copies, notify)
        finally:
            self._lane.run(handover.copies_ended)

    def _abandon(self, why: str, error: EverstepError | None = None) -> None:
        """Abandon the open window, and release its memory.

        Args:
            why: reason, in words.
            error: error to report; None to log a warning only.
        """
        window = self._window
        self._window = None
        self._updates.forget()
        if window is None:
            if error is not None:
                self._channel.post(error)
            return
        self.stats.abandoned += 1
        self._voids_in_row += 1
        self._request_retake(why)
        ours = error or StateError(f"a base over several steps was abandoned: {why}")
        fail(window.save.staged, ours)
        fail(window.save.durable, ours)
        if error is not None and error is not self._updates.reported:
            self._channel.post(error)
        else:
            _log.warning("%s", ours)

        self._parts.forget(window)

        # On the lane, after copies that were begun: until then they write into this memory.
        def release() -> None:
            window.release_updates()
            window.pool.release(window.room)

        self._lane.run(release)

    def _request_retake(self, why: str) -> None:
        """Make another base due."""
        self.again = why

    def _end_at(self, window: Window, identity: ShardIdentity) -> None:
        """End the window at this step mark, because no step follows."""
        try:
            survey = self._state.survey()
            why = self._why_invalid(window, identity, survey)
            if why is None:
                self._close_window(window, identity, survey)
            else:
                self._abandon(why, window.failed)
        except Exception as error:
            ours = as_everstep_error(error, identity.step)
            self._abandon(ours.message, ours)

    def _abandon_late(self, window: Window, error: EverstepError) -> None:
        """Abandon the window: a copy took too long, and an update must not wait any longer."""
        if window is self._window:
            self._abandon(error.message, error)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time inside as "capture", except time counted as another cause meanwhile."""
        stall_s = self._saver.stall_s
        start_s = self._clock.monotonic_s()
        before_s = sum(stall_s.values())
        try:
            yield
        finally:
            counted_s = sum(stall_s.values()) - before_s
            stall_s["capture"] += max(0.0, self._clock.monotonic_s() - start_s - counted_s)

    def _why_invalid(self, window: Window, identity: ShardIdentity, survey: Survey) -> str | None:
        """Return why the window cannot end at this step mark, or None."""
        if (why := window.why_void(identity, survey)) is not None:
            return why
        if not self._updates.consumption.grouped_as_before():
            return "parameters moved to other parameter groups"
        return None

    def _digest_of(self, shape: Shape) -> str:
        """Return the digest of the state's shape and of its current parameter groups."""
        consumption = self._updates.consumption
        if self._digest[0] is not shape.entries or not consumption.grouped_as_before():
            self._digest = (shape.entries, state_digest(shape, consumption.regroup()))
        return self._digest[1]
