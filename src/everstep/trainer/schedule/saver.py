"""Capture at every step: most captures stay in the keeper's memory, those that are due become
durable.

The newest complete capture is *parked*: it stays in its block of the arena, known to the keeper,
which offers it to a new process when the training process is killed. It is released when the next
one is complete, not before. So the arena holds two states, and while one is being written a third,
or training waits. Several ranks capture only bases that are due: the newest captures held by their
keepers could be of different steps."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from everstep.capture import Batch, Dispatch, Lane, Transfer
from everstep.capture.lane import Progress, Take
from everstep.errors import DeadlineError, KeeperError
from everstep.format import BasePlan, ShardIdentity
from everstep.link import Save, fail, failing_save
from everstep.link.capture import Capture
from everstep.link.pool import CapturePool
from everstep.seams.processes import Outcome
from everstep.state.survey import Survey
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.base import PlannedCopies, PreparedBase, Saver
from everstep.trainer.participant import BaseRequest, Mark, Participant, TrainingContext
from everstep.trainer.schedule.given import GivenPlan
from everstep.trainer.schedule.scheduler import Scheduler


class ScheduledSaver(Saver):
    """Saver whose captures follow a plan.

    Args:
        given: plan to follow; None: plans are made from the steps.

    Attributes:
        scheduler: makes the plans and issues the copies.
    """

    copies_in_flight = 3
    parks = True

    def __init__(
        self,
        context: TrainingContext,
        participants: Sequence[Participant],
        given: GivenPlan | None = None,
    ) -> None:
        self.scheduler = Scheduler(context.run, context.state, context.lane, given)
        self._planned = _PlannedLane(context.lane, self.scheduler)
        super().__init__(replace(context, lane=self._planned), participants)
        in_memory = context.options.method.in_memory
        self._can_park = context.state.ranks.world == 1 and not in_memory
        # For the fields below: captures become complete in the lane's thread.
        self._parking = threading.Lock()
        self._parked: Capture | None = None  # newest complete capture
        self._of_before = False  # the parked capture is of an earlier timeline
        self._newest: Save | None = None  # of the last park(), complete or not
        self._persist_when_complete: list[Save] = []  # each is to be persisted once it is complete
        self._starts = 0

    def start(self, service: Service) -> None:
        with self._parking:
            if service.pool is not self._pool and self._parked is not None:  # its keeper is lost
                # A lost keeper will not report the end of the capture, so its memory is released
                # here.
                self._parked.on_end(self._parked)
                self._parked = None
            # It stays until a newer one is complete, since a crash would be restored from it. It is
            # of the earlier timeline, so it must not be persisted any more.
            self._of_before = True
            self._newest = None
            self._persist_when_complete = []
            self._starts += 1
            self._service = None  # a capture for the old keeper may complete meanwhile
        super().start(service)

    @property
    def _process(self) -> RemoteKeeper | None:
        return None if self._service is None else self._service.process

    @property
    def reachable_step(self) -> int | None:
        """Return the step of the newest complete capture held by the keeper; None if it
        holds none."""
        parked = self._parked
        return None if parked is None else parked.step

    def park(self, mark: Mark) -> None:
        """Take a capture that stays in memory until a newer one is complete.

        Does nothing without a keeper process, where it would not survive a crash, and with several
        ranks, where one rank may have released it while another has no newer one.

        Raises:
            EverstepError: this capture, or an earlier save in the background, has failed and the
                failure policy raises.
        """
        # Even if nothing is parked: copies of a due base must be issued, and the step is learned
        # from.
        self.scheduler.end_step()
        if not self._can_park or self._process is None:
            return
        identity = mark.identity
        save = self._newest = Save(identity.step, identity.timeline, parked=True)
        with failing_save(save, self.post):
            self._take(identity, save, None, show=False)
        self._last = save
        self._context.channel.check()

    def take(self, request: BaseRequest) -> Save:
        save = self._take_or_persist(request)
        if request.show:
            # The caller may wait for this base before the next step: copies planned for events of
            # that step would never be issued.
            self.scheduler.flush()
        return save

    def _take_or_persist(self, request: BaseRequest) -> Save:
        identity = request.identity
        again = None
        with contextlib.suppress(KeeperError):  # a lost keeper is reported by the take() below
            again = self._persist_newest(identity)
        if again is not None:
            self._context.channel.check()
            return again
        same = self._last is not None and self._last.is_of(identity)
        if not same or (self.last_is_in_memory and not request.in_memory):
            self.scheduler.end_step()
        return super().take(request)

    def persist_parked(self) -> None:
        """Make the newest complete capture durable if it is not; no copy may be in progress.

        Raises:
            KeeperError: the keeper is lost.
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
        """Remove all hooks."""
        self.scheduler.close()

    def _persist_newest(self, identity: ShardIdentity) -> Save | None:
        """Make the parked capture of this step durable; return None if there is none."""
        with self._parking:
            save = self._newest
            if save is None or save.is_lost or not save.is_of(identity):
                return None
            if save.is_durable:
                return save
            if save in self._persist_when_complete or not save.parked:
                return save
            self.saves += 1
            self.last_save_s = self._context.clock.monotonic_s()
            if self._parked is not None and self._parked.save is save:
                capture = self._parked
                self._parked = None
                self._persist(capture)
            else:
                waiting = (one for one in self._persist_when_complete if not one.durable.done())
                self._persist_when_complete = [*waiting, save]
        return save

    def _persist(self, capture: Capture) -> None:
        process = self._process
        assert process is not None
        capture.save.parked = False
        try:
            process.persist(capture)
        except KeeperError as error:
            fail(capture.save.durable, error)
            capture.on_end(capture)
            raise

    def _capture(self, prepared: PreparedBase, plan: BasePlan, survey: Survey, save: Save) -> None:
        service = self._service
        pool = self._pool
        assert service is not None
        assert pool is not None
        tensors = survey.tensors
        # The scheduler's gate knows what each update changes, so the base class gets no gate.
        copies = PlannedCopies((), {}, prepared.copies(tensors).check)
        room = self.acquire(prepared, survey)
        with pool.releasing(room):
            block = pool.block(room)
            dispatch = self.scheduler.dispatch(prepared, tensors, block, self._planned.release)
            complete = functools.partial(self.scheduler.complete, dispatch, prepared)
            notify = functools.partial(self._notify_keeper, service, pool, self._starts, complete)
            self._planned.next = dispatch
        try:
            self.fill(prepared, plan, survey, save, room, copies, notify)
        finally:
            self._planned.next = None  # of a capture that has failed before it began

    def finish_copies(self) -> None:
        self.scheduler.flush()

    def figures(self) -> Mapping[str, Any]:
        return {**super().figures(), "schedule": self.scheduler.stats()}

    def gate_update(self, optimizer: str | None) -> None:
        """Block an update until it cannot tear a planned capture (I1)."""
        timeout_s = self._context.options.progress_timeout_s
        wait_s, late = self.scheduler.gate(optimizer, timeout_s)
        self.stall_s["gate"] += wait_s
        # Do not block training for ever: the update goes on, these captures are void.
        for dispatch in late:
            dispatch.fail(
                DeadlineError(f"copying the state to host memory took longer than {timeout_s:g} s")
            )

    def _notify_keeper(
        self,
        service: Service,
        pool: CapturePool,
        starts: int,
        complete: Callable[[int], None],
        capture: Capture,
        objects: Mapping[str, bytes],
    ) -> None:
        """Notify the keeper of a complete capture, which replaces the parked one; in the lane's
        thread.

        If another keeper is in service by now, it does not know this capture, and nothing is
        replaced.
        """
        # First the newer capture is handed over, last the older one is released: a crash at any
        # moment leaves one of them complete.
        service.keeper.captured(capture, objects)
        pool.drop_kept()
        complete(capture.step)
        older: Capture | None = None
        with self._parking:
            # Under the lock: start() clears the service before another keeper comes into use.
            serves = service.keeper is self._keeper
            if serves:
                older = self._parked
                self._parked = None
            if service.process is not None and capture.parked:
                service.process.set_aside(capture)
                if not serves:
                    older = capture
                elif capture.save in self._persist_when_complete:
                    self._persist_when_complete.remove(capture.save)
                    self._persist(capture)
                else:
                    self._parked = capture
                    self._of_before = starts != self._starts
        if older is not None:
            older.on_end(older)


class _PlannedLane:
    """Lane on which the copies of a capture are issued one by one; jobs that must run after them
    wait until all are issued.

    Attributes:
        next: capture that :meth:`submit` is called for next.
    """

    def __init__(self, lane: Lane, scheduler: Scheduler) -> None:
        self._lane = lane
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._open = False
        self._jobs: list[tuple[Callable[[], None], Future[None]]] = []
        self.next: Dispatch | None = None

    def warm(
        self, tensors: Iterable[torch.Tensor], block: torch.Tensor, take: Take | None = None
    ) -> None:
        """See :class:`.Lane`."""
        self._lane.warm(tensors, block, take)

    def ready_bytes(self, tensors: Iterable[torch.Tensor], block: torch.Tensor) -> int:
        """See :class:`.Lane`."""
        return self._lane.ready_bytes(tensors, block)

    def leave(self) -> None:
        """See :class:`.Lane`."""
        self._lane.leave()

    def copy_now(self, batches: Sequence[Batch], block: torch.Tensor) -> None:
        """See :class:`.Lane`."""
        self._lane.copy_now(batches, block)

    def submit(self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress) -> Transfer:
        """Begin the capture that is ``next``."""
        dispatch = self.next
        self.next = None
        assert dispatch is not None
        with self._lock:
            # Before the first unit is issued: begin() may issue all of them, and release() closes
            # it again.
            self._open = True
        self._scheduler.begin(dispatch)
        return dispatch

    def submit_yielding(
        self, batches: Sequence[Batch], block: torch.Tensor, progress: Progress
    ) -> Transfer:
        """See :class:`.Lane`."""
        return self._lane.submit_yielding(batches, block, progress)

    def release(self) -> None:
        """Run the waiting jobs: all copies of the capture were issued."""
        with self._lock:
            self._open = False
            jobs = self._jobs
            self._jobs = []
            # Under the lock: jobs that run() gets meanwhile must not overtake these.
            for job, future in jobs:
                self._lane.run(functools.partial(_run, job, future))

    def run(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` in the lane's thread, after the copies of the capture."""
        with self._lock:
            if not self._open:
                return self._lane.run(job)
            future = Outcome[None]()
            self._jobs.append((job, future))
            return future

    def close(self) -> None:
        """See :class:`.Lane`."""
        # Jobs that wait for copies may release memory: they must run even if nothing is issued any
        # more.
        self.release()
        self._lane.close()


def _run(job: Callable[[], None], future: Future[None]) -> None:
    try:
        job()
    except BaseException as error:
        future.set_exception(error)
        raise
    future.set_result(None)
