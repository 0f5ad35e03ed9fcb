"""Host memory that a device copies into by itself: pinned, range by range.

A copy into memory that is not pinned holds up whoever asks for it. All of an arena would be
too much to pin, since pinned pages are taken and stay taken: only what captures use is, the
first time they use it, and it stays so until the arena is no longer copied into.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import torch

from everstep.errors import UnavailableError

__all__ = ["PinnedMemory"]

_cuda: Any = torch.cuda  # what it calls has no annotations

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one alone
_SLICE_BYTES = 256 << 20  # at a time: another thread may want to pin something, too


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

    @property
    def size_bytes(self) -> int:
        """Bytes that are pinned."""
        return sum(end - begin for begin, end in self._ranges)

    def holds(self, block: torch.Tensor) -> bool:
        """Whether ``block`` is a part of this arena."""
        return block.untyped_storage().data_ptr() == self._memory.data_ptr()

    def pin(self, block: torch.Tensor) -> None:
        """Pins what of ``block`` is not pinned yet, whole pages.

        Raises:
            UnavailableError: the system refuses, with the number of bytes and the limit.
        """
        page = mmap.PAGESIZE
        position = block.data_ptr() // page * page
        end = -(-(block.data_ptr() + block.numel()) // page) * page
        while position < end:
            with self._lock:
                index = bisect.bisect_right(self._ranges, position, key=_first)
                if index and self._ranges[index - 1][1] > position:  # pinned already
                    position = self._ranges[index - 1][1]
                    continue
                upto = min(end, position + _SLICE_BYTES)
                if index < len(self._ranges):
                    upto = min(upto, self._ranges[index][0])
                self._register(position, upto - position)
                self._ranges.insert(index, (position, upto))
                position = upto

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
