"""Blocks of the arena, in the training process: taken for a capture, given back by the keeper."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everstep.arena.allocator import Allocator
from everstep.arena.memory import PROGRESS_WORDS, Arena
from everstep.errors import DeadlineError, EverstepError, OutOfSpaceError
from everstep.seams.conditions import Condition
from everstep.seams.moving import Standstill

__all__ = ["CapturePool", "Room"]

_WARM_BYTES = 64 << 20
_NO_WORD = -1
_VIEWS_MAX = 64


@dataclass(eq=False, slots=True)
class Room:
    """A block of the arena, and a progress word for it.

    Attributes:
        forget: set while the block is kept only so that a restarted training process can
            restore from it: called when the memory is needed.
        others: blocks that are given back with it.
    """

    offset: int
    size_bytes: int
    word: int
    forget: Callable[[], None] | None = None
    others: Sequence[Room] = ()


class CapturePool:
    """Hands out blocks; a full arena pushes back, it never grows (I10).

    Args:
        lost: why the keeper of this arena is gone; None: it is not. A keeper that does not answer
            may live on, and write what it was given: no memory of its arena is given out again.

    Attributes:
        moves: changes as long as bases are being written, behind which there will be room; None:
            nobody knows.
    """

    def __init__(
        self, arena: Arena, lost: Callable[[], EverstepError | None] = lambda: None
    ) -> None:
        self.arena = arena
        self._lost = lost
        self._allocator = Allocator(arena.size_bytes)
        self._words = list(range(PROGRESS_WORDS))
        self._changed = Condition()
        self._kept: list[Room] = []
        self._touching = threading.Lock()
        self._touched_to = 0
        self._retired = False
        self._whole: torch.Tensor | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self.moves: Callable[[], object] | None = None
        self._stuck = False  # nothing was released since somebody has waited in vain

    @property
    def whole(self) -> torch.Tensor:
        """All of the memory (flat ``uint8``)."""
        if self._whole is None:
            with torch.inference_mode(False):  # or nobody outside of it may write there
                self._whole = torch.frombuffer(self.arena.view, dtype=torch.uint8)
        return self._whole

    def block(self, room: Room) -> torch.Tensor:
        """The memory of a room: of the same room the same tensor each time."""
        key = room.offset, room.size_bytes
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            view = self._views[key] = self.whole[room.offset : room.offset + room.size_bytes]
        return view

    def close(self, *, later: bool = False) -> None:
        """Lets go of the memory, whoever still knows this pool. Not while a capture is under way:
        storage that hangs may come back.

        Args:
            later: once none is under way any more.
        """
        with self._changed:
            self._retired = later
            if self._in_flight:
                return
            self._views.clear()
            self._whole = None
            self.arena.close()

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks that are in use or kept."""
        with self._changed:
            return self._allocator.used_bytes

    @property
    def touched_bytes(self) -> int:
        """Host memory that the arena has taken so far."""
        return self._touched_to

    def rounded_bytes(self, size_bytes: int) -> int:
        """What a block of ``size_bytes`` takes."""
        return self._allocator.rounded_bytes(size_bytes)

    def acquire(
        self, size_bytes: int, *, timeout_s: float, in_flight_max: int | None = None
    ) -> Room:
        """A block; waits for one to be released if there is no room.

        Args:
            in_flight_max: so many blocks of this kind may be in use, besides those kept, with
                this one; None: as many as there is room for.

        Raises:
            OutOfSpaceError: when the budget can never hold such a block.
            DeadlineError: when none was released within ``timeout_s``, and nothing has moved.
            KeeperError: the keeper is gone.
        """
        if size_bytes > self.arena.size_bytes:
            raise OutOfSpaceError(
                f"a copy of the state takes {size_bytes} bytes of host memory, the budget is "
                f"{self.arena.size_bytes}",
                hint=f'Budget(host_bytes={size_bytes}) or more, or method="sync"',
            )
        with self._changed:
            # Whoever has waited in vain once, does not again until something is released.
            room = self._wait(size_bytes, 0.0 if self._stuck else timeout_s, in_flight_max)
        try:
            self.populate(room)
            self.arena.set_progress(room.word, 0)
        except BaseException:
            self.release(room)
            raise
        return room

    def acquire_now(self, size_bytes: int) -> Room | None:
        """A block for a record of the log, if there is one: without a progress word, and without
        its pages, which are taken with :meth:`populate`."""
        with self._changed:
            offset = None if self._lost() is not None else self._allocator.allocate(size_bytes)
            return None if offset is None else Room(offset, size_bytes, _NO_WORD)

    def populate(self, room: Room) -> None:
        """Takes the pages of a block now, and not in the middle of a copy, which would be 6
        times slower."""
        with self._touching:
            begin, end = max(self._touched_to, room.offset), room.offset + room.size_bytes
            if begin < end:
                self.arena.populate(begin, end - begin)
                self._touched_to = end

    def warm(self, size_bytes: int) -> None:
        """Takes memory that captures will need, before they need it."""
        end = min(size_bytes, self.arena.size_bytes)
        while self._touched_to < end:
            with self._touching:
                begin = self._touched_to
                if begin < end:
                    self.arena.populate(begin, min(_WARM_BYTES, end - begin))
                    self._touched_to = begin + min(_WARM_BYTES, end - begin)

    def warm_ahead(self, size_bytes: int) -> None:
        """Takes so much memory beyond what was ever used, before a record needs it."""
        used_to = self.used_bytes
        if used_to + size_bytes > self._touched_to:
            self.warm(used_to + size_bytes)

    def keep(self, room: Room, forget: Callable[[], None]) -> None:
        """The block is durable; it stays until a newer one is, or its memory is needed."""
        with self._changed:
            room.forget = forget
            self._kept.append(room)
            self._stuck = False
            self._changed.notify_all()
            self._close_retired()

    def drop_kept(self, *, but: Room | None = None) -> None:
        """Forgets every kept block; a newer one is there."""
        with self._changed:
            while self._kept:
                room = self._kept.pop(0)
                if room is but:
                    self._kept.append(room)
                    return
                self._forget(room)

    def release(self, room: Room) -> None:
        """Gives a block back."""
        with self._changed:
            self._free(room)

    @property
    def _in_flight(self) -> int:
        """Captures that are under way."""
        return PROGRESS_WORDS - len(self._words) - len(self._kept)

    def _wait(self, size_bytes: int, timeout_s: float, in_flight_max: int | None) -> Room:
        found: list[Room] = []

        def take() -> bool:
            if (lost := self._lost()) is not None:
                raise lost
            if in_flight_max is not None and self._in_flight >= in_flight_max:
                return False
            while True:
                offset = self._allocator.allocate(size_bytes) if self._words else None
                if offset is not None:
                    found.append(Room(offset, size_bytes, self._words.pop()))
                    return True
                if not self._kept:
                    return False
                self._forget(self._kept.pop(0))

        still = Standstill(timeout_s)
        look_s = timeout_s if self.moves is None else still.look_again_s
        try:
            while not (there := self._changed.wait_for(take, look_s)):
                if self.moves is None or still.is_over(self.moves()):
                    break
        except BaseException:  # an interrupt
            for room in found:
                self._free(room)
            raise
        if not there:
            since = "since the last base was lost" if self._stuck else f"within {timeout_s:g} s"
            self._stuck = True
            raise DeadlineError(
                f"no host memory was released {since}: earlier bases are still being written",
                hint="look at the disk (dmesg, df, iostat); is the keeper stopped? (everstep ps); "
                "a longer interval, or a larger Budget(host_bytes=...), leaves it more time",
            )
        return found[0]

    def _forget(self, room: Room) -> None:
        if room.forget is not None:
            room.forget()
        self._free(room)

    def _free(self, room: Room) -> None:
        for other in room.others:
            self._free(other)
        self._allocator.free(room.offset)
        self._stuck = False
        if room.word != _NO_WORD:
            self._words.append(room.word)
        self._changed.notify_all()
        self._close_retired()

    def _close_retired(self) -> None:
        if self._retired:
            self.close(later=True)
