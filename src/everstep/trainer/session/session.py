"""One life of a Checkpointer: what happens at a resume, at a step mark, at a save, and at the end.

A session drives participants (:mod:`everstep.trainer.participant`). It calls each of them at the
same events, and knows none by name. The order of the events within a call is what this module is
about; each participant says what it does there.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from everstep.commit import BaseId
from everstep.config import Options
from everstep.link import Save
from everstep.restore.start import Recovery, describe
from everstep.state.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.job import RunPlace, seams_with_copies
from everstep.trainer.participant import BaseRequest, Mark, RestoredState
from everstep.trainer.session.calls import CallGuard
from everstep.trainer.session.closing import Closing, report_lost_bases, wait_for_bases
from everstep.trainer.session.components import Components, build_components
from everstep.trainer.session.preemption import PreemptionHandler
from everstep.trainer.session.start import RunStarter
from everstep.trainer.session.state_watch import Position, StateWatch
from everstep.trainer.session.stats import Stats, stats_of
from everstep.trainer.session.step_consensus import StepConsensus


def open_session(
    options: Options,
    place: RunPlace,
    state: State,
    preemption: PreemptionHandler,
    calls: CallGuard,
) -> Session:
    """Open the run folder, build the components, and print what they will take.

    Raises:
        OutOfSpaceError: A budget is too small.
        UnsupportedStateError, OptionError: The method cannot repeat some updates.
        StorageError: The folder or a place for copies cannot be used.
    """
    # Before the run is opened: a new folder becomes one of the run whose copies the places contain.
    copies = () if place.job is not None else place.tiers
    place = replace(place, reading=seams_with_copies(copies, place.seams, place.run))
    components = build_components(options, place, state)
    components.keepers.terms.copy_to(place.tiers)
    return Session(components, place, preemption, calls)


class Session:
    """Drive the components of one training process.

    Args:
        components: what the method of the Checkpointer needs.
        place: run folder, ranks and places for copies.
        preemption: signals that announce the end of the job.
        calls: calls of other threads.

    Attributes:
        at: step and timeline of training.
        keeper: keeper in use; None before the first timeline.
        is_open: False once everything is released.
    """

    def __init__(
        self,
        components: Components,
        place: RunPlace,
        preemption: PreemptionHandler,
        calls: CallGuard,
    ) -> None:
        self.parts = parts = components
        self.at = Position(parts.run_id, parts.state, parts.updates)
        self.watch = StateWatch(parts, self.at)
        self.watch.install(calls.wait_for_others)
        self.starter = RunStarter(place, parts)
        self.consensus = StepConsensus(place.job, parts)
        self.preemption = preemption
        self._clock = place.seams.clock
        self.keeper: Keeper | None = None
        self._base_due = False
        self._closing = Closing(self, calls)
        preemption.install()
        self.is_open = True

    # --- The beginning ------------------------------------------------------------------

    def resume(self, step: int | None, *, strict: bool) -> Recovery:
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
        return describe(resumed, seconds, has_data=parts.state.has_data(resumed.base is None))

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
        self._closing.arm(service.keeper)

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

    def step(self) -> None:
        """End a step, and take a base if one is due."""
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
                self._end_step()

    def _end_step(self) -> None:
        self._ready()
        survey = self.watch.survey() if self.watch.surveys else None
        if survey is not None:
            self.watch.marked(survey)
        mark = Mark(self.at.identity(), survey)
        for participant in self.parts.participants:
            if participant.mark(mark):
                self.watch.count_untracked_write()
        # Before the ranks decide: a base that is agreed on there is not the one in progress.
        busy = any(one.is_busy for one in self.parts.participants)
        needed, due = self.consensus.decide(self.at.step)
        self._base_due = needed or self._base_due
        if due and busy:
            for participant in self.parts.participants:
                participant.base_deferred()
        if due or self._base_due:
            self._take_due_base(survey, busy=busy)
        elif self.parts.keepers.lost is None:
            self.parts.saver.park(self.at.identity())
        self.preemption.step_ended(self.at.step, self.save_last)

    def _take_due_base(self, survey: Survey | None, *, busy: bool) -> None:
        """Take the base that is due, or postpone it.

        A single rank postpones it while a base of several steps is under way or the keeper is
        missing. Several ranks never postpone: all of them must take a base at the same step.
        """
        postponed = busy or (self.is_alone and self.parts.keepers.lost is not None)
        # Read before it is cleared below: a base that something required goes to disk.
        in_memory = not self._base_due and self.parts.options.stays_in_memory(self.at.step)
        self._base_due = postponed and self.is_alone
        if not postponed:
            self.take(survey, show=False, in_memory=in_memory)

    # --- Bases --------------------------------------------------------------------------

    def save(self) -> Save:
        """Take a base of the last step."""
        self._ready()
        self.parts.updates.settle()
        survey, exact = self.watch.survey_for_save()
        return self.take(survey, show=True, exact=exact)

    def take(
        self, survey: Survey | None, *, show: bool, in_memory: bool = False, exact: bool = True
    ) -> Save:
        """Take a base of the current step.

        Args:
            survey: survey of the state; None to make one where it is needed.
            show: take a base of this very step, even if the method captures over several.
            in_memory: keep the base in the memory of keepers only.
            exact: the state may be called exact.
        """
        participants = self.parts.participants
        for participant in participants:
            participant.base_requested(self.at.step)
        captured = any(one.needs_capture for one in participants)
        identity = self.at.identity(exact)
        save = self.parts.source.take(BaseRequest(identity, survey, show, in_memory, captured))
        # The log last: it begins at a base that the keeper has completely, and may wait for it.
        for participant in reversed(participants):
            participant.base_taken(save)
        return save

    def save_last(self, timeout_s: float) -> None:
        """Take a last base unless it is refused, and wait for it."""
        refused = [one.refuses_last_base(self.at.step) for one in self.parts.participants]
        if not any(refused):
            self.take(None, show=True)
        self.wait(timeout_s)

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
        alone = self.is_alone
        again = alone and self.watch.is_at_a_step
        self._base_due = not again if alone else self._base_due
        save = self.take(self.watch.survey_at_mark, show=True) if again else None
        self.parts.saver.finish_captures()
        assert self.keeper is not None
        self.keeper.wait(timeout_s)
        report_lost_bases(save, lost, self.parts.keepers, self.parts.channel, alone=alone)

    # --- The end ------------------------------------------------------------------------

    def close(self) -> None:
        """Take a last base if state would be lost otherwise, wait for it, and release all."""
        self._closing.close()

    def release(self, *, stay: bool = False) -> None:
        """Release everything; the keeper may ``stay`` with its memory."""
        # First: a call of another thread, or of a signal handler, must find it closed.
        self.is_open = False
        self.parts.state.close()
        self._closing.disarm()
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

    def stats(self) -> Stats:
        """Return the costs and results of checkpointing so far."""
        return stats_of(self.at.step, self.parts.keepers, self.parts.participants)
