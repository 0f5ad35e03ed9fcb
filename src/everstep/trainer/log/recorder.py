"""Record the gradient log: the inputs of each optimizer update, and a mark of each step.

The training thread does as little as possible: it takes references to the gradients before an
update, waits for their copies after it (they run beside the update, on the lane), and copies at the
step mark the few tensors that no optimizer replays. Everything else happens in the lane's thread
and in the keeper (LowDiff sections IV and V; I2, I8).

Any failure, in the training thread or the lane's, leaves a hole in the log: the memory of the
record is returned, and a new base becomes due."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from everstep.capture import Lane, on_cuda, plan_batches
from everstep.errors import AuditError, DeadlineError, EverstepError, UnsupportedStateError
from everstep.format.log import RecordHead
from everstep.link import Save, as_everstep_error
from everstep.link.recordable import Layouts, ReplacedTensors, state_digest
from everstep.restore.load.load import nonfinite_parameter
from everstep.seams import failpoint
from everstep.seams.fingerprint import FingerprintWatch
from everstep.seams.processes import wait_done
from everstep.seams.progress import log_or_print
from everstep.state.layout import ShardLayout
from everstep.state.survey import Survey
from everstep.state.values.objects import encode
from everstep.trainer.attach.keeper import Service
from everstep.trainer.base import BaseRetry, Saver
from everstep.trainer.log.kept_records import (
    DiskLog,
    LogMemory,
    LogTarget,
    MarksInFlight,
    PendingUpdate,
    Reservation,
    log_dropped,
    log_dropped_early,
    too_large,
)
from everstep.trainer.log.nonfinite import NonFiniteCheck
from everstep.trainer.log.untracked_writes import UntrackedWrites
from everstep.trainer.log.update_inputs import DeclaredUpdates, InputReader, RankInputReader
from everstep.trainer.participant import Mark, Participant, RestoredState, TrainingContext

if TYPE_CHECKING:
    from everstep.trainer.session.replica_bases import ReplicaBases


_FULL = "the log fills half of its memory, or its share of the disk budget between bases"


class Recorder(Participant):
    """Record the updates of all optimizers of a state, and its step marks.

    Args:
        saver: saver of the same state; gates updates.
        log_bytes_max: limit on the memory of records, in bytes; above half of it a base is due.
        replica: replica in the keeper that applies records; None without one.

    Attributes:
        base_due: reason why the log needs a new base; None if it needs none.
        base_step: step of the newest requested base that has not failed.
        disk: the log on disk.
        memory: host memory of records.
        nonfinite: detects gradients that are not finite, if they are watched.
        untracked: detects writes to optimizer-owned tensors that no hook announced.
        stats: counters of records, marks and holes.
    """

    follows_updates = True

    def __init__(
        self,
        context: TrainingContext,
        saver: Saver,
        *,
        log_bytes_max: int,
        replica: ReplicaBases | None = None,
    ) -> None:
        options = context.options
        state = context.state
        channel = context.channel
        self._saver = saver
        self._context = context
        self._channel = channel
        self._lane = context.lane
        self._exact = True
        self._timeout_s = options.progress_timeout_s
        self._opened = FingerprintWatch(state.optimizers)
        self._step_bytes = 0  # of the records of the step in progress
        self._last_marked_step: int | None = None  # None before the first
        self._last_lsn = -1  # of the last update that was copied
        self.base_step = 0
        self.disk = DiskLog(options, channel)
        self._replica = replica
        relieved_to = (lambda: None) if replica is None else replica.relieved_to
        self.memory = LogMemory(self.disk, log_bytes_max, relieved_to)
        self._marks = MarksInFlight(options.log.in_flight_steps, self._timeout_s)
        self._pending_update: PendingUpdate | None = None
        self._layouts = Layouts()
        self._declared = DeclaredUpdates(state)
        log = options.method.log
        ratio = options.log.ratio if log == "adaptive" else None
        self._inputs = InputReader(state, lossy_ratio=ratio, sparse=log == "topk")
        self._share = RankInputReader(state)
        self._replaced = ReplacedTensors(state)
        self.untracked = UntrackedWrites(channel, state, on_first=saver.copy_everything_at_mark)
        self.nonfinite = NonFiniteCheck(channel, watched=options.log.watch)
        self._retry = BaseRetry()
        self._entries: Any = None
        self._in_marks: list[str] = []  # names of entries that each mark holds in full
        self._digest = ""
        self.base_due: str | None = "no base yet"
        self._base_ahead: Save | None = None  # being captured over several steps
        self._leads_here = False  # a complete base and the records since lead to the last step
        self._reachable_step: int | None = None
        self._warned_too_large = False  # of a record that is too large
        self.stats = RecorderStats()

    @property
    def is_over(self) -> bool:
        """True if the log was given up: nothing is recorded any more, and bases alone go on."""
        return self._context.refusals.is_over

    @property
    def reads_marks(self) -> bool:
        """True until the log is given up."""
        return not self.is_over

    @property
    def needs_capture(self) -> bool:
        """Return True if a base is due that must be captured here: the log does not lead to this
        step, or another reason than half-full memory made the base due."""
        return self.base_due is not None and not (self.base_due == _FULL and self._leads_here)

    def start(self, service: Service) -> None:
        """Send records to the keeper in service from now on."""
        self._discard_pending()
        keeper = service.keeper
        pool = service.pool
        if pool is not None:
            pool.log = self
        timeline = service.timeline
        self._exact = service.exact
        self._opened.began(timeline)
        self.nonfinite.begin()
        self.memory.start(LogTarget(keeper, pool, timeline) if pool else None)
        self.disk.start(keeper)
        self._declared.start()
        survey = None
        if self.memory.target is not None:
            survey = service.survey or self._context.state.survey()
        self._replaced.start(survey)
        self.untracked.start(survey, service.step)
        self._marks.clear()
        self._last_marked_step = None
        self._last_lsn = -1
        self._entries = None
        if survey is not None:  # save() may take a base before the first mark
            self._adopt_shape(survey)
        if not self.is_over:
            self.base_due = self.base_due or "a new timeline"
        self._base_ahead = None
        self._leads_here = False
        self._reachable_step = None

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """Begin to copy the gradients that an optimizer is about to consume.

        Args:
            key: key of the optimizer.
            lsn: number of the update.
            step: step in progress.
            over: the update has already run: a hook registered later was called last.
        """
        if self.memory.target is None or self.is_over:
            return
        if lsn == self._last_lsn:
            if self._pending_update is not None:
                self._pending_update.calls += 1  # a closure called again: not recorded
            return
        with self._recording(step):
            self._discard_pending()
            self._last_lsn = lsn
            # After the update its own writes would be found: only compare before it.
            if not over and (written := self.untracked.before(key, step)):
                self._note_write(step, written)
                return
            self._pending_update = self._copy(self.memory.target, key, lsn, step, over)

    def applied(self, key: str) -> None:
        """Wait for the copies of the gradients: after the update they may change."""
        pending = self._pending_update
        if pending is None:
            if not self.is_over:
                self.untracked.applied(key)
            return
        with self._recording(None):
            self.untracked.applied(key)
            try:
                there = pending.transfer.gate(pending.end, self._timeout_s)
                if not there:
                    late = "copying gradients to host memory has hung"
                    self._add_hole(late)
                    self._channel.post(DeadlineError(late))
                elif pending.calls > 1:
                    self._add_hole(f"optimizer {key} called its closure more than once")
                else:
                    # In this order: after an interrupt in between the reservation ends twice, which
                    # is harmless. In the other order its memory would be lost.
                    self._lane.run(pending.job)
                    self._pending_update = None
            finally:
                self._discard_pending()

    def skipped(self, why: str) -> None:
        """Record a hole: something changed optimizer-owned tensors in a way replay cannot
        repeat."""
        if self.is_over:
            return
        self.finish_records()
        self._discard_pending()
        self._declared.start()
        self.untracked.accept()
        self._add_hole(why)

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """Record that the function registered for ``pattern`` has run: replay runs it here (I8).

        Args:
            pattern: pattern the function is registered for.
            lsn: number of the update.
            step: step in progress.
        """
        if self.memory.target is None or self.is_over:
            return
        with self._recording(step):
            self.untracked.declared(pattern)
            named = self._declared.ran(pattern)
            head = self._head("update", step, lsn, pattern)
            self._copy_now(head, named, dict)

    def mark(self, mark: Mark) -> bool:
        """Record a step mark: the entries that no optimizer replays, at the end of a step (I8)."""
        target = self.memory.target
        survey = mark.survey
        step = mark.step
        if self.is_over:
            self._after_end(step)
        if target is None or survey is None or self.is_over:
            return False
        untracked = False
        if why := self._retry.due(step):
            self.base_due = self.base_due or why
        last_marked = self._last_marked_step
        self._last_marked_step = step
        if last_marked is not None and step != last_marked + 1:
            self._add_hole(f"step {last_marked + 1} ended in an error")
        with self._recording(step):
            untracked = self._mark(target, survey, mark.position.lsn, step)
            self.disk.over(step)
        return untracked

    def _after_end(self, step: int) -> None:
        """Retry the base that the end of the log has made due; let the keeper write the rest."""
        self.base_due = self.base_due or self._retry.due(step)
        if self.disk.on:
            self.stop_disk()

    def stop_disk(self) -> None:
        """Write no record of a later step to disk."""
        self.finish_records()  # the disk gets what was recorded before
        self.disk.stop()

    def base_taken(self, save: Save) -> None:
        """Continue the log from a base of this step, which is being captured.

        Where the log does not lead to this step, only the base does: then wait until the keeper
        has all of it, or a crash could lose more than the step in flight."""
        if self._last_marked_step is not None and save.step > self._last_marked_step:
            # It is captured over the next steps. Without a hole the log leads to its end; one rank
            # of several may have found a hole that the others hear of at the next step.
            self._base_ahead = save
            if self._leads_here:
                self.base_due = None
            self.memory.base_taken()
            return
        self._base_ahead = None
        self.finish_records()
        with self._saver.stalled("capture"):
            self._continue_from(save)

    def step_done(self, step: int) -> None:
        """Continue the log from a multi-step base that has ended, unless it was abandoned."""
        save = self._base_ahead
        if save is not None and (save.is_lost or save.step <= step):
            self._base_ahead = None
            if save.is_lost:
                self.memory.base_failed()
            else:
                self._continue_from(save)

    def finish_copies(self) -> None:
        """Wait for the step marks in flight; continue the log from a multi-step base that has
        ended at the last one."""
        self.finish_records()
        if self._last_marked_step is not None:
            self.step_done(self._last_marked_step)

    def _continue_from(self, save: Save) -> None:
        why = self.base_due
        self.base_due = None
        led = self._leads_here
        if not led and self.memory.target is not None:
            wait_done(save.staged, self._timeout_s)  # the saver reports a failure
            self._leads_here = save.is_staged
            self._reachable_step = save.step if self._leads_here else self._reachable_step
        self.untracked.follows_base = True
        before = self.base_step
        self.base_step = save.step
        target = self.memory.target
        self.memory.base_taken()
        self.disk.base_taken(save, self.memory.number, leads=led)

        def durable(_: Any) -> None:
            fine = not save.is_lost
            # The callback of another timeline: its step numbers mean other states.
            if self.memory.target is not target:
                return
            if fine:
                self.memory.base_durable(save.step)
            else:  # the keeper has discarded it
                self._leads_here = False
                self._reachable_step = None
                if self.base_step == save.step:
                    self.base_step = before
                    self.memory.base_failed()
            self._retry.ended(save.step, why, fine=fine)

        # Last: if the base is durable already, the callback runs at once and needs all of the
        # above.
        save.durable.add_done_callback(durable)
        self.disk.over(save.step)

    def restored(self, restored: RestoredState) -> None:
        """Continue from a restored state."""
        self.base_step = restored.led_from or 0
        self.untracked.follows_base = there = restored.led_from is not None
        self._leads_here = (
            there and self._exact and None not in (restored.survey, self.memory.target)
        )
        self._reachable_step = restored.resumed.step if self._leads_here else None
        self.disk.restored(on_disk=restored.on_disk is not None)

    def log_on_disk(self, number: int) -> None:
        """Release records up to ``number``, which are on disk; 0 if the keeper was lost. Any
        thread."""
        self.disk.reached(number)
        self.memory.release()

    def base_everywhere(self, step: int) -> None:
        """Release records that only peers without the base of ``step`` needed. Any thread."""
        self.memory.base_everywhere(step)

    @property
    def is_as_marked(self) -> bool:
        """False if an optimizer-owned tensor was written to since the last mark."""
        return self.untracked.is_as_marked

    @property
    def durable_step(self) -> int | None:
        """Newest step that the log on disk leads to."""
        return self.disk.step

    @property
    def reachable_step(self) -> int | None:
        """Newest step that a base and the records after it lead to, all of them held by the keeper
        in service."""
        return self._reachable_step

    def lacks_base_of(self, step: int) -> bool:
        """Return True if ``step`` is newer than the last base: the log in memory ends with this
        process."""
        return step > self.base_step and not self.is_over

    def refuses_last_base(self, step: int) -> bool:
        """Return True, with a message, if the parameters are not finite."""
        bad = self.nonfinite.first
        if bad is None or not nonfinite_parameter(self._context.state):
            return False
        self.nonfinite.given_up = True
        before = (
            ""
            if bad.step is None
            else f"; to keep the state before, call ckpt.rewind({bad.step - 1}) first"
        )
        log_or_print(
            f"{self._context.run}: no last base of step {step} is taken, as its parameters are "
            f"not finite ({bad.message}); to take one, call ckpt.save() before close(){before}",
            level=logging.WARNING,
        )
        return True

    @property
    def holds_steps(self) -> bool:
        """True if records lead further than any base, and a last base was not refused."""
        return not self.nonfinite.given_up and self.memory.is_ahead

    @property
    def holds_steps_at_exit(self) -> bool:
        """True if records lead further than any base; with a replica, they are in its state."""
        return self._replica is None and self.memory.is_ahead

    def figures(self) -> Mapping[str, Any]:
        """Return what was recorded."""
        return {
            "log_bytes": self.stats.record_bytes,
            "log_steps_in_memory": self.disk.steps_in_memory,
            "log_holes": self.stats.holes,
        }

    @property
    def needs_base(self) -> bool:
        """True if the log needs a base."""
        return self.base_due is not None

    def handles_torn_base(self, error: AuditError) -> bool:
        """Make a new base due at the next step mark; see
        :meth:`.UntrackedWrites.handles_torn_base`."""
        return not self.is_over and self.untracked.handles_torn_base(error)

    def _adopt_shape(self, survey: Survey) -> None:
        """Record states of this shape from now on."""
        shape = survey.shape
        self._digest = state_digest(shape, self._inputs.regroup())
        self._entries = shape.entries
        self._in_marks = [e.name for e in shape.entries if shape.owners[e.name].in_marks]

    def _mark(self, target: LogTarget, survey: Survey, lsn: int, step: int) -> bool:
        """Record a step mark; return True if the state was changed by something that no hook has
        announced."""
        written = self.untracked.at_mark(survey, step)
        regrouped = not self._inputs.grouped_as_before()
        if survey.shape.entries is not self._entries or regrouped:
            changed = self._entries is not None
            before = self._digest
            self._adopt_shape(survey)
            self._leads_here = self._leads_here and self._digest == before
            if changed:
                self.base_due = "the set of entries has changed"
        why = "parameters moved to other parameter groups" if regrouped else written
        if not regrouped and (replaced := self._replaced.since(survey)):
            why = f"{replaced!r} was replaced by another tensor, not by its optimizer"
        if why is not None:  # an update of this step may have been recorded before
            self._note_write(step, why)
            return True
        named = {name: survey.tensors[name] for name in self._in_marks}
        samples, ran = self._declared.samples(survey)
        named |= samples | self.untracked.samples(step)
        head = self._head("mark", step, lsn)
        about_bytes = sum(survey.shape.objects_bytes.values())
        record = self._copy_now(head, named, survey.objects, ran, about_bytes)
        if record is None:
            self._lane.run(survey.measure)  # the objects may be smaller next time
            return False
        self._marks.add(step, *record)
        step_bytes = self._step_bytes
        self._step_bytes = 0
        # Wait until the keeper has the mark, or a crash could lose more than the step in flight.
        # The lane is short here: only this step's updates are before it, as no update begins while
        # a base is being copied.
        self._settle(self._marks.most)
        # On the lane: touching pages overlaps the next backward.
        self._lane.run(lambda: target.pool.warm_ahead(2 * step_bytes))
        self.stats.marks += 1
        return False

    def finish_records(self) -> None:
        """Wait for all step marks in flight."""
        with self._saver.stalled("log"):
            self._settle(0)

    def _settle(self, in_flight: int) -> None:
        """Wait until the keeper has all but the newest ``in_flight`` step marks."""
        for step, number, there in self._marks.settled(in_flight):
            if not there:
                self._add_hole("the keeper did not accept the step mark in time")
                self._channel.post(DeadlineError("recording a step mark has hung", step=step))
            if number is not None and self._leads_here:
                self._reachable_step = step
            self.disk.marked(number or self.memory.number, step)

    def _copy(
        self, target: LogTarget, key: str, lsn: int, step: int, over: bool
    ) -> PendingUpdate | None:
        if not self._inputs.grouped_as_before(key):
            self._add_hole(f"the parameters of {key} moved to other parameter groups")
            return None
        consumed, name, about = self._share.look(self._inputs, key)
        if consumed.written and over:
            self._add_hole(
                f"optimizer {key} writes to its gradients, which were seen only after that"
            )
            return None
        head = self._head("update", step, lsn)
        layout = consumed.layout
        timeout_s = self._timeout_s
        with self._reserved(layout.size_bytes) as reservation:
            if reservation is None:
                return None
            room = reservation.room
            if consumed.in_host_memory:  # for device copies, pinning has touched the pages
                self._lane.run(lambda: target.pool.populate(room))
            transfer = self._lane.submit(consumed.batches, target.block(room), lambda end: None)
            # The update writes to its own gradients: it must not begin before the copy ends.
            if consumed.written and not transfer.gate(layout.size_bytes, timeout_s):
                raise DeadlineError("copying gradients to host memory has hung", step=step)

            def objects() -> dict[str, bytes]:
                if not transfer.wait(timeout_s):
                    raise DeadlineError("copying gradients to host memory has hung", step=step)
                return {name: encode(about, checked=True)}

            def job() -> None:
                self._notify_keeper(reservation, head, layout, objects)

            return PendingUpdate(transfer, layout.size_bytes, job, reservation)

    def _copy_now(
        self,
        head: RecordHead,
        named: Mapping[str, torch.Tensor],
        objects: Objects,
        ran: frozenset[str] = frozenset(),
        objects_bytes: int = 0,
    ) -> tuple[Reservation, Future[None]] | None:
        """Copy tensors that may change at once, and notify the keeper on the lane.

        Args:
            head: header of the record.
            named: tensors by name.
            objects: encodes the objects, in the lane's thread.
            ran: patterns of the declared updates since the last mark.
            objects_bytes: approximate size of the encoded objects.

        Returns:
            The record, and the future of the notification; None if there is no memory for it.
        """
        target = self.memory.target
        assert target is not None
        layout = self._layouts.of(named)
        with self._reserved(layout.size_bytes, objects_bytes) as reservation:
            if reservation is None:
                return None
            target.pool.populate(reservation.room)
            objects = copy_now(
                self._lane,
                layout,
                named,
                target.block(reservation.room),
                objects,
                self._timeout_s,
            )
            return reservation, self._lane.run(
                lambda: self._notify_keeper(reservation, head, layout, objects, ran)
            )

    def _notify_keeper(
        self,
        reservation: Reservation,
        head: RecordHead,
        layout: ShardLayout,
        objects: Objects,
        ran: frozenset[str] = frozenset(),
    ) -> None:
        """Notify the keeper of a complete record; in the lane's thread, after its copies."""
        if not reservation.end():
            return  # training was interrupted as it handed it over
        target = reservation.target
        room = reservation.room
        try:
            encoded = objects()
            objects_bytes = sum(map(len, encoded.values()))
            failpoint("log.before_record")
            if not self.memory.fits(target, room, objects_bytes):
                self._handle_no_memory()
                return
            reservation.number = number = self.memory.keep(target, head, room, objects_bytes)
            if number is None:
                return
            if head.kind == "mark":
                self._declared.check(head, layout, target.block(room), ran)
            self.memory.stored(number, head, layout, encoded, room)
            target.keeper.log(number, head, layout, encoded, room.offset)
            failpoint("log.after_record")
            self.stats.record_bytes += layout.size_bytes + objects_bytes
            self.nonfinite.check(head, layout, target.block(room))
        except EverstepError as error:
            self._fail(error)
        except Exception as error:
            self._fail(EverstepError(f"internal error in the log: {error!r}", step=head.step))
        finally:
            # A record that is kept is released by LogMemory; any other one here.
            if reservation.number is None:
                target.pool.release(room)

    @contextlib.contextmanager
    def _reserved(self, size_bytes: int, objects_bytes: int = 0) -> Iterator[Reservation | None]:
        """Reserve memory for a record; return it if the body raises.

        Yields None, with a base due, if there is no memory."""
        target = self.memory.target
        room = self.memory.take(size_bytes, objects_bytes)
        assert target is not None
        self._step_bytes += size_bytes
        if self.memory.half_full:
            self.base_due = self.base_due or _FULL
        if self.memory.cut_short >= 0:
            step = self.memory.cut_short
            self.memory.cut_short = -1
            self._channel.post_notice(log_dropped_early(step))
        if room is None:
            self._handle_no_memory()
        reservation = None if room is None else Reservation(target, room)
        try:
            yield reservation
        except BaseException:
            if reservation is not None:
                # On the lane, after copies that may have begun to write to it.
                self._lane.run(reservation.give_back)
            raise

    def _handle_no_memory(self) -> None:
        self._add_hole("there is no host memory left for the log")
        if self._replica is not None and self._replica.relieved_to() is not None:
            self._replica.overrun()
        if self.memory.too_large and not self._warned_too_large:
            self._warned_too_large = True
            self._channel.post_notice(too_large(self.memory.too_large, self.memory.bytes_max))

    def give_way(self) -> bool:
        """Release all records for a base that has no memory beside them; the pool calls this.

        Without it neither could ever continue: the base waits for memory, the log for the base."""
        # Called with the lock of the pool held, so nothing that holds the lock of the log may call
        # the pool.
        if self.memory.relieved_to() is not None or not self.memory.surrender():
            return False
        self._add_hole("its memory was released for a base")
        self._reachable_step = None
        self._channel.post_notice(log_dropped(self._last_marked_step))
        return True

    def _discard_pending(self) -> None:
        """Return the memory of the update whose copies are in progress, if any: it is not
        recorded."""
        pending = self._pending_update
        self._pending_update = None
        if pending is not None:
            self._lane.run(pending.reservation.give_back)

    def _head(
        self, kind: Literal["update", "mark"], step: int, lsn: int, declared: str = ""
    ) -> RecordHead:
        target = self.memory.target
        assert target is not None
        exact = self._exact and self._opened.holds
        if kind == "mark":  # readers take exactness of the state from marks only
            exact = exact and self._context.state.exact
        return RecordHead(kind, target.timeline, step, lsn, self._digest, exact, declared)

    def _fail(self, error: EverstepError) -> None:
        self._add_hole(error.message)
        # Also an entry that has changed without the update that was declared for it.
        self._context.refusals.post(error, (UnsupportedStateError, AuditError))

    def _note_write(self, step: int, why: str) -> None:
        """Record a hole: the state was changed by something that no hook has announced."""
        self._add_hole(why)
        self._context.refusals.written(step, why)

    def _add_hole(self, why: str) -> None:
        self.stats.holes += 1
        self.base_due = self.base_due or why
        self._leads_here = False
        self.memory.broken(why)

    @contextlib.contextmanager
    def _recording(self, step: int | None) -> Iterator[None]:
        """Turn a failure into a hole in the log and report it by the failure policy; training goes
        on.

        An interrupt leaves a hole, too, and propagates."""
        try:
            with self._saver.stalled("log"):
                yield
        except Exception as error:
            self._fail(as_everstep_error(error, step))
        except BaseException:
            self._add_hole("recording was interrupted")
            raise


@dataclass(slots=True)
class RecorderStats:
    """Counters of the log.

    Attributes:
        record_bytes: size of all records, in bytes.
        marks: number of step marks.
        holes: number of updates and marks that could not be recorded; each makes a base due.
    """

    record_bytes: int = 0
    marks: int = 0
    holes: int = 0


Objects = Callable[[], Mapping[str, bytes]]


def copy_now(
    lane: Lane,
    layout: ShardLayout,
    named: Mapping[str, torch.Tensor],
    block: torch.Tensor,
    objects: Objects,
    wait_s: float,
) -> Objects:
    """Copy tensors that may change at once.

    A CUDA device that has failed leaves the old bytes in ``block`` without an error at the call.
    So the returned callable first waits for a transfer queued after these copies, in the lane's
    thread.

    Args:
        lane: makes the copies.
        layout: layout of ``block``.
        named: tensors by name.
        block: destination (flat ``uint8``).
        objects: encodes the objects of the record.
        wait_s: timeout of the copies, in seconds.

    Returns:
        ``objects``, or a callable that raises if the copies were not made.
    """
    lane.copy_now(plan_batches(layout, named, named.keys()), block)
    if not any(map(on_cuda, named.values())):
        return objects
    transfer = lane.submit((), block, lambda end: None)

    def check_copied() -> Mapping[str, bytes]:
        try:
            there = transfer.wait(wait_s)
        except RuntimeError as error:
            raise EverstepError(f"the tensors of a step mark were not copied: {error}") from error
        if not there:
            raise DeadlineError("copying the tensors of a step mark has hung")
        return objects()

    return check_copied
