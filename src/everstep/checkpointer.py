"""The trainer's side: wires state, capture and keeper together."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import PurePath
from types import TracebackType
from typing import Any

from everstep.capture.devices import DeviceLane
from everstep.capture.lane import CpuLane, Lane
from everstep.capture.updates import UpdateHooks
from everstep.commit.lineage import BaseId
from everstep.errors import (
    DeadlineError,
    EverstepError,
    OptionError,
    RecoveryError,
    StateError,
)
from everstep.format.header import ShardIdentity
from everstep.format.writer import ChunkRing
from everstep.keeper.budget import (
    announcement,
    check_disk_budget,
    host_budget_bytes,
    log_budget_bytes,
)
from everstep.keeper.channel import BackgroundChannel
from everstep.keeper.keepers import Keepers
from everstep.keeper.lifetime import check_platform, close_earlier, finish_at_exit
from everstep.keeper.local import CHUNKS, WRITERS
from everstep.keeper.recordable import refuse_optimizers
from everstep.keeper.recorder import Recorder
from everstep.keeper.save import Save
from everstep.keeper.saver import Keeper, Saver
from everstep.keeper.stats import Stats, stats_of
from everstep.options import (
    Budget,
    FailurePolicy,
    KeeperOptions,
    LogOptions,
    Method,
    Options,
    nearest,
    validate_options,
)
from everstep.recover.folder import open_run_folder, refuse_unresumed, run_path
from everstep.recover.report import Recovery, describe
from everstep.recover.resume import open_timeline, resume
from everstep.seams import Seams
from everstep.state.image import State
from everstep.state.survey import Survey
from everstep.tiers.disk import storage_errors

__all__ = ["Checkpointer"]

_log = logging.getLogger("everstep")
_live: weakref.WeakValueDictionary[PurePath, Checkpointer] = weakref.WeakValueDictionary()


class Checkpointer:
    """Makes training recoverable.

    Args:
        path: the run folder; made if it is not there, refused if it holds something else.
        state: what is saved, by name: modules, optimizers, anything with ``state_dict`` and
            ``load_state_dict``, or plain data. Plain data is read from this dict at each save
            and put back into it on resume. RNG states are always included.
        method: a preset's name (:data:`everstep.presets`) or a :class:`Method`.
        every: when :meth:`step` takes a base: steps, a time like ``"10min"``, or None.
        keep: bases to keep.
        budget: upper bounds for host memory and disk.
        on_failure: ``"raise"`` background errors at the next call, ``"warn"``, or a function
            that gets them.
        progress_timeout_s: a transfer or base that makes no progress for so long is reported
            as hung.
        keeper: the process that makes bases durable: where it runs, and how long it stays.
        log: where the gradient log is kept, if the method has one.
        declared: patterns (``"ema/*"``) of entries that change only between
            :meth:`before_update` and :meth:`after_update`.
        static: patterns of entries that never change; a change is an error.
        seams: file system and clock; for tests.

    Raises:
        OptionError: for an argument that cannot work.
        UnsupportedStateError: listing all parts of the state that cannot be stored.
        StorageError: when the folder cannot be used.
    """

    def __new__(cls, *args: Any, **options: Any) -> Checkpointer:
        """Refuses unknown options with the nearest known one, before Python refuses them."""
        known = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in options:
            if name not in known:
                guess = nearest(name, known)
                raise OptionError(
                    f"Checkpointer has no option {name!r}; there are: {', '.join(known)}",
                    hint=f"did you mean {guess!r}?" if guess else None,
                )
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        method: str | Method = "lazy",
        every: int | str | None = 100,
        keep: int = 3,
        budget: Budget | None = None,
        on_failure: FailurePolicy = "raise",
        progress_timeout_s: float = 120.0,
        keeper: KeeperOptions | None = None,
        log: LogOptions | None = None,
        declared: Sequence[str] = (),
        static: Sequence[str] = (),
        seams: Seams | None = None,
    ) -> None:
        self._open = False
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
        self._seams = seams or Seams()
        self._state = State(state, declared=declared, static=static)
        close_earlier(_live.get(self._run), self._run)
        shape = self._state.survey().shape
        size_bytes = shape.size_bytes
        tensors_bytes = sum(entry.size_bytes for entry in shape.entries)
        arena_bytes = host_budget_bytes(self._options, tensors_bytes)
        check_disk_budget(self._options, self._run, max(1, size_bytes))
        self._run_id = open_run_folder(self._seams.filesystem, self._run).run or ""
        self._channel = BackgroundChannel(
            on_failure, self._seams.clock, progress_timeout_s=progress_timeout_s
        )
        self._ring = ChunkRing(CHUNKS, WRITERS)
        self._lane: Lane = self._seams.lane() if self._seams.lane else DeviceLane(CpuLane())
        self._keepers = Keepers(
            self._options,
            self._seams,
            self._run,
            self._run_id,
            self._channel,
            self._ring,
            arena_bytes,
        )
        self._keeper: Keeper | None = None
        self._timeline = 0
        self._exact = True
        self._step = 0
        self._damaged = False
        self._touches = 0
        self._base_due = False
        self._saver = Saver(
            self._options, self._run, self._state, self._lane, self._channel, self._seams.clock
        )
        self._recorder: Recorder | None = None
        self._updates = UpdateHooks(self._saver.gate)
        if self._options.logs:
            refuse_optimizers(self._state, self._options.method.log)
            self._recorder = Recorder(
                self._options,
                self._state,
                self._lane,
                self._channel,
                self._seams.clock,
                log_bytes_max=log_budget_bytes(arena_bytes, tensors_bytes),
            )
            self._keepers.on_disk = self._recorder.on_disk
            self._updates.consumed = self._consumed
            self._updates.applied = self._recorder.applied
        self._lsn_at_mark = 0
        for key, optimizer in self._state.optimizers.items():
            self._updates.watch(key, optimizer)
        self._pid = os.getpid()
        self._at_exit: Callable[[], None] | None = None
        self._open = True
        _live[self._run] = self
        print(announcement(self._options, self._run, size_bytes, arena_bytes), file=sys.stderr)

    def resume(self, step: int | None = None, *, strict: bool = True) -> Recovery:
        """Restores the newest base whose bytes all verify, and takes the run over.

        Opens a new timeline: any other process that still works on this run can neither
        commit nor delete from now on.

        Args:
            step: restore the base of this step instead; 0 starts from scratch.
            strict: refuse a base whose names, shapes or dtypes differ from the live state;
                otherwise load the rest and report the differences.

        Raises:
            RecoveryError: there are bases, but none that can be used, or none of ``step``.
            MismatchError: the base is of another model; nothing has been touched.
        """
        self._check_open()
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise OptionError(f"resume(step={step!r}): steps are whole numbers from 0")
        self._saver.finish_captures()
        if self._keeper is not None:
            self._keeper.wait(None)
        start_s = self._seams.clock.monotonic_s()
        self._keepers.open()
        recalled = self._keepers.left_behind(own=self._timeline > 0)
        held = recalled.base
        was_damaged, self._damaged, self._touches = self._damaged, False, 0
        try:
            resumed = resume(
                self._seams,
                self._run,
                self._state,
                self._ring,
                recalled,
                step=step,
                strict=strict,
                timeout_s=self._options.progress_timeout_s,
                on_touch=self._touch,
            )
        except BaseException:
            self._damaged = self._damaged or was_damaged
            raise
        loaded = resumed.loaded
        if self._damaged and loaded is not None and loaded.mismatches and self._touches > 1:
            raise RecoveryError(
                "a damaged base was read half-way into the live state, and the older one that "
                f"was used instead leaves {len(loaded.mismatches)} part(s) of it out",
                step=loaded.marker.step,
                path=self._run,
                hint="build the model and optimizer again, then resume",
            )
        self._damaged = was_damaged and loaded is None
        verified = resumed.base if resumed.source == "disk" else None
        self._updates.lsn, self._step = resumed.lsn, resumed.step
        self._start_timeline(resumed.timeline, resumed.exact, verified)
        if self._recorder is not None:
            self._recorder.base_step = 0 if resumed.base is None else resumed.base.step
        # What came from memory and could not be written is on no disk yet.
        self._base_due = resumed.source == "memory" and held is not None and not held.durable
        self._lsn_at_mark = self._updates.lsn
        return describe(resumed, self._seams.clock.monotonic_s() - start_s)

    def rewind(self, step: int) -> Recovery:
        """Goes back to an earlier step, in this very process: after a NaN, or a loss spike.

        The same as :meth:`resume` with a step: everything is as it was at the end of it, and
        what was done since is no longer part of the history.

        Raises:
            RecoveryError: neither a base nor the log has the step.
        """
        return self.resume(step)

    def step(self) -> None:
        """The step is over; takes a base when one is due.

        Call it where gradients are spent: gradients that are still being accumulated are not
        part of the state, and a resume would lose them.

        Raises:
            EverstepError: what failed in the background since the last call, by the policy.
        """
        self._check_open()
        # Counted whatever is raised: a caller that goes on has still taken this step.
        self._step += 1
        self._lsn_at_mark = self._updates.lsn
        self._ready()
        self._saver.warm()
        survey = None
        if self._recorder is not None:
            survey = self._state.survey()
            self._recorder.mark(survey, self._updates.lsn, self._step)
            self._base_due = self._base_due or self._recorder.base_due is not None
        since_s = self._seams.clock.monotonic_s() - self._saver.last_save_s
        if self._options.every.due(self._step, since_s) or self._base_due:
            self._base_due = self._keepers.lost is not None  # as soon as there is a keeper
            if not self._base_due:
                self._take(survey, show=False)

    def save(self) -> Save:
        """Takes a base now, of the step that :meth:`step` has just ended.

        A second call at the same step returns the same base.

        Raises:
            StateError: between ``optimizer.step()`` and :meth:`step`: that state belongs to no
                step, and resuming from it would repeat an update.
        """
        self._ready()
        if self._updates.lsn != self._lsn_at_mark:
            raise StateError(
                "save() after optimizer.step() and before ckpt.step(): this state belongs to a "
                "step that is not over",
                step=self._step,
                hint="call ckpt.step() first, then ckpt.save()",
            )
        return self._take(None, show=True)

    def _take(self, survey: Survey | None, *, show: bool) -> Save:
        save = self._saver.take(self._identity(), show=show, survey=survey)
        recorder = self._recorder
        if recorder is not None:
            recorder.base_taken(save)
        return save

    def _consumed(self, key: str) -> None:
        """An optimizer's gradients are what its update is going to consume."""
        if self._recorder is not None and os.getpid() == self._pid:
            self._recorder.consumed(key, self._updates.lsn + 1, self._step + 1)

    def before_update(self) -> None:
        """Call before anything other than ``optimizer.step()`` changes what an optimizer owns
        or what was ``declared``: waits for copies that are under way (I1, I8)."""
        self._check_open()
        self._saver.gate(None)

    def after_update(self) -> None:
        """Call after such a change, which counts as one update."""
        self._check_open()
        self._updates.updated()
        if self._recorder is not None:
            self._recorder.skipped("a change that no optimizer made")

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until everything that was taken is durable.

        Raises:
            DeadlineError: when it is not after ``timeout_s``, or makes no progress.
            EverstepError: what failed, by the policy.
        """
        self._check_open()
        self._saver.finish_captures()
        if self._keeper is not None:
            self._keeper.wait(timeout_s)
            if self._keepers.revive(self._timeline):
                self._take_over()
                if self._updates.lsn == self._lsn_at_mark:  # what was lost can be taken again
                    self._take(None, show=True)
                    self._saver.finish_captures()
                self._keeper.wait(timeout_s)
        self._channel.check()

    def close(self) -> None:
        """Waits until what was taken is durable and lets go of everything. Idempotent.

        Raises:
            EverstepError: what failed in the background, by the policy.
        """
        if not self._open or os.getpid() != self._pid:
            return
        failed: list[EverstepError] = []
        try:
            self._take_last(failed)
            while True:  # one failed base is no reason to abandon those behind it
                try:
                    self.wait()
                    break
                except EverstepError as error:
                    failed.append(error)
                    if isinstance(error, DeadlineError) or self._keepers.gave_up:
                        break
        finally:
            self._release()
        for other in failed[1:]:
            _log.error("another background task failed: %s", other)
        if failed:
            raise failed[0]

    def _take_last(self, failed: list[EverstepError]) -> None:
        """With a log no step is lost, and none at the end: the log in memory ends with us."""
        if self._recorder is None or self._step <= self._recorder.base_step:
            return
        if self._updates.lsn == self._lsn_at_mark and not self._damaged:
            try:
                self._take(None, show=True)
            except EverstepError as error:
                failed.append(error)

    def stats(self) -> Stats:
        """What checkpointing has cost and done so far."""
        return stats_of(self._step, self._saver, self._keepers)

    def __enter__(self) -> Checkpointer:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(EverstepError):  # the error under way is the one to be seen
            self.close()

    def _identity(self) -> ShardIdentity:
        return ShardIdentity(
            run=self._run_id,
            timeline=self._timeline,
            step=self._step,
            lsn=self._updates.lsn,
            rank=0,
            world=1,
            exact=self._exact,
        )

    def _ready(self) -> None:
        """Before anything is counted or saved: open, healthy, and with a timeline."""
        self._check_open()
        self._channel.check()
        if self._damaged:
            raise StateError(
                "the state in memory was partly overwritten by a resume that failed; it is not "
                "that of any step",
                hint="resume() another base, or build the model again",
            )
        if self._keeper is None:
            self._start_fresh()
        elif self._keepers.revive(self._timeline):
            self._take_over()
            self._base_due = True

    def _start_fresh(self) -> None:
        with storage_errors("open the run", self._run):
            refuse_unresumed(self._seams.filesystem, self._run, None)
            self._keepers.open()  # it may be writing what an earlier process took
            held = self._keepers.left_behind().base
            inventory = refuse_unresumed(self._seams.filesystem, self._run, held)
            timeline = open_timeline(self._seams, self._run, inventory, parent=None, exact=True)
        self._start_timeline(timeline, exact=True)

    def _start_timeline(self, timeline: int, exact: bool, verified: BaseId | None = None) -> None:
        self._timeline, self._exact = timeline, exact
        self._keepers.serve(timeline, verified)
        self._take_over()

    def _take_over(self) -> None:
        """A keeper has come into service."""
        keeper = self._keepers.current
        assert keeper is not None
        self._keeper = keeper
        self._saver.start(keeper, self._keepers.pool)
        if self._recorder is not None:
            self._recorder.start(keeper, self._keepers.pool, self._timeline, self._exact)
        # A script that ends without close() still gets its last base.
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        pid, show, saver = self._pid, sys.stderr, self._saver
        self._at_exit = lambda: finish_at_exit(saver, keeper, pid, show)
        atexit.register(self._at_exit)

    def _touch(self) -> None:
        self._damaged = True  # until everything is restored
        self._touches += 1

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(
                "this Checkpointer is closed",
                path=getattr(self, "_run", None),
                hint="a second Checkpointer on the same run closes the first",
            )
        if os.getpid() != self._pid:
            raise StateError(
                "this Checkpointer belongs to the process that this one was forked from",
                path=self._run,
                hint="make a Checkpointer (on a run folder of its own) in this process",
            )

    def _release(self) -> None:
        self._open = False
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._updates.close()
        self._lane.close()
        self._keepers.close()
        self._ring.close()
        if _live.get(self._run) is self:
            del _live[self._run]
