"""Pinned host memory, which a device can copy into asynchronously.

A copy into memory that is not pinned blocks its caller. Pinning the entire arena would be too much,
because pinned pages stay allocated. So only the ranges that captures use are pinned, at the latest
at their first use, and they stay pinned until the arena is no longer copied into.

While memory is being pinned, CUDA lets no other thread launch a kernel, and most of that time is
spent on fresh pages (of 460 ms for a GiB on an H200 all but 40). So pages are touched first, and
memory is pinned in slices of a few milliseconds, with pauses for other threads
(docs/design/capture.md).
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from everstep.capture.lane import Take
from everstep.errors import EverstepError, UnavailableError
from everstep.seams.machine import limit_of
from everstep.seams.memory import take_pages

_log = logging.getLogger("everstep")
_cuda: Any = torch.cuda  # what it calls has no annotations

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one alone
_SLICE_BYTES = 32 << 20  # minimum; copies are cut at the ends of slices
_SLICE_BYTES_MAX = 256 << 20
_SLICE_S = 4e-3  # target for the time that one slice may block other threads
_PAUSE_S_MAX = 0.05


class PinnedMemory:
    """Pinned ranges of one arena. Thread-safe.

    It keeps the arena mapped, because pages stay pinned when they are unmapped: if another arena
    were mapped at the same addresses, copies would still go to the old pages.

    Args:
        block: flat ``uint8``, any part of the arena.
        device: device whose context is used. Pinned memory is pinned for all devices, but a thread
            without a current device would create a context on the first one, which may belong to
            another job.
    """

    def __init__(self, block: torch.Tensor, device: torch.device) -> None:
        self._memory = block.untyped_storage()
        self._device = device
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []  # addresses, in order; each one registration
        self._slice_bytes = _SLICE_BYTES

    @property
    def size_bytes(self) -> int:
        """Number of pinned bytes."""
        return sum(end - begin for begin, end in self._ranges)

    def holds(self, block: torch.Tensor) -> bool:
        """Return True if ``block`` is a part of this arena."""
        # The address identifies the arena: the storage held here keeps it from being reused.
        return block.untyped_storage().data_ptr() == self._memory.data_ptr()

    def ready_bytes(self, block: torch.Tensor) -> int:
        """Return the number of bytes of ``block``, from its beginning, that are pinned."""
        begin = position = block.data_ptr()
        ranges = self._ranges.copy()  # without the lock, which is held during a registration
        index = bisect.bisect_right(ranges, position, key=_first) - 1
        for first, end in ranges[max(0, index) :]:
            if first > position:
                break
            position = max(position, end)
        return min(position - begin, block.numel())

    def pin(self, block: torch.Tensor, *, at_once: bool = False) -> None:
        """Pin the pages of ``block`` that are not pinned yet.

        Args:
            at_once: make no pauses; the caller is the thread they would be made for.

        Raises:
            UnavailableError: the system refuses; with the number of bytes and the limit.
        """
        for taken_s in self.slices(block):
            if not at_once:
                self.pause(taken_s)

    def slices(self, block: torch.Tensor, take: Take | None = None) -> Iterator[float]:
        """Pin slice by slice; yield the seconds for which each slice has blocked other threads.

        Args:
            take: touches pages, if they must be accounted for.
        """
        # Whole pages are registered. Where the system's pages are larger than those of the arena,
        # two blocks share one.
        page = mmap.PAGESIZE
        position = block.data_ptr() // page * page
        end = -(-(block.data_ptr() + block.numel()) // page) * page
        while (found := self._next(position, end)) is not None:
            begin, upto = found
            if take is not None:
                take(min(upto - block.data_ptr(), block.numel()))
            # Before the lock: touching pages blocks no other thread, and pinning them afterwards is
            # short.
            take_pages(begin, upto - begin)
            with self._lock:
                if self._unpinned(begin, upto) != found:  # another thread has pinned some of it
                    continue
                start_s = time.perf_counter()
                self._register(begin, upto - begin)
                taken_s = time.perf_counter() - start_s
                bisect.insort(self._ranges, found)
                # A shorter slice does not show how long a full one takes.
                if upto - begin >= self._slice_bytes:
                    self._slice_bytes = _next_slice(self._slice_bytes, taken_s)
            position = upto
            yield taken_s

    def pause(self, taken_s: float) -> None:
        """Sleep to let threads continue that were blocked for ``taken_s``."""
        time.sleep(min(taken_s, _PAUSE_S_MAX))

    def pieces(self, block: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut bytes ``[begin, end)`` of ``block`` at the boundaries of registrations.

        All of them are pinned. CUDA need not accept a copy that crosses such a boundary.
        """
        address = block.data_ptr()
        with self._lock:
            index = bisect.bisect_right(self._ranges, address + begin, key=_first) - 1
            edges = []
            for _, stop in self._ranges[max(0, index) :]:
                if stop >= address + end:
                    break
                if stop > address + begin:
                    edges.append(stop - address)
        for edge in edges:
            yield begin, edge
            begin = edge
        yield begin, end

    def _next(self, position: int, end: int) -> tuple[int, int] | None:
        """Return the next slice to pin between these addresses; None if all are pinned."""
        with self._lock:
            found = self._unpinned(position, end)
        return None if found is None else (found[0], min(found[1], found[0] + self._slice_bytes))

    def _unpinned(self, position: int, end: int) -> tuple[int, int] | None:
        """Return the first contiguous range between these addresses that is not pinned."""
        index = bisect.bisect_right(self._ranges, position, key=_first)
        if index and self._ranges[index - 1][1] > position:
            position = self._ranges[index - 1][1]
        for begin, stop in self._ranges[index:]:
            if begin > position or position >= end:
                end = min(end, begin)
                break
            position = stop
        return (position, end) if position < end else None

    def release(self) -> None:
        """Unpin everything; no more copies may go there."""
        with self._lock, _cuda.device(self._device):
            while self._ranges:
                _cuda.cudart().cudaHostUnregister(self._ranges.pop()[0])

    def _register(self, address: int, size_bytes: int) -> None:
        cudart = _cuda.cudart()
        with _cuda.device(self._device):
            status = cudart.cudaHostRegister(address, size_bytes, _PORTABLE)
            if int(status) == 0:
                return
            # CUDA keeps the error for this thread, and training's next kernel would raise it.
            with contextlib.suppress(RuntimeError):
                _launch_something()
        limit = limit_of("RLIMIT_MEMLOCK")
        raise UnavailableError(
            f"{size_bytes} bytes of host memory cannot be pinned for the GPU: "
            f"{cudart.cudaGetErrorString(status)} (CUDA error {int(status)}); "
            f"{self.size_bytes} bytes are pinned already, the limit for locked memory is "
            f"{'unlimited' if limit is None else f'{limit} bytes'}",
            hint="a larger limit (ulimit -l, of the container or job too), more free memory, or "
            'method="sync"',
        )


class PinnedAhead:
    """Pinning of memory before it is used, in a thread that does its other work between two slices.

    Args:
        run: runs a function in that thread, after its queued work.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._pinned: PinnedMemory | None = None
        self._in_progress: tuple[int, int] | None = None  # address and size of the largest block
        self._warned = False

    def make_ready(
        self, pinned: PinnedMemory, block: torch.Tensor, take: Take | None = None
    ) -> None:
        """Pin ``block``; log the first failure."""
        region = block.data_ptr(), block.numel()
        with self._lock:
            before = self._in_progress
            self._pinned = pinned
            # The block is part of one that is being pinned already.
            if before is not None and before[0] == region[0] and before[1] >= region[1]:
                return
            self._in_progress = region
        slices = pinned.slices(block, take)

        def pin() -> None:
            taken_s = None
            try:
                taken_s = next(slices, None) if self._pinned is pinned else None
            except (EverstepError, RuntimeError) as error:
                # A copy into that memory raises the error again; other copies do not need it.
                if not self._warned:
                    _log.warning(
                        "memory for copies could not be pinned ahead; training may stall at its "
                        'first use, and parts="auto" chooses fewer parts: %s',
                        error,
                    )
                self._warned = True
            with self._lock:
                goes_on = taken_s is not None and self._pinned is pinned
                if goes_on:  # under the lock, so never after stop(), when the thread may have ended
                    self._run(pin)
                # By identity: another call may have put a region of its own there meanwhile.
                elif self._in_progress is region:
                    self._in_progress = None
            # Outside the lock, which stop() takes in the training thread.
            if goes_on and taken_s is not None:
                pinned.pause(taken_s)

        self._run(pin)

    def stop(self) -> None:
        """Stop pinning after the current slice."""
        with self._lock:
            self._pinned = self._in_progress = None


def _next_slice(size_bytes: int, taken_s: float) -> int:
    """Return the size of the next slice, after one of ``size_bytes`` took ``taken_s``."""
    if taken_s > _SLICE_S:
        return max(mmap.PAGESIZE, _SLICE_BYTES, size_bytes // 2)
    if taken_s < _SLICE_S / 4:
        return max(size_bytes, min(2 * size_bytes, _SLICE_BYTES_MAX))
    return size_bytes


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def _launch_something() -> None:
    """Launch a kernel, after which torch reads and clears CUDA's last error.

    Not a kernel that only fills memory: CUDA may do that without one.
    """
    torch.ones(1, device="cuda").add_(1)
