"""Host memory of the gradient log, seen from the training process: which record lies where, and how
long it is needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from everstep.format.log import RecordHead
from everstep.link.messages import RECORD_BYTES
from everstep.link.pool import Block, CapturePool
from everstep.link.recordable import LogKeeper
from everstep.trainer.log.disk_log import DiskLog


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

    def release(self, room: Block) -> None:
        """Return the memory of a record that was not stored."""
        self.pool.release(room)


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory reserved for a record; either the record is stored there, or the memory is returned.

    Ended in the lane's thread, after the copies, by the first of the two; an interrupt may request
    the second one after the first."""

    target: LogTarget
    room: Block
    over: bool = False

    def end(self) -> bool:
        """End the reservation; return True if it had not ended before."""
        first = not self.over
        self.over = True
        return first

    def give_back(self) -> None:
        """Return the memory to the pool unless the reservation has ended."""
        if self.end():
            self.target.release(self.room)


@dataclass(slots=True, eq=False)
class _StoredRecord:
    number: int
    timeline: int
    step: int
    room: Block
    to_disk: bool
    taken_bytes: int


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

    def start(self, target: LogTarget | None) -> None:
        """Store records in ``target`` from now on; records in the memory of another pool are
        lost."""
        with self.lock:
            if target is None or self.target is None or target.pool is not self.target.pool:
                self.kept.clear()
                self.kept_bytes = 0
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
            while self.kept and target is not None:
                record = self.kept[0]
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
