"""The memory of the log, seen from the training process: which record lies where, and how long."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from everstep.format.log import RecordHead
from everstep.link.log_records import RECORD_BYTES
from everstep.link.pool import Block, CapturePool
from everstep.link.recordable import LogKeeper
from everstep.trainer.log.disklog import DiskLog

__all__ = ["Into", "Loan", "LogRooms"]


@dataclass(frozen=True, slots=True, eq=False)
class Into:
    """Where records go: a keeper, and the memory that it shares with this process. A record whose
    copy has begun belongs there, whatever keeper is in service when the copy is over.

    Attributes:
        timeline: of the records.
    """

    keeper: LogKeeper
    pool: CapturePool
    timeline: int

    def part(self, room: Block) -> torch.Tensor:
        """The memory of a room."""
        return self.pool.whole[room.offset : room.offset + room.size_bytes]

    def release(self, room: Block) -> None:
        """Gives a room back that no record has come to lie in."""
        self.pool.release(room)


@dataclass(slots=True, eq=False)
class Loan:
    """A room that was taken for a record. Either the record comes to lie there, or it is given
    back: in the lane's thread, behind the copies, and whatever comes first. An interrupt may ask
    for the second behind the first."""

    into: Into
    room: Block
    over: bool = False

    def end(self) -> bool:
        """Whether it was not over yet."""
        first = not self.over
        self.over = True
        return first

    def give_back(self) -> None:
        """Nothing comes to lie there, or it does already."""
        if self.end():
            self.into.release(self.room)


@dataclass(slots=True, eq=False)
class _Kept:
    number: int
    timeline: int
    step: int
    room: Block
    to_disk: bool
    taken_bytes: int


@dataclass(slots=True, eq=False)
class LogRooms:
    """Rooms of records that may still be needed.

    Attributes:
        disk: which records go to disk.
        bytes_max: of records in memory, with all that they take there; half as much is asked for a
            new base.
        relieved_to: tells the number up to which records have gone into a replica; None: there is
            none.
        into: where records go now; None before there is a keeper that takes any.
        number: of the newest record.
        held_bytes: of all records, when a room was last asked for.
        taken_bytes: of all that there have ever been.
        too_large: a record that was refused, for it alone takes more than all may: its bytes.
        half_full: the log has half filled its memory, or has its part of the disk, and nothing but
            a base relieves it: another than the one that is under way.
        waits_for_peers: a base relieves it when it is whole with all peers: before, whoever loses
            a node goes back to the one before. Not where the log has half filled its memory.
        cut_short: the step up to which it was let go before, because of that; -1: never.
        given_up: the number up to which it was let go of, for a base had no room beside it.
    """

    disk: DiskLog
    bytes_max: int
    relieved_to: Callable[[], int | None] = lambda: None
    into: Into | None = None
    number: int = 0
    held_bytes: int = 0
    taken_bytes: int = 0
    too_large: int = 0
    half_full: bool = False
    kept: deque[_Kept] = field(default_factory=deque)
    kept_bytes: int = 0
    asked_number: int = 0  # of the newest record that a base which is under way relieves
    asked_bytes: int = 0  # of these
    lock: threading.Lock = field(default_factory=threading.Lock)
    durable_step: int = -1
    everywhere_step: int = -1
    waits_for_peers: bool = False
    cut_short: int = -1
    given_up: int = 0

    def start(self, into: Into | None) -> None:
        """From now on records go there; those in other memory are gone with it."""
        with self.lock:
            if into is None or self.into is None or into.pool is not self.into.pool:
                self.kept.clear()
                self.kept_bytes = 0
            self.asked_number = self.asked_bytes = 0
            for kept in self.kept:
                kept.to_disk = False  # by whom, now?
            self.into = into
            self.durable_step = -1
            self.everywhere_step = -1

    @property
    def is_ahead(self) -> bool:
        """Whether records in memory are of steps that nothing on disk has."""
        with self.lock:
            newest = max((kept.step for kept in self.kept), default=-1)
            return not self.disk.on and newest > self.durable_step

    def take(self, size_bytes: int, objects_bytes: int = 0) -> Block | None:
        """A room for a record; None if there is none.

        Args:
            objects_bytes: that lie beside it, as far as is known.
        """
        assert self.into is not None
        pool = self.into.pool
        beside_bytes = objects_bytes + RECORD_BYTES
        need_bytes = pool.rounded_bytes(size_bytes) + beside_bytes
        self.too_large = 0
        held = self._held_bytes()
        relieved_to = self.relieved_to()
        if held + need_bytes > self.bytes_max // 2 and self._relieved_step() < self.durable_step:
            self.cut_short = self.durable_step
            self.base_everywhere(self.durable_step)
            held = self._held_bytes()
        if held + need_bytes > self.bytes_max // 2:
            if relieved_to is None:
                rest = held + need_bytes - self.asked_bytes
                self.half_full = self.half_full or rest > self.bytes_max // 2
            else:
                self.release(relieved_to)
                held = self._held_bytes()
        self.held_bytes = held
        fits = self._fits(held, need_bytes)
        room = pool.acquire_now(max(1, size_bytes), beside_bytes) if fits else None
        if room is None and fits and relieved_to is not None:  # there is more in the arena
            self.release(relieved_to)
            room = pool.acquire_now(max(1, size_bytes), beside_bytes)
        return room

    def fits(self, into: Into, room: Block, objects_bytes: int) -> bool:
        """Whether a record may come to lie in its room, now that it is known how much lies beside
        it: the log has no more than is its own, or no base might have room beside it."""
        need_bytes = into.pool.rounded_bytes(room.size_bytes) + objects_bytes + RECORD_BYTES
        return self._fits(self._held_bytes(), need_bytes)

    def _fits(self, held_bytes: int, need_bytes: int) -> bool:
        if need_bytes > self.bytes_max:
            self.too_large = need_bytes
        return held_bytes + need_bytes <= self.bytes_max

    def keep(self, into: Into, head: RecordHead, room: Block, objects_bytes: int = 0) -> int | None:
        """A record has come to lie in a room; returns its number, or None if nobody wants it:
        another keeper has come into service, or another timeline, and takes it for one of its own.

        Args:
            objects_bytes: that lie beside it.
        """
        beside_bytes = objects_bytes + RECORD_BYTES
        into.pool.charge(room, beside_bytes)
        taken = into.pool.rounded_bytes(room.size_bytes) + beside_bytes
        with self.lock:
            if into is not self.into:
                return None
            self.number += 1
            on_disk = self.disk.on
            self.kept.append(_Kept(self.number, into.timeline, head.step, room, on_disk, taken))
            self.kept_bytes += taken
            self.taken_bytes += taken
            return self.number

    def base_taken(self) -> None:
        """A base of what all records so far lead to is under way."""
        with self.lock:
            self.half_full = False
            self.asked_number = self.number
            self.asked_bytes = self.kept_bytes

    def base_failed(self) -> None:
        """The newest that was under way relieves nothing; in any thread."""
        with self.lock:
            self.asked_number = self.asked_bytes = 0

    def base_durable(self, step: int) -> None:
        """Records up to ``step`` are no longer needed; in any thread."""
        with self.lock:
            self.durable_step = max(self.durable_step, step)
        self.release()

    def base_everywhere(self, step: int) -> None:
        """A base of ``step`` is whole with all peers; in any thread."""
        with self.lock:
            self.everywhere_step = max(self.everywhere_step, step)
        self.release()

    def give_way(self) -> bool:
        """Lets go of all records, but for those that are to be written first: a base has no room
        beside them. Whether any has gone."""
        with self.lock:
            self.given_up, before = self.number, len(self.kept)
        self.release()
        return len(self.kept) < before

    def _relieved_step(self) -> int:
        """The step up to which no record is needed."""
        if not self.waits_for_peers:
            return self.durable_step
        return min(self.durable_step, self.everywhere_step)

    def release(self, relieved_to: int = 0) -> None:
        """Lets go of records that nobody needs.

        Args:
            relieved_to: nor those up to this number.
        """
        with self.lock:
            into = self.into
            free: list[_Kept] = []
            while self.kept and into is not None:
                kept = self.kept[0]
                old = kept.timeline < into.timeline and self._relieved_step() >= 0
                unwritten = kept.to_disk and not self.disk.has(kept.number)
                needed = kept.step > self._relieved_step() and not old
                if unwritten or (needed and kept.number > max(relieved_to, self.given_up)):
                    break
                free.append(self.kept.popleft())
                self.kept_bytes -= kept.taken_bytes
                if kept.number <= self.asked_number:
                    self.asked_bytes -= kept.taken_bytes
        if free and into is not None:
            into.keeper.forget_log(free[-1].number)
            for kept in free:
                into.pool.release(kept.room)

    def _held_bytes(self) -> int:
        with self.lock:
            return self.kept_bytes
