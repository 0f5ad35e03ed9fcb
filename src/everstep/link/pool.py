"""Blocks of the arena, in the training process: taken for a capture, given back by the keeper."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everstep.arena.allocator import Allocator
from everstep.arena.memory import PROGRESS_WORDS, Arena
from everstep.errors import DeadlineError, EverstepError, OutOfSpaceError
from everstep.seams.files.moving import Standstill
from everstep.seams.processes.conditions import Condition

__all__ = ["Block", "CapturePool"]

_WARM_BYTES = 64 << 20
_NO_WORD = -1
_VIEWS_MAX = 64


@dataclass(eq=False, slots=True)
class Block:
    """A block of the arena, and a progress word for it.

    Attributes:
        beside_bytes: what belongs to it and lies outside of the arena, as plain data does.
        forget: set while the block is kept only so that a restarted training process can
            restore from it: called when the memory is needed.
        others: blocks that are given back with it.
    """

    offset: int
    size_bytes: int
    word: int
    beside_bytes: int = 0
    forget: Callable[[], None] | None = None
    others: Sequence[Block] = ()


class CapturePool:
    """Hands out blocks; a full arena pushes back, it never grows (I10). What its blocks hold, and
    what belongs to them and lies beside it, is together no more than the arena has bytes.

    Args:
        lost: why the keeper of this arena is gone; None: it is not. A keeper that does not answer
            may live on, and write what it was given: no memory of its arena is given out again.

    Attributes:
        moves: changes as long as bases are being written, behind which there will be room; None:
            nobody knows.
        give_way: called where a base has no room though none is in flight: whether the log, which
            has it, has let go of any.
    """

    def __init__(
        self, arena: Arena, lost: Callable[[], EverstepError | None] = lambda: None
    ) -> None:
        self.arena = arena
        self._lost = lost
        self._allocator = Allocator(arena.size_bytes)
        self._words = list(range(PROGRESS_WORDS))
        self._changed = Condition()
        self._kept: list[Block] = []
        self._touching = threading.Lock()
        self._touched_to = 0
        self._beside_bytes = self._most_bytes = 0
        self._retired = False
        self._whole: torch.Tensor | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self.moves: Callable[[], object] | None = None
        self._stuck = False  # nothing was released since somebody has waited in vain
        self.give_way: Callable[[], bool] = lambda: False

    @property
    def whole(self) -> torch.Tensor:
        """All of the memory (flat ``uint8``)."""
        if self._whole is None:
            with torch.inference_mode(False):  # or nobody outside of it may write there
                self._whole = torch.frombuffer(self.arena.view, dtype=torch.uint8)
        return self._whole

    def block(self, room: Block) -> torch.Tensor:
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

    @property
    def taken_bytes(self) -> int:
        """Host memory that was taken so far: by the arena, and beside it, at most at a time."""
        return max(self._most_bytes, self._touched_to + self._beside_bytes)

    def rounded_bytes(self, size_bytes: int) -> int:
        """What a block of ``size_bytes`` takes."""
        return self._allocator.rounded_bytes(size_bytes)

    def acquire(
        self,
        size_bytes: int,
        *,
        timeout_s: float,
        beside_bytes: int = 0,
        in_flight_max: int | None = None,
    ) -> Block:
        """A block; waits for one to be released if there is no room.

        Args:
            beside_bytes: that will belong to it outside of the arena, as far as is known.
            in_flight_max: so many blocks of this kind may be in use, besides those kept, with
                this one; None: as many as there is room for.

        Raises:
            OutOfSpaceError: when the budget can never hold such a block.
            DeadlineError: when none was released within ``timeout_s``, and nothing has moved.
            KeeperError: the keeper is gone.
        """
        if self.rounded_bytes(size_bytes) + beside_bytes > self.arena.size_bytes:
            plain = f" ({beside_bytes} of them plain data)" if beside_bytes else ""
            need = self.rounded_bytes(self.rounded_bytes(size_bytes) + beside_bytes)
            raise OutOfSpaceError(
                f"a copy of the state takes {size_bytes + beside_bytes} bytes{plain} of host "
                f"memory, the budget is {self.arena.size_bytes}",
                hint=f'Budget(host_bytes={need}) or more, or method="sync"',
            )
        with self._changed:
            # Whoever has waited in vain once, does not again until something is released.
            wait_s = 0.0 if self._stuck else timeout_s
            room = self._wait(size_bytes, beside_bytes, wait_s, in_flight_max)
        try:
            self.populate(room)
            self.arena.set_progress(room.word, 0)
        except BaseException:
            self.release(room)
            raise
        return room

    def acquire_now(self, size_bytes: int, beside_bytes: int = 0) -> Block | None:
        """A block for a record of the log, if there is one: without a progress word, and without
        its pages, which are taken with :meth:`populate`."""
        with self._changed:
            if self._lost() is not None:
                return None
            offset = self._allocate(size_bytes, beside_bytes)
            return None if offset is None else Block(offset, size_bytes, _NO_WORD, beside_bytes)

    def charge(self, room: Block, beside_bytes: int) -> None:
        """It is known by now how much belongs to a block outside of the arena. It is there: where
        that is more than was thought, whoever comes next waits for it."""
        with self._changed:
            less = room.beside_bytes - beside_bytes
            self._beside_bytes -= less
            room.beside_bytes = beside_bytes
            self._count()
            if less > 0:
                self._changed.notify_all()

    def populate(self, room: Block) -> None:
        """Takes the pages of a block now, and not in the middle of a copy, which would be 6
        times slower."""
        with self._touching:
            begin = max(self._touched_to, room.offset)
            end = room.offset + room.size_bytes
            if begin < end:
                self.arena.populate(begin, end - begin)
                self._touched_to = end

    def warm(self, size_bytes: int) -> None:
        """Takes memory that captures will need, before they need it."""
        end = min(size_bytes, self.arena.size_bytes - self._beside_bytes)
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

    def keep(self, room: Block, forget: Callable[[], None]) -> None:
        """The block is durable; it stays until a newer one is, or its memory is needed."""
        with self._changed:
            room.forget = forget
            self._kept.append(room)
            self._stuck = False
            self._changed.notify_all()
            self._close_retired()

    def drop_kept(self, *, but: Block | None = None) -> None:
        """Forgets every kept block; a newer one is there."""
        with self._changed:
            while self._kept:
                room = self._kept.pop(0)
                if room is but:
                    self._kept.append(room)
                    return
                self._forget(room)

    def release(self, room: Block) -> None:
        """Gives a block back."""
        with self._changed:
            self._free(room)

    @property
    def _in_flight(self) -> int:
        """Captures that are under way."""
        return PROGRESS_WORDS - len(self._words) - len(self._kept)

    def _allocate(self, size_bytes: int, beside_bytes: int) -> int | None:
        """The offset of a block, and what belongs to it beside the arena counts: of the arena so
        much less is used, at its end, as memory that it has taken stays taken."""
        offset = self._allocator.allocate(size_bytes)
        if offset is None:
            return None
        end = offset + self.rounded_bytes(size_bytes)
        if end + self._beside_bytes + beside_bytes > self._allocator.size_bytes:
            self._allocator.free(offset)
            return None
        self._beside_bytes += beside_bytes
        self._count()
        return offset

    def _count(self) -> None:
        self._most_bytes = max(self._most_bytes, self._touched_to + self._beside_bytes)

    def _wait(
        self, size_bytes: int, beside_bytes: int, timeout_s: float, in_flight_max: int | None
    ) -> Block:
        found: list[Block] = []

        def take() -> bool:
            if (lost := self._lost()) is not None:
                raise lost
            if in_flight_max is not None and self._in_flight >= in_flight_max:
                return False
            while True:
                offset = self._allocate(size_bytes, beside_bytes) if self._words else None
                if offset is not None:
                    found.append(Block(offset, size_bytes, self._words.pop(), beside_bytes))
                    return True
                if self._kept:
                    self._forget(self._kept.pop(0))
                elif self._in_flight or not self.give_way():
                    return False

        still = Standstill(timeout_s)
        look_s = timeout_s if self.moves is None else still.poll_s
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

    def _forget(self, room: Block) -> None:
        if room.forget is not None:
            room.forget()
        self._free(room)

    def _free(self, room: Block) -> None:
        for other in room.others:
            self._free(other)
        self._allocator.free(room.offset)
        self._beside_bytes -= room.beside_bytes
        self._stuck = False
        if room.word != _NO_WORD:
            self._words.append(room.word)
        self._changed.notify_all()
        self._close_retired()

    def _close_retired(self) -> None:
        if self._retired:
            self.close(later=True)
