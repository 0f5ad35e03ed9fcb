"""Copy gradients to a device: one slice is copied while the one before it is used.

There are two slots, each of pinned host memory and of device memory, and a side stream. Three waits
order the work: the host fills a slot after the copy from it has ended; the copy begins after the
updates that read the slot have ended; updates begin after the copy of their slice. In host memory
there is nothing to copy: updates read the filled memory.
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
        there: on the device; the same as ``host`` if that is the CPU.
        sent: event after the copy from ``host`` to ``there``.
        free: event after the updates that read ``there``.
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
        device: device to copy to.
        size_bytes: size of the largest slice.

    Raises:
        torch.OutOfMemoryError: there is no memory for two slices.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self._device = device
        self._slots = [_Slot(device, size_bytes) for _ in range(2)]
        self._side = None
        if device.type == "cuda":
            self._side = _cuda.Stream(device)
            # The allocator may have reused memory that the current stream still reads.
            self._side.wait_stream(_cuda.current_stream(device))
            for slot in self._slots:
                _used_on(slot.there, self._side)

    def send(self, number: int, fill: Callable[[torch.Tensor], int]) -> None:
        """Start the copy of a slice.

        Args:
            number: number of the slice.
            fill: writes the bytes of the slice to a flat ``uint8`` tensor, and returns their
                number.
        """
        slot = self._slots[number % 2]
        if self._side is None:
            fill(slot.host)
            return
        # The host must not overwrite a slot whose copy is still running.
        slot.sent.synchronize()
        size_bytes = fill(slot.host)
        with _cuda.stream(self._side):
            # Nor may the copy overwrite memory that earlier updates still read.
            slot.free.wait(self._side)
            _send(slot.host[:size_bytes], slot.there[:size_bytes])
            slot.sent.record(self._side)

    def receive(self, number: int) -> torch.Tensor:
        """Return the bytes of a slice that was sent, for work given to the current stream from now
        on."""
        slot = self._slots[number % 2]
        if self._side is not None:
            # Updates must not start before the copy of their slice has ended.
            slot.sent.wait(_cuda.current_stream(self._device))
        return slot.there

    def release(self, number: int) -> None:
        """Mark the slice as read, by the work given to the current stream so far."""
        if self._side is not None:
            self._slots[number % 2].free.record(_cuda.current_stream(self._device))


# --- Replaced by tests to emulate a device ----------------------------------------------


def _memory(device: torch.device, size_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.empty(
        size_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda"
    )
    return host, host if device.type == "cpu" else torch.empty_like(host, device=device)


def _send(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy from pinned host memory, in the order of the current stream."""
    target.copy_(source, non_blocking=True)


def _used_on(tensor: torch.Tensor, stream: Any) -> None:
    """Keep the memory from being reused before the stream has finished with it."""
    tensor.record_stream(stream)
