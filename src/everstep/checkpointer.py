"""The trainer's side: wires state, capture and keeper together."""

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
from everstep.trainer.base.calls import Calls, not_within, one_at_a_time
from everstep.trainer.checks.first_batches import FirstBatches
from everstep.trainer.job.copies import seams_with_copies
from everstep.trainer.job.job import job_of, open_together
from everstep.trainer.schedule.scheduled_saver import ScheduledSaver
from everstep.trainer.session.joint import Joint
from everstep.trainer.session.lifetime import (
    AtExit,
    check_platform,
    check_resume,
    check_timeout,
    check_usable,
    close_earlier,
    must_stay,
    needs_last_base,
    no_last_base,
    persist_parked,
    raise_first,
    refuse_pickling,
    stays_for_the_log,
    stays_with_bases,
    take_at_end,
    take_failed,
    wait_for_bases,
    wait_through,
)
from everstep.trainer.session.lost_steps import tell_if_bases_are_lost, tell_if_steps_are_lost
from everstep.trainer.session.overwritten import Overwritten
from everstep.trainer.session.parts import assemble
from everstep.trainer.session.preemption import Preempting, asks_ranks
from everstep.trainer.session.recoverable import Recoverable
from everstep.trainer.session.starts import Starts
from everstep.trainer.session.stats import Stats, stats_of
from everstep.trainer.session.watched import Watched

__all__ = ["Checkpointer"]

_live = weakref.WeakValueDictionary[tuple[PurePath, int], "Checkpointer"]()


class Checkpointer:
    """Makes training recoverable.

    Args:
        path: the run folder; made if it is not there, refused if it holds something else.
        state: what is saved, by name: modules, optimizers, anything with ``state_dict`` and
            ``load_state_dict``, or plain data. Plain data is read from this dict at each save
            and put back into it on resume. RNG states are always included.
        method: a preset's name (:data:`everstep.presets`) or a :class:`Method`.
        every: when :meth:`step` takes a base: steps, a time like ``"10min"``, ``"auto"`` (as
            often as wastes the least time by what is measured), or None.
        keep: bases to keep.
        budget: upper bounds for host memory, disk, and what is written in a day.
        on_failure: ``"raise"`` background errors at the next call, ``"warn"``, or call this.
        progress_timeout_s: what gets nowhere for so long, pauses of the job aside, is called hung.
        keeper: the process that makes bases durable: where it runs, and how long it stays.
        log: where the gradient log is kept, if the method has one.
        declared: patterns (``"ema/*"``) of entries that change only between :meth:`before_update`
            and :meth:`after_update`; perhaps, as a dict, with the function that makes the change: a
            log then leaves these entries out, and replay runs it. It takes no arguments, reads
            nothing but parameters, buffers and what it covers, and gives the same each time.
        static: patterns of entries that never change; a change is an error.
        tiers: places that keep copies of the bases: URLs (``"s3://bucket/prefix"``), directories
            on other disks, or :class:`~everstep.tiers.options.TierOptions`; of several ranks,
            ``"peer"`` or :class:`~everstep.tiers.options.PeerOptions`, too: the memory of the
            keeper of the same local rank on the next node. The keeper makes them behind
            training; :meth:`resume` takes from there what the run folder has not.
        preempt: when a signal announces that the job is going to be killed: True (``Preemption()``)
            or a :class:`~everstep.config.options.Preemption`: a last base at the next :meth:`step`,
            and :attr:`preempted`. False: signals are not touched.
        seams: file system and clock; for tests.

    Raises:
        OptionError: for an argument that cannot work.
        UnsupportedStateError: listing all parts of the state that cannot be stored.
        StorageError: when the folder cannot be used.
        StateError, DeadlineError: other ranks of the job cannot be known, or do not come.
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
        self._preempting = Preempting(Preemption.parse(preempt), self._seams.clock, asks_ranks())
        named, peers = split_peers(tiers, self._options.method.tiers)
        places = validate_tiers(named, keep, peers, logs=self._options.logs)
        job = job_of(self._seams, progress_timeout_s)
        chosen = self._options, self._seams, self._run, places, peers
        self._info, open_run = open_together(job, *chosen)
        self._state = State(state, declared=declared, static=static, ranks=self._info)
        self._state.replays_fast = self._options.log.replay == "fast"
        self._live_key = (self._run, self._info.rank)
        self._calls = Calls(progress_timeout_s)
        close_earlier(_live, self._live_key)
        reading = seams_with_copies(() if job else places, self._seams, self._run)
        made_of = self._options, self._run, open_run, self._state, self._seams, peers, places, job
        parts = assemble(*made_of)
        parts.keepers.copy_to(places)
        self._parts = parts
        self._run_id = parts.run_id
        self._channel = parts.channel
        self._ring = parts.ring
        self._lane = parts.lane
        self._keepers = parts.keepers
        self._saver = parts.saver
        self._recorder = parts.recorder
        self._updates = parts.updates
        self._cadence = parts.cadence
        self._standby = parts.standby
        self._multistep, self._watched = parts.multistep, Watched(self._state, parts, self._options)
        self._watched.watch(self._consumed, self._calls.wait_for_others)
        self._keeper: Keeper | None = None
        self._timeline = 0
        self._step = 0
        self._base_due = False
        self._overwritten, self._at_exit = Overwritten(), AtExit(self._calls)
        about = self._run, self._run_id, self._state, self._ring, self._overwritten
        self._starts = Starts(job, self._keepers, reading, *about, timeout_s=progress_timeout_s)
        self._joint = Joint(job, self._options, parts, self._state)
        self._recoverable = Recoverable(self._keepers, self._saver, self._recorder)
        self._last: Save | None = None
        self._first_batches: FirstBatches | None = None
        self._preempting.install()
        self._open = True
        _live[self._live_key] = self

    __reduce__ = refuse_pickling

    def __repr__(self) -> str:
        if not hasattr(self, "_live_key"):  # refused by its constructor
            return "<Checkpointer, not made>"
        chosen = self._options
        closed = "" if self._open else ", closed"
        what = f"{chosen.method_name}, {chosen.every.in_words}, keep {chosen.keep}"
        return f"<Checkpointer of {self._run}: {what}; at step {self._step}{closed}>"

    @named("resume", strict=bool)
    @one_at_a_time("resume")
    def resume(self, step: int | None = None, *, strict: bool = True) -> Recovery:
        """Restores the newest base whose bytes all verify, and takes the run over: with the new
        timeline no other process that still works on this run can commit or delete.

        Args:
            step: go back to this one instead, of a branch that was given up if the present history
                has none, which ``notes`` says; 0 starts from scratch.
            strict: refuse a base whose names, shapes or dtypes differ from the live state;
                otherwise load the rest and report the differences.

        Raises:
            RecoveryError: no base can be used, or is left of what the run had; or none of ``step``.
            MismatchError: the base is of another model; nothing has been touched.
            StateError, KeeperError, DeadlineError, StorageError
        """
        self._check_open()
        check_resume(step)
        if self._multistep is not None:
            self._multistep.drop("training goes back")
        self._saver.finish_captures()
        if self._keeper is not None:
            with self._channel.going_back(step):
                self._keeper.wait(None)
        start_s = self._seams.clock.monotonic_s()
        own = self._timeline > 0
        how = {"strict": strict, "own": own, "trained": own and self._watched.has_moved(self._step)}
        self._begun()
        resumed, only_in_memory = self._starts.resume(step, **how)
        self._updates.restored(resumed.lsn)
        self._step = resumed.step
        base = resumed.base if resumed.source == "disk" else None
        self._cadence.began(resumed, again=self._timeline > 0)
        survey = self._state.survey() if self._recorder or only_in_memory else None
        self._state.coverage.descends_from = resumed.descends_from
        self._start_timeline(resumed.timeline, resumed.exact, base, survey)
        self._base_due = self._saver.restored_from_memory = only_in_memory  # on no disk yet
        on_disk = None if only_in_memory else resumed.base
        self._recoverable.restored(None if on_disk is None else on_disk.step)
        if self._recorder is not None:
            led_from = resumed.led_from(self._state.ranks.world)
            self._recorder.restored(led_from, survey, self._step, on_disk=on_disk is not None)
        self._watched.started(survey, fresh=resumed.base is None)
        if resumed.base is not None:
            self._saver.warm(survey)  # behind the first step, at the end of which one may be due
            self._first_batches = FirstBatches(self._state, self._step)
        seconds = self._seams.clock.monotonic_s() - start_s
        return describe(resumed, seconds, has_data=self._state.has_data(resumed.base is None))

    def _begun(self) -> None:
        """The first step after a resume is over, or there will be none."""
        if self._first_batches is not None:
            self._first_batches.end()
        self._first_batches = None

    @named("rewind", step=int)
    def rewind(self, step: int) -> Recovery:
        """Goes back to an earlier step, in this very process: after a NaN, or a loss spike.

        The same as :meth:`resume` with a step: everything is as it was at the end of it, and
        what was done since is no longer part of the history.

        Raises:
            RecoveryError: neither a base nor the log has the step.
        """
        return self.resume(step)

    @one_at_a_time("step")
    def step(self) -> None:
        """The step is over; takes a base when one is due.

        Call it where gradients are spent: gradients that are still being accumulated are not
        part of the state, and a resume would lose them.

        Raises:
            EverstepError: what failed in the background since the last call, by the policy.
        """
        self._check_open()
        # Counted whatever is raised: a caller that goes on has still taken this step.
        self._step = self._step + 1
        self._state.trains_in = threading.get_ident()
        self._preempting.ask(self._step)
        self._begun()
        with self._joint.answering(self._step):
            self._updates.settle()
            self._watched.ended(self._step)
            with self._channel.raising_storage_errors_last():
                self._end_step()

    def _end_step(self) -> None:
        self._ready()
        survey = self._watched.survey() if self._watched.surveys else None
        if survey is not None:
            self._watched.marked(survey)
            if self._recorder is not None:
                self._recorder.mark(survey, self._updates.lsn, self._step)
        under_way = self._multistep is not None and self._multistep.marked(self._identity())
        if self._multistep is not None:
            self._base_due = self._base_due or self._multistep.again is not None
        self._saver.warm()  # behind the mark, which is waited for
        self._cadence.stepped()
        needed, due = self._joint.ask(self._step)
        self._base_due = needed or self._base_due
        if self._multistep is not None and due and under_way:
            self._multistep.stats.deferred += 1
        if due or self._base_due:
            # As soon as there is a keeper, and nothing is under way. Several ranks: now, or none.
            later = under_way or (self._info.world == 1 and self._keepers.lost is not None)
            in_memory = not self._base_due and self._options.stays_in_memory(self._step)
            self._base_due = later and self._info.world == 1
            if not later:
                self._take(self._joint.shared(survey), show=False, in_memory=in_memory)
        elif isinstance(self._saver, ScheduledSaver) and self._keepers.lost is None:
            self._saver.park(self._identity())
        self._preempting.marked(self._step, self._save_last)

    @property
    def preempted(self) -> bool:
        """Whether a signal has announced the end, and its last base is taken: leave the loop."""
        return self._preempting.preempted

    def _save_last(self, timeout_s: float) -> None:
        if not no_last_base(self._run, self._step, self._recorder, self._state):
            self._take(None, show=True)
        self._wait(timeout_s)

    @named("save")
    @one_at_a_time("save")
    def save(self) -> Save:
        """Takes a base now, of the step that :meth:`step` has just ended; once for each step.

        Where the next is under way (in a signal handler, behind a ``KeyboardInterrupt``), it is of
        the last step mark if that is known, else not called exact, which is said.

        Raises:
            StateError: between ``optimizer.step()`` and :meth:`step`, or before :meth:`resume`.
        """
        self._ready()
        self._updates.settle()
        survey, exact = self._watched.asked_for(self._step)
        return self._take(survey, show=True, exact=exact)

    def _take(
        self, survey: Survey | None, *, show: bool, in_memory: bool = False, exact: bool = True
    ) -> Save:
        self._cadence.asked(self._step)
        standby = self._standby
        due = self._recorder is not None and self._recorder.needs_capture
        identity = self._identity(exact)
        if standby is not None and not due and standby.gives(exact=show):
            save = standby.ask(identity, survey or self._state.survey(), exact=show)
        elif self._multistep is not None:
            save = self._multistep.take(identity, survey, sharp=show)
        else:
            if standby is not None:
                standby.settle(self._options.progress_timeout_s)
            save = self._saver.take(identity, survey=survey, show=show, in_memory=in_memory)
            if standby is not None:
                standby.base_taken(save)
        self._cadence.taken(save)
        self._recoverable.taken(save)
        if self._recorder is not None:
            with self._saver.stalled("capture"):  # a log begins at a base that the keeper has
                self._recorder.base_taken(save)
        return save

    def _consumed(self, key: str) -> None:
        """An optimizer's gradients are what its update is going to consume."""
        if os.getpid() == self._pid:
            self._watched.consumed(key, self._step + 1)

    def before_update(self) -> None:
        """Call before anything other than ``optimizer.step()`` changes what an optimizer owns
        or what was ``declared``: waits for copies that are under way (I1, I8)."""
        self._check_open()
        self._watched.check_changing()
        self._watched.changing = True
        self._saver.gate(None)

    def after_update(self, *declared: str) -> None:
        """Call after such a change, which counts as one update.

        Args:
            declared: the patterns whose registered functions have made it, in this order, and
                nothing else has: a log notes only that they ran. Without, anything may have
                changed: no log can repeat that, so the next step takes a base.

        Raises:
            OptionError: no function is registered for one of the patterns.
        """
        self._check_open()
        self._watched.check_changing()
        self._watched.changed(declared, self._step + 1)

    @named("wait")
    @not_within("wait")
    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until everything that was taken is durable.

        Raises:
            DeadlineError: when it is not after ``timeout_s``, or makes no progress.
            EverstepError: what failed, by the policy.
        """
        self._check_open()
        check_timeout(timeout_s)
        self._wait(timeout_s)

    def _wait(self, timeout_s: float | None) -> None:
        self._saver.finish_captures()
        if self._keeper is not None:
            keeper = self._keeper
            wait_for_bases(self._saver, keeper, timeout_s)
            if self._keepers.revive(self._timeline, insist=True):
                self._take_over()
                alone = self._info.world == 1
                again = alone and self._watched.is_of_a_step  # other ranks do not
                self._base_due = not again if alone else self._base_due
                save = self._take(self._watched.whole_at_mark, show=True) if again else None
                self._saver.finish_captures()
                self._keeper.wait(timeout_s)
                tell_if_bases_are_lost(save, keeper, self._keepers, self._channel, alone=alone)
        self._channel.check()

    @not_within("close")
    def close(self) -> None:
        """Waits until what was taken is durable and lets go of everything. Idempotent.

        Raises:
            EverstepError: what failed in the background, by the policy; a StateError in the middle
                of :meth:`step` (in a signal handler), where it would wait for what is below it.
        """
        if not self._open or os.getpid() != self._pid:
            return
        failed = list[EverstepError]()
        stay = False
        over = False
        try:
            stay = self._take_last(failed)
            again = partial(take_failed, self._standby, self._watched, self._take_at, failed)
            failed += wait_through(self.wait, lambda: self._keepers.gave_up, again)
            tell_if_steps_are_lost(self._step, self._keepers, self._options, self._channel, failed)
            over = True  # or it was interrupted
        finally:
            about = self._run, self._recorder, self._keeper, self._last
            self._release(stay=stay or must_stay(*about, over=over, needed=self._keeper_stays))
        raise_first(failed)

    def _take_last(self, failed: list[EverstepError]) -> bool:
        """With a log no step is lost, and none at the end: the log in memory ends with us, and so
        do captures of every step. Returns whether the keeper must stay, since it alone has it."""
        if self._keeper is None:  # none ever came; or interrupted as it came to serve us
            return self._timeline > 0
        self._joint.left()
        persist_parked(self._saver, failed, again=self._watched.is_of_a_step)  # one rank parks
        if self._overwritten.partly:
            return False
        if self._saver.last_is_in_memory:
            return stays_with_bases(self._run, self._watched.whole_at_mark, self._take_at, failed)
        if not needs_last_base(self._run, self._step, self._recorder, self._state):
            return False
        survey = self._watched.whole_at_mark
        if survey is None:
            return stays_for_the_log(self._run, self._step, self._options, self._keeper)
        take_at_end(survey, self._take_at, failed)
        return False

    def _take_at(self, survey: Survey) -> None:
        self._last = self._take(survey, show=True)

    def stats(self) -> Stats:
        """What checkpointing has cost and done so far."""
        about = self._saver, self._keepers, self._recorder, self._cadence, self._multistep
        return stats_of(self._step, *about, self._recoverable)

    def __enter__(self) -> Checkpointer:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        own = self._open and os.getpid() == self._pid and not self._calls.over
        if error is None:
            self.close()
        elif own and self._keeper_stays:  # others may be gone
            self._release(stay=True)
        else:
            self._watched.leave()
            with contextlib.suppress(EverstepError):  # the error under way is the one to be seen
                self.close()

    @property
    def _keeper_stays(self) -> bool:
        """Whether others need this one's log, or what it holds for them, or bases are in memory."""
        logs = self._recorder is not None and self._info.world > 1
        return logs or len(set(self._info.nodes)) > 1 or self._options.method.in_memory

    def _identity(self, exact: bool = True) -> ShardIdentity:
        at = (self._timeline, self._step, self._updates.lsn)
        info = self._info
        of_rank = self._run_id, *at, info.rank, info.world, exact and self._state.exact
        return ShardIdentity(*of_rank, inexact=self._state.why_inexact)

    def _ready(self) -> None:
        """Before anything is counted or saved: open, healthy, and with a timeline."""
        self._check_open()
        self._channel.check()
        self._overwritten.check()
        keepers = self._keepers
        if self._keeper is None:
            self._start_timeline(self._starts.fresh(), exact=True)
        elif keepers.lost is not None:
            with self._saver.stalled("keeper"):
                self._replace_keeper()
        else:
            self._replace_keeper()

    def _replace_keeper(self) -> None:
        keepers = self._keepers
        if keepers.revive(self._timeline, self._step) or self._keeper is not keepers.current:
            self._take_over()
            self._base_due = self._info.world == 1

    def _start_timeline(
        self, timeline: int, exact: bool, verified: BaseId | None = None, seen: Survey | None = None
    ) -> None:
        self._timeline = timeline
        self._state.coverage.descends_exactly = exact
        self._joint.began()
        self._keepers.serve(timeline, verified, self._starts.job_session)
        self._take_over(seen)

    def _take_over(self, seen: Survey | None = None) -> None:
        """A keeper has come into service."""
        keeper = self._keepers.current
        assert keeper is not None
        self._parts.start(keeper, self._timeline, self._state.exact, self._step, seen)
        self._keeper = keeper  # last: what an interrupt leaves half done is done again
        self._at_exit.watch(self._parts, keeper, self._watched.leave, stay=self._keeper_stays)

    def _check_open(self) -> None:
        if self._open and os.getpid() == self._pid:
            return  # mostly; what follows takes its time, and this is asked at each step
        check_usable(self._open, self._pid, self._run, _live.get(self._live_key, self) is not self)

    def _release(self, *, stay: bool = False) -> None:
        self._open = False
        self._begun()
        self._state.close()
        self._at_exit.forget()
        self._preempting.close()
        self._parts.close(stay=stay)
        if _live.get(self._live_key) is self:
            del _live[self._live_key]
