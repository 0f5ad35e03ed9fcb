"""Records of the gradient log, as the training process keeps track of them.

:class:`LogMemory` knows which record lies where in host memory, and how long it is needed;
:class:`DiskLog` which records go to disk, and how far training may run ahead of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from everstep.capture import Transfer
from everstep.config import Options
from everstep.errors import DeadlineError, KeeperError, OutOfSpaceError
from everstep.format.log import RecordHead
from everstep.link import BackgroundChannel, Save
from everstep.link.assembly import PartialUpdate
from everstep.link.messages import ENDED, RECORD_BYTES
from everstep.link.pool import Block, CapturePool
from everstep.link.recordable import LogKeeper
from everstep.seams.filesystem import StallTimer
from everstep.seams.processes import Condition, wait_done
from everstep.state.layout import ShardLayout


class _ReachableStep:
    """Newest step that a base and the log on disk lead to.

    Attributes:
        first_base: base that the log on disk starts from.
        unwritten_marks: number and step of each mark that is not on disk yet.
    """

    def __init__(self) -> None:
        self.first_base: Save | None = None
        self.unwritten_marks: deque[tuple[int, int]] = deque()
        self._step: int | None = None

    @property
    def step(self) -> int | None:
        """The step; None if it is unknown, or its base is not durable."""
        return self._step if self.first_base is None or self.first_base.is_durable else None

    def start_from(self, base: Save | None) -> None:
        """Continue from a base, before which the log leads nowhere; None: one that is on disk."""
        self._step = None
        self.first_base = base
        self.unwritten_marks.clear()

    def written(self, number: int) -> None:
        """Note that records up to ``number`` are on disk."""
        while self.unwritten_marks and self.unwritten_marks[0][0] <= number:
            _, self._step = self.unwritten_marks.popleft()


class DiskLog:
    """Log that the keeper writes to disk while training goes on.

    Attributes:
        on: True if records made now go to disk.
        steps_in_memory: number of steps that should have gone to disk and did not, because of the
            write budget or after a write failure.
    """

    def __init__(self, options: Options, channel: BackgroundChannel) -> None:
        self._wanted = self.on = options.log_on_disk
        self._lag = options.log.lag_steps
        self._timeout_s = options.progress_timeout_s
        self._channel = channel
        self._keeper: LogKeeper | None = None
        self._changed = Condition()
        self._reached = 0
        self._marks: deque[int] = deque()  # numbers of the newest, at most lag_steps
        self._written = 0  # number of the newest record on disk
        self._reachable = _ReachableStep()
        self._pending_bases: deque[Save] = (
            deque()
        )  # that the log starts from, perhaps not durable yet
        self._restart_at_base = False
        self._failed = False  # writing has ended in an error
        self.steps_in_memory = 0

    def start(self, keeper: LogKeeper | None) -> None:
        """Send records to ``keeper`` from now on; it writes none of the earlier ones."""
        self._keeper = keeper
        with self._changed:
            self._reached = 0
            self._written = 0
            self._failed = False
            self._marks.clear()
        self._reachable.unwritten_marks.clear()
        self._pending_bases.clear()
        if keeper is not None and self._wanted and not self.on:
            # A new keeper begins with a log on disk; this one continues a log in memory.
            keeper.log_to_disk(False)

    def reached(self, number: int) -> None:
        """Note that records up to ``number`` are on disk; in any thread.

        Args:
            number: number of the newest record on disk; 0 if the keeper was lost; :data:`ENDED` if
                no further record will be written.
        """
        with self._changed:
            # ENDED exceeds every number, so has() is True from then on. 0 only wakes the waiting
            # threads.
            self._reached = max(self._reached, number)
            self._written = number if number not in (0, ENDED) else self._written
            self._failed = self._failed or number == ENDED
            self._changed.notify_all()

    def has(self, number: int) -> bool:
        """Return True if a record is on disk or never will be."""
        return number <= self._reached

    @property
    def step(self) -> int | None:
        """Return the newest step that a durable base and the log on disk lead to; None if
        unknown."""
        self._update_step()
        return self._reachable.step

    def restored(self, *, on_disk: bool) -> None:
        """Continue from a restored state.

        Args:
            on_disk: the base it was restored from is on disk.
        """
        self._reachable.start_from(None if on_disk else Save(0, 0))

    def _update_step(self) -> None:
        with self._changed:  # stats() may run in another thread
            self._reachable.written(self._written)

    def marked(self, number: int, step: int) -> None:
        """Note a step mark; block until the log on disk lags by at most ``lag_steps``.

        Args:
            number: number of the mark's record.
            step: step of the mark.
        """
        if self._failed and self.on:
            # Segments after a hole are useless; a base has no hole after it. By then the cause of
            # the failure (a full disk, say) may be gone.
            self.on = False
            self._restart_at_base = True
            self._marks.clear()
        if self._wanted and not self.on:
            self.steps_in_memory += 1
        if not self.on:
            return
        self._update_step()
        self._reachable.unwritten_marks.append((number, step))
        if self._lag is None:
            return
        self._marks.append(number)
        if len(self._marks) <= self._lag:
            return
        wanted = self._marks.popleft()
        if not self._wait_for_record(wanted):
            self._report_hang(
                f"step {step}: no record of the log was written to disk within "
                f"{self._timeout_s:g} s: the storage has hung",
                step,
            )

    def _wait_for_record(self, wanted: int) -> bool:
        """Wait until a record is on disk.

        Returns:
            False if the storage has hung. True also if the keeper is lost: the next step replaces
            it.
        """
        with self._changed:
            standstill: StallTimer | None = None
            while self._reached < wanted:
                keeper = self._keeper
                if keeper is None or keeper.lost:
                    break
                standstill = standstill or StallTimer(self._timeout_s)
                if standstill.is_over(keeper.log_moves):
                    return False
                self._changed.wait(standstill.poll_s)
        return True

    def over(self, step: int) -> None:
        """Wait, at the end of a step, for durable bases that the log on disk begins at.

        These bases must lag no more than the log itself.

        Args:
            step: step that has ended; its own base, if any, is being captured.
        """
        if self._lag is None or not self.on:
            self._pending_bases.clear()
        while self._pending_bases and self._pending_bases[0].step <= step - (self._lag or 0):
            base = self._pending_bases.popleft()
            if not self._wait_until_durable(base):
                self._report_hang(
                    f"the base of step {base.step}, which the log on disk starts from, is not "
                    f"durable, and nothing was written for {self._timeout_s:g} s: the storage "
                    "or the keeper of another rank has hung",
                    step,
                )

    def _report_hang(self, message: str, step: int) -> None:
        hint = "check the disk or the network file system (dmesg, df, iostat)"
        self._channel.post(DeadlineError(message, step=step, hint=hint))

    def _wait_until_durable(self, base: Save) -> bool:
        """Wait until a base is durable.

        Returns:
            False if the storage has hung. True also if the base has failed or the keeper is lost,
            which the code that writes it reports: then another base is due.
        """
        standstill = StallTimer(self._timeout_s)
        while self._keeper is not None and not base.durable.done():
            if standstill.is_over((self._keeper.moves, self._keeper.log_moves)):
                return False
            wait_done(base.durable, standstill.poll_s)
        return True

    def stop(self) -> None:
        """Stop writing records to disk, at the end of a step; earlier records are still written."""
        self.on = self._restart_at_base = False
        self._marks.clear()
        if self._keeper is not None:
            self._keeper.log_to_disk(False)

    def again(self) -> bool:
        """Resume writing records to disk at the next base.

        Returns:
            False if that was requested before.
        """
        requested = self._restart_at_base
        self._restart_at_base = not self.on
        return self._restart_at_base and not requested

    def base_taken(self, save: Save, number: int, *, leads: bool) -> None:
        """Continue the log on disk from a base of the step that has just ended.

        Args:
            save: the base.
            number: number of the newest record; one that is not on disk by now never will be.
            leads: the log in memory leads to this step.
        """
        if self._restart_at_base and self._keeper is not None:
            self._restart_at_base = False
            self.on = True
            leads = False
            with self._changed:
                self._reached = number
                self._failed = False
            self._keeper.log_to_disk(True)
        if not leads:
            self._reachable.start_from(save)
        elif self._reachable.first_base is not None and not self._reachable.first_base.is_durable:
            self._reachable.first_base = save
        # Records before it end in a hole or never reached the disk: only this base can serve.
        if not leads and self.on and self._lag is not None:
            self._pending_bases.append(save)


@dataclass(frozen=True, slots=True, eq=False)
class LogTarget:
    """Keeper that takes records, and the memory shared with it.

    A record whose copy has begun belongs to its target, whatever keeper is in service when the copy
    ends.

    Attributes:
        keeper: receives the records.
        pool: memory shared with ``keeper``.
        timeline: timeline of the records.
    """

    keeper: LogKeeper
    pool: CapturePool
    timeline: int

    def block(self, room: Block) -> torch.Tensor:
        """Return the memory of ``room`` (flat ``uint8``)."""
        return self.pool.whole[room.offset : room.offset + room.size_bytes]


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory reserved for a record; either the record is stored there, or the memory is returned.

    Ended in the lane's thread, after the copies, by the first of the two; an interrupt may request
    the second one after the first.

    Attributes:
        number: number of the record, once it is stored.
    """

    target: LogTarget
    room: Block
    over: bool = False
    number: int | None = None

    def end(self) -> bool:
        """End the reservation; return True if it had not ended before."""
        first = not self.over
        self.over = True
        return first

    def give_back(self) -> None:
        """Return the memory to the pool unless the reservation has ended."""
        if self.end():
            self.target.pool.release(self.room)


class MarksInFlight:
    """Step marks on their way to the keeper.

    Args:
        most: number of them when training goes on.
        timeout_s: longest wait for one, in seconds.
    """

    def __init__(self, most: int, timeout_s: float) -> None:
        self.most = most
        self._timeout_s = timeout_s
        self._marks: deque[tuple[int, Reservation, Future[None]]] = deque()

    def add(self, step: int, record: Reservation, notified: Future[None]) -> None:
        """Add the newest mark."""
        self._marks.append((step, record, notified))

    def settled(self, most: int) -> Iterator[tuple[int, int | None, bool]]:
        """Wait until at most ``most`` marks are in flight.

        Yields:
            Step and number of each mark that is over, and False if it was waited for in vain.
        """
        while len(self._marks) > most or (self._marks and self._marks[0][2].done()):
            step, record, notified = self._marks.popleft()
            there = wait_done(notified, self._timeout_s)
            if there:
                notified.result()  # raises what has ended the job
            yield step, record.number, there

    def clear(self) -> None:
        """Forget them: their keeper is gone, or training has gone back."""
        self._marks.clear()


@dataclass(slots=True, eq=False)
class PendingUpdate:
    """Update whose inputs are being copied.

    Attributes:
        transfer: the copies.
        end: size of the copied block, in bytes.
        job: notifies the keeper, in the lane's thread, after the copies.
        reservation: memory of the record.
        calls: number of calls of the optimizer's closure.
    """

    transfer: Transfer
    end: int
    job: Callable[[], None]
    reservation: Reservation
    calls: int = 1


@dataclass(slots=True, eq=False)
class _StoredRecord:
    number: int
    timeline: int
    step: int
    room: Block
    to_disk: bool
    taken_bytes: int


@dataclass(slots=True, eq=False)
class HeldRecords:
    """Records that a multi-step base needs, kept in memory until it is rebuilt.

    Attributes:
        after: number of the last record before them.
        updates: their updates, in order; complete up to a step mark when the keeper has the mark.
        hole: reason why an update is missing; None if none is.
    """

    memory: LogMemory
    after: int
    updates: list[PartialUpdate] = field(default_factory=list)
    hole: str | None = None

    def release(self) -> None:
        """Release them; in any thread, any number of times."""
        self.memory.unhold(self)


@dataclass(slots=True, eq=False)
class LogMemory:
    """Records in memory that may still be needed.

    Attributes:
        disk: the log on disk.
        bytes_max: limit on the memory of all records, in bytes; half of it makes a base due.
        relieved_to: returns the number of the newest record applied to the replica; None without
            one.
        target: where records go; None before a keeper takes any.
        number: number of the newest record.
        taken_bytes: memory of all records ever stored.
        too_large: size of the last record refused because it alone exceeds ``bytes_max``; 0 if
            none.
        half_full: the log fills half of its memory or its share of the disk, and the base in
            progress does not relieve it: another one is due.
        kept: records in memory, oldest first.
        kept_bytes: their memory.
        covered_number: newest record that the base in progress makes superfluous.
        covered_bytes: memory of the records up to ``covered_number``.
        durable_step: step of the newest durable base; -1 if there is none.
        everywhere_step: step of the newest base that all peers hold; -1 if there is none.
        waits_for_peers: records are needed until a base is complete on all peers: losing a node
            before falls back to the previous base. Not if the log fills half of its memory.
        cut_short: step up to which records were released before the peers had the base; -1 if none.
        surrendered_number: newest record released because a base needed the memory.
        held: records that multi-step bases in progress need.
    """

    disk: DiskLog
    bytes_max: int
    relieved_to: Callable[[], int | None] = lambda: None
    target: LogTarget | None = None
    number: int = 0
    taken_bytes: int = 0
    too_large: int = 0
    half_full: bool = False
    kept: deque[_StoredRecord] = field(default_factory=deque)
    kept_bytes: int = 0
    covered_number: int = 0  # of the newest record that a base which is under way relieves
    covered_bytes: int = 0  # of these
    lock: threading.Lock = field(default_factory=threading.Lock)
    durable_step: int = -1
    everywhere_step: int = -1
    waits_for_peers: bool = False
    cut_short: int = -1
    surrendered_number: int = 0
    held: list[HeldRecords] = field(default_factory=list)

    def start(self, target: LogTarget | None) -> None:
        """Store records in ``target`` from now on; records in the memory of another pool are
        lost."""
        with self.lock:
            if target is None or self.target is None or target.pool is not self.target.pool:
                self.kept.clear()
                self.kept_bytes = 0
                self.held.clear()  # a window of that memory is lost, too
            self.covered_number = self.covered_bytes = 0
            for record in self.kept:
                record.to_disk = False  # the old keeper was to write it; no other one will
            self.target = target
            self.durable_step = -1
            self.everywhere_step = -1

    @property
    def is_ahead(self) -> bool:
        """Return True if records in memory hold steps that nothing on disk has."""
        with self.lock:
            newest = max((record.step for record in self.kept), default=-1)
            return not self.disk.on and newest > self.durable_step

    def take(self, size_bytes: int, objects_bytes: int = 0) -> Block | None:
        """Reserve memory for a record; return None if there is none.

        Args:
            size_bytes: size of the record's tensors.
            objects_bytes: size of its objects, as far as known.
        """
        assert self.target is not None
        pool = self.target.pool
        beside_bytes = objects_bytes + RECORD_BYTES
        need_bytes = pool.rounded_bytes(size_bytes) + beside_bytes
        self.too_large = 0
        # Without the lock: other threads change it meanwhile, and fits() tests again before the
        # record is kept.
        held = self.kept_bytes
        relieved_to = self.relieved_to()
        if held + need_bytes > self.bytes_max // 2 and self._relieved_step() < self.durable_step:
            self.cut_short = self.durable_step
            self.base_everywhere(self.durable_step)
            held = self.kept_bytes
        if held + need_bytes > self.bytes_max // 2:
            if relieved_to is None:
                rest = held + need_bytes - self.covered_bytes
                self.half_full = self.half_full or rest > self.bytes_max // 2
            else:
                self.release(relieved_to)
                held = self.kept_bytes
        fits = self._fits(held, need_bytes)
        room = pool.acquire_now(max(1, size_bytes), beside_bytes) if fits else None
        if (
            room is None and fits and relieved_to is not None
        ):  # the arena may have more free memory by now
            self.release(relieved_to)
            room = pool.acquire_now(max(1, size_bytes), beside_bytes)
        return room

    def fits(self, target: LogTarget, room: Block, objects_bytes: int) -> bool:
        """Return True if a record still fits, now that the size of its objects is known.

        The log must stay within its own limit, or a base might find no memory beside it."""
        need_bytes = target.pool.rounded_bytes(room.size_bytes) + objects_bytes + RECORD_BYTES
        return self._fits(self.kept_bytes, need_bytes)

    def _fits(self, held_bytes: int, need_bytes: int) -> bool:
        if need_bytes > self.bytes_max:
            self.too_large = need_bytes
        return held_bytes + need_bytes <= self.bytes_max

    def keep(
        self, target: LogTarget, head: RecordHead, room: Block, objects_bytes: int = 0
    ) -> int | None:
        """Store a record.

        Args:
            target: target it was copied to.
            head: header of the record.
            room: its memory.
            objects_bytes: size of its encoded objects.

        Returns:
            Number of the record; None if another keeper or timeline is in service by now, which
            would take the number for one of its own records.
        """
        beside_bytes = objects_bytes + RECORD_BYTES
        # Not under the lock: the pool calls surrender() with its own lock held.
        target.pool.charge(room, beside_bytes)
        taken = target.pool.rounded_bytes(room.size_bytes) + beside_bytes
        with self.lock:
            if target is not self.target:
                return None
            self.number += 1
            on_disk = self.disk.on
            self.kept.append(
                _StoredRecord(self.number, target.timeline, head.step, room, on_disk, taken)
            )
            self.kept_bytes += taken
            self.taken_bytes += taken
            return self.number

    def hold(self) -> HeldRecords:
        """Keep all records from now on in memory, for a multi-step base that begins here."""
        with self.lock:
            held = HeldRecords(self, self.number)
            self.held.append(held)
            return held

    def unhold(self, held: HeldRecords) -> None:
        """Release records that only a multi-step base needed."""
        with self.lock:
            if held not in self.held:
                return
            self.held.remove(held)
        self.release()

    def stored(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        room: Block,
    ) -> None:
        """Note the update in record ``number`` for bases that need it; in the lane's thread."""
        if head.kind != "update":
            return
        update = PartialUpdate(head, layout, objects, room.offset)
        with self.lock:
            for held in self.held:
                if number > held.after:
                    held.updates.append(update)

    def broken(self, why: str) -> None:
        """Note that an update or a mark is missing."""
        with self.lock:
            for held in self.held:
                held.hole = held.hole or why

    def base_taken(self) -> None:
        """Note that a base is in progress which all records so far lead to."""
        with self.lock:
            self.half_full = False
            self.covered_number = self.number
            self.covered_bytes = self.kept_bytes

    def base_failed(self) -> None:
        """Note that the newest base in progress has failed and relieves no record; in any
        thread."""
        with self.lock:
            self.covered_number = self.covered_bytes = 0

    def base_durable(self, step: int) -> None:
        """Release records up to ``step``; in any thread."""
        with self.lock:
            self.durable_step = max(self.durable_step, step)
        self.release()

    def base_everywhere(self, step: int) -> None:
        """Note that all peers hold the base of ``step``; in any thread."""
        with self.lock:
            self.everywhere_step = max(self.everywhere_step, step)
        self.release()

    def surrender(self) -> bool:
        """Release all records, except those still to be written to disk, because a base needs the
        memory.

        Returns:
            True if any record was released.
        """
        with self.lock:
            # That base has its memory, and relieves the log when it is durable.
            if self.held:
                return False
            self.surrendered_number = self.number
            before = len(self.kept)
        self.release()
        return len(self.kept) < before

    def _relieved_step(self) -> int:
        """Return the step up to which no record is needed."""
        if not self.waits_for_peers:
            return self.durable_step
        return min(self.durable_step, self.everywhere_step)

    def release(self, relieved_to: int = 0) -> None:
        """Release records that are not needed any more.

        Args:
            relieved_to: number of the newest record applied to the replica.
        """
        with self.lock:
            target = self.target
            free: list[_StoredRecord] = []
            last = min((held.after for held in self.held), default=self.number)
            while self.kept and target is not None:
                record = self.kept[0]
                if record.number > last:
                    break
                # Steps of different timelines cannot be compared. Records of an older one are
                # needed until a base of this one is durable.
                old = record.timeline < target.timeline and self._relieved_step() >= 0
                unwritten = record.to_disk and not self.disk.has(record.number)
                needed = record.step > self._relieved_step() and not old
                if unwritten or (
                    needed and record.number > max(relieved_to, self.surrendered_number)
                ):
                    break
                free.append(self.kept.popleft())
                self.kept_bytes -= record.taken_bytes
                if record.number <= self.covered_number:
                    self.covered_bytes -= record.taken_bytes
        if free and target is not None:
            # Before the memory is returned: the keeper must not read a record that is being
            # overwritten. Without the lock, because sending may block.
            target.keeper.forget_log(free[-1].number)
            for record in free:
                target.pool.release(record.room)


def too_large(need_bytes: int, most_bytes: int) -> OutOfSpaceError:
    """Return the error for a record that is larger than the memory of the log."""
    return OutOfSpaceError(
        f"a record of the log needs {need_bytes} bytes of host memory, and the whole log may use "
        f"{most_bytes}: steps are not recorded, and a crash loses all steps since the newest base",
        hint="a larger Budget(host_bytes=), less plain data in the state, or method='lazy'",
    )


def log_dropped(step: int | None) -> OutOfSpaceError:
    """Return the error for a log that was dropped up to a step to make space for a base."""
    return OutOfSpaceError(
        "the gradient log was dropped because host memory has no space for it beside a base: until "
        "the next base is durable, a crash loses all steps since the previous base",
        step=step,
        hint="a larger Budget(host_bytes=), or less plain data in the state",
    )


def log_dropped_early(step: int) -> KeeperError:
    """Return the error for a log that was dropped before the peers had the base after it."""
    return KeeperError(
        f"the log up to step {step} was dropped before the base of that step was complete with all "
        "peers, because there is no host memory to keep it longer",
        step=step,
        tier="peer",
        hint="if a node is lost before, all ranks return to an older base; use more "
        "Budget(host_bytes=), a shorter every=, or a larger PeerOptions(bytes_per_s=)",
    )
