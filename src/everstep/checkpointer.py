"""The public :class:`Checkpointer`: the facade of the training process.

A Checkpointer validates its arguments, builds the components of the training process
(:mod:`everstep.trainer.session.components`) and drives them: at a resume, at each step mark, when a
base is taken, and at the end. It runs in the training process; the keeper process writes to disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from everstep.commit.lineage import BaseId
from everstep.config.given import named
from everstep.config.options import (
    Budget,
    Every,
    FailurePolicy,
    KeeperOptions,
    LogOptions,
    Method,
    Options,
    Preemption,
    validate_options,
)
from everstep.errors import EverstepError
from everstep.format.header import ShardIdentity
from everstep.link.save import Save
from everstep.restore.start.report import Recovery, describe
from everstep.run.folder import run_path
from everstep.seams import Seams
from everstep.state.survey.ownership import DeclaredUpdate
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.tiers.options import PeerOptions, TierOptions, split_peers, validate_tiers
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.checks.first_batches import FirstBatches
from everstep.trainer.job.copies import seams_with_copies
from everstep.trainer.job.job import join_job, prepare_run
from everstep.trainer.schedule.saver import ScheduledSaver
from everstep.trainer.session.calls import CallGuard, exclusive, refuse_reentry
from everstep.trainer.session.closing import (
    AtExit,
    must_stay,
    needs_last_base,
    persist_parked,
    raise_first,
    report_lost_bases,
    report_lost_steps,
    retake_failed_base,
    save_memory_base,
    skips_last_base,
    stays_for_log,
    take_last_base,
    wait_and_collect,
    wait_for_bases,
)
from everstep.trainer.session.components import build_components
from everstep.trainer.session.guards import (
    check_platform,
    check_resume,
    check_timeout,
    check_usable,
    close_earlier,
    refuse_pickling,
)
from everstep.trainer.session.preemption import PreemptionHandler, rank_vote
from everstep.trainer.session.start import LiveStateGuard, RunStarter
from everstep.trainer.session.state_watch import StateWatch
from everstep.trainer.session.stats import RecoverableSteps, Stats, stats_of
from everstep.trainer.session.step_consensus import StepConsensus

__all__ = ["Checkpointer"]

_live = weakref.WeakValueDictionary[tuple[PurePath, int], "Checkpointer"]()


class Checkpointer:
    """Checkpoints a training run, and resumes it.

    A Checkpointer takes a *base* (a snapshot of the complete state) every few steps. With a method
    that has a gradient log, it also records the gradients of every step, so that no step is lost
    between two bases. A separate *keeper* process writes both to disk while training goes on, and
    it survives a crash of the training process.

    Call :meth:`resume` once before the training loop, and :meth:`step` at the end of each step::

        with everstep.Checkpointer("runs/a", {"model": model, "optimizer": optimizer}) as ckpt:
            ckpt.resume()
            for batch in loader:
                ...
                optimizer.step()
                ckpt.step()

    In a job of several ranks, every rank makes a Checkpointer with the same options and calls the
    same methods at the same steps.

    Args:
        path: run folder. It is created if it does not exist. A folder with other contents is
            refused.
        state: objects to save, by name: modules, optimizers, any object with ``state_dict`` and
            ``load_state_dict``, or plain data. Plain data is read from this mapping at each save
            and written back to it at a resume. RNG states are always saved, too.
        method: name of a preset (:data:`everstep.presets`) or a :class:`Method`.
        every: interval between the bases that :meth:`step` takes: a number of steps, a time such as
            ``"10min"``, ``"auto"`` (the interval that wastes the least training time according to
            measurements), or None to take bases only in :meth:`save`.
        keep: number of bases to keep.
        budget: upper bounds for host memory, disk space, and bytes written per day.
        on_failure: policy for errors in the background: ``"raise"`` them at the next call,
            ``"warn"``, or a function to call with the error.
        progress_timeout_s: seconds without any progress after which an operation counts as hung.
            Time during which the whole job is paused does not count.
        keeper: options of the keeper process: where it runs, and how long it stays after training.
        log: options of the gradient log. Only for methods that have one.
        declared: patterns (``"ema/*"``) of entries that change only between
            :meth:`before_update` and :meth:`after_update`. A mapping may give, for each pattern,
            the function that makes the change: the log then omits these entries, and replay calls
            the function. It takes no arguments, reads only parameters, buffers and the entries that
            it covers, and is deterministic.
        static: patterns of entries that never change. A change is an error.
        tiers: additional places for copies of the bases: URLs (``"s3://bucket/prefix"``),
            directories on other disks, or :class:`~everstep.tiers.options.TierOptions`. With
            several ranks also ``"peer"`` or :class:`~everstep.tiers.options.PeerOptions`: the
            memory of the keeper of the same local rank on the next node. The keeper makes the
            copies in the background. :meth:`resume` reads from them if the run folder lacks a base.
        preempt: handling of the signals that announce the end of a job: True (``Preemption()``) or
            a :class:`~everstep.config.options.Preemption` takes a last base at the next
            :meth:`step` and then sets :attr:`preempted`. False leaves signals alone.
        seams: file system, clock and other interfaces to the world. For tests.

    Raises:
        OptionError: An argument is invalid.
        UnsupportedStateError: Some entries of the state cannot be stored. The error lists them.
        StorageError: The run folder cannot be used.
        StateError, DeadlineError: The other ranks of the job are unknown, or do not arrive in time.
    """

    @named("Checkpointer")
    def __init__(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        method: str | Method = "lazy",
        every: int | str | Every | None = 100,
        keep: int = 3,
        budget: Budget | None = None,
        on_failure: FailurePolicy = "raise",
        progress_timeout_s: float = 120.0,
        keeper: KeeperOptions | None = None,
        log: LogOptions | None = None,
        declared: Sequence[str] | Mapping[str, DeclaredUpdate | None] = (),
        static: Sequence[str] = (),
        tiers: Sequence[str | PurePath | TierOptions | PeerOptions] = (),
        preempt: bool | Preemption = False,
        seams: Seams | None = None,
    ) -> None:
        self._open = False
        self._pid = os.getpid()
        check_platform()
        self._options: Options = validate_options(
            method=method,
            every=every,
            keep=keep,
            budget=budget,
            on_failure=on_failure,
            progress_timeout_s=progress_timeout_s,
            keeper=keeper,
            log=log,
        )
        self._run = run_path(path)
        self._seams = Seams.parse(seams)
        self._preemption = PreemptionHandler(
            Preemption.parse(preempt), self._seams.clock, rank_vote()
        )
        named, peers = split_peers(tiers, self._options.method.tiers)
        places = validate_tiers(named, keep, peers, logs=self._options.logs)
        job = join_job(self._seams, progress_timeout_s)
        # The ranks open their run folders first: which entries a rank writes depends on which
        # ranks share a folder.
        self._info, open_run = prepare_run(
            job, self._options, self._seams, self._run, places, peers
        )
        self._state = State(state, declared=declared, static=static, ranks=self._info)
        self._state.replays_fast = self._options.log.replay == "fast"
        self._live_key = (self._run, self._info.rank)
        self._calls = CallGuard(progress_timeout_s)
        # Before a keeper is attached: the earlier Checkpointer still holds it.
        close_earlier(_live, self._live_key)
        reading = seams_with_copies(() if job else places, self._seams, self._run)
        components = build_components(
            self._options, self._run, open_run, self._state, self._seams, peers, places, job
        )
        components.keepers.copy_to(places)
        self._components = components
        self._run_id = components.run_id
        self._channel = components.channel
        self._lane = components.lane
        self._keepers = components.keepers
        self._saver = components.saver
        self._recorder = components.recorder
        self._updates = components.updates
        self._cadence = components.cadence
        self._replica_bases = components.replica_bases
        self._multistep = components.multistep
        self._state_watch = StateWatch(self._state, components, self._options)
        self._state_watch.install(self._consumed, self._calls.wait_for_others)
        self._keeper: Keeper | None = None
        self._timeline = 0
        self._step = 0
        self._base_due = False
        self._live_state = LiveStateGuard()
        self._at_exit = AtExit(self._calls)
        self._starter = RunStarter(
            job,
            self._keepers,
            reading,
            self._run,
            self._run_id,
            self._state,
            components.ring,
            self._live_state,
            timeout_s=progress_timeout_s,
        )
        self._consensus = StepConsensus(job, self._options, components, self._state)
        self._recoverable = RecoverableSteps(self._keepers, self._saver, self._recorder)
        self._last: Save | None = None
        self._first_batches: FirstBatches | None = None
        self._preemption.install()
        # Last: a constructor that fails leaves no Checkpointer that could be closed or used.
        self._open = True
        _live[self._live_key] = self

    __reduce__ = refuse_pickling

    def __repr__(self) -> str:
        if not hasattr(self, "_live_key"):  # the constructor has raised an error
            return "<Checkpointer, not made>"
        chosen = self._options
        closed = "" if self._open else ", closed"
        settings = f"{chosen.method_name}, {chosen.every.in_words}, keep {chosen.keep}"
        return f"<Checkpointer of {self._run}: {settings}; at step {self._step}{closed}>"

    @named("resume", strict=bool)
    @exclusive("resume")
    def resume(self, step: int | None = None, *, strict: bool = True) -> Recovery:
        """Restore the newest intact base, replay the log after it, and take over the run.

        Every byte of a base is verified; a damaged base is skipped in favor of the previous one.
        The resume opens a new timeline: any other process that still works on this run can no
        longer commit or delete anything.

        Args:
            step: step to return to instead of the newest one. A step that only an abandoned branch
                of the run's history contains is found, too, and ``notes`` mentions it. 0 starts
                from scratch.
            strict: refuse a base whose names, shapes or dtypes differ from the live state. With
                False, load the matching entries and report the differences.

        Returns:
            The step that training continues from, and how it was reached.

        Raises:
            RecoveryError: No base can be used although the run has had some, or no base and log
                lead to ``step``.
            MismatchError: The base belongs to a different model. The live state is unchanged.
            StateError, KeeperError, DeadlineError, StorageError
        """
        self._check_open()
        check_resume(step)
        if self._multistep is not None:
            self._multistep.drop("training goes back")
        self._saver.finish_captures()
        if self._keeper is not None:
            # Bases of the current timeline must be durable or failed before a new timeline fences
            # them off.
            with self._channel.going_back(step):
                self._keeper.wait(None)
        start_s = self._seams.clock.monotonic_s()
        own = self._timeline > 0
        trained = own and self._state_watch.has_moved(self._step)
        self._end_first_step()
        resumed, only_in_memory = self._starter.resume(
            step, strict=strict, own=own, trained=trained
        )
        self._updates.restored(resumed.lsn)
        self._step = resumed.step
        base = resumed.base if resumed.source == "disk" else None
        self._cadence.resumed(resumed, again=self._timeline > 0)
        survey = self._state.survey() if self._recorder or only_in_memory else None
        self._state.coverage.descends_from = resumed.descends_from
        self._start_timeline(resumed.timeline, resumed.exact, base, survey)
        # A base that is on no disk yet is saved again at the next step.
        self._base_due = only_in_memory
        self._saver.restored_from_memory = only_in_memory
        on_disk = None if only_in_memory else resumed.base
        self._recoverable.restored(None if on_disk is None else on_disk.step)
        if self._recorder is not None:
            led_from = resumed.led_from(self._state.ranks.world)
            self._recorder.restored(led_from, survey, self._step, on_disk=on_disk is not None)
        self._state_watch.started(survey, fresh=resumed.base is None)
        if resumed.base is not None:
            # Prepare for a capture during the first step, as a base may be due at its end.
            self._saver.warm(survey)
            self._first_batches = FirstBatches(self._state, self._step)
        seconds = self._seams.clock.monotonic_s() - start_s
        return describe(resumed, seconds, has_data=self._state.has_data(resumed.base is None))

    def _end_first_step(self) -> None:
        """Stop watching the batches between a resume and its first step."""
        if self._first_batches is not None:
            self._first_batches.end()
        self._first_batches = None

    @named("rewind", step=int)
    def rewind(self, step: int) -> Recovery:
        """Return to an earlier step within this process, for example after a NaN or a loss spike.

        Equivalent to ``resume(step)``: the state is restored as it was at the end of ``step``, and
        later steps are no longer part of the run's history.

        Raises:
            RecoveryError: No base and log lead to ``step``.
        """
        return self.resume(step)

    @exclusive("step")
    def step(self) -> None:
        """Mark the end of a training step, and take a base if one is due.

        Call it after ``optimizer.step()`` and ``zero_grad()``, where all gradients have been
        consumed. Gradients that are still being accumulated are not part of the state; a resume
        would lose them.

        Raises:
            EverstepError: An operation in the background has failed since the last call, and the
                policy is to raise.
        """
        self._check_open()
        # Count first: a caller that handles an error raised below has still taken this step.
        self._step = self._step + 1
        self._state.trains_in = threading.get_ident()
        # Before anything can fail: the ranks' agreement is a collective call, and a rank that
        # skipped it would answer with the next collective call of its training.
        self._preemption.agree(self._step)
        self._end_first_step()
        with self._consensus.participating(self._step):
            self._updates.settle()
            self._state_watch.step_ended(self._step)
            with self._channel.raising_storage_errors_last():
                self._end_step()

    def _end_step(self) -> None:
        self._ready()
        survey = self._state_watch.survey() if self._state_watch.surveys else None
        if survey is not None:
            self._state_watch.marked(survey)
            if self._recorder is not None:
                self._recorder.mark(survey, self._updates.lsn, self._step)
        under_way = self._multistep is not None and self._multistep.marked(self._identity())
        if self._multistep is not None:
            self._base_due = self._base_due or self._multistep.again is not None
        # After the mark, because training waits for the mark's copies.
        self._saver.warm()
        self._cadence.step_ended()
        needed, due = self._consensus.decide(self._step)
        self._base_due = needed or self._base_due
        if self._multistep is not None and due and under_way:
            self._multistep.stats.deferred += 1
        if due or self._base_due:
            self._take_due_base(survey, under_way=under_way)
        elif isinstance(self._saver, ScheduledSaver) and self._keepers.lost is None:
            self._saver.park(self._identity())
        self._preemption.step_ended(self._step, self._save_last)

    def _take_due_base(self, survey: Survey | None, *, under_way: bool) -> None:
        """Take the base that is due, or postpone it.

        A single rank postpones it while a multi-step base is under way or the keeper is missing.
        Several ranks never postpone: all of them must take a base at the same step.
        """
        alone = self._info.world == 1
        postponed = under_way or (alone and self._keepers.lost is not None)
        in_memory = not self._base_due and self._options.stays_in_memory(self._step)
        self._base_due = postponed and alone
        if not postponed:
            self._take(self._consensus.current_survey(survey), show=False, in_memory=in_memory)

    @property
    def preempted(self) -> bool:
        """True once a signal has announced the end and the last base was taken. Leave the loop."""
        return self._preemption.preempted

    def _save_last(self, timeout_s: float) -> None:
        if not skips_last_base(self._run, self._step, self._recorder, self._state):
            self._take(None, show=True)
        self._wait(timeout_s)

    @named("save")
    @exclusive("save")
    def save(self) -> Save:
        """Take a base of the step that the last call of :meth:`step` has ended.

        Call it between two steps. Repeated calls for the same step return the same base. If the
        next step is already under way (the call comes from a signal handler, or after a
        ``KeyboardInterrupt``), the base holds the state of the last step mark if that is still
        known. Otherwise it holds the current state, is not called exact, and a warning is logged.

        Returns:
            The base, with futures for the end of the capture (``staged``) and of the write
            (``durable``).

        Raises:
            StateError: The call comes between ``optimizer.step()`` and :meth:`step`, or before
                :meth:`resume`.
        """
        self._ready()
        self._updates.settle()
        survey, exact = self._state_watch.survey_for_save(self._step)
        return self._take(survey, show=True, exact=exact)

    def _take(
        self, survey: Survey | None, *, show: bool, in_memory: bool = False, exact: bool = True
    ) -> Save:
        self._cadence.base_requested(self._step)
        replica = self._replica_bases
        log_starts = self._recorder is not None and self._recorder.needs_capture
        identity = self._identity(exact)
        if replica is not None and not log_starts and replica.can_serve(exact=show):
            save = replica.request(identity, survey or self._state.survey(), exact=show)
        elif self._multistep is not None:
            save = self._multistep.take(identity, survey, single_step=show)
        else:
            if replica is not None:
                # The new base replaces the replica that pending requests are to be served from.
                replica.settle(self._options.progress_timeout_s)
            save = self._saver.take(identity, survey=survey, show=show, in_memory=in_memory)
            if replica is not None:
                replica.base_taken(save)
        self._cadence.base_started(save)
        self._recoverable.base_taken(save)
        if self._recorder is not None:
            # A log begins at a base that the keeper has completely: this may wait for the capture.
            with self._saver.stalled("capture"):
                self._recorder.base_taken(save)
        return save

    def _consumed(self, key: str) -> None:
        """Handle an optimizer's pre-step hook: its gradients are final."""
        if os.getpid() == self._pid:  # hooks are inherited by forked children
            self._state_watch.consumed(key, self._step + 1)

    def before_update(self) -> None:
        """Announce a change of the state that no ``optimizer.step()`` makes.

        Call it before other code changes tensors that an optimizer owns, or entries that were
        ``declared``. Waits for copies of these tensors that are in flight (I1, I8). Call
        :meth:`after_update` when the change is complete.
        """
        self._check_open()
        self._state_watch.refuse_during_replay()
        self._state_watch.changing = True
        self._saver.gate(None)

    def after_update(self, *declared: str) -> None:
        """End a change announced by :meth:`before_update`. It counts as one update.

        Args:
            declared: patterns whose registered functions have made the change, in the order of the
                calls, and nothing else has. A log then records only that they ran. Without
                arguments, any entry may have changed: no log can repeat that, so the next step
                takes a base.

        Raises:
            OptionError: No function is registered for one of the patterns.
        """
        self._check_open()
        self._state_watch.refuse_during_replay()
        self._state_watch.changed(declared, self._step + 1)

    @named("wait")
    @refuse_reentry("wait")
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all bases taken so far are durable.

        Args:
            timeout_s: seconds to wait; None waits as long as there is progress.

        Raises:
            DeadlineError: A base is not durable after ``timeout_s``, or nothing makes progress.
            EverstepError: A base has failed, and the policy is to raise.
        """
        self._check_open()
        check_timeout(timeout_s)
        self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> None:
        self._saver.finish_captures()
        if self._keeper is not None:
            keeper = self._keeper
            wait_for_bases(self._saver, keeper, timeout_s)
            if self._keepers.replace_if_lost(self._timeline, insist=True):
                self._replace_lost_base(keeper, timeout_s)
        self._channel.check()

    def _replace_lost_base(self, lost: Keeper, timeout_s: float | None) -> None:
        """Take a base in place of those lost with a keeper, and wait for it.

        Only a single rank does so at once. Several ranks take their next base together as usual.
        """
        self._use_current_keeper()
        alone = self._info.world == 1
        again = alone and self._state_watch.is_at_a_step
        self._base_due = not again if alone else self._base_due
        save = self._take(self._state_watch.survey_at_mark, show=True) if again else None
        self._saver.finish_captures()
        assert self._keeper is not None
        self._keeper.wait(timeout_s)
        report_lost_bases(save, lost, self._keepers, self._channel, alone=alone)

    @refuse_reentry("close")
    def close(self) -> None:
        """Take a last base if steps would be lost otherwise, wait until all is durable, and end.

        Further calls have no effect.

        Raises:
            EverstepError: An operation in the background has failed, and the policy is to raise.
            StateError: The call comes from within :meth:`step` (in a signal handler), where it
                would deadlock.
        """
        if not self._open or os.getpid() != self._pid:
            return
        failed = list[EverstepError]()
        stay = False
        completed = False
        try:
            stay = self._take_last(failed)
            again = partial(
                retake_failed_base, self._replica_bases, self._state_watch, self._take_at, failed
            )
            failed += wait_and_collect(self.wait, lambda: self._keepers.unavailable, again)
            report_lost_steps(self._step, self._keepers, self._options, self._channel, failed)
            completed = True
        finally:
            # Also after an interrupt: the keeper must then keep what is on no disk.
            stay = stay or must_stay(
                self._run,
                self._recorder,
                self._keeper,
                self._last,
                completed=completed,
                needed=self._keeper_is_needed,
            )
            self._release(stay=stay)
        raise_first(failed)

    def _take_last(self, failed: list[EverstepError]) -> bool:
        """Take the last base if state would be lost without it.

        A log in memory and captures of every step end with this process.

        Returns:
            True if the keeper must stay, since nothing else has that state.
        """
        if self._keeper is None:  # no timeline was opened, or an interrupt came while it was
            return self._timeline > 0
        self._consensus.flush_errors()
        persist_parked(self._saver, failed, again=self._state_watch.is_at_a_step)
        if self._live_state.is_mixed:
            return False
        survey = self._state_watch.survey_at_mark
        if self._saver.last_is_in_memory:
            return save_memory_base(self._run, survey, self._take_at, failed)
        if not needs_last_base(self._run, self._step, self._recorder, self._state):
            return False
        if survey is None:
            return stays_for_log(self._run, self._step, self._options, self._keeper)
        take_last_base(survey, self._take_at, failed)
        return False

    def _take_at(self, survey: Survey) -> None:
        self._last = self._take(survey, show=True)

    def stats(self) -> Stats:
        """Return the costs and results of checkpointing since construction."""
        return stats_of(
            self._step,
            self._saver,
            self._keepers,
            self._recorder,
            self._cadence,
            self._multistep,
            self._recoverable,
        )

    def __enter__(self) -> Checkpointer:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = self._open and os.getpid() == self._pid and not self._calls.over
        if error is None:
            self.close()
        elif own and self._keeper_is_needed:
            # Other ranks may have died: do not wait for them, and keep everything in memory.
            self._release(stay=True)
        else:
            self._state_watch.abandon()
            with contextlib.suppress(EverstepError):  # do not hide the error in flight
                self.close()

    @property
    def _keeper_is_needed(self) -> bool:
        """Return True if the keeper holds data that other processes may need after this one."""
        logs = self._recorder is not None and self._info.world > 1
        return logs or len(set(self._info.nodes)) > 1 or self._options.method.in_memory

    def _identity(self, exact: bool = True) -> ShardIdentity:
        return ShardIdentity(
            self._run_id,
            self._timeline,
            self._step,
            self._updates.lsn,
            self._info.rank,
            self._info.world,
            exact and self._state.exact,
            inexact=self._state.why_inexact,
        )

    def _ready(self) -> None:
        """Check that the Checkpointer is usable, with a timeline and a keeper."""
        self._check_open()
        self._channel.check()
        self._live_state.check()
        keepers = self._keepers
        if self._keeper is None:
            self._start_timeline(self._starter.start_fresh(), exact=True)
        elif keepers.lost is not None:
            with self._saver.stalled("keeper"):
                self._replace_keeper()
        else:
            self._replace_keeper()

    def _replace_keeper(self) -> None:
        keepers = self._keepers
        replaced = keepers.replace_if_lost(self._timeline, self._step)
        # An interrupt may have left a keeper that was replaced, but not yet taken into use.
        if replaced or self._keeper is not keepers.current:
            self._use_current_keeper()
            self._base_due = self._info.world == 1

    def _start_timeline(
        self, timeline: int, exact: bool, verified: BaseId | None = None, seen: Survey | None = None
    ) -> None:
        self._timeline = timeline
        self._state.coverage.descends_exactly = exact
        self._consensus.restarted()
        self._keepers.serve(timeline, verified, self._starter.job_session)
        self._use_current_keeper(seen)

    def _use_current_keeper(self, seen: Survey | None = None) -> None:
        service = self._keepers.service
        assert service is not None
        self._components.start(service, self._state.exact, self._step, seen)
        # Last: after an interrupt before this line, the next call repeats the whole method.
        self._keeper = service.keeper
        self._at_exit.arm(
            self._components, service.keeper, self._state_watch.abandon, stay=self._keeper_is_needed
        )

    def _check_open(self) -> None:
        if self._open and os.getpid() == self._pid:
            return  # the usual case; this runs at every step
        replaced = _live.get(self._live_key, self) is not self
        check_usable(self._open, self._pid, self._run, replaced)

    def _release(self, *, stay: bool = False) -> None:
        self._open = False
        self._end_first_step()
        self._state.close()
        self._at_exit.disarm()
        self._preemption.close()
        self._components.close(stay=stay)
        if _live.get(self._live_key) is self:
            del _live[self._live_key]
