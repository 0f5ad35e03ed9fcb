"""A few elements of every tensor that an optimizer replays: in each step mark, and in replay.

Replay knows nothing of what was written past the optimizers, and version counters do not move for
all of it (``.data``, NumPy, captured graphs). So each mark of the log holds some elements as
training had them, and whoever replays the step compares them with what replay gives (I8, I9).

Which elements depends on nothing but shape and step: eight along a tensor's longest dimension, in
another row or column in each of eight steps; small tensors whole. Indices are logical, so that it
does not matter how a tensor lies in memory, here or there. Tensors on devices are left out: replay
is not exact there, and reading them would hold training up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everstep.errors import FormatError
from everstep.seams.gather import Gather
from everstep.seams.memory import memory_at
from everstep.state.layout.names import SPOT
from everstep.state.survey.survey import same_objects

__all__ = [
    "PHASES",
    "MarkComparison",
    "MarkSampler",
    "mark_entries",
    "sample_indices",
    "sampled_bits",
]

PHASES = 8
"""So many steps until the same elements are looked at again."""

_EACH = 8  # elements of a large tensor
_WHOLE = 16  # elements up to which a tensor is small
_WHICH = "which"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Index = tuple[int | slice | None, ...]


class MarkSampler:
    """Reads the same elements of tensors as everybody else does at that step.

    Args:
        tensors: by entry name; those that lie on a device, or have no elements, are left out.

    Attributes:
        names: of the tensors that are looked at, in order.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._kept: list[torch.Tensor] = []  # as long as their memory is looked at
        self._arrays: dict[str, list[npt.NDArray[Any]]] = {}
        self._named: dict[str, list[str]] = {}
        self._phases: dict[int, dict[str, Gather]] = {}
        for name in sorted(tensors):
            tensor = tensors[name]
            if not _is_looked_at(tensor):
                continue
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._kept.append(tensor)
            self._arrays.setdefault(dtype, []).append(_array(tensor))
            self._named.setdefault(dtype, []).append(name)
        self._addresses = [tensor.data_ptr() for tensor in self._kept]
        self.names = frozenset(name for names in self._named.values() for name in names)

    @property
    def intact(self) -> bool:
        """Whether all tensors lie where they did; a storage may have been resized."""
        return [tensor.data_ptr() for tensor in self._kept] == self._addresses

    def take(self, step: int) -> dict[str, npt.NDArray[Any]]:
        """The elements as they are now, as integers, by the name of their dtype."""
        phase = step % PHASES
        parts = self._phases.get(phase)
        if parts is None:
            parts = self._phases[phase] = {
                dtype: Gather(
                    [
                        array[index]
                        for array in arrays
                        for index in sample_indices(array.shape, phase)
                    ]
                )
                for dtype, arrays in self._arrays.items()
            }
        return {dtype: gather.take() for dtype, gather in parts.items()}

    def other(self, step: int, values: Mapping[str, npt.NDArray[Any]]) -> str | None:
        """The name of a tensor that has other elements now than :meth:`take` gave at that step;
        None if all have the same. One NaN is as good as another.

        Raises:
            FormatError: ``values`` are of other tensors.
        """
        now = self.take(step)
        if now.keys() != values.keys():
            raise FormatError("samples of tensors of other dtypes than the state has")
        for dtype, mine in now.items():
            theirs = values[dtype]
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise FormatError(f"samples of other {dtype} tensors than the state has")
            differs = mine != theirs
            if not differs.any():
                continue
            differs &= ~(_are_nan(mine, dtype) & _are_nan(theirs, dtype))
            if differs.any():
                return self._entry_at(dtype, step, int(np.flatnonzero(differs)[0]))
        return None

    def _entry_at(self, dtype: str, step: int, position: int) -> str:
        for name, array in zip(self._named[dtype], self._arrays[dtype], strict=True):
            position -= sum(array[index].size for index in sample_indices(array.shape, step))
            if position < 0:
                return name
        raise AssertionError("unreachable")


def sample_indices(shape: Sequence[int], step: int) -> list[Index]:
    """Where a tensor with elements is looked at: each index gives one dimension of elements."""
    count = int(np.prod(shape, dtype=np.int64))
    if not shape:
        return [(None,)]
    if count <= _WHOLE:
        return [(*index, slice(None)) for index in product(*map(range, shape[:-1]))]
    phase = step % PHASES
    longest = max(range(len(shape)), key=lambda d: shape[d])
    stride = max(1, shape[longest] // _EACH)
    begin = phase * stride // PHASES
    end = begin + min(_EACH, shape[longest]) * stride
    return [
        tuple(
            slice(begin, end, stride) if d == longest else phase * n // PHASES
            for d, n in enumerate(shape)
        )
    ]


def sampled_bits(spots: MarkSampler, entries: Sequence[str]) -> torch.Tensor:
    """Which tensors are looked at, for the marks: a bit for each.

    Args:
        entries: names of all tensors of the state, sorted.
    """
    return torch.from_numpy(np.packbits([name in spots.names for name in entries]))


def mark_entries(spots: MarkSampler, which: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """What a mark holds, by the names of its entries.

    Args:
        which: of :func:`sampled_bits`.
    """
    found = {SPOT + dtype: torch.from_numpy(values) for dtype, values in spots.take(step).items()}
    return {SPOT + _WHICH: which, **found}


class MarkComparison:
    """Compares states of some tensors with the marks of their steps."""

    def __init__(self) -> None:
        self._bits = b""
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._spots = MarkSampler({})

    def other(
        self,
        logged: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        step: int,
        names: Sequence[str] = (),
    ) -> str | None:
        """The name of an entry of which the state has other elements than the mark of ``step``;
        None: there is none, or the mark holds no elements.

        Args:
            logged: all that the mark holds under :data:`~everstep.state.layout.names.SPOT`.
            tensors: all of the state, by entry name.
            names: of all entries of the state when the mark was made, sorted, where it may have
                others now (a part may show a tensor only while it runs); none: those of
                ``tensors``.

        Raises:
            FormatError: it is the mark of another state.
        """
        values = {name.removeprefix(SPOT): tensor.numpy() for name, tensor in logged.items()}
        which = values.pop(_WHICH, None)
        if which is None:
            return None
        entries = names or sorted(tensors)
        if which.dtype != np.uint8 or which.size != (len(entries) + 7) // 8:
            raise FormatError("samples of a state that consists of other tensors")
        all_of_them = tuple(tensors.values())
        if which.tobytes() != self._bits or not same_objects(all_of_them, self._tensors):
            bits = np.unpackbits(which)[: len(entries)]
            checked_path = [name for name, bit in zip(entries, bits, strict=True) if bit]
            if missing := [name for name in checked_path if name not in tensors]:
                raise FormatError(f"samples of {missing[0]!r}, which the state does not have")
            chosen = {name: tensors[name] for name in checked_path}
            self._spots = MarkSampler(chosen)
            if self._spots.names != chosen.keys():
                raise FormatError("samples of tensors in host memory, which these are not")
            self._bits = which.tobytes()
            self._tensors = all_of_them
        return self._spots.other(step, values)


def _is_looked_at(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.numel() > 0 and tensor.data_ptr() != 0


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The memory of a tensor as integers: not by ``Tensor.numpy()``, see
    :func:`~everstep.state.values.tensors.host_bytes`."""
    if tensor.element_size() not in _INTEGERS:
        tensor = torch.view_as_real(tensor)
    whole = tensor.view(_INTEGERS[tensor.element_size()])
    if whole.is_contiguous() and whole.numel() <= _WHOLE:
        whole = whole.view(-1)  # in one piece
    width = whole.element_size()
    strides = whole.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(whole.shape, strides, strict=True))
    memory = memory_at(whole.data_ptr(), span * width)
    kind = np.dtype(f"i{width}")
    return np.ndarray(whole.shape, kind, memory, strides=[step * width for step in strides])


def _are_nan(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.bool_]:
    kind = getattr(torch, dtype)
    if kind not in _FLOATS:
        return np.zeros(values.shape, np.bool_)
    found: npt.NDArray[np.bool_] = torch.from_numpy(values).view(kind).isnan().numpy()
    return found
