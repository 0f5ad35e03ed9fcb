"""Gradients on their way to a device: one slice is copied while the one before it is used.

Two slots, each of pinned host memory and of device memory, and a side stream. Three waits hold it
together: the host fills a slot when the copy from it has ended, the copy begins when the updates
that read the slot have ended, and updates begin behind the copy of their slice. In host memory,
where there is nothing to copy, updates read what was filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Uploads"]

_cuda: Any = torch.cuda  # its constructors have no annotations


class _Slot:
    """Memory of one slice.

    Attributes:
        host: flat ``uint8``, pinned.
        there: on the device; the same as ``host`` where that is the CPU.
        sent: behind the copy from ``host`` to ``there``.
        free: behind the updates that have read ``there``.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.host, self.there = _memory(device, size_bytes)
        if device.type == "cuda":
            self.sent = _cuda.Event(blocking=True)
            self.free = _cuda.Event(blocking=True)


class Uploads:
    """Slices are sent and received in the order of their numbers, 0, 1, 2, ..., by one thread;
    number ``n`` is released before ``n + 2`` is sent.

    Args:
        device: where they are wanted.
        size_bytes: of one slice, at most.

    Raises:
        torch.OutOfMemoryError: twice that are not there.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device
        self._slots = [_Slot(device, size_bytes) for _ in range(2)]
        self._side = None
        if device.type == "cuda":
            self._side = _cuda.Stream(device)
            # Their memory may have been another tensor's, which the current stream still reads.
            self._side.wait_stream(_cuda.current_stream(device))
            for slot in self._slots:
                _used_on(slot.there, self._side)

    def send(self, number: int, fill: Callable[[torch.Tensor], int]) -> None:
        """Starts a slice on its way.

        Args:
            fill: writes the bytes of the slice to a flat ``uint8`` tensor, and returns how many.
        """
        slot = self._slots[number % 2]
        if self._side is None:
            fill(slot.host)
            return
        slot.sent.synchronize()
        size_bytes = fill(slot.host)
        with _cuda.stream(self._side):
            slot.free.wait(self._side)
            _send(slot.host[:size_bytes], slot.there[:size_bytes])
            slot.sent.record(self._side)

    def receive(self, number: int) -> torch.Tensor:
        """The bytes of a slice that was sent, for what the current stream is given from now on."""
        slot = self._slots[number % 2]
        if self._side is not None:
            slot.sent.wait(_cuda.current_stream(self._device))
        return slot.there

    def release(self, number: int) -> None:
        """Nothing reads the slice but what the current stream has been given up to now."""
        if self._side is not None:
            self._slots[number % 2].free.record(_cuda.current_stream(self._device))


# --- What a test replaces to play a device ----------------------------------------------


def _memory(device: torch.device, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.empty(
        size_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
    )
    return host, host if device.type == "cpu" else torch.empty_like(host, device=device)


def _send(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies from pinned host memory, in the order of the current stream."""
    target.copy_(source, non_blocking=True)


def _used_on(tensor: torch.Tensor, stream: Any) -> None:
    """Its memory is not to be given to others before the stream is done with it."""
    tensor.record_stream(stream)
