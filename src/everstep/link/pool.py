"""Blocks of the arena in the training process: taken for a capture, given back by the keeper."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from everstep.arena import PROGRESS_WORDS, Allocator, Arena
from everstep.errors import DeadlineError, EverstepError, OutOfSpaceError
from everstep.seams.filesystem import StallTimer
from everstep.seams.processes import Condition

_WARM_BYTES = 64 << 20
_NO_WORD = -1
_VIEWS_MAX = 64


class BlockKeeper(Protocol):
    """Keeper that writes captures from the blocks of a pool.

    Attributes:
        lost: reason why it no longer writes anything; None while it does.
    """

    lost: EverstepError | None

    @property
    def moves(self) -> int:
        """Counter that changes while a base or retention makes progress."""
        ...

    @property
    def log_moves(self) -> int:
        """Counter that changes while writing the log makes progress."""
        ...


class LogInMemory(Protocol):
    """Gradient log that uses blocks of a pool."""

    def give_way(self) -> bool:
        """Release all records for a base; return True if there were any. Called with the lock of
        the pool held."""
        ...


@dataclass(eq=False, slots=True)
class Block:
    """A block of the arena, with a progress word.

    Attributes:
        offset: offset in the arena, in bytes.
        size_bytes: size in bytes.
        word: index of its progress word; -1 without one.
        beside_bytes: memory outside of the arena that belongs to it, such as plain data.
        forget: set while the block is kept only so that a restarted training process can restore
            from it; called when the memory is needed.
        others: blocks that are freed together with it.
    """

    offset: int
    size_bytes: int
    word: int
    beside_bytes: int = 0
    forget: Callable[[], None] | None = None
    others: Sequence[Block] = ()


class CapturePool:
    """Hands out blocks of the arena, which never grows: if it is full, callers wait (I10).

    Blocks and the memory that belongs to them outside of the arena together stay within the size of
    the arena.

    Args:
        arena: shared memory of this process and its keeper.
        keeper: keeper of this arena; None: there is none yet. If it is lost, no memory is handed
            out again: a keeper that does not answer may still be alive and write its captures.

    Attributes:
        log: gives way if a base does not fit though none is in flight; None: no log uses the
            memory.
    """

    def __init__(self, arena: Arena, keeper: BlockKeeper | None = None) -> None:
        self.arena = arena
        self.keeper = keeper
        self.log: LogInMemory | None = None
        self._allocator = Allocator(arena.size_bytes)
        # Free progress words. Each capture takes one: their number limits captures even if the
        # arena has space for more.
        self._words = list(range(PROGRESS_WORDS))
        self._changed = Condition()
        self._kept: list[Block] = []
        self._touching = threading.Lock()
        self._touched_to = 0
        self._beside_bytes = self._most_bytes = 0
        self._retired = False
        self._whole: torch.Tensor | None = None
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        self._stuck = False  # a wait has timed out, and nothing was released since

    @property
    def whole(self) -> torch.Tensor:
        """All of the memory as a flat ``uint8`` tensor."""
        if self._whole is None:
            # A tensor made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                self._whole = torch.frombuffer(self.arena.view, dtype=torch.uint8)
        return self._whole

    def block(self, block: Block) -> torch.Tensor:
        """Return the memory of a block as a tensor; for the same block the same tensor each
        time."""
        key = block.offset, block.size_bytes
        view = self._views.get(key)
        if view is None:
            # Bounded: views of blocks of many sizes would otherwise accumulate.
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            view = self._views[key] = self.whole[block.offset : block.offset + block.size_bytes]
        return view

    def close(self, *, later: bool = False) -> None:
        """Release the memory, unless a capture is in flight: storage that hangs may recover and
        read it.

        Args:
            later: True to release it as soon as no capture is in flight.
        """
        with self._changed:
            self._retired = later
            # The keeper may still read the memory of a capture in flight.
            if self._in_flight:
                return
            # Drop the tensors first: the mapping lasts until the last view of it is released.
            self._views.clear()
            self._whole = None
            self.arena.close()

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks in use or kept."""
        with self._changed:
            return self._allocator.used_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of all blocks in use, without kept ones."""
        with self._changed:
            kept = [one for block in self._kept for one in (block, *block.others)]
            return self._allocator.used_bytes - sum(
                self._allocator.rounded_bytes(block.size_bytes) for block in kept
            )

    @property
    def touched_bytes(self) -> int:
        """Host memory that the arena has taken so far, in bytes."""
        return self._touched_to

    @property
    def taken_bytes(self) -> int:
        """Largest host memory taken so far, inside and outside of the arena, in bytes."""
        return max(self._most_bytes, self._touched_to + self._beside_bytes)

    def rounded_bytes(self, size_bytes: int) -> int:
        """Return the bytes that a block of ``size_bytes`` takes."""
        return self._allocator.rounded_bytes(size_bytes)

    def acquire(
        self,
        size_bytes: int,
        *,
        timeout_s: float,
        beside_bytes: int = 0,
        in_flight_max: int | None = None,
    ) -> Block:
        """Return a block; wait for one to be released if the arena is full.

        Args:
            size_bytes: size in bytes.
            timeout_s: seconds without progress to wait.
            beside_bytes: expected memory outside of the arena that will belong to it.
            in_flight_max: largest number of such blocks in use, including this one and without kept
                ones;
                None for no limit.

        Raises:
            OutOfSpaceError: the budget can never hold such a block.
            DeadlineError: no block was released, and nothing has moved, for ``timeout_s`` seconds.
            KeeperError: the keeper is lost.
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
            # After one timeout further calls fail at once, until something is released: training
            # must not stall for the full time at each step.
            wait_s = 0.0 if self._stuck else timeout_s
            block = self._wait(size_bytes, beside_bytes, wait_s, in_flight_max)
        with self.releasing(block):
            # Outside of the lock: taking pages is slow, and other threads release blocks meanwhile.
            self.populate(block)
            # Before the capture is announced: a stale count would make the keeper read bytes of an
            # earlier base.
            self.arena.set_progress(block.word, 0)
        return block

    @contextlib.contextmanager
    def releasing(self, block: Block) -> Iterator[None]:
        """Free a block if the context fails or is interrupted: nothing uses the block yet."""
        try:
            yield
        except BaseException:
            self.release(block)
            raise

    def acquire_now(self, size_bytes: int, beside_bytes: int = 0) -> Block | None:
        """Return a block for a log record, or None if there is no space now.

        It has no progress word, and its pages are taken only by :meth:`populate`.
        """
        with self._changed:
            # A keeper that seems lost may still read its captures from this memory.
            if self._lost is not None:
                return None
            offset = self._allocate(size_bytes, beside_bytes)
            return None if offset is None else Block(offset, size_bytes, _NO_WORD, beside_bytes)

    def charge(self, block: Block, beside_bytes: int) -> None:
        """Correct the memory outside of the arena that belongs to a block.

        The memory exists already: if it exceeds the estimate, the next caller waits for it.
        """
        with self._changed:
            less = block.beside_bytes - beside_bytes
            self._beside_bytes -= less
            block.beside_bytes = beside_bytes
            self._count()
            if less > 0:
                self._changed.notify_all()

    def populate(self, block: Block) -> None:
        """Take the pages of a block now: page faults in the middle of a copy make it 6 times
        slower."""
        # A lock of its own: one thread warms the arena ahead while another one acquires blocks.
        with self._touching:
            begin = max(self._touched_to, block.offset)
            end = block.offset + block.size_bytes
            if begin < end:
                self.arena.populate(begin, end - begin)
                self._touched_to = end

    def warm(self, size_bytes: int) -> None:
        """Take pages that captures will need, ahead of time."""
        end = min(size_bytes, self.arena.size_bytes - self._beside_bytes)
        while self._touched_to < end:
            # In slices, so that populate() of an urgent block does not wait for all of it.
            with self._touching:
                begin = self._touched_to
                if begin < end:
                    self.arena.populate(begin, min(_WARM_BYTES, end - begin))
                    self._touched_to = begin + min(_WARM_BYTES, end - begin)

    def warm_ahead(self, size_bytes: int) -> None:
        """Take ``size_bytes`` beyond the memory in use, before a record needs it."""
        used_to = self.used_bytes
        if used_to + size_bytes > self._touched_to:
            self.warm(used_to + size_bytes)

    def keep(self, block: Block, forget: Callable[[], None]) -> None:
        """Keep the block of a durable base until a newer base is durable or the memory is
        needed."""
        with self._changed:
            block.forget = forget
            self._kept.append(block)
            self._stuck = False
            self._changed.notify_all()
            self._close_retired()

    def drop_kept(self) -> None:
        """Free all kept blocks: a newer base exists."""
        with self._changed:
            while self._kept:
                self._forget(self._kept.pop(0))

    def release(self, block: Block) -> None:
        """Free a block."""
        with self._changed:
            self._free(block)

    @property
    def _lost(self) -> EverstepError | None:
        return None if self.keeper is None else self.keeper.lost

    @property
    def _in_flight(self) -> int:
        """Number of captures in flight."""
        # Blocks of log records have no progress word and do not count.
        return PROGRESS_WORDS - len(self._words) - len(self._kept)

    def _allocate(self, size_bytes: int, beside_bytes: int) -> int | None:
        """Return the offset of a new block; None if it does not fit.

        Memory outside of the arena counts against its end: pages that the arena has taken stay
        taken, so
        only the untouched end can make up for other memory.
        """
        offset = self._allocator.allocate(size_bytes)
        if offset is None:
            return None
        end = offset + self.rounded_bytes(size_bytes)
        # Both kinds of memory together must stay within the budget, even if the arena alone has
        # space.
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
        """Wait for a block; free kept blocks, the oldest first, if that helps."""
        found: list[Block] = []

        def take() -> bool:
            # Checked at each turn: no block may be handed out after the keeper was lost.
            if (lost := self._lost) is not None:
                raise lost
            if in_flight_max is not None and self._in_flight >= in_flight_max:
                return False
            while True:
                offset = self._allocate(size_bytes, beside_bytes) if self._words else None
                if offset is not None:
                    found.append(Block(offset, size_bytes, self._words.pop(), beside_bytes))
                    return True
                # A kept block is only a convenience for restarts: sacrifice it before waiting.
                if self._kept:
                    self._forget(self._kept.pop(0))
                # The log is given up only if no base is in flight: the end of one would free memory
                # without a gap in the log.
                elif self._in_flight or self.log is None or not self.log.give_way():
                    return False

        keeper = self.keeper
        still = StallTimer(timeout_s)
        look_s = timeout_s if keeper is None else still.poll_s
        try:
            while not (there := self._changed.wait_for(take, look_s)):
                # While bases are being written, blocks will be released.
                if keeper is None or still.is_over((keeper.moves, keeper.log_moves)):
                    break
        except BaseException:
            # An interrupt may come after take() has succeeded: the block would be lost.
            for block in found:
                self._free(block)
            raise
        if not there:
            since = "since the last base was lost" if self._stuck else f"within {timeout_s:g} s"
            self._stuck = True
            raise DeadlineError(
                f"no host memory was released {since}: earlier bases are still being written",
                hint="check the disk (dmesg, df, iostat) and that the keeper is not stopped "
                "(everstep ps); a longer interval or a larger Budget(host_bytes=...) leaves it "
                "more time",
            )
        return found[0]

    def _forget(self, block: Block) -> None:
        if block.forget is not None:
            block.forget()
        self._free(block)

    def _free(self, block: Block) -> None:
        for other in block.others:
            self._free(other)
        self._allocator.free(block.offset)
        self._beside_bytes -= block.beside_bytes
        # Memory was released: the next caller may wait for the full time again.
        self._stuck = False
        if block.word != _NO_WORD:
            self._words.append(block.word)
        self._changed.notify_all()
        self._close_retired()

    def _close_retired(self) -> None:
        if self._retired:
            self.close(later=True)
