"""Base captures: how a base's bytes get from live tensors into the file's order.

Both hand out the body of a shard in pieces, in file order. :class:`LiveBody` (``sync``)
copies each piece from the live tensors when it is asked for: training stands still until
the last piece is taken, and host memory is a few chunks. :func:`stage` (``async``) copies
everything first, into a block that mirrors the file, and :class:`StagedBody` hands out
slices of it while training goes on (CheckFreq's two phases, snapshot and persist).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from everstep.capture.lane import Copy, Lane
from everstep.errors import DeadlineError
from everstep.state.layout import Placed

__all__ = ["Body", "LiveBody", "StagedBody", "stage"]

_PIECE_BYTES = 16 << 20  # staged in pieces, so that a hung copy is noticed by its deadline


class Body(Protocol):
    """The data bytes of one shard."""

    def read(self, begin: int, into: torch.Tensor) -> None:
        """Puts data bytes ``[begin, begin + len(into))`` into a flat ``uint8`` tensor."""
        ...

    def held(self, begin: int, end: int) -> torch.Tensor | None:
        """Data bytes ``[begin, end)`` where they already lie, if they do; begins at a page if
        ``begin`` is a multiple of one, and the rest of the last page may be written to."""
        ...


class LiveBody:
    """The body read from live tensors, which may not change meanwhile.

    Args:
        placed: entries in file order.
        tensors: live tensors (objects as ``uint8``) by entry name.
        lane: carries the bytes.
        timeout_s: after so long without completion a copy counts as hung.
    """

    def __init__(
        self,
        placed: Sequence[Placed],
        tensors: Mapping[str, torch.Tensor],
        lane: Lane,
        *,
        timeout_s: float,
    ) -> None:
        self._placed = [place for place in placed if place.end > place.begin]
        self._ends = [place.end for place in self._placed]
        self._tensors = tensors
        self._lane = lane
        self._timeout_s = timeout_s
        self._flat: tuple[str, torch.Tensor] | None = None

    def read(self, begin: int, into: torch.Tensor) -> None:
        end = begin + into.numel()
        copies = []
        index = bisect.bisect_right(self._ends, begin)
        while index < len(self._placed) and self._placed[index].begin < end:
            place = self._placed[index]
            start, stop = max(begin, place.begin), min(end, place.end)
            source = self._contiguous(place.entry.name)
            copies.append(Copy(source, start - place.begin, into[start - begin : stop - begin]))
            index += 1
        if not self._lane.submit(copies).wait(self._timeout_s):
            raise DeadlineError(f"a copy off the device took longer than {self._timeout_s} s")

    def held(self, begin: int, end: int) -> torch.Tensor | None:
        return None

    def _contiguous(self, name: str) -> torch.Tensor:
        """The tensor in row-major order; the last rearranged one is kept for the next piece."""
        tensor = self._tensors[name]
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        if self._flat is None or self._flat[0] != name:
            self._flat = (name, tensor.resolve_conj().resolve_neg().contiguous())
        return self._flat[1]


class StagedBody:
    """The body in a page-aligned block that mirrors it, byte for byte."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block

    def read(self, begin: int, into: torch.Tensor) -> None:
        into.copy_(self._block[begin : begin + into.numel()])

    def held(self, begin: int, end: int) -> torch.Tensor | None:
        return self._block[begin:end]


def stage(body: Body, size_bytes: int, block: torch.Tensor) -> StagedBody:
    """Copies a whole body of ``size_bytes`` into ``block`` (flat ``uint8``, page-aligned)."""
    for begin in range(0, size_bytes, _PIECE_BYTES):
        body.read(begin, block[begin : min(size_bytes, begin + _PIECE_BYTES)])
    return StagedBody(block)
