"""Base captures: how a base's bytes get from live tensors into the file's order.

:class:`LiveBody` (``sync``) copies each chunk of the file from the live tensors when it is
asked for: training stands still until the last one is taken, and host memory is a few
chunks. :func:`stage` (``async``) copies everything first, into a block that mirrors the
file, and :class:`StagedBody` hands out slices of it while training goes on (CheckFreq's two
phases, snapshot and persist).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from everstep.capture.lane import Copy, Lane
from everstep.errors import DeadlineError
from everstep.state.layout import Placed

__all__ = ["PIECE_BYTES", "Body", "LiveBody", "Seen", "StagedBody", "overlaps", "pieces", "stage"]

PIECE_BYTES = 256 << 10
"""Bytes that are copied and digested in one go: source and copy together stay in the
second-level cache (measured: 0.15 CPU seconds per GB for both, 0.23 with 1 MiB)."""

_STAGE_BYTES = 16 << 20

Seen = Callable[[memoryview], None]


class Body(Protocol):
    """The data bytes of one shard."""

    def fill(self, begin: int, chunk: torch.Tensor, seen: Seen) -> None:
        """Puts data bytes ``[begin, begin + len(chunk))`` into ``chunk`` (flat ``uint8``), and
        shows them to ``seen`` in order, while they are in the cache."""
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

    def fill(self, begin: int, chunk: torch.Tensor, seen: Seen) -> None:
        target = chunk.numpy()
        for place, start, stop in overlaps(self._placed, self._ends, begin, chunk.numel()):
            source = self._contiguous(place.entry.name)
            part = target[start - begin : stop - begin]
            host = self._lane.host_bytes(source)
            if host is None:
                copy = Copy(source, start - place.begin, chunk[start - begin : stop - begin])
                if not self._lane.submit([copy]).wait(self._timeout_s):
                    raise DeadlineError(f"a copy of {place.entry.name!r} off the device hangs")
                for piece in pieces(part.data):
                    seen(piece)
                continue
            copied, live = part.data, host[start - place.begin : stop - place.begin].data
            for at in range(0, stop - start, PIECE_BYTES):
                piece = copied[at : at + PIECE_BYTES]
                piece[:] = live[at : at + PIECE_BYTES]
                seen(piece)

    def held(self, begin: int, end: int) -> torch.Tensor | None:
        return None

    def _contiguous(self, name: str) -> torch.Tensor:
        """The tensor in row-major order; the last rearranged one is kept for the next chunk."""
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

    def fill(self, begin: int, chunk: torch.Tensor, seen: Seen) -> None:
        chunk.copy_(self._block[begin : begin + chunk.numel()])
        for piece in pieces(chunk.numpy().data):
            seen(piece)

    def held(self, begin: int, end: int) -> torch.Tensor | None:
        return self._block[begin:end]


def stage(body: Body, size_bytes: int, block: torch.Tensor) -> StagedBody:
    """Copies a whole body of ``size_bytes`` into ``block`` (flat ``uint8``, page-aligned)."""
    for begin in range(0, size_bytes, _STAGE_BYTES):
        body.fill(begin, block[begin : min(size_bytes, begin + _STAGE_BYTES)], lambda _: None)
    return StagedBody(block)


def overlaps(
    placed: Sequence[Placed], ends: Sequence[int], begin: int, size: int
) -> Iterator[tuple[Placed, int, int]]:
    """Entries that have bytes in ``[begin, begin + size)``, each with the range of those bytes.

    Args:
        placed: entries that are not empty, in file order; ``ends`` are their ends.
    """
    end = begin + size
    for index in range(bisect.bisect_right(ends, begin), len(placed)):
        place = placed[index]
        if place.begin >= end:
            return
        yield place, max(begin, place.begin), min(end, place.end)


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """``memory`` in pieces of at most :data:`PIECE_BYTES`."""
    for begin in range(0, memory.nbytes, PIECE_BYTES):
        yield memory[begin : begin + PIECE_BYTES]
