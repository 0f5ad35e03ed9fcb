"""Spot checks: was what was captured what the step left behind?

A lazy copy is right only if nobody changes its source before the gate. An optimizer is held
back by its hooks; a swap of averaged weights for an evaluation, a captured CUDA graph or a
write through NumPy is not, and tensor version counters do not move for them. So a few
elements of every tensor are read at the step mark, in one packed copy, and compared with
what has arrived. A change of whole tensors is found at once; one of a few elements may hide
between the samples. The comparison of digests between bases finds that only where no update
comes in between; a version counter, if it went through torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from everstep.seams.gather import Gather
from everstep.state.layout.names import SAMPLE
from everstep.state.layout.shards import ShardLayout, plan_shards
from everstep.state.survey.survey import Survey, same_objects
from everstep.state.values.tensors import byte_view, host_bytes, tensor_entry

__all__ = [
    "Probe",
    "Sample",
    "SpotCheck",
]

_SAMPLES = 4  # of each tensor
_SAMPLES_OF_SMALL = 8
_SMALL_BYTES = 4096  # in a page or two; each place in another takes its time to be found
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Kind = tuple[int, torch.device]  # what one packed copy can hold


@dataclass(frozen=True, slots=True)
class Sample:
    """What the elements were, by width and device."""

    values: Mapping[_Kind, torch.Tensor]


class _SampledLine(NamedTuple):
    """A tensor that is looked at along a line: all of its elements, or those in one dimension.

    Attributes:
        line: one-dimensional, of the same memory, as integers.
        begin: of the first element in the block, in elements.
        step: from one to the next there.
    """

    name: str
    line: torch.Tensor
    begin: int
    step: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, width: int, begin: int) -> _SampledLine:
        """Of a tensor that is not conjugated or negated, whose rows begin there, in elements."""
        if tensor.is_contiguous():
            return cls(name, byte_view(tensor).view(_INTEGERS[width]), begin, 1)
        # However it lies: along its longest dimension, from the first element on.
        longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        line = tensor.detach()
        apart = math.prod(tensor.shape[longest + 1 :])
        for dim in reversed(range(tensor.dim())):
            line = line if dim == longest else line.select(dim, 0)
        if tensor.element_size() > width:  # complex128: the real parts
            line = torch.view_as_real(line).select(-1, 0)
            apart = 2 * apart
        return cls(name, line.view(_INTEGERS[width]), begin, apart)


@dataclass(frozen=True, slots=True, eq=False)
class _Elements:
    """Those of one kind.

    Attributes:
        names: of the tensors.
        counts: of the elements of each that are looked at.
        where: these are in the block, in elements, as int64.
        tensors: as long as their memory is read; of those on a device, views of these elements.
        gather: reads them in host memory, from these addresses.
    """

    kind: _Kind
    names: Sequence[str]
    counts: npt.NDArray[np.int64]
    where: torch.Tensor
    tensors: Sequence[torch.Tensor]
    addresses: npt.NDArray[np.int64] | None = None
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
            gathered = _gathered(first + between * steps, width)
            return cls(kind, names, counts, where, lines, *gathered)
        few = [line[::stride] for line, stride in zip(lines, strides.tolist(), strict=True)]
        return cls(kind, names, counts, where, few)

    def some(self, chosen: Sequence[bool]) -> _Elements:
        """Those of some of the tensors."""
        which = np.array(chosen, bool)
        elements = which.repeat(self.counts)
        where = torch.from_numpy(self.where.numpy()[elements])
        names = [name for name, mine in zip(self.names, chosen, strict=True) if mine]
        tensors = [tensor for tensor, mine in zip(self.tensors, chosen, strict=True) if mine]
        counts = self.counts[which]
        if self.addresses is None:
            return _Elements(self.kind, names, counts, where, tensors)
        gathered = _gathered(self.addresses[elements], self.kind[0])
        return _Elements(self.kind, names, counts, where, tensors, *gathered)

    def take(self) -> torch.Tensor:
        """As they are now."""
        if self.gather is None:
            return torch.cat(list(self.tensors))
        return torch.from_numpy(self.gather.take())


class SpotCheck:
    """Reads the same elements of tensors now and of their copies later.

    Args:
        layouts: of each shard, with the offset of its body in the block.
        tensors: live tensors by entry name; those that are conjugated or negated are left out.
        chosen: names of the entries to look at.
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
                if tensor.is_conj() or tensor.is_neg():
                    continue
                width = tensor.element_size() if tensor.element_size() in _INTEGERS else 8
                looked = _SampledLine.of(name, tensor, width, (offset + place.begin) // width)
                found.setdefault((width, tensor.device), []).append(looked)
        self._elements = {kind: _Elements.of(kind, looked) for kind, looked in found.items()}

    def some(self, names: Container[str]) -> SpotCheck:
        """That of fewer entries: what was found out about their memory is used again."""
        check = SpotCheck((), {}, ())
        for kind, elements in self._elements.items():
            chosen = [name in names for name in elements.names]
            if any(chosen):
                check._elements[kind] = elements.some(chosen)
        return check

    def take(self) -> Sample:
        """The elements as they are now; on a device, as they will be at this point of the
        current stream."""
        return Sample({kind: elements.take() for kind, elements in self._elements.items()})

    def differing(self, sample: Sample, block: torch.Tensor) -> str | None:
        """The name of an entry of which ``block`` holds something else than ``sample``."""
        for kind, expected in sample.values.items():
            width = kind[0]
            whole = block[: block.numel() // width * width].view(_INTEGERS[width])
            differs = whole[self._elements[kind].where] != expected.cpu()
            if bool(differs.any()):
                return self.entry_at(kind, int(differs.nonzero()[0]))
        return None

    def packed(self, sample: Sample) -> list[tuple[int, bytes, bytes]]:
        """A sample for another process: of each width the places in the block, in elements, as
        int64, and the values."""
        found = []
        for kind, values in sample.values.items():
            where = self._elements[kind].where  # kept as long as it is read
            copy = values.cpu()
            found.append((kind[0], bytes(host_bytes(where)), bytes(host_bytes(copy))))
        return found

    def entry_at(self, kind: _Kind, index: int) -> str:
        """The name of the entry that an element of a sample is of.

        Args:
            kind: width in bytes, and device.
            index: in the values of that kind.
        """
        elements = self._elements[kind]
        ends = np.cumsum(elements.counts)
        return elements.names[int(np.searchsorted(ends, index, side="right"))]


def _gathered(addresses: npt.NDArray[np.int64], width: int) -> tuple[npt.NDArray[np.int64], Gather]:
    return addresses, Gather.at(addresses, np.dtype(f"i{width}"))


def _each(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(numbers), np.int64)


def _places(
    lengths: npt.NDArray[np.int64], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every how many elements tensors of these lengths are looked at, and how often that is."""
    least = np.where(lengths * width <= _SMALL_BYTES, _SAMPLES_OF_SMALL, _SAMPLES)
    strides = np.maximum(1, lengths // least)
    return strides, -(-lengths // strides)


def _within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ... for each of the counts, one behind the other."""
    ends = np.cumsum(counts)
    found: npt.NDArray[np.int64] = np.arange(ends[-1]) - (ends - counts).repeat(counts)
    return found


class Probe:
    """Takes the same elements of the same entries, survey after survey."""

    def __init__(self) -> None:
        self._tensors: tuple[torch.Tensor, ...] = ()
        self._checks: dict[str, SpotCheck] = {}

    def take(self, survey: Survey) -> dict[str, torch.Tensor]:
        """The elements as they are now, packed, by the name of the entry of a mark that holds
        them: for each pattern, width and device one."""
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
        """The name of the entry that an element of a sample is of."""
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
        (layout,) = plan_shards(entries, header_bytes_max=1 << 62)
        checks[pattern] = SpotCheck([(layout, 0)], named, named.keys())
    return checks


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose dimensions come in the order of memory, so that one without gaps is
    contiguous."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order)
