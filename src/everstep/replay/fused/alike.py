"""What goes together in a slice: tensors that all updates of a call treat alike, end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from everstep.compress.quantized import BLOCK_NUMEL
from everstep.replay.forms import Tensors

__all__ = ["Alike", "Kernel", "Slice", "cut_alike", "slice_elements"]

ELEMENTS_MIN = 64 * 1024
ELEMENTS_MAX = 4 * 1024 * 1024
"""Of a slice. In smaller ones, launching shows; in larger ones, gradients take too much memory."""

_CACHE_SHARE = 2  # of the cache one half: what streams through it, too, wants room
_ALIGNED_BYTES = 256

Kernel = Callable[[torch.Tensor, Tensors, Tensors, torch.Tensor], None]
"""Updates a slice in place: parameters; moments, in the order of their names; the gradients of each
update, one as far behind the other in memory; and for each a row of
:func:`~everstep.replay.fused.passes.numbers`, float32. All on the device."""


def slice_elements(device: torch.device, element_bytes: int) -> int:
    """How many elements of a state the cache of a device holds besides what passes through.

    Args:
        element_bytes: of parameter, moments and gradient together.
    """
    if device.type != "cuda":
        return ELEMENTS_MIN
    cache_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    elements = cache_bytes // (_CACHE_SHARE * element_bytes)
    return min(max(elements, ELEMENTS_MIN), ELEMENTS_MAX) // BLOCK_NUMEL * BLOCK_NUMEL


@dataclass(frozen=True, slots=True)
class Alike:
    """Parameters that all updates treat alike.

    Attributes:
        group: number of their parameter group.
        keys: names of the moments that they have and some update needs.
        dtypes: of their gradients in each update; None: they have none in it.
        count: of their steps before; None: there is no ``step``.
        names: of the parameters, in order.
        kernel, rows: stands for torch's functions; None: nothing does. And its numbers.
    """

    group: int
    keys: tuple[str, ...]
    dtypes: tuple[torch.dtype | None, ...]
    count: float | None
    names: list[str] = field(default_factory=list)
    kernel: Kernel | None = None
    rows: torch.Tensor | None = None

    @property
    def present(self) -> list[int]:
        """Updates that have gradients of them."""
        return [number for number, dtype in enumerate(self.dtypes) if dtype is not None]


Piece = tuple[str, slice]


@dataclass(frozen=True, slots=True)
class Slice:
    """Some elements of parameters that are alike, end to end.

    Attributes:
        pieces: parameters, and which of their elements, in memory order.
        numel: of all pieces.
    """

    alike: Alike
    pieces: Sequence[Piece]
    numel: int

    @property
    def size_bytes(self) -> int:
        """Of all gradients."""
        places = self.places()
        return int(places[-1][2].stop)

    def places(self) -> list[tuple[int, torch.dtype, slice]]:
        """Where gradients lie in memory: update, dtype, bytes."""
        found = []
        begin = 0
        for number in self.alike.present:
            dtype = self.alike.dtypes[number]
            assert dtype is not None
            end = begin + self.numel * dtype.itemsize
            found.append((number, dtype, slice(begin, end)))
            begin = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return found


def cut_alike(alike: Alike, numels: Mapping[str, int], elements: int) -> Iterator[Slice]:
    """In slices; parameters are cut at multiples of :data:`BLOCK_NUMEL` only.

    Args:
        numels: elements of each parameter.
        elements: of a slice, at most: a multiple of :data:`BLOCK_NUMEL`.
    """
    pieces: list[Piece] = []
    room = elements
    for name in alike.names:
        begin = 0
        numel = numels[name]
        while True:
            part = numel - begin
            if part > room:
                part = room // BLOCK_NUMEL * BLOCK_NUMEL
            if part or not numel:  # an empty one counts its steps, too
                pieces.append((name, slice(begin, begin + part)))
            begin = begin + part
            room = room - part
            if begin == numel:
                break
            yield Slice(alike, pieces, elements - room)
            pieces = []
            room = elements
    if pieces:
        yield Slice(alike, pieces, elements - room)
