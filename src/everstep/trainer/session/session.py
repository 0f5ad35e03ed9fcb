"""One life of a Checkpointer: what happens at a resume, at a step mark, at a save, and at the end.

A session drives participants (:mod:`everstep.trainer.participant`). It calls each of them at the
same events, and knows none by name. The order of the events within a call is what this module is
about; each participant says what it does there.

A run ends in one of three ways. ``close()`` takes a last base if state would be lost otherwise,
waits until everything is durable, and reports every failure. A script that ends without ``close()``
gets the same from :func:`finish_at_exit`, except for a last base of the log. After an error, the
keeper may have to stay: its memory may hold the only copy of some steps.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR
from everstep.config import Options
from everstep.errors import DeadlineError, EverstepError, FencedError, KeeperError
from everstep.format.records import Annotations
from everstep.link import BackgroundChannel, Save
from everstep.restore.start import Recovery, describe
from everstep.seams.progress import log_or_print
from everstep.state.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.job import RunPlace, seams_with_copies
from everstep.trainer.participant import BaseRequest, Mark, RestoredState
from everstep.trainer.session.calls import CallGuard
from everstep.trainer.session.components import Components, build_components
from everstep.trainer.session.preemption import PreemptionHandler, rank_vote
from everstep.trainer.session.start import RunStarter
from everstep.trainer.session.state_watch import Position, StateWatch
from everstep.trainer.session.stats import Stats, stats_of
from everstep.trainer.session.step_consensus import StepConsensus

if TYPE_CHECKING:
    from everstep.convert.initial import InitialState
    from everstep.trainer.checks.recompute import RecomputeAudit

_log = logging.getLogger("everstep")
_Result = TypeVar("_Result")


class Session:
    """Drive the components of one training process.

    Opens the run folder, builds the components, and prints what they will take.

    Args:
        place: run folder, ranks and places for copies.
        preemption: signals that announce the end of the job.
        calls: calls of other threads, which are refused from the exit on. A daemon thread that
            keeps training would take base after base, and each would be waited for.

    Attributes:
        at: step and timeline of training.
        keeper: keeper in use; None before the first timeline.
        is_open: False once everything is released.

    Raises:
        OutOfSpaceError: A budget is too small.
        UnsupportedStateError, OptionError: The method cannot repeat some updates.
        StorageError: The folder or a place for copies cannot be used.
    """

    def __init__(
        self,
        options: Options,
        place: RunPlace,
        state: State,
        preemption: PreemptionHandler,
        calls: CallGuard,
    ) -> None:
        # Before the run is opened: a new folder becomes one of the run whose copies the places
        # contain.
        copies = () if place.job is not None else place.tiers
        place = replace(place, reading=seams_with_copies(copies, place.seams, place.run))
        self.parts = parts = build_components(options, place, state)
        parts.keepers.terms.copy_to(place.tiers)
        self.at = Position(parts.run_id, parts.state, parts.updates)
        self.watch = StateWatch(parts, self.at)
        self.watch.install(calls.wait_for_others)
        self.starter = RunStarter(place, parts)
        self.consensus = StepConsensus(place.job, parts)
        self.preemption = preemption
        self._clock = place.seams.clock
        self.keeper: Keeper | None = None
        self._base_due = False
        self._calls = calls
        self._at_exit: Callable[[], None] | None = None
        self._last: Save | None = None  # taken by close()
        self._annotations: Annotations | None = None  # the last ones
        self._audit: RecomputeAudit | None = None
        preemption.install()
        self.is_open = True

    # --- The beginning ------------------------------------------------------------------

    def resume(
        self, step: int | None, *, strict: bool, initial: InitialState | None = None
    ) -> Recovery:
        """Restore a state, and open a timeline for it."""
        parts = self.parts
        for participant in parts.participants:
            # Before finish_captures(), which would end a base of several steps that is undone here
            # anyway.
            participant.go_back()
        parts.saver.finish_captures()
        if self.keeper is not None:
            # Bases of the current timeline must be durable or failed before a new timeline fences
            # them off.
            with parts.channel.going_back(step):
                self.keeper.wait(None)
        start_s = self._clock.monotonic_s()
        own = self.at.timeline > 0
        trained = own and self.watch.has_moved()
        resumed, only_in_memory = self.starter.resume(step, strict=strict, own=own, trained=trained)
        begun = None
        if initial is not None and resumed.base is None:
            # Before anything is compared with the state that training begins with.
            begun = initial.load(parts.state.values, strict=strict)
        parts.updates.restored(resumed.lsn)
        self.at.step = resumed.step
        surveys = parts.reads_marks or only_in_memory
        survey = parts.state.survey() if surveys else None
        parts.state.coverage.descends_from = resumed.descends_from
        verified = resumed.base if resumed.source == "disk" else None
        self._start_timeline(resumed.timeline, resumed.exact, verified, survey)
        # A base that is on no disk yet is saved again at the next step.
        self._base_due = only_in_memory
        self.watch.started(survey, fresh=resumed.base is None)
        led_from = resumed.led_from(parts.state.ranks.world)
        restored = RestoredState(resumed, led_from, survey, only_in_memory, again=own)
        for participant in parts.participants:
            participant.restored(restored)
        seconds = self._clock.monotonic_s() - start_s
        found = describe(resumed, seconds, has_data=parts.state.has_data(resumed.base is None))
        found = found if begun is None else begun.told(found)
        for participant in parts.participants:
            participant.recovered(found)
        return found

    def _start_timeline(
        self, timeline: int, exact: bool, verified: BaseId | None = None, seen: Survey | None = None
    ) -> None:
        # Before anything can fail: the timeline was opened and fences off the earlier one, of which
        # no base may be taken any more.
        self.at.timeline = timeline
        self.parts.state.coverage.descends_exactly = exact
        self.consensus.restarted()
        self.parts.keepers.serve(timeline, verified, self.starter.job_session)
        self._use_current_keeper(seen)

    def _use_current_keeper(self, seen: Survey | None = None) -> None:
        service = self.parts.keepers.service
        assert service is not None
        self.parts.start(service.beginning_at(self.at.step, self.parts.state.exact, seen))
        # Last: after an interrupt before this line, the next call repeats the whole method.
        self.keeper = service.keeper
        self._finish_at_exit(service.keeper)

    def _ready(self) -> None:
        """Raise what has failed in the background; begin a timeline, or replace a lost keeper."""
        self.parts.channel.check()
        self.starter.live_state.check()
        if self.keeper is None:
            self._start_timeline(self.starter.start_fresh(), exact=True)
        elif self.parts.keepers.lost is not None:
            with self.parts.saver.stalled("keeper"):
                self._replace_keeper()
        else:
            # Without a loss, too: an interrupt may have come between a replacement and its first
            # use.
            self._replace_keeper()

    def _replace_keeper(self) -> None:
        keepers = self.parts.keepers
        replaced = keepers.replace_if_lost(self.at.timeline, self.at.step)
        # An interrupt may have left a keeper that was replaced, but not yet taken into use.
        if replaced or self.keeper is not keepers.current:
            self._use_current_keeper()
            self._base_due = self._base_due or self.is_alone

    # --- A step -------------------------------------------------------------------------

    def step(self, metrics: Mapping[str, float]) -> None:
        """End a step, and take a base if one is due.

        Args:
            metrics: for the base of this step, if one is taken.
        """
        # Count first: a caller that handles an error raised below has still taken this step.
        self.at.step += 1
        self.parts.state.trains_in = threading.get_ident()
        # Before anything can fail: the ranks' agreement is a collective call, and a rank that
        # skipped it would answer with the next collective call of its training.
        self.preemption.agree(self.at.step)
        for participant in self.parts.participants:
            participant.step_ends()
        with self.consensus.participating(self.at.step):
            self.parts.updates.settle()
            self.watch.step_ended()
            with self.parts.channel.raising_storage_errors_last():
                self._end_step(metrics)

    def _end_step(self, metrics: Mapping[str, float]) -> None:
        self._ready()
        self._annotate(metrics)
        survey = self.watch.survey() if self.watch.surveys else None
        if survey is not None:
            self.watch.marked(survey)
        mark = Mark(self.at, survey)
        self._mark(mark)
        # Before the ranks decide: a base that is agreed on there is not the one in progress.
        busy = any(one.is_busy for one in self.parts.participants)
        needed, due = self.consensus.decide(self.at.step)
        self._base_due = needed or self._base_due
        if due and busy:
            for participant in self.parts.participants:
                participant.base_deferred()
        if due or self._base_due:
            self._take_due_base(survey, busy=busy, needed=needed)
        elif self.parts.keepers.lost is None:
            self.parts.saver.park(mark)
        for participant in self.parts.participants:
            participant.step_done(self.at.step)
        self.preemption.step_ended(self.at.step, self.save_last)

    def _mark(self, mark: Mark) -> None:
        """Let all participants handle a step mark, and know of a base that was taken there."""
        for participant in self.parts.participants:
            if participant.mark(mark):
                self.watch.count_untracked_write()
        for save in [one.replaced_base for one in self.parts.participants]:
            if save is not None:
                self._tell_taken(save)

    def _take_due_base(self, survey: Survey | None, *, busy: bool, needed: bool) -> None:
        """Take the base that is due, or postpone it.

        A single rank postpones it while a base of several steps is under way or the keeper is
        missing. Several ranks, all of which must take a base at the same step, leave out one that
        is due by the interval while another is under way.
        """
        if self.is_alone:
            postponed = busy or self.parts.keepers.lost is not None
        else:
            postponed = busy and not needed
        # Read before it is cleared below: a base that something required goes to disk.
        in_memory = not self._base_due and self.parts.options.stays_in_memory(self.at.step)
        self._base_due = postponed and self.is_alone
        if not postponed:
            self.take(survey, show=False, in_memory=in_memory, needed=needed)

    def audited(self, compute: Callable[[], _Result], fraction: float) -> _Result:
        """Compute the gradients of the step in progress, of sampled steps twice."""
        if self._audit is None:
            # Imported when it is used.
            from everstep.trainer.checks.recompute import RecomputeAudit

            parts = self.parts
            self._audit = RecomputeAudit(
                parts.state, parts.channel, parts.run_id, rank_vote(), parts.saver.gate
            )
        return self._audit.run(compute, self.at.step + 1, fraction)

    # --- Bases --------------------------------------------------------------------------

    def save(self, metrics: Mapping[str, float], note: str) -> Save:
        """Take a base of the last step, and annotate it."""
        self._ready()
        self._annotate(metrics, note)
        self.parts.updates.settle()
        survey, exact = self.watch.survey_for_save()
        return self.take(survey, show=True, exact=exact)

    def _annotate(self, metrics: Mapping[str, float], note: str = "") -> None:
        """Pass metrics and a note for the base of the current step to the keeper.

        Before the base is taken, so that it counts as durable only together with them.
        """
        # The ranks' metrics differ, and a base has only one set of them.
        if not (metrics or note) or self.parts.state.ranks.rank != COORDINATOR:
            return
        earlier = self._annotations
        at = self.at
        if earlier is None or (earlier.timeline, earlier.step) != (at.timeline, at.step):
            earlier = Annotations(at.timeline, at.step, {}, "")
        self._annotations = replace(
            earlier, metrics={**earlier.metrics, **metrics}, note=note or earlier.note
        )
        assert self.keeper is not None
        self.keeper.annotate(self._annotations)

    def take(
        self,
        survey: Survey | None,
        *,
        show: bool,
        in_memory: bool = False,
        exact: bool = True,
        needed: bool = False,
    ) -> Save:
        """Take a base of the current step.

        Args:
            survey: survey of the state; None to make one where it is needed.
            show: take a base of this very step, even if the method captures over several.
            in_memory: keep the base in the memory of keepers only.
            exact: the state may be called exact.
            needed: the log of some rank needs it.
        """
        participants = self.parts.participants
        for participant in participants:
            participant.base_requested(self.at.step)
        captured = any(one.needs_capture for one in participants)
        identity = self.at.identity(exact)
        request = BaseRequest(identity, survey, show, in_memory, captured, needed)
        save = self.parts.source.take(request)
        self._tell_taken(save)
        return save

    def _tell_taken(self, save: Save) -> None:
        # The log last: it begins at a base that the keeper has completely, and may wait for it.
        for participant in reversed(self.parts.participants):
            participant.base_taken(save)

    def save_last(self, timeout_s: float) -> None:
        """Take a last base unless it is refused, and wait for it."""
        if not self._last_base_is_refused():
            self.take(None, show=True)
        self.wait(timeout_s)

    def _last_base_is_refused(self) -> bool:
        """Return True, with a message, if the state is not worth a last base."""
        participants = self.parts.participants
        for one in participants:
            one.finish_records()  # gradients of the last step may still be checked
        return any(one.refuses_last_base(self.at.step) for one in participants)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until all bases are durable; take one in place of those lost with a keeper."""
        self.parts.saver.finish_captures()
        # Of this moment: the bases that are waited for are with it, even if it is replaced below.
        keeper = self.keeper
        if keeper is not None:
            wait_for_bases(self.parts, keeper, timeout_s)
            if self.parts.keepers.replace_if_lost(self.at.timeline, insist=True):
                self._replace_lost_base(keeper, timeout_s)
        self.parts.channel.check()

    def _replace_lost_base(self, lost: Keeper, timeout_s: float | None) -> None:
        """Take a base in place of those lost with a keeper, and wait for it.

        Only a single rank does so at once. Several ranks take their next base together as usual.
        """
        self._use_current_keeper()
        if (annotations := self._annotations) is not None and self.keeper is not None:
            self.keeper.annotate(annotations)
        alone = self.is_alone
        again = alone and self.watch.is_at_a_step
        self._base_due = not again if alone else self._base_due
        save = self.take(self.watch.survey_at_mark, show=True) if again else None
        self.parts.saver.finish_captures()
        assert self.keeper is not None
        self.keeper.wait(timeout_s)
        _report_second_loss(save, self.parts.keepers.lost, self.parts.channel)
        if not alone:
            _report_base_lost_on_all_ranks(lost, self.parts.channel)

    # --- The end ------------------------------------------------------------------------

    def release(self, *, stay: bool = False) -> None:
        """Release everything; the keeper may ``stay`` with its memory."""
        # First: a call of another thread, or of a signal handler, must find it closed.
        self.is_open = False
        self.parts.state.close()
        self._disarm()
        self.preemption.close()
        self.parts.close(stay=stay)

    @property
    def is_alone(self) -> bool:
        """True if this process trains without other ranks."""
        return self.parts.state.ranks.world == 1

    @property
    def keeper_is_needed(self) -> bool:
        """True if the keeper holds data that other processes may need after this one."""
        ranks = self.parts.state.ranks
        logs = self.parts.options.logs and ranks.world > 1
        return logs or len(set(ranks.nodes)) > 1 or self.parts.options.method.in_memory

    @property
    def in_words(self) -> str:
        """Settings and step, for ``repr``."""
        chosen = self.parts.options
        ended = " (given up: bases alone)" if self.parts.refusals.is_over else ""
        settings = f"{chosen.method_name}{ended}, {chosen.every.in_words}"
        return f"{settings}, keep {chosen.keep.in_words}; at step {self.at.step}"

    def stats(self) -> Stats:
        """Return the costs and results of checkpointing so far."""
        return stats_of(self.at.step, self.parts.keepers, self.parts.participants)

    # --- At the exit of the process -----------------------------------------------------

    def _finish_at_exit(self, keeper: Keeper) -> None:
        """Finish ``keeper`` at the exit of this process, if close() is not called before."""
        self._disarm()
        # Nothing here may refer to the session: one that is dropped must not live until the exit,
        # or its signal handlers would.
        calls = self._calls
        abandon = self.watch.abandon

        def end_training() -> None:
            calls.last()
            abandon()

        self._at_exit = partial(
            finish_at_exit,
            self.parts,
            keeper,
            end_training,
            os.getpid(),
            sys.stderr,
            stay=self.keeper_is_needed,
        )
        atexit.register(self._at_exit)

    def _disarm(self) -> None:
        """Do nothing at exit."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = None

    # --- By close() ---------------------------------------------------------------------

    def close(self) -> None:
        """Take a last base if state would be lost otherwise, wait until all is durable, and release
        everything.

        Raises:
            EverstepError: An operation in the background has failed, and the policy is to raise.
        """
        failed = list[EverstepError]()
        stay = False
        completed = False
        try:
            stay = self._take_last(failed)
            self._wait_until_over(failed)
            _report_lost_steps(self, failed)
            completed = True
        finally:
            # Also after an interrupt: the keeper must then keep what is on no disk.
            stay = stay or self._must_stay(completed=completed)
            self.release(stay=stay)
        _raise_first(failed)

    def _take_last(self, failed: list[EverstepError]) -> bool:
        """Take the last base if state would be lost without it.

        A log in memory and captures of every step end with this process.

        Returns:
            True if the keeper must stay, since nothing else has that state.
        """
        parts = self.parts
        if self.keeper is None:  # no timeline was opened, or an interrupt came while it was
            return self.at.timeline > 0
        for one in parts.participants:
            one.finish_records()
        self.consensus.flush_errors()
        self._persist_parked(failed)
        # The live state is that of no step, so a base of it would be wrong.
        if self.starter.live_state.is_mixed:
            return False
        survey = self.watch.survey_at_mark
        if parts.saver.last_is_in_memory:
            return self._save_memory_base(survey, failed)
        step = self.at.step
        lacking = [one for one in parts.participants if one.lacks_base_of(step)]
        if not lacking or any(one.refuses_last_base(step) for one in lacking):
            return False
        if survey is None:
            return _stays_for_log(parts.run, step, parts.options, self.keeper)
        self._take_last_base(survey, failed)
        return False

    def _persist_parked(self, failed: list[EverstepError]) -> None:
        """Make the newest capture of a schedule durable, as captures end with this process.

        The loss of the keeper is no failure yet if a base can still be taken: the next wait reports
        it and takes one.
        """
        saver = self.parts.saver
        if not saver.parks:
            return
        try:
            saver.finish_captures()
            saver.persist_parked()
        except EverstepError as error:
            if not (self.watch.is_at_a_step and saver.is_keeper_loss(error)):
                failed.append(error)

    def _save_memory_base(self, survey: Survey | None, failed: list[EverstepError]) -> bool:
        """Write a last base to disk when the newest one is in the memory of keepers only.

        Args:
            survey: state at the last step mark; None if it was changed since.
            failed: list that receives a failure.

        Returns:
            True if the keeper must stay because no base was written. Prints a message then.
        """
        if survey is not None:
            return not self._take_last_base(survey, failed) or bool(failed)
        log_or_print(
            f"{self.parts.run}: no last base is taken: the state was changed "
            "since the last step (close() before the change takes one). The newest base stays in "
            "the keeper's memory for a while: resume within that time",
            level=logging.WARNING,
        )
        return True

    def _take_last_base(self, survey: Survey, failed: list[EverstepError]) -> bool:
        """Take the last base; return True if it was started, else add the failure to ``failed``."""
        try:
            self._last = self.take(survey, show=True)
        except EverstepError as error:
            failed.append(error)
            return False
        return True

    def _wait_until_over(self, failed: list[EverstepError]) -> None:
        """Wait until everything is durable or has failed; add the failures to ``failed``.

        One failed base is no reason to abandon the next ones.
        """
        while True:
            try:
                self.wait(None)
                if not self._retake_failed_base(failed):
                    return
            except EverstepError as error:
                failed.append(error)
                # Another wait would last as long, for the same storage or keeper.
                if isinstance(error, DeadlineError) or self.parts.keepers.unavailable:
                    return

    def _retake_failed_base(self, failed: list[EverstepError]) -> bool:
        """Capture the last base if the keeper's replica has failed to make it.

        The replica may have stopped, or the base that it was to begin with has failed.

        Returns:
            True if a base was started.
        """
        if not any(one.forget_failed_base() for one in self.parts.participants):
            return False
        survey = self.watch.survey_at_mark
        return survey is not None and self._take_last_base(survey, failed)

    def _must_stay(self, *, completed: bool) -> bool:
        """Return True if the keeper must keep running.

        That is the case if the last base has failed or was interrupted, or was never tried because
        a resume was interrupted. Prints a message if only the keeper has the log.

        Args:
            completed: True if ``close()`` was not interrupted.
        """
        # Another rank may lack a base that is not durable, and its keeper stays with its log. A
        # resume of all ranks needs this rank's log, too.
        lost = self._last is not None and not self._last.is_durable
        if self.keeper_is_needed and (lost or not completed):
            return True
        if not any(one.holds_steps for one in self.parts.participants):
            return False
        return _report_log_holder(self.keeper, f"{self.parts.run}: no last base", sys.stderr)


def wait_for_bases(components: Components, keeper: Keeper, timeout_s: float | None) -> None:
    """Wait until all bases are durable, including those taken in place of lost ones."""
    keeper.wait(timeout_s)
    if any(one.retake_lost_base() for one in components.participants):
        components.saver.finish_captures()
        keeper.wait(timeout_s)


def _raise_first(failed: Sequence[EverstepError]) -> None:
    """Raise the first failure and log the others."""
    for other in failed[1:]:
        _log.error("another background operation failed: %s", other)
    if failed:
        raise failed[0]


def finish_at_exit(
    components: Components,
    keeper: Keeper,
    abandon: Callable[[], None],
    pid: int,
    shown: Any,
    *,
    stay: bool = False,
) -> None:
    """Make the last base durable when a script ends without ``close()``.

    The keeper keeps the log after that base in memory, as if this process had crashed.

    Args:
        abandon: function to call first; gives up operations in progress among several ranks.
        pid: process that made the Checkpointer.
        shown: stream for messages.
        stay: True to leave everything to the keeper, which keeps the log, too. Another rank may
            have died, and all ranks need this one's log to resume.
    """
    if os.getpid() != pid:
        return  # a forked child has inherited the exit handler, but owns nothing
    # First: a daemon thread must not begin another base, and other ranks may never reply.
    abandon()
    saver = components.saver
    if stay:
        # Copies must end before this process does; the keeper knows which captures are incomplete.
        with contextlib.suppress(EverstepError):
            saver.finish_captures()
        _report_lost_keeper(keeper, shown)
        keeper.close(stay=True)
        return
    while True:
        try:
            saver.finish_captures()
            saver.persist_parked()
            wait_for_bases(components, keeper, None)
            break
        except EverstepError as error:
            if not saver.is_keeper_loss(error):
                log_or_print(
                    f"a base was lost at exit: {error}", level=logging.WARNING, stream=shown
                )
            # Other errors are taken from the queue one by one; after this one the wait would hang
            # again.
            if isinstance(error, DeadlineError):
                break
    _report_lost_keeper(keeper, shown)
    stays = any(one.holds_steps_at_exit for one in components.participants)
    if stays:
        _report_log_holder(keeper, "this script ended without close()", shown)
    keeper.close(stay=stays)


def _report_log_holder(keeper: Keeper | None, why: str, shown: Any) -> bool:
    """Print which process holds the log after the newest base; return False if none does."""
    if keeper is None or keeper.pid is None or keeper.lost is not None:
        return False
    log_or_print(
        f"{why}: the steps after the newest base are in the memory of the keeper "
        f"(process {keeper.pid}) for a while; a resume() within that time restores them",
        level=logging.WARNING,
        stream=shown,
    )
    return True


def _report_lost_keeper(keeper: Keeper, shown: Any) -> None:
    """Print the loss of a keeper that will not be replaced."""
    if keeper.lost is not None:
        steps = ", ".join(map(str, sorted(keeper.lost_steps)))
        bases = f" (bases of steps {steps})" if steps else ""
        why = f"{keeper.lost.message}; resume() continues from the newest durable base"
        log_or_print(
            f"data that was not durable{bases} was lost at exit: {why}",
            level=logging.WARNING,
            stream=shown,
        )


def _stays_for_log(run: PurePath, step: int, options: Options, keeper: Keeper) -> bool:
    """Return True if the keeper must stay, because no last base can be taken of the last step.

    The state was changed since the last step mark, so only the log in the keeper's memory has that
    step. Prints a message.
    """
    if options.log is None or options.log.to != "memory":
        return False
    stays = keeper.pid is not None and keeper.lost is None
    if keeper.lost is not None and keeper.replaced:
        log_or_print(
            f"{run}: no last base of step {step} is taken: another process has taken "
            f"over the run, and continues without the steps trained here ({keeper.lost.message})",
            level=logging.WARNING,
        )
        return False
    where = f"is in the keeper's memory for {options.keeper.linger_s:g} s: resume within that time"
    if not stays:
        whose = "this process only" if keeper.pid is None else "a keeper that was lost"
        where = f"was in the memory of {whose}, and is lost with it"
    log_or_print(
        f"{run}: no last base of step {step} is taken: the state was changed since "
        f"(close() before the change takes one). The log since the newest base {where}",
        level=logging.WARNING,
    )
    return stays


def _report_lost_steps(session: Session, failed: list[EverstepError]) -> None:
    """Report the steps lost because a lost keeper could not be replaced before training ended.

    A keeper that now serves another process has been reported already.

    Args:
        failed: list that receives the error first, if the policy is to raise.
    """
    step = session.at.step
    options = session.parts.options
    keepers = session.parts.keepers
    channel = session.parts.channel
    why = keepers.attempts.why_not
    durable_step = keepers.stats.durable_step
    if why is None or isinstance(why, FencedError) or step == (durable_step or 0):
        return
    base = (
        "there is no base" if durable_step is None else f"the newest base is of step {durable_step}"
    )
    but = ", except for those in the log on disk" if options.logs and options.log.on_disk else ""
    error = KeeperError(
        f"training has ended at step {step} without a keeper, because the lost one could not be "
        f"replaced: as far as is known, {base}, and later steps are lost{but}. {why.message}",
        step=step,
        path=why.path,
        hint=why.hint,
    )
    channel.post(error, first=True)
    try:
        channel.check()
    except EverstepError as raised:
        failed.insert(0, raised)


def _report_second_loss(
    save: Save | None, lost: EverstepError | None, channel: BackgroundChannel
) -> None:
    """Report that the base taken in place of a lost one was lost with the next keeper."""
    if save is None or lost is None or save.is_durable:
        return
    channel.post(
        KeeperError(
            f"two keepers in a row were lost: no base of step {save.step} is durable. The second: "
            f"{lost.message}",
            step=save.step,
            hint="check with dmesg whether they were killed for memory; each call of save() or "
            "wait() tries again",
        )
    )


def _report_base_lost_on_all_ranks(keeper: Keeper, channel: BackgroundChannel) -> None:
    """Report a base that no rank has because it was lost with this rank's keeper.

    The other ranks learn it from their keepers.
    """
    if keeper.lost is None or not keeper.lost_steps:
        return
    steps = sorted(keeper.lost_steps)
    bases = f"the base{'s'[: len(steps) > 1]} of step {', '.join(map(str, steps))}"
    channel.post(
        KeeperError(
            f"no rank has {bases}: {keeper.lost.message}",
            step=steps[-1],
            hint="training goes on; the next base is taken as usual",
        )
    )
