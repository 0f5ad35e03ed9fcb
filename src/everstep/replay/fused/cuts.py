"""Where tensors are cut into blocks, and the blocks as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.replay.packed import Gradient, Packed

__all__ = [
    "Block",
    "Scratch",
    "copied",
    "cut",
    "flat",
    "has_gaps",
    "line",
    "memory_order",
]

MAX_TENSORS = 256
"""Small tensors go together until they fill a block, but not more of them than this, or there
is nothing to share out among threads."""


@dataclass(frozen=True, slots=True)
class Block:
    """Part of one large tensor, or several whole small ones, of one parameter group.

    Attributes:
        group: number of the parameter group.
        names: of the parameters.
        elements: half-open range in the memory order of the one large tensor; None: whole.
    """

    group: int
    names: tuple[str, ...]
    elements: slice | None = None

    def of(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
        """What of these tensors lies in it."""
        if self.elements is None:
            return [tensors[name] for name in names]
        return [tensors[name][self.elements] for name in names]

    def of_gradient(self, gradient: Gradient) -> Gradient:
        """What of a gradient lies in it."""
        if self.elements is None:
            return gradient
        if isinstance(gradient, Packed):
            return gradient.part(self.elements)
        return gradient[self.elements]


def cut(
    groups: Sequence[Sequence[str]], tensors: Mapping[str, torch.Tensor], elements: int
) -> Iterator[Block]:
    """Everything in blocks.

    Args:
        groups: names of tensors.
        tensors: by name.
        elements: of a block, at most.
    """
    for number, members in enumerate(groups):
        small: list[str] = []
        filled = 0
        for name in members:
            numel = tensors[name].numel()
            if numel > elements:
                for start in range(0, numel, elements):
                    yield Block(number, (name,), slice(start, min(start + elements, numel)))
                continue
            if small and (filled + numel > elements or len(small) == MAX_TENSORS):
                yield Block(number, tuple(small))
                small = []
                filled = 0
            small.append(name)
            filled += numel
        if small:
            yield Block(number, tuple(small))


class Scratch:
    """Memory for the gradients of one block, where they are compressed, must be converted, or may
    be written to.

    Args:
        elements: of a block.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._lines: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0

    def clear(self) -> None:
        """Forgets the gradients of the last update."""
        self._used = 0

    def gradient(self, logged: Gradient, dtype: torch.dtype, copies: bool) -> torch.Tensor:
        """``logged`` in ``dtype``, dense; another tensor than that if ``copies``."""
        if isinstance(logged, Packed):
            return logged.into(self._room(logged.numel(), dtype))
        if logged.dtype == dtype and not copies:
            return logged
        if not logged.is_contiguous():
            return copied(logged, dtype)
        return self._room(logged.numel(), dtype).view(logged.shape).copy_(logged)

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        line = self._lines.get(dtype)
        if line is None:
            line = self._lines[dtype] = torch.empty(self._elements, dtype=dtype, device="cpu")
        # Fresh memory would be several times slower to write to.
        own = line[self._used : self._used + numel]
        self._used += numel
        return own


def copied(
    tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """A copy that lies as the tensor does. torch's own closes gaps, and kernels that find none
    take another way, by which halves are rounded otherwise."""
    shape = tensor.shape
    strides = tensor.stride()
    for dim, step in enumerate(strides):
        if step == 0:  # expanded: one element in memory
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
    device = tensor.device if device is None else device
    own = torch.empty_strided(tuple(tensor.shape), strides, dtype=dtype, device=device)
    return own.copy_(tensor).expand(shape)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the one with the longest stride to the one with the shortest."""
    dims = range(tensor.dim())
    return tuple(sorted(dims, key=lambda d: (tensor.stride(d), tensor.shape[d] > 1), reverse=True))


def line(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """:func:`flat`, in the memory order of ``like``, a tensor of the same shape."""
    if tensor.is_contiguous() and like.is_contiguous():  # mostly, and ten times quicker
        return tensor.reshape(-1)
    return flat(tensor, memory_order(like))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether the elements lie apart in memory, or several at one place. Fused kernels read and
    write as many as there are from the first one on, whatever is between them."""
    return not tensor.is_contiguous() and flat(tensor, memory_order(tensor)) is None


def flat(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor | None:
    """The elements in the order in which they lie in memory, shape ``[n]``, without a copy.

    Args:
        order: of dimensions, outermost first.

    Returns:
        None if the tensor has gaps or overlaps, or lies in another order.
    """
    turned = tensor.permute(tuple(order))
    return turned.reshape(-1) if turned.is_contiguous() else None
