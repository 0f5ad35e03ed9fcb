"""The newest whole capture, kept in memory for a training process that is restarted.

It stays until a newer one is whole, until its memory is written over, or until it can be of
no use. What the disk has refused is the only copy there is, and stays as long as it can.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import AuditError
from everstep.format.header import ShardIdentity
from everstep.format.plan import BasePlan
from everstep.format.writer import Written, digest_shard
from everstep.keeper.log.held import base_to_wire
from everstep.link.capture import Capture, shard_offsets
from everstep.link.wire import Connection

__all__ = [
    "LookReply",
    "NewestCapture",
]

_log = logging.getLogger("everstep.keeper")


class NewestCapture:
    """What is in memory, if anything. The thread that serves and the one that writes use it.

    Attributes:
        on_disk: a base that the disks of all ranks have, whatever became of its capture here: a
            start that finds all parts of it commits it.
    """

    def __init__(self) -> None:
        self.on_disk: BaseId | None = None
        self._lock = threading.Lock()
        self._held: tuple[Capture, Arena] | None = None

    @property
    def step(self) -> int | None:
        """Of the base that is held."""
        held = self._held
        return None if held is None else held[0].step

    @property
    def arena(self) -> Arena | None:
        """The memory that it lies in."""
        held = self._held
        return None if held is None else held[1]

    @property
    def undigested(self) -> ShardIdentity | None:
        """The identity of what is held, while there are no digests of it yet."""
        held = self._held
        return None if held is None or held[0].written else held[0].plan.identity

    @property
    def is_only_copy(self) -> bool:
        """Whether there is one that is on no disk."""
        held = self._held
        if held is None or held[0].durable:
            return False
        return BaseId(held[0].timeline, held[0].step) != self.on_disk

    def take(self, capture: Capture, arena: Arena) -> None:
        """A capture is whole: it takes the place of the one before; not of a newer one, which may
        have become whole while this one was put together."""
        mine = capture.plan.identity
        with self._lock:
            if self._held is not None and self._held[1] is arena:
                held = self._held[0].plan.identity
                if (held.timeline, held.step) > (mine.timeline, mine.step):
                    return
            self._held = (capture, arena)

    def written_over_by(self, capture: Capture, arena: Arena) -> None:
        """Memory that is written again holds no base any more, whatever we were told."""
        with self._lock:
            if self._held is None or self._held[1] is not arena:
                return
            begin, end = _block(self._held[0])
            new_begin, new_end = _block(capture)
            if new_begin < end and begin < new_end:
                self._held = None

    def forget(self, number: int | None, arena: Arena) -> None:
        """A training process says that it needs a base no more.

        Args:
            number: of its own captures; None for what another process left.
            arena: of the process that says so.
        """
        with self._lock:
            if self._held is None:
                return
            capture = self._held[0]
            mine = self._held[1] is arena
            if number is None:
                forgets = not mine and capture.durable
            else:
                forgets = mine and capture.number == number
            if forgets:
                self._held = None

    def parked(self, arena: Arena, timeline: int) -> Capture | None:
        """What is held, of this timeline, and on no disk because nobody has asked for it."""
        with self._lock:
            if self._held is None or self._held[1] is not arena:
                return None
            capture = self._held[0]
            return capture if capture.parked and capture.timeline == timeline else None

    def durable(self, base: BaseId) -> tuple[Capture, Arena] | None:
        """The capture of a base that is on the disk, too, and its memory, if it is held."""
        held = self._held
        if held is None or held[0].redo is not None or not held[0].durable:
            return None
        found = BaseId(held[0].timeline, held[0].step)
        return held if found == base and held[0].written else None

    def has(self, capture: Capture) -> bool:
        """Whether the memory of a capture is as it was."""
        held = self._held
        return held is not None and held[0] is capture

    def drop(self, capture: Capture) -> None:
        """The memory of a base is going to change."""
        with self._lock:
            if self._held is not None and self._held[0] is capture:
                self._held = None

    def passed_over(self) -> None:
        """The run goes on from a base on the disk: one that is in memory only, and was not chosen,
        is of a history that nobody comes back to."""
        with self._lock:
            if self._held is not None and not self._held[0].durable:
                self._held = None

    def drop_from(self, timeline: int) -> None:
        """Bases of this timeline, and of those behind it, are of another history."""
        with self._lock:
            if self._held is not None and self._held[0].timeline >= timeline:
                self._held = None

    def failed(self, capture: Capture, error: BaseException, *, reused: bool) -> None:
        """A capture has not become durable.

        Args:
            reused: its training process is there, and will use the memory again.
        """
        # What an audit has refused is not the state of its step.
        wrong = reused or isinstance(error, AuditError)
        with self._lock:
            if wrong and self._held is not None and self._held[0] is capture:
                self._held = None

    def recall(
        self,
        arena: Arena,
        audit: Callable[[BasePlan, Sequence[Written]], None],
        *,
        own: bool = False,
    ) -> tuple[dict[str, Any], list[bytes], Arena] | None:
        """What another process than that of ``arena`` has left: see
        :func:`.held.base_to_wire`, and its arena.

        Args:
            own: what the process of ``arena`` has captured, too.
            audit: raises AuditError for what may not be restored; asked where the disk has
                refused a base before it could be audited.
        """
        held = self._held
        if held is None or (held[1] is arena and not own):
            return None
        return self.look(audit)

    def look(
        self, audit: Callable[[BasePlan, Sequence[Written]], None] | None
    ) -> tuple[dict[str, Any], list[bytes], Arena] | None:
        """What is held, whoever has captured it; as :meth:`recall`.

        Args:
            audit: as there; None: what has no digests yet is left out. It can be written over by
                who has captured it, and nothing would tell.
        """
        held = self._held
        if held is None or (audit is None and not held[0].written):
            return None
        capture, theirs = held
        if audit is not None and not capture.written:  # what is in memory is all there is
            identity = capture.plan.identity
            written = tuple(
                digest_shard(shard, identity, body)
                for shard, body in zip(capture.files.shards, capture.bodies(theirs), strict=True)
            )
            try:
                audit(capture.plan, written)
            except AuditError as error:
                _log.error("%s", error)
                self.failed(capture, error, reused=False)
                return None
            capture.written = written
        return *base_to_wire(capture), theirs


def _block(capture: Capture) -> tuple[int, int]:
    """Where its memory begins and ends in the arena."""
    return capture.offset, capture.offset + shard_offsets(capture.plan)[1]


@dataclass(frozen=True, slots=True)
class LookReply:
    """What a keeper shows to a process that is not attached.

    Attributes:
        recalled, blobs, arenas: as in the answer to ``recall``.
        settled: nothing of it is still being written or digested.
        moves: change as long as that goes on.
        pending: the identity of a base in memory that has no digests yet.
    """

    recalled: dict[str, Any]
    blobs: list[bytes]
    arenas: list[Arena]
    settled: bool
    moves: list[int]
    pending: dict[str, Any] | None

    def send(self, connection: Connection, trainer: int | None) -> None:
        """Sends it.

        Args:
            trainer: the process that is served.
        """
        index: bytes = msgpack.packb(
            {**self.recalled, "blobs": self.blobs, "pending": self.pending},
            unicode_errors="surrogatepass",
        )
        about = {"settled": self.settled, "moves": self.moves, "trainer": trainer}
        with Arena.create(len(index)) as memory:
            memory.view[: len(index)] = index
            fds = [one.fd for one in (memory, *self.arenas) if one.fd is not None]
            connection.send({"kind": "looked", "size_bytes": len(index), **about}, fds)
