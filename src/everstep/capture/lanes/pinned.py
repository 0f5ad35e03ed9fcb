"""Host memory that a device copies into by itself: pinned, range by range.

A copy into memory that is not pinned holds up whoever asks for it. All of an arena would be
too much to pin, since pinned pages are taken and stay taken: only what captures use is, at the
latest the first time they use it, and it stays so until the arena is no longer copied into.

While memory is being pinned CUDA lets no other thread launch a kernel, and most of that time goes
into fresh pages (of 460 ms for a GiB on an H200 all but 40). So pages are taken first, and memory
is pinned in slices of a few milliseconds, between which others come (docs/design/capture.md).
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

from everstep.capture.lanes.lane import Take
from everstep.errors import EverstepError, UnavailableError
from everstep.seams.memory import take_pages

__all__ = ["PinnedAhead", "PinnedMemory"]

_log = logging.getLogger("everstep")
_cuda: Any = torch.cuda  # what it calls has no annotations

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one alone
_SLICE_BYTES = 32 << 20  # at a time, at least; copies are cut where one ends
_SLICE_BYTES_MAX = 256 << 20
_SLICE_S = 4e-3  # that others may have to wait for one
_PAUSE_S_MAX = 0.05


class PinnedMemory:
    """The pinned ranges of one arena. Any thread may call.

    It keeps the arena mapped, since pages stay pinned when they are unmapped: if another
    arena came to lie at their addresses, copies would go on into pages that nobody sees.

    Args:
        block: flat ``uint8``, any part of the arena.
        device: in whose context it is done. Pinned memory is so for all of them, but a thread
            that names none would make a context on the first, which may be another job's.
    """

    def __init__(self, block: torch.Tensor, device: torch.device) -> None:
        self._memory = block.untyped_storage()
        self._device = device
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []  # addresses, in order; each one registration
        self._slice_bytes = _SLICE_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes that are pinned."""
        return sum(end - begin for begin, end in self._ranges)

    def holds(self, block: torch.Tensor) -> bool:
        """Whether ``block`` is a part of this arena."""
        return block.untyped_storage().data_ptr() == self._memory.data_ptr()

    def ready_bytes(self, block: torch.Tensor) -> int:
        """So many bytes of ``block``, from its beginning, are pinned."""
        begin = position = block.data_ptr()
        ranges = self._ranges.copy()  # who holds the lock may be in the middle of pinning
        index = bisect.bisect_right(ranges, position, key=_first) - 1
        for first, end in ranges[max(0, index) :]:
            if first > position:
                break
            position = max(position, end)
        return min(position - begin, block.numel())

    def pin(self, block: torch.Tensor, *, at_once: bool = False) -> None:
        """Pins what of ``block`` is not pinned yet, whole pages.

        Args:
            at_once: the caller is who others would be let in for.

        Raises:
            UnavailableError: the system refuses, with the number of bytes and the limit.
        """
        for taken_s in self.slices(block):
            if not at_once:
                self.pause(taken_s)

    def slices(self, block: torch.Tensor, take: Take | None = None) -> Iterator[float]:
        """As :meth:`pin`, slice by slice: the seconds that each has kept others waiting.

        Args:
            take: takes pages, if somebody counts them.
        """
        page = mmap.PAGESIZE
        position = block.data_ptr() // page * page
        end = -(-(block.data_ptr() + block.numel()) // page) * page
        while (found := self._next(position, end)) is not None:
            begin, upto = found
            if take is not None:
                take(min(upto - block.data_ptr(), block.numel()))
            take_pages(begin, upto - begin)
            with self._lock:
                if self._unpinned(begin, upto) != found:  # another thread was faster
                    continue
                start_s = time.perf_counter()
                self._register(begin, upto - begin)
                taken_s = time.perf_counter() - start_s
                bisect.insort(self._ranges, found)
                if upto - begin >= self._slice_bytes:
                    self._slice_bytes = _next_slice(self._slice_bytes, taken_s)
            position = upto
            yield taken_s

    def pause(self, taken_s: float) -> None:
        """Lets others in, who have waited for so long."""
        time.sleep(min(taken_s, _PAUSE_S_MAX))

    def pieces(self, block: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Cuts bytes ``[begin, end)`` of ``block``, which are pinned, where one registration
        ends and the next begins: CUDA need not accept a copy that goes over such an edge."""
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
        """The next slice of these addresses to be pinned; None: all of them are."""
        with self._lock:
            found = self._unpinned(position, end)
        return None if found is None else (found[0], min(found[1], found[0] + self._slice_bytes))

    def _unpinned(self, position: int, end: int) -> tuple[int, int] | None:
        """The first of these addresses that are not pinned, as far as that goes."""
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
        """Unpins everything. Nothing may be copied there any more."""
        with self._lock, _cuda.device(self._device):
            while self._ranges:
                _cuda.cudart().cudaHostUnregister(self._ranges.pop()[0])

    def _register(self, address: int, size_bytes: int) -> None:
        cudart = _cuda.cudart()
        with _cuda.device(self._device):
            status = cudart.cudaHostRegister(address, size_bytes, _PORTABLE)
            if int(status) == 0:
                return
            # CUDA remembers it for this thread, and training's next kernel would be told of it.
            with contextlib.suppress(RuntimeError):
                _launch_something()
        raise UnavailableError(
            f"{size_bytes} bytes of host memory cannot be pinned for the GPU: "
            f"{cudart.cudaGetErrorString(status)} (CUDA error {int(status)}); "
            f"{self.size_bytes} bytes are pinned already, the limit for locked memory is "
            f"{_limit()}",
            hint="a larger limit (ulimit -l, of the container or job too), more free memory, or "
            'method="sync"',
        )


class PinnedAhead:
    """Pins memory before it is used, in a thread that has other things to do: between two slices
    it does them.

    Args:
        run: in that thread, behind what it has to do.
    """

    def __init__(self, run: Callable[[Callable[[], None]], object]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._pinned: PinnedMemory | None = None
        self._under_way: tuple[int, int] | None = None  # where, and how much; the largest
        self._told = False  # that it fails

    def make_ready(
        self, pinned: PinnedMemory, block: torch.Tensor, take: Take | None = None
    ) -> None:
        """Pins ``block``. What it fails with is logged, once."""
        about = block.data_ptr(), block.numel()
        with self._lock:
            before = self._under_way
            self._pinned = pinned
            if before is not None and before[0] == about[0] and before[1] >= about[1]:
                return
            self._under_way = about
        slices = pinned.slices(block, take)

        def pin() -> None:
            taken_s = None
            try:
                taken_s = next(slices, None) if self._pinned is pinned else None
            except (EverstepError, RuntimeError) as error:
                # Who uses that memory all the same is told again; others do without it.
                if not self._told:
                    _log.warning(
                        "memory for copies is not made ready ahead; training may be held up where "
                        'it is used first, and parts="auto" takes fewer parts: %s',
                        error,
                    )
                self._told = True
            with self._lock:
                goes_on = taken_s is not None and self._pinned is pinned
                if goes_on:  # not behind stop(): the thread may end behind that, too
                    self._run(pin)
                elif self._under_way is about:
                    self._under_way = None
            if goes_on and taken_s is not None:
                pinned.pause(taken_s)

        self._run(pin)

    def stop(self) -> None:
        """Nothing more is pinned, but for the slice that is under way."""
        with self._lock:
            self._pinned = self._under_way = None


def _next_slice(size_bytes: int, taken_s: float) -> int:
    """What the next slice should have, after one of ``size_bytes`` has taken so long."""
    if taken_s > _SLICE_S:
        return max(mmap.PAGESIZE, _SLICE_BYTES, size_bytes // 2)
    if taken_s < _SLICE_S / 4:
        return max(size_bytes, min(2 * size_bytes, _SLICE_BYTES_MAX))
    return size_bytes


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def _launch_something() -> None:
    """A kernel, after whose start torch asks CUDA for the last error and so clears it. Not one that
    only fills memory: CUDA can do that without a kernel."""
    torch.ones(1, device="cuda").add_(1)


def _limit() -> str:
    import resource  # not on Windows, where everstep refuses to run, but can be imported

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
