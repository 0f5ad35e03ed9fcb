"""Capture bases of the state in the training process and hand them to the keeper.

A base passes through these states: tensors that no optimizer owns are copied at the step mark; the
rest is copied by the lane's thread (on CUDA: a side stream) during the next forward and backward,
while :meth:`Saver.gate` holds updates back; the lane's thread then encodes the objects, checks
samples, and notifies the keeper. From that notification on the base survives the training process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from everstep.capture import Transfer, Versions
from everstep.capture.cuda import refuse_graph_capture
from everstep.capture.lane import LiveBody
from everstep.capture.spot_check import Sample
from everstep.errors import (
    AuditError,
    DeadlineError,
    EverstepError,
    KeeperError,
    OutOfSpaceError,
)
from everstep.format import BasePlan, ShardIdentity
from everstep.link import Save, as_everstep_error, complete, fail, failing_save
from everstep.link.capture import Capture, Incoming
from everstep.link.pool import Block, CapturePool
from everstep.link.save import changed_during_copy_error
from everstep.seams import failpoint
from everstep.seams.garbage import collection_paused
from everstep.seams.processes import wait_done
from everstep.state.survey import Survey
from everstep.trainer.attach.keeper import Keeper, Service
from everstep.trainer.base.prepared_base import PlannedCopies, PreparedBase, prepare_base
from everstep.trainer.budget import bases_in_flight_max, check_disk_budget
from everstep.trainer.participant import (
    BaseRequest,
    Mark,
    Participant,
    RestoredState,
    TrainingContext,
)

NotifyKeeper = Callable[[Capture, Mapping[str, bytes]], None]
"""Notify the keeper that a capture is complete, with its encoded objects; in the lane's thread."""

_RETRY_STEPS_MAX = 64  # between two tries of a base that has failed

STALL_CAUSES = ("capture", "gate", "back_pressure", "persist", "keeper")
"""Causes of delays of the training thread, which every method has."""


class Saver(Participant):
    """Capture bases of the timeline that is being written.

    Args:
        participants: all participants; their gates hold updates back, too.

    Attributes:
        layouts: layouts of bases.
        saves: number of bases requested.
        stall_s: time the training thread was blocked, in seconds, by cause.
        last_save_s: time of the last request, on the monotonic clock.
        restored_from_memory: True if the restored base exists in memory only.
    """

    copies_in_flight = 2
    parks = False  # True if it captures every step

    def __init__(self, context: TrainingContext, participants: Sequence[Participant]) -> None:
        options = context.options
        self._context = context
        self._service: Service | None = None
        self._pool: CapturePool | None = None
        self._last: Save | None = None
        self._warm = self._copies_at_mark = self.restored_from_memory = False
        self.layouts = BaseLayouts(gates=self._gates, static_apart=not options.is_multistep)
        self._pid = os.getpid()
        self._participants = participants
        self._captures = 0
        self._pending: list[PendingCapture] = []
        self.saves = 0
        self.stall_s = dict.fromkeys(STALL_CAUSES, 0.0)
        if options.is_multistep:
            self.stall_s["gradients"] = 0.0
        if options.logs:
            self.stall_s["log"] = 0.0
        if context.options.promise is not None:
            self.stall_s["promise"] = 0.0
        self.last_save_s = context.clock.monotonic_s()

    def start(self, service: Service) -> None:
        """Send bases to the keeper in service from now on."""
        # Cleared first: an interrupt must not leave this keeper with the pool of another one.
        self._service = self._last = None
        pool = service.pool
        if pool is not self._pool:
            self.layouts.current = None  # this pool's keeper has received no layout yet
            self._warm = False
            before = self._pool
            self._pool = pool
            if before is not None:
                # Unpin now, or the old arena stays pinned until the new one is. Close it on the
                # lane, after copies into it that are still queued.
                self._context.lane.leave()
                self._context.lane.run(lambda: before.close(later=True))
        self._service = service

    def restored(self, restored: RestoredState) -> None:
        """Continue from a restored state; prepare for a base at the end of the first step."""
        self.restored_from_memory = restored.only_in_memory
        if restored.resumed.base is not None:
            self.warm(restored.survey)

    def mark(self, mark: Mark) -> bool:
        """Prepare for the first base.

        After the log has handled the mark, because training waits for the mark's copies.
        """
        self.warm()
        return False

    def warm(self, survey: Survey | None = None) -> None:
        """Touch the memory of the first captures, once, after the first step, when optimizer state
        exists.

        Args:
            survey: survey of the current state, if one was taken.
        """
        if self._warm or self._pool is None:
            return
        self._warm = True
        pool = self._pool
        survey = survey or self._context.state.survey()
        size_bytes = pool.rounded_bytes(sum(entry.size_bytes for entry in survey.shape.entries))
        size_bytes *= self.copies_in_flight
        beside_bytes = self.copies_in_flight * sum(survey.shape.objects_bytes.values())
        size_bytes = min(size_bytes, max(0, pool.arena.size_bytes - beside_bytes))
        self._context.lane.warm(survey.tensors.values(), pool.whole[:size_bytes], pool.warm)

    def park(self, mark: Mark) -> None:
        """Keep a capture of a step without a base in memory, if the method captures every step."""

    def persist_parked(self) -> None:
        """Make the newest capture of :meth:`park` durable."""

    def figures(self) -> Mapping[str, Any]:
        """Return the number of bases and the time that training was blocked."""
        return {"saves": self.saves, "stall_s": dict(self.stall_s)}

    @property
    def _gates(self) -> bool:
        """True if copies go on after the step mark, and updates wait for them."""
        return self._context.options.method.base in ("lazy", "checkfreq", "multistep", "scheduled")

    @property
    def _keeper(self) -> Keeper | None:
        return None if self._service is None else self._service.keeper

    @property
    def copying(self) -> bool:
        """Return True if copies of a capture may be in progress."""
        return bool(self._pending)

    @property
    def last_is_in_memory(self) -> bool:
        """Return True if the last base exists in memory only and is not being written to disk;
        before the first base, the answer is that of the restored one."""
        return self.restored_from_memory if self._last is None else self._last.in_memory

    def take(self, request: BaseRequest) -> Save:
        """Capture a base of the current state, or return the base already taken of this step.

        Raises:
            EverstepError: this save, or an earlier one in the background, has failed and the
                failure policy raises.
        """
        identity = request.identity
        in_memory = request.in_memory
        last = self._last
        there = last is not None and last.is_of(identity) and not last.is_lost
        if last is not None and there and (in_memory or not last.in_memory):
            return last
        save = Save(identity.step, identity.timeline, in_memory=in_memory)
        self.saves += 1
        self.last_save_s = self._context.clock.monotonic_s()
        with failing_save(save, self.post):
            self._take(identity, save, request.survey, show=request.show)
        self._last = save
        process = None if self._service is None else self._service.process
        if save.is_lost and process is not None and process.lost is not None:
            process.lost_steps.add(save.step)  # other ranks may still commit their shards of it
        self._context.channel.check()
        return save

    @property
    def base_stall_s(self) -> float:
        """Time that bases have blocked the training thread, in seconds: all but the log's."""
        return sum(self.stall_s.values()) - self.stall_s.get("log", 0.0)

    @contextlib.contextmanager
    def stalled(self, cause: str) -> Iterator[None]:
        """Add the time spent inside the context to ``stall_s[cause]``, except time that is added to
        any cause meanwhile."""
        start_s = self._context.clock.monotonic_s()
        before_s = sum(self.stall_s.values())
        try:
            yield
        finally:
            added_s = sum(self.stall_s.values()) - before_s
            self.stall_s[cause] += max(0.0, self._context.clock.monotonic_s() - start_s - added_s)

    def post(self, error: EverstepError) -> None:
        """Report an error of a base through the background channel.

        The loss of the keeper is not reported here: the session that replaces the keeper reports it
        once, whether or not a base was in progress."""
        if not self.is_keeper_loss(error):
            self._context.channel.post(error)

    def is_keeper_loss(self, error: EverstepError) -> bool:
        """Return True if ``error`` is the loss of the keeper in service and nothing else."""
        keeper = self._keeper
        return keeper is not None and error is keeper.lost and isinstance(error, KeeperError)

    def request_base(self, survey: Survey, identity: ShardIdentity) -> PreparedBase:
        """Count a base that the keeper's replica will write; return the layout such a base would
        have."""
        self.saves += 1
        self.last_save_s = self._context.clock.monotonic_s()
        return self.prepare_base(survey, identity)

    def gate(self, optimizer: str | None) -> None:
        """Block an update until the tensors it will change have been copied (I1).

        Args:
            optimizer: key of the optimizer about to update; None if anything may be updated.

        Raises:
            StateError: the update is being captured into a CUDA graph.
        """
        refuse_graph_capture()
        # A forked child inherits the hooks but not the lane: nothing is being copied there.
        if os.getpid() != self._pid:
            return
        for participant in self._participants:
            participant.gate_update(optimizer)
        if not self._pending:
            return
        start_s = self._context.clock.monotonic_s()
        timeout_s = self._context.options.progress_timeout_s
        # A copy of the list: the lane's thread removes captures meanwhile.
        for pending in list(self._pending):
            # State that moved to another optimizer may have been copied with that one's.
            known = (
                pending.prepared is self.layouts.current
                and self._context.state.has_known_parameters(optimizer)
            )
            key = optimizer if known else None
            end = pending.prepared.size_bytes if key is None else pending.copies.ends.get(key, 0)
            assert pending.transfer is not None
            # Before the update, which moves the counters itself.
            pending.check_versions(releases=pending.prepared.owned_by(key))
            if not pending.transfer.gate(end, timeout_s):
                # Do not block training for ever: the update goes on, the capture is void.
                late = f"copying the state to host memory took longer than {timeout_s:g} s"
                self._fail_capture(pending, DeadlineError(late, step=pending.capture.step))
        self.stall_s["gate"] += self._context.clock.monotonic_s() - start_s

    def check_disk(self, plan: BasePlan, more_bytes: int = 0) -> None:
        """Check that a base, and so many bytes beside it, fit into the disk budget.

        Raises:
            OutOfSpaceError: they do not.
        """
        options = self._context.options
        if options.budget.disk_bytes is not None:
            check_disk_budget(options, self._context.run, plan.size_bytes + more_bytes)

    def copy_everything_at_mark(self) -> None:
        """Copy everything at the step mark from now on: some code writes to the state without
        passing the gate (I1)."""
        self._copies_at_mark = True

    def finish_captures(self) -> None:
        """Block until no copy is in progress.

        Raises:
            DeadlineError: a copy has hung.
        """
        if not self._gates:
            return
        # The log last: it continues from a base that ends here.
        for participant in reversed(self._participants):
            participant.finish_copies()
        self.gate(None)
        timeout_s = self._context.options.progress_timeout_s
        # The lane runs its jobs in order: after this one, complete captures were announced to the
        # keeper.
        if not wait_done(self._context.lane.run(lambda: None), timeout_s):
            raise DeadlineError(f"copying the state to host memory has hung for {timeout_s:g} s")

    def _take(
        self, identity: ShardIdentity, save: Save, survey: Survey | None, *, show: bool
    ) -> None:
        state = self._context.state
        start_s = self._context.clock.monotonic_s()
        behind_mark = survey is None and self._context.options.logs
        survey = survey or state.survey()
        exact = identity.exact and state.exact  # after the survey, which sets it
        why = state.why_inexact
        identity = replace(identity, exact=exact, inexact=why)
        prepared = self.prepare_base(survey, identity)
        plan = prepared.plan(identity, behind_mark=behind_mark)
        self.check_disk(plan)
        # An interrupted save must not be returned as the base of this step.
        self._last = None
        if self._context.options.method.base == "sync":
            self._persist_now(plan, survey, save, show=show)
            return
        self.stall_s["capture"] += self._context.clock.monotonic_s() - start_s
        self._capture(prepared, plan, survey, save)

    def prepare_base(self, survey: Survey, identity: ShardIdentity) -> PreparedBase:
        """Return the layout and copies of a base of this state."""
        return self.layouts.of(survey, identity)

    def _persist_now(self, plan: BasePlan, survey: Survey, save: Save, *, show: bool) -> None:
        with self.stalled("persist"):
            assert self._service is not None
            keeper = self._service.thread
            assert keeper is not None
            objects = survey.objects()
            objects_in = plan.objects_in
            bodies = [
                LiveBody(shard.layout, survey.tensors, objects if shard is objects_in else {})
                for shard in plan.shards
            ]
            keeper.persist(plan, bodies, save, show=show)
            save.staged.set_result(None)

    def _capture(self, prepared: PreparedBase, plan: BasePlan, survey: Survey, save: Save) -> None:
        """Begin to copy the state into the arena; copy now the entries that may change now."""
        # Before the block is acquired: an error must not leave a block that nobody returns.
        copies = prepared.copies(survey.tensors)
        self.fill(prepared, plan, survey, save, self.acquire(prepared, survey), copies)

    def acquire(self, prepared: PreparedBase, survey: Survey) -> Block:
        """Reserve a block of the arena for a base, with space for its encoded objects; block until
        there is one.

        Raises:
            OutOfSpaceError: the base does not fit into the arena.
            DeadlineError: no block became free in time.
        """
        assert self._keeper is not None
        assert self._pool is not None
        options = self._context.options
        start_s = self._context.clock.monotonic_s()
        if options.method.base == "checkfreq":
            # CheckFreq has one base in progress: the previous one must be durable first.
            self._keeper.wait(None, show=False)
        size_bytes = prepared.size_bytes
        beside_bytes = prepared.objects_bytes
        try:
            room = self._pool.acquire(
                size_bytes,
                timeout_s=options.progress_timeout_s,
                beside_bytes=beside_bytes,
                in_flight_max=bases_in_flight_max(options, size_bytes + beside_bytes),
            )
        except (OutOfSpaceError, DeadlineError):
            # The objects may be smaller by now: measure them again for the next attempt.
            self._context.lane.run(survey.measure)
            raise
        self.stall_s["back_pressure"] += self._context.clock.monotonic_s() - start_s
        return room

    def fill(
        self,
        prepared: PreparedBase,
        plan: BasePlan,
        survey: Survey,
        save: Save,
        room: Block,
        copies: PlannedCopies,
        notify: NotifyKeeper | None = None,
    ) -> None:
        """Copy the entries that may change at once, and begin to copy the rest.

        Args:
            room: block of the arena; returned to the pool if this fails.
            copies: copies that may run after the step mark and are not made yet.
            notify: notification of the keeper that the capture is complete; None for that of a
                complete base.
        """
        keeper = self._keeper
        pool = self._pool
        assert keeper is not None
        assert pool is not None
        lane = self._context.lane
        begun_s = self._context.clock.monotonic_s()
        with pool.releasing(room):
            block = pool.block(room)
            shared = SharedBlock(keeper, pool, room)
            capture = self._new_capture(prepared, plan, save, shared, whole=notify is None)
            pending = PendingCapture(capture, shared, prepared, survey, copies, notify)
        try:
            # Counters first: the survey has just accessed the tensors, nothing has written since.
            if copies.versions is not None:
                pending.versions_at_mark = copies.versions.now()
                pending.versions = copies.versions
            # The keeper counts the capture before any copy: close() must wait for it.
            keeper.begin(capture)
            failpoint("capture.before_mark")
            lane.copy_now(prepared.marked_batches(survey.tensors), block)
            if copies.check is not None:
                pending.sample = copies.check.take()
            # On the lane, which is one queue: captures are announced in the order in which they are
            # taken.
            lane.run(lambda: self._announce_capture(pending))
            pending.transfer = lane.submit(
                copies.batches, block, lambda end: pool.arena.set_progress(room.word, end)
            )
            # Only now: a gate that finds the capture needs its transfer.
            self._pending.append(pending)
            if self._copies_at_mark:
                self.gate(None)
            if self._gates:
                lane.run(lambda: self._complete_capture(pending, block))
            else:  # everything was copied at the mark
                self._complete_capture(pending, block)
        except BaseException as error:
            # The keeper does not know the capture, so nothing else returns the block.
            if not capture.begun:
                pool.release(room)
                raise
            self._fail_capture(pending, error)
            # On the lane, after copies that were begun: until then they write into the block.
            lane.run(lambda: self._end_copies(pending))
            if not isinstance(error, Exception):
                raise
        self.stall_s["capture"] += self._context.clock.monotonic_s() - begun_s

    def _new_capture(
        self,
        prepared: PreparedBase,
        plan: BasePlan,
        save: Save,
        shared: SharedBlock,
        *,
        whole: bool,
    ) -> Capture:
        options = self._context.options
        room = shared.room
        arena = shared.pool.arena
        self._captures += 1
        return Capture(
            number=self._captures,
            plan=plan,
            layout=prepared.number,
            save=save,
            offset=room.offset,
            word=room.word,
            stream=whole and options.method.base in ("lazy", "multistep"),
            incoming=Incoming(
                lambda: arena.progress(room.word), timeout_s=options.progress_timeout_s
            ),
            on_end=shared.drop_user,
        )

    def _announce_capture(self, pending: PendingCapture) -> None:
        """Announce the capture to the keeper, in the lane's thread, before the first copy makes
        progress."""
        try:
            pending.shared.keeper.announce(pending.capture)
        except BaseException as error:
            self._fail_capture(pending, error)
            if not isinstance(error, Exception):
                raise

    def _complete_capture(self, pending: PendingCapture, block: torch.Tensor) -> None:
        """Encode the objects, check samples and notify the keeper; in the lane's thread, after the
        copies."""
        capture = pending.capture
        # Until the claim the gate may fail the capture in the training thread.
        claimed = notified = False
        try:
            assert pending.transfer is not None
            if not pending.transfer.wait(self._context.options.progress_timeout_s):
                raise DeadlineError("copying the state to host memory has hung", step=capture.step)
            failpoint("capture.before_captured")
            objects = pending.objects()
            check = pending.copies.check
            if check is not None and pending.sample is not None:
                torn = pending.check_versions() or check.differing(pending.sample, block)
                if torn is not None:
                    raise changed_during_copy_error(torn, capture.step)
            claimed = pending.claim_outcome()
            if not claimed:
                return  # the gate has failed it meanwhile
            (pending.notify or pending.shared.keeper.captured)(capture, objects)
            notified = True
            if pending.notify is None:
                # Older bases kept in the arena are superseded: this one also survives a crash.
                pending.shared.pool.drop_kept()
            failpoint("capture.after_captured")
            complete(capture.save.staged, None)
        except BaseException as error:
            # A claim of this thread is taken back if the keeper was not notified. The capture can
            # then still fail.
            pending.outcome_claimed = pending.outcome_claimed and (notified or not claimed)
            self._fail_capture(pending, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._end_copies(pending)

    def _fail_capture(self, pending: PendingCapture, error: BaseException) -> None:
        """Fail a capture after an error or an interrupt. None of its bytes may become durable,
        unless the keeper was already notified that it is complete."""
        if not pending.claim_outcome():
            return
        save = pending.capture.save
        if isinstance(error, Exception):
            ours = as_everstep_error(error, save.step)
            handled = isinstance(ours, AuditError) and any(
                participant.handles_torn_base(ours) for participant in self._participants
            )
            pending.shared.keeper.abandon(pending.capture, None if handled else ours)
            fail(save.staged, ours)
            fail(save.durable, ours)
        else:
            pending.shared.keeper.abandon(pending.capture, None)
            save.staged.cancel()
            save.durable.cancel()
        self._remove_pending(pending)

    def _remove_pending(self, pending: PendingCapture) -> None:
        with contextlib.suppress(ValueError):
            self._pending.remove(pending)

    def _end_copies(self, pending: PendingCapture) -> None:
        """Release a capture's memory for the training process: no copy writes into it any more."""
        if pending.claim_end():
            self._remove_pending(pending)
            pending.shared.drop_user(pending.capture)


class BaseLayouts:
    """Layouts of bases, each prepared once and numbered.

    Args:
        gates: see :func:`.prepare_base`.
        static_apart: see :func:`.prepare_base`.

    Attributes:
        current: layout of the last base; None if the keeper in service knows none.
    """

    def __init__(self, *, gates: bool, static_apart: bool) -> None:
        self._gates = gates
        self._static_apart = static_apart
        self._number = 0
        self.current: PreparedBase | None = None

    def of(self, survey: Survey, identity: ShardIdentity) -> PreparedBase:
        """Return the layout of a base of this state."""
        if self.current is None or self.current.shape is not survey.shape:
            self._number += 1
            with collection_paused():
                self.current = prepare_base(
                    survey,
                    identity,
                    number=self._number,
                    gates=self._gates,
                    # Bases over several steps copy and rebuild entries in an order of their own.
                    static_apart=self._static_apart,
                )
        return self.current


@dataclass(eq=False, slots=True)
class SharedBlock:
    """Block of the arena that copies fill and the keeper reads.

    Not part of :class:`PendingCapture`, whose survey must not live as long as a capture that the
    keeper holds."""

    keeper: Keeper
    pool: CapturePool
    room: Block
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def drop_user(self, capture: Capture) -> None:
        """Drop one of the two users; the last one returns the block to the pool.

        Called once when no copy writes into the block any more, and once when the keeper no longer
        reads it."""
        with self._lock:
            capture.users -= 1
            if capture.users:
                return
        keeper = self.keeper
        if capture.durable and keeper.pid is not None:
            self.pool.keep(self.room, lambda: keeper.forget(capture))
            return
        # Before the block is reused: the next capture writes into it before the keeper processes
        # any message about it.
        keeper.forget(capture)
        self.pool.release(self.room)


@dataclass(eq=False, slots=True)
class PendingCapture:
    """Capture whose copies may still be in progress.

    Attributes:
        capture: the capture as the keeper sees it.
        shared: the block that the copies fill.
        prepared: layout of the base.
        notify: notification that it is complete; None for that of a complete base.
        transfer: the copies, once submitted.
        sample: elements of live tensors as they were at the step mark.
        versions_at_mark: version counters at the step mark.
        released: entries whose updates were allowed.
        checked: True when no version counter needs to be compared any more.
        overwritten: name of an entry that was written while it was copied.
        outcome_claimed: True when a thread has decided between success and failure.
        copies_ended: True when no copy writes into the block any more.
    """

    capture: Capture
    shared: SharedBlock
    prepared: PreparedBase
    survey: Survey
    copies: PlannedCopies
    notify: NotifyKeeper | None = None
    transfer: Transfer | None = None
    sample: Sample | None = None
    versions: Versions | None = None
    versions_at_mark: list[int] = field(default_factory=list)
    released: frozenset[str] = frozenset()
    checked: bool = False
    overwritten: str | None = None
    outcome_claimed: bool = False
    copies_ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def objects(self) -> dict[str, bytes]:
        """Return the encoded objects, and charge their size to the arena."""
        objects = self.survey.objects()
        self.shared.pool.charge(self.shared.room, sum(map(len, objects.values())))
        return objects

    def check_versions(self, releases: frozenset[str] = frozenset()) -> str | None:
        """Compare version counters: after all copies, or before an update.

        Args:
            releases: names of the entries that the next update may change; later changes of these
                are expected.

        Returns:
            Name of an entry that was written by anything but a released update; None if there is
            none.
        """
        with self._lock:
            if not self.checked and self.versions is not None and self.overwritten is None:
                self.overwritten = self.versions.moved(self.versions_at_mark, self.released)
            self.released |= releases
            # Once an update of every entry was allowed, a moved counter proves nothing.
            self.checked = len(self.released) == len(self.prepared.gated)
        return self.overwritten

    def claim_outcome(self) -> bool:
        """Return True for the first caller that decides the outcome."""
        with self._lock:
            first = not self.outcome_claimed
            self.outcome_claimed = True
        return first

    def claim_end(self) -> bool:
        """Return True for the first caller after the last copy."""
        with self._lock:
            first = not self.copies_ended
            self.copies_ended = True
        return first


class BaseRetry:
    """Schedule of retries for a base that the log needs and that has failed.

    The base is taken again at the next step, then after 2, 4, 8, ... up to 64 more steps, until
    one is durable. Each failure is reported by the code that wrote the base."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times = 0
        self._why: str | None = None
        self._from_step = 0

    def ended(self, step: int, why: str | None, *, fine: bool) -> None:
        """Note the end of a base; in any thread.

        Args:
            step: step of the base.
            why: reason it was needed; None if only its interval was over.
            fine: True if it is durable.
        """
        with self._lock:
            if fine:
                self._times = 0
                self._why = None
            elif why is not None:
                self._why = why
                self._from_step = step + min(1 << self._times, _RETRY_STEPS_MAX)
                self._times += 1

    def due(self, step: int) -> str | None:
        """Return the reason why a base is due at ``step``, or None."""
        with self._lock:
            why = self._why if step >= self._from_step else None
            self._why = None if why else self._why
        return why
