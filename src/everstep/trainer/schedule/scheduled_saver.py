"""Captures at every step: most of them stay in the keeper's memory, the ones that are due become
durable.

The newest whole capture is *parked*: in its block of the arena, known to the keeper, which gives
it to whoever takes the run over when the training process is killed. It is let go when the next one
is whole, and not before. So the arena holds two states; while one is being written a third, or
training waits. Of several ranks only those are taken that are due: of the newest ones that keepers
hold, one may be a step ahead of another.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import PurePath

import torch

from everstep.capture.lanes.batches import Batch
from everstep.capture.lanes.lane import Lane, Progress, Take, Transfer
from everstep.capture.scheduled import Dispatch
from everstep.config.options import Options
from everstep.errors import DeadlineError, KeeperError, StateError
from everstep.format.header import ShardIdentity
from everstep.format.plan import BasePlan
from everstep.link.capture import Capture
from everstep.link.channel import BackgroundChannel
from everstep.link.pool import CapturePool
from everstep.link.save import Save, fail, failing_save
from everstep.seams import Clock
from everstep.seams.processes.conditions import Outcome
from everstep.state.survey.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Keeper
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base.prepared import Copies, Prepared
from everstep.trainer.base.saver import Saver
from everstep.trainer.schedule.scheduled import Scheduler

__all__ = ["ScheduledSaver"]


class ScheduledSaver(Saver):
    """A :class:`.saver.Saver` whose captures follow a plan.

    Attributes:
        scheduler: makes the plan, and keeps to it.
    """

    copies_in_flight = 3

    def __init__(
        self,
        options: Options,
        run: PurePath,
        state: State,
        lane: Lane,
        channel: BackgroundChannel,
        clock: Clock,
    ) -> None:
        self._planned = _PlannedLane(lane)
        super().__init__(options, run, state, self._planned, channel, clock)
        self.scheduler = Scheduler(run, state, lane)
        self.also_gate = self._admit
        self.finish_first = self.scheduler.flush
        self._parks = state.ranks.world == 1 and not options.method.in_memory
        self._parking = threading.Lock()
        self._parked: Capture | None = None  # whole, and the newest
        self._of_before = False  # of a timeline that is over
        self._newest: Save | None = None  # that was parked, whole or not
        self._wanted: Save | None = None  # durable after all, as soon as it is whole
        self._starts = 0

    def start(self, keeper: Keeper, pool: CapturePool | None) -> None:
        with self._parking:
            if pool is not self._pool and self._parked is not None:  # its keeper is gone
                self._parked.on_end(self._parked)
                self._parked = None
            self._of_before = True
            self._newest = self._wanted = None
            self._starts += 1
            self._keeper = None  # a capture for the one before may become whole meanwhile
        super().start(keeper, pool)

    @property
    def parked_step(self) -> int | None:
        """Step of the newest whole capture that the keeper holds; None: it holds none."""
        parked = self._parked
        return None if parked is None else parked.step

    def park(self, identity: ShardIdentity) -> None:
        """Takes a capture that stays in memory until a newer one is whole. Without a keeper
        process it would survive nothing, and of several ranks one may have let it go when another
        has no newer one, so then there is none.

        Raises:
            EverstepError: what failed, now or in the background, by the policy.
        """
        self.scheduler.ended()
        if not self._parks or not isinstance(self._keeper, RemoteKeeper):
            return
        save = self._newest = Save(identity.step, identity.timeline, parked=True)
        with failing_save(save, self.post):
            self._take(identity, save, None, show=False)
        self._last = save
        self._channel.check()

    def take(
        self,
        identity: ShardIdentity,
        *,
        show: bool,
        survey: Survey | None = None,
        in_memory: bool = False,
    ) -> Save:
        save = self._take_or_persist(identity, show=show, survey=survey, in_memory=in_memory)
        if show:
            # Somebody has asked, and may wait for it before the next step, whose events the copies
            # that are left would go by: they would never come.
            self.scheduler.flush()
        return save

    def _take_or_persist(
        self, identity: ShardIdentity, *, show: bool, survey: Survey | None, in_memory: bool
    ) -> Save:
        again = None
        with contextlib.suppress(KeeperError):  # it is gone: what follows says so, by the policy
            again = self._persist_newest(identity)
        if again is not None:
            self._channel.check()
            return again
        last = self._last
        base = (identity.timeline, identity.step)
        same = last is not None and (last.timeline, last.step) == base
        if not same or (self.last_is_in_memory and not in_memory):
            self.scheduler.ended()
        return super().take(identity, show=show, survey=survey, in_memory=in_memory)

    def persist_parked(self) -> None:
        """The newest whole capture becomes durable, if it is not; no copy is under way.

        Raises:
            KeeperError: the keeper is gone.
        """
        with self._parking:
            capture = self._parked
            self._parked = None
            if capture is None or self._of_before:
                self._parked = capture
                return
            self.saves += 1
            self._persist(capture)

    def close(self) -> None:
        """Takes all hooks away."""
        self.scheduler.close()

    def _persist_newest(self, identity: ShardIdentity) -> Save | None:
        """The capture of this very step, which was parked, becomes durable; None if there is
        none."""
        with self._parking:
            save = self._newest
            if save is None or (save.timeline, save.step) != (identity.timeline, identity.step):
                return None
            if save.durable.done():  # it has failed
                return None if save.durable.cancelled() or save.durable.exception() else save
            if self._wanted is save or not save.parked:
                return save
            self.saves += 1
            self.last_save_s = self._clock.monotonic_s()
            if self._parked is not None and self._parked.save is save:
                capture = self._parked
                self._parked = None
                self._persist(capture)
            else:
                self._wanted = save
        return save

    def _persist(self, capture: Capture) -> None:
        keeper = self._keeper
        assert isinstance(keeper, RemoteKeeper)
        capture.save.parked = False
        try:
            keeper.persist(capture)
        except KeeperError as error:
            fail(capture.save.durable, error)
            capture.on_end(capture)
            raise

    def _capture(self, prepared: Prepared, plan: BasePlan, survey: Survey, save: Save) -> None:
        room = self.acquire(prepared, survey)
        keeper = self._keeper
        pool = self._pool
        assert keeper is not None
        assert pool is not None
        block = pool.block(room)
        tensors = survey.tensors
        dispatch = self.scheduler.dispatch(prepared, tensors, block, self._planned.release)
        self._planned.next = functools.partial(self._begin, dispatch)
        prepared.gated_batches(tensors)  # which the spot check goes by
        # Who updates is held back by the scheduler, which knows what each update changes.
        copies = Copies((), {}, prepared.spot_check(tensors) if prepared.gated else None)
        tell = functools.partial(self._tell, keeper, pool, self._starts, dispatch)
        try:
            self.fill(prepared, plan, survey, save, room, copies, tell)
        finally:
            if self._planned.next is not None:  # it has failed before: nothing may fill that room
                self._planned.next = None
                dispatch.fail(StateError("a capture that never began", step=save.step))

    def _begin(self, dispatch: Dispatch) -> Dispatch:
        self.scheduler.begin(dispatch)
        return dispatch

    def _admit(self, optimizer: str | None) -> None:
        """Before an update, in addition to what the gate does."""
        timeout_s = self._options.progress_timeout_s
        wait_s, late = self.scheduler.gate(optimizer, timeout_s)
        self.stall_s["gate"] += wait_s
        for dispatch in late:  # training goes on; the copy that it overtakes is worth nothing
            dispatch.fail(DeadlineError(f"copying the state took longer than {timeout_s:g} s"))

    def _tell(
        self,
        keeper: Keeper,
        pool: CapturePool,
        starts: int,
        dispatch: Dispatch,
        capture: Capture,
        objects: Mapping[str, bytes],
    ) -> None:
        """In the lane's thread: a capture is whole, and takes the place of the one before; unless
        another keeper is in service by now, which knows nothing of it."""
        keeper.captured(capture, objects)
        pool.drop_kept()
        self.scheduler.whole(dispatch, capture.step)
        older: Capture | None = None
        with self._parking:
            serves = keeper is self._keeper
            if serves:
                older = self._parked
                self._parked = None
            if isinstance(keeper, RemoteKeeper) and capture.parked:
                keeper.set_aside(capture)
                if not serves:
                    older = capture
                elif capture.save is self._wanted:
                    self._persist(capture)
                else:
                    self._parked = capture
                    self._of_before = starts != self._starts
        if older is not None:
            older.on_end(older)


class _PlannedLane:
    """A lane on which a capture's copies are issued one after the other; jobs that belong behind
    them wait until all are."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._open = False
        self._jobs: list[tuple[Callable[[], None], Future[None]]] = []
        self.next: Callable[[], Transfer] | None = None

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """As of the lane."""
        self._lane.warm(tensors, block, take)

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        """As of the lane."""
        return self._lane.ready_bytes(tensors, block)

    def leave(self) -> None:
        """As of the lane."""
        self._lane.leave()

    def mark(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """As of the lane."""
        self._lane.mark(batches, block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        """Begins the capture that is ``next``."""
        begin = self.next
        self.next = None
        assert begin is not None
        with self._lock:
            self._open = True
        return begin()

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """As of the lane."""
        return self._lane.submit_yielding(batches, block, progress)

    def release(self) -> None:
        """All copies of the capture were issued."""
        with self._lock:
            self._open = False
            jobs = self._jobs
            self._jobs = []
            for job, future in jobs:
                self._lane.run(functools.partial(_run, job, future))

    def in_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """As of the lane."""
        return self._lane.in_host_memory(tensor)

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Runs ``job`` in the lane's thread, behind the copies of the capture."""
        with self._lock:
            if not self._open:
                return self._lane.run(job)
            future = Outcome[None]()
            self._jobs.append((job, future))
            return future

    def close(self) -> None:
        """As of the lane."""
        self.release()
        self._lane.close()


def _run(job: Callable[[], None], future: Future[None]) -> None:
    try:
        job()
    except BaseException as error:
        future.set_exception(error)
        raise
    future.set_result(None)
