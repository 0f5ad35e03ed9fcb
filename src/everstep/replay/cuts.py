"""Cut tensors into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from everstep.replay.updates import Gradient, Packed

MAX_TENSORS = 256
"""Small tensors are grouped until they fill a block, but no more than this, or there is nothing to
share among threads."""


@dataclass(frozen=True, slots=True)
class Block:
    """Range of one large tensor, or several complete small ones, of one parameter group.

    Attributes:
        group: number of the parameter group.
        names: names of the parameters.
        elements: half-open range in the memory order of the large tensor; None: complete tensors.
    """

    group: int
    names: tuple[str, ...]
    elements: slice | None = None

    def of(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
        """Return the elements of these tensors that are in the block."""
        if self.elements is None:
            return [tensors[name] for name in names]
        return [tensors[name][self.elements] for name in names]

    def of_gradient(self, gradient: Gradient) -> Gradient:
        """Return the elements of a gradient that are in the block."""
        if self.elements is None:
            return gradient
        if isinstance(gradient, Packed):
            return gradient.part(self.elements)
        return gradient[self.elements]


def cut(
    groups: Sequence[Sequence[str]], tensors: Mapping[str, torch.Tensor], elements: int
) -> Iterator[Block]:
    """Cut all tensors into blocks.

    Args:
        groups: names of tensors.
        tensors: by name.
        elements: largest number of elements of a block.
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
    """Memory for one block: for gradients that are compressed, must be converted, or may be written
    to, and for intermediate results. Reused, since fresh memory is several times slower to write
    to.

    Args:
        elements: number of elements of a block.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._lines: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0
        self._work: dict[torch.dtype, Sequence[torch.Tensor]] = {}

    def work(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return two buffers of one block each for the intermediate results of a program."""
        if dtype not in self._work:
            pair = torch.empty(2, self._elements, dtype=dtype, device="cpu")
            self._work[dtype] = tuple(pair)
        return self._work[dtype]

    def clear(self) -> None:
        """Release the gradients of the last update."""
        self._used = 0

    def gradient(self, logged: Gradient, dtype: torch.dtype, copies: bool) -> torch.Tensor:
        """Return ``logged`` in ``dtype``, dense; a copy if ``copies``."""
        if isinstance(logged, Packed):
            return logged.into(self._buffer(logged.numel(), dtype))
        if logged.dtype == dtype and not copies:
            return logged
        if not logged.is_contiguous():
            return copied(logged, dtype)
        return self._buffer(logged.numel(), dtype).view(logged.shape).copy_(logged)

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        line = self._lines.get(dtype)
        if line is None:
            line = self._lines[dtype] = torch.empty(self._elements, dtype=dtype, device="cpu")
        own = line[self._used : self._used + numel]
        self._used += numel
        return own


def copied(
    tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Copy a tensor with its strides. torch's own copy closes gaps, and kernels that find none take
    another path, which rounds halves differently."""
    shape = tensor.shape
    strides = tensor.stride()
    for dim, step in enumerate(strides):
        if step == 0:  # expanded: one element in memory
            # copy_() refuses a target whose elements share memory; expand() restores the shape.
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
    device = tensor.device if device is None else device
    own = torch.empty_strided(tuple(tensor.shape), strides, dtype=dtype, device=device)
    return own.copy_(tensor).expand(shape)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions from the longest to the shortest stride."""
    dims = range(tensor.dim())
    return tuple(sorted(dims, key=lambda d: (tensor.stride(d), tensor.shape[d] > 1), reverse=True))


def line(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Return :func:`flat` in the memory order of ``like``, a tensor of the same shape."""
    if tensor.is_contiguous() and like.is_contiguous():  # mostly, and ten times quicker
        return tensor.reshape(-1)
    return flat(tensor, memory_order(like))


def has_gaps(tensor: torch.Tensor) -> bool:
    """Return True if elements are not adjacent in memory, or several share one address. Fused
    kernels read and write as many as there are from the first one on, gaps included."""
    return not tensor.is_contiguous() and flat(tensor, memory_order(tensor)) is None


def flat(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor | None:
    """Return the elements in their memory order, shape ``[n]``, without a copy.

    Args:
        tensor: tensor to flatten.
        order: dimensions, outermost first.

    Returns:
        None if the tensor has gaps or overlaps, or another memory order.
    """
    turned = tensor.permute(tuple(order))
    return turned.reshape(-1) if turned.is_contiguous() else None
