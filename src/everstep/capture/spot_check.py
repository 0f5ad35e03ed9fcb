"""Spot checks: compare a few elements of a capture with the live state at the step mark.

A lazy copy is right only if its source does not change before the gate. Hooks hold optimizers back;
but a swap of averaged weights for an evaluation, a captured CUDA graph or a write through NumPy has
no hook and does not move version counters. So a few elements of every tensor are read at the step
mark, in one packed copy, and compared with the captured bytes. A change of entire tensors is found
at once; a change of a few elements may fall between the samples. Comparing digests between bases
finds those only if no update comes in between, and version counters only if they were written by
torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everstep.seams.memory import Gather
from everstep.state.layout import SAMPLE, ShardLayout
from everstep.state.layout.shards import plan_shards
from everstep.state.survey import Survey, same_objects
from everstep.state.values.tensors import INTEGERS, byte_view, host_bytes, tensor_entry

_SAMPLES = 4  # of each tensor
_SAMPLES_OF_SMALL = 8
_SMALL_BYTES = 4096  # in one or two pages; each further page costs a cache and TLB miss

# As integers: as floats a NaN differs from itself, and -0.0 equals 0.0.
_Kind = tuple[int, torch.device]  # width in bytes; elements of one packed copy


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled elements, by width and device."""

    values: Mapping[_Kind, torch.Tensor]


class _SampledLine(NamedTuple):
    """A tensor sampled along a line: all of its elements, or those in one dimension.

    Attributes:
        line: one-dimensional view of the tensor, as integers.
        begin: position of the first element in the block, in elements.
        step: distance between elements there, in elements.
    """

    name: str
    line: torch.Tensor
    begin: int
    step: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, width: int, begin: int) -> _SampledLine:
        """Return the line of a tensor (not conjugated or negated) whose rows begin at ``begin``."""
        if tensor.is_contiguous():
            return cls(name, byte_view(tensor).view(INTEGERS[width]), begin, 1)
        # In any other memory layout: along its longest dimension, from the first element.
        longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        line = tensor.detach()
        apart = math.prod(tensor.shape[longest + 1 :])
        for dim in reversed(range(tensor.dim())):
            line = line if dim == longest else line.select(dim, 0)
        if tensor.element_size() > width:  # complex128: the real parts
            line = torch.view_as_real(line).select(-1, 0)
            apart = 2 * apart
        return cls(name, line.view(INTEGERS[width]), begin, apart)


@dataclass(frozen=True, slots=True, eq=False)
class _Elements:
    """Sampled elements of one width and device.

    Attributes:
        names: names of the tensors.
        counts: number of sampled elements of each.
        where: positions of the elements in the block, in elements, as int64.
        tensors: tensors kept alive while their memory is read; on a device, views of the elements.
        gather: reads elements in host memory; None: they are on a device.
    """

    kind: _Kind
    names: Sequence[str]
    counts: npt.NDArray[np.int64]
    where: torch.Tensor
    tensors: Sequence[torch.Tensor]
    gather: Gather | None = None

    @classmethod
    def of(cls, kind: _Kind, looked: Sequence[_SampledLine]) -> _Elements:
        names, lines, begins, apart = zip(*looked, strict=True)
        width, device = kind
        strides, counts = _places(_each(line.numel() for line in lines), width)
        steps = _within(counts) * strides.repeat(counts)
        where = torch.from_numpy(_each(begins).repeat(counts) + _each(apart).repeat(counts) * steps)
        if device.type == "cpu":
            first = _each(line.data_ptr() for line in lines).repeat(counts)
            between = _each(width * line.stride(0) for line in lines).repeat(counts)
            gather = Gather.at(first + between * steps, np.dtype(f"i{width}"))
            return cls(kind, names, counts, where, lines, gather)
        few = [line[::stride] for line, stride in zip(lines, strides.tolist(), strict=True)]
        return cls(kind, names, counts, where, few)

    def take(self) -> torch.Tensor:
        """Return the current values."""
        if self.gather is None:
            return torch.cat(list(self.tensors))
        return torch.from_numpy(self.gather.take())


class SpotCheck:
    """Reader of the same elements of live tensors now, and of their copies later.

    Args:
        layouts: each shard's layout, with the offset of its body in the block.
        tensors: live tensors by entry name; conjugated or negated ones are left out.
        chosen: names of the entries to sample.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[ShardLayout, int]],
        tensors: Mapping[str, torch.Tensor],
        chosen: Collection[str],
    ) -> None:
        found: dict[_Kind, list[_SampledLine]] = {}
        for layout, offset in layouts:
            for place in layout.placed:
                name = place.entry.name
                size_bytes = place.end - place.begin
                if not size_bytes or name not in chosen:
                    continue
                tensor = tensors[name]
                # Its copy holds the resolved values, so the bytes differ.
                if tensor.is_conj() or tensor.is_neg():
                    continue
                width = tensor.element_size() if tensor.element_size() in INTEGERS else 8
                looked = _SampledLine.of(name, tensor, width, (offset + place.begin) // width)
                found.setdefault((width, tensor.device), []).append(looked)
        self._elements = {kind: _Elements.of(kind, looked) for kind, looked in found.items()}

    def take(self) -> Sample:
        """Sample the elements now; on a device, at this point of the current stream."""
        return Sample({kind: elements.take() for kind, elements in self._elements.items()})

    def differing(self, sample: Sample, block: torch.Tensor) -> str | None:
        """Return the name of an entry of which ``block`` differs from ``sample``."""
        for kind, expected in sample.values.items():
            width = kind[0]
            whole = block[: block.numel() // width * width].view(INTEGERS[width])
            # Waits for the device; this runs in the lane's thread.
            differs = whole[self._elements[kind].where] != expected.cpu()
            if bool(differs.any()):
                return self.entry_at(kind, int(differs.nonzero()[0]))
        return None

    def packed(self, sample: Sample) -> list[tuple[int, bytes, bytes]]:
        """Return a sample for another process: per width, positions in the block (int64) and
        values."""
        found = []
        for kind, values in sample.values.items():
            where = self._elements[kind].where  # a reference, while its memory is read
            copy = values.cpu()
            found.append((kind[0], bytes(host_bytes(where)), bytes(host_bytes(copy))))
        return found

    def entry_at(self, kind: _Kind, index: int) -> str:
        """Return the name of the entry of a sampled element.

        Args:
            kind: width in bytes, and device.
            index: index in the values of that kind.
        """
        elements = self._elements[kind]
        ends = np.cumsum(elements.counts)
        return elements.names[int(np.searchsorted(ends, index, side="right"))]


def _each(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(numbers), np.int64)


def _places(
    lengths: npt.NDArray[np.int64], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the sampling stride and number of samples for tensors of these lengths."""
    least = np.where(lengths * width <= _SMALL_BYTES, _SAMPLES_OF_SMALL, _SAMPLES)
    strides = np.maximum(1, lengths // least)
    return strides, -(-lengths // strides)


def _within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return 0, 1, ... for each of the counts, concatenated."""
    ends = np.cumsum(counts)
    found: npt.NDArray[np.int64] = np.arange(ends[-1]) - (ends - counts).repeat(counts)
    return found


class Probe:
    """Samples of the entries that registered functions update, for marks and replay.

    The same elements of the same entries are sampled in survey after survey.
    """

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._checks: dict[str, SpotCheck] = {}

    def take(self, survey: Survey) -> dict[str, torch.Tensor]:
        """Return the current values by entry name of the mark: one per pattern, width and
        device."""
        owners = survey.shape.owners
        covered = [(name, owner.update) for name, owner in owners.items() if owner.update]
        tensors = tuple(survey.tensors[name] for name, _ in covered)
        if not same_objects(tensors, self._tensors):
            self._tensors = tensors
            self._checks = _checks(covered, tensors)
        return {
            f"{SAMPLE}{pattern}/{width}/{device}": values
            for pattern, check in self._checks.items()
            for (width, device), values in check.take().values.items()
        }

    def entry_at(self, sample: str, index: int) -> str:
        """Return the name of the entry of a sampled element."""
        pattern, width, device = sample.removeprefix(SAMPLE).rsplit("/", 2)
        return self._checks[pattern].entry_at((int(width), torch.device(device)), index)


def _checks(
    covered: list[tuple[str, str]], tensors: tuple[torch.Tensor, ...]
) -> dict[str, SpotCheck]:
    by_pattern: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for (name, pattern), tensor in zip(covered, tensors, strict=True):
        by_pattern[pattern][name] = _as_it_lies(tensor)
    checks = {}
    for pattern, named in by_pattern.items():
        entries = [tensor_entry(name, tensor) for name, tensor in named.items()]
        # No file is written: the layout only gives positions, and must not be split into shards.
        (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
        checks[pattern] = SpotCheck([(layout, 0)], named, named.keys())
    return checks


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with its dimensions in memory order; without gaps it is contiguous."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)
