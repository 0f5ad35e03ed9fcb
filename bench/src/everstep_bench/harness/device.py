"""Measurements on a CUDA device: waits for copies, and the bandwidth of its link."""

from __future__ import annotations

from typing import Any

import torch

_cuda: Any = torch.cuda  # its constructors have no annotations

_LINK_BYTES = 1 << 30


class DeviceClock:
    """Time on the device's current stream between pairs of moments: whatever was enqueued in
    between, waiting for other streams above all."""

    def __init__(self) -> None:
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """The first moment of a pair."""
        self._begun = _now()

    def end(self) -> None:
        """The second."""
        if self._begun is not None:
            self._pairs.append((self._begun, _now()))
            self._begun = None

    def taken_s(self) -> float:
        """Seconds between the pairs since this was last asked; the device has come so far."""
        pairs = self._pairs
        self._pairs = []
        taken_ms: float = sum(begun.elapsed_time(ended) for begun, ended in pairs)
        return taken_ms / 1e3


class PinnedLink:
    """A plain copy from the device into pinned memory: as fast as its link is."""

    def __init__(self) -> None:
        self._source = torch.ones(_LINK_BYTES, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.bytes_per_s()  # warm

    def bytes_per_s(self) -> float:
        """Of one copy, while nothing else is going on."""
        torch.cuda.synchronize()
        begun = _now()
        self._target.copy_(self._source, non_blocking=True)
        ended = _now()
        ended.synchronize()
        taken_ms: float = begun.elapsed_time(ended)
        return 1e3 * _LINK_BYTES / taken_ms


def _now() -> Any:
    """An event of the current stream, which says when."""
    event = _cuda.Event(enable_timing=True)
    event.record()
    return event
