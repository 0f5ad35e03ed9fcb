"""Lanes: ordered copies from a device into host memory.

A lane is one queue: copies start in the order of their submission. A device with a copy
engine has a lane of its own (a side stream); tensors in host memory are copied by the
calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from everstep.state.entries import byte_view

__all__ = ["Copy", "HostLane", "Lane", "Ticket"]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies bytes ``[begin, begin + len(target))`` of ``source``'s row-major bytes.

    Attributes:
        source: contiguous tensor on the lane's device.
        target: flat ``uint8`` tensor in host memory.
    """

    source: torch.Tensor
    begin: int
    target: torch.Tensor


class Ticket(Protocol):
    """Tells when a batch of copies is complete."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool:
        """Waits until the copies are complete; False if they are not after ``timeout_s``."""
        ...


class Lane(Protocol):
    """One queue of copies off one device."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Queues ``copies``. Sources may not change until the ticket is done (I1)."""
        ...

    def host_bytes(self, source: torch.Tensor) -> npt.NDArray[np.uint8] | None:
        """The bytes of a contiguous tensor that lies in host memory already: whoever copies
        them may do so himself, piece by piece. None for a tensor on a device."""
        ...

    def close(self) -> None: ...


class _Done:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True


class HostLane:
    """Copies at once, in the calling thread: for host memory, and for devices without a lane
    of their own, whose copies to the host block."""

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        for copy in copies:
            size = copy.target.numel()
            copy.target.copy_(byte_view(copy.source)[copy.begin : copy.begin + size])
        return _Done()

    def host_bytes(self, source: torch.Tensor) -> npt.NDArray[np.uint8] | None:
        return byte_view(source).numpy() if source.device.type == "cpu" else None

    def close(self) -> None:
        pass
