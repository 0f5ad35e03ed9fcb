"""The memory in which a keeper holds steps of other ranks' logs, beside their bases."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass

from everstep.arena.allocator import Allocator
from everstep.arena.memory import CONTROL_BYTES, Arena
from everstep.commit.job.messages import PeerLogAt, PeerLogBegun, PeerLogPart
from everstep.commit.lineage import BaseId
from everstep.commit.peerlog import LogCopy, LogShelf
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format.digests import digest
from everstep.restore.fetch.peer_log import Packed, PeerLog, read_packed

__all__ = ["PeerLogStore"]

_log = logging.getLogger("everstep.keeper")
_ALIGNMENT_BYTES = 4096


@dataclass(slots=True)
class _Coming:
    """Steps that are on their way, of one rank.

    Attributes:
        offset: of their memory.
        received_bytes: from the first one on.
    """

    begun: PeerLogBegun
    offset: int
    received_bytes: int = 0


class PeerLogStore:
    """Steps that other ranks' keepers have sent. It outlives timelines; several threads use it.

    All lie in one arena of the size of the bound, whose pages come when they are first used.

    Args:
        bound_bytes: of all steps together, those that are on their way included (I10).
    """

    def __init__(self, bound_bytes: int = 0) -> None:
        self._lock = threading.Lock()
        self._shelf = LogShelf(bound_bytes)
        self._sources: tuple[int, ...] = ()
        self._arena: Arena | None = None
        self._rooms: Allocator | None = None
        self._touched_bytes = 0
        self._coming: dict[int, _Coming] = {}
        self._there: dict[tuple[int, int, int], tuple[int, PeerLogBegun]] = {}

    @property
    def used_bytes(self) -> int:
        """Host memory that is taken: what was let go is used again, and not given back."""
        return 0 if self._arena is None else CONTROL_BYTES + self._touched_bytes

    @property
    def held(self) -> dict[int, int]:
        """By rank: the newest step that is held of its log."""
        found: dict[int, int] = {}
        with self._lock:
            for copy in self._shelf.copies:  # by timeline: the newest comes last
                found[copy.source] = copy.run.last
        return found

    def whole(self) -> tuple[list[tuple[PeerLog, int]], Arena | None]:
        """All steps that are held, each with its offset in the memory that they lie in."""
        with self._lock:
            if self._arena is None:
                return [], None
            found = []
            for copy in self._shelf.copies:
                offset, begun = self._there[copy.key]
                memory = self._arena.view[offset : offset + begun.size_bytes]
                steps = Packed(copy.run, memory, begun.index_bytes, begun.index_digest)
                found.append((PeerLog(copy.source, begun.record, steps), offset))
            return found, self._arena

    def new_start(self, bound_bytes: int, sources: Collection[int]) -> None:
        """The job was started anew: what was on its way will not come any more.

        Args:
            sources: ranks that send here from now on. What is held of others stays until a newer
                base is whole with all peers.
        """
        with self._lock:
            self._sources = tuple(sources)
            for source in list(self._coming):
                self._drop(source)
            if self._arena is not None and not self._shelf.copies:
                self._arena = self._rooms = None
                self._touched_bytes = 0
            size_bytes = bound_bytes if self._arena is None else self._arena.size_bytes
            self._shelf.bound_bytes = min(bound_bytes, size_bytes)

    def passed(self, everywhere: BaseId, there: Collection[int]) -> None:
        """A base is whole with all peers; ``there``: ranks whose part of it is held here."""
        with self._lock:
            self._let_go(self._shelf.passed(everywhere, there, self._sources))

    def begun(self, source: int, message: PeerLogBegun) -> PeerLogAt:
        """A rank wants to send steps, or asks how far they have come."""
        with self._lock:
            coming = self._coming.get(source)
            if coming is not None and coming.begun == message:
                return _at(message, coming.received_bytes, "more")
            self._drop(source)  # another keeper of that rank, or it has given up
            self._let_go(self._shelf.strangers(source, message.timeline, digest(message.record)))
            known = self._there.get((source, message.timeline, message.first))
            if known is not None and known[1] == message:
                return _at(message, message.size_bytes, "whole")
            if not 0 < message.index_bytes <= message.size_bytes:
                return _at(message, 0, "refused", "it is nothing")
            try:
                offset = self._room(message.size_bytes)
            except EverstepError as error:
                return _at(message, 0, "full", error.message)
            if offset is None:
                held_bytes = self._shelf.used_bytes
                bound_bytes = self._shelf.bound_bytes
                why = (
                    f"they take {message.size_bytes} bytes, beside {held_bytes} that have to stay, "
                    f"and the bound for logs of other ranks is {bound_bytes}"
                )
                return _at(message, 0, "full", why)
            self._coming[source] = _Coming(message, offset)
            return _at(message, 0, "more")

    def part(self, source: int, message: PeerLogPart) -> PeerLogAt:
        """Bytes have come; those that were expected next are kept."""
        with self._lock:
            coming = self._coming.get(source)
            ours = None if coming is None else (coming.begun.timeline, coming.begun.first)
            if coming is None or ours != (message.timeline, message.first):
                known = self._there.get((source, message.timeline, message.first))
                if known is not None:  # the last part once more
                    return _at(known[1], known[1].size_bytes, "whole")
                return PeerLogAt(message.timeline, message.first, 0, "lost", "")
            begun = coming.begun
            arena = self._arena
            assert arena is not None
            end = message.offset + len(message.data)
            if message.offset == coming.received_bytes and end <= begun.size_bytes:
                place = coming.offset + message.offset
                arena.view[place : coming.offset + end] = message.data
                coming.received_bytes = end
            if coming.received_bytes < begun.size_bytes:
                return _at(begun, coming.received_bytes, "more")
            return self._arrived(source, coming, arena)

    def _arrived(self, source: int, coming: _Coming, arena: Arena) -> PeerLogAt:
        """All of it is there."""
        begun = coming.begun
        memory = arena.view[coming.offset : coming.offset + begun.size_bytes]
        try:
            run, _ = read_packed(begun.timeline, memory, begun.index_bytes, begun.index_digest)
            if (run.first, run.last) != (begun.first, begun.last):
                raise FormatError(f"they are steps {run.first} to {run.last}")
        except (DamageError, FormatError) as error:
            _log.warning("steps of the log of rank %d: %s", source, error)
            self._drop(source)
            return _at(begun, 0, "refused", f"they have arrived damaged: {error.message}")
        if self._shelf.holds(source, run):
            self._drop(source)
            return _at(begun, 0, "refused", "some of these steps are held already")
        del self._coming[source]
        rounded = self._rounded(begun.size_bytes)
        copy = LogCopy(source, digest(begun.record), run, rounded)
        self._there[copy.key] = coming.offset, begun
        self._shelf.take(copy)
        return _at(begun, begun.size_bytes, "whole")

    def _room(self, size_bytes: int) -> int | None:
        """Memory for so many bytes; None: there is none before something is let go.

        Raises:
            EverstepError: the system gives none.
        """
        rounded = self._rounded(size_bytes)
        on_way = sum(self._rounded(one.begun.size_bytes) for one in self._coming.values())
        if not self._shelf.fits(rounded + on_way):
            return None
        if self._arena is None:
            self._arena = Arena.create(self._shelf.bound_bytes)
            self._rooms = Allocator(self._arena.size_bytes, alignment_bytes=_ALIGNMENT_BYTES)
        assert self._rooms is not None
        offset = self._rooms.allocate(size_bytes)
        if offset is not None:
            self._touched_bytes = max(self._touched_bytes, offset + rounded)
        return offset

    @staticmethod
    def _rounded(size_bytes: int) -> int:
        return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def _drop(self, source: int) -> None:
        coming = self._coming.pop(source, None)
        if coming is not None and self._rooms is not None:
            self._rooms.free(coming.offset)

    def _let_go(self, gone: list[LogCopy]) -> None:
        for copy in gone:
            offset, _ = self._there.pop(copy.key)
            assert self._rooms is not None
            self._rooms.free(offset)


def _at(begun: PeerLogBegun, received_bytes: int, state: str, problem: str = "") -> PeerLogAt:
    return PeerLogAt(begun.timeline, begun.first, received_bytes, state, problem)
