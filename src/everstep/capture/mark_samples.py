"""Samples of every tensor that an optimizer replays: written to each step mark, compared in replay.

Replay has no record of writes that bypassed the optimizers, and version counters do not count all
of them (``.data``, NumPy, captured graphs). So each mark of the log contains some elements as
training had them, and replay compares them with its own results (I8, I9).

The choice of elements depends only on shape and step: eight along a tensor's longest dimension, in
another row or column in each of eight steps; small tensors are sampled completely. Indices are
logical, so the memory layout does not matter. Tensors on devices are left out: replay is not exact
there, and reading them would delay training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everstep.errors import FormatError
from everstep.seams.memory import Gather, memory_at
from everstep.state.layout.entries import SPOT
from everstep.state.survey import same_objects
from everstep.state.values.tensors import INTEGERS

PHASES = 8
"""Number of steps after which the same elements are sampled again."""

_EACH = 8  # elements of a large tensor
_WHOLE = 16  # elements up to which a tensor is small
_WHICH = "which"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Index = tuple[int | slice | None, ...]


class MarkSampler:
    """Sampler of the elements that belong to a step.

    Args:
        tensors: tensors by entry name; those on a device, or without elements, are left out.

    Attributes:
        names: names of the sampled tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._kept: list[torch.Tensor] = []  # references, while their memory is read
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
        """True if all tensors are still at their addresses; a storage may have been resized."""
        return [tensor.data_ptr() for tensor in self._kept] == self._addresses

    def take(self, step: int) -> dict[str, npt.NDArray[Any]]:
        """Return the current elements as integers, by name of their dtype."""
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
        """Return the name of a tensor whose elements differ from those that :meth:`take` gave at a
        step.

        None if there is none. All NaNs count as equal.

        Raises:
            FormatError: ``values`` are of other tensors.
        """
        now = self.take(step)
        if now.keys() != values.keys():
            raise FormatError("the samples have other dtypes than the tensors of the state")
        for dtype, mine in now.items():
            theirs = values[dtype]
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise FormatError(f"the samples are of other {dtype} tensors than the state has")
            differs = mine != theirs
            if not differs.any():
                continue
            # Replay may give a NaN another payload.
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
    """Return the indices of a tensor's samples; each selects one dimension of elements."""
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
    """Return a bit for each tensor of the state, set if it is sampled, for the marks.

    Args:
        entries: names of all tensors of the state, sorted.
    """
    return torch.from_numpy(np.packbits([name in spots.names for name in entries]))


def mark_entries(spots: MarkSampler, which: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """Return the samples for a mark, by entry name.

    Args:
        which: result of :func:`sampled_bits`.
    """
    found = {SPOT + dtype: torch.from_numpy(values) for dtype, values in spots.take(step).items()}
    return {SPOT + _WHICH: which, **found}


class MarkComparison:
    """Comparison of states with the samples in the marks of their steps."""

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
        """Return the name of an entry whose elements differ from those in the mark of ``step``.

        None if there is none, or the mark has no samples.

        Args:
            logged: all entries of the mark under :data:`~everstep.state.layout.entries.SPOT`.
            tensors: all tensors of the state, by entry name.
            names: sorted names of all entries when the mark was made, if they may differ now (a
                provider may show a tensor only while it runs); empty for those of ``tensors``.

        Raises:
            FormatError: the mark is of another state.
        """
        values = {name.removeprefix(SPOT): tensor.numpy() for name, tensor in logged.items()}
        which = values.pop(_WHICH, None)
        if which is None:
            return None
        entries = names or sorted(tensors)
        if which.dtype != np.uint8 or which.size != (len(entries) + 7) // 8:
            raise FormatError("the samples are of a state with other tensors")
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
    # The address is 0 where FSDP has resized the storage to nothing. Conjugated and negated tensors
    # have other bytes than values.
    plain = tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.numel() > 0 and tensor.data_ptr() != 0


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory of a tensor as integers.

    Not by ``Tensor.numpy()``, see :func:`~everstep.state.values.tensors.host_bytes`.
    """
    if tensor.element_size() not in INTEGERS:
        tensor = torch.view_as_real(tensor)
    whole = tensor.view(INTEGERS[tensor.element_size()])
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
