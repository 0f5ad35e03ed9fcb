"""Spot checks: was what was captured what the step left behind?

A lazy copy is right only if nobody changes its source before the gate. An optimizer is held
back by its hooks; a swap of averaged weights for an evaluation, a captured CUDA graph or a
write through NumPy is not, and tensor version counters do not move for them. So a few
elements of every tensor are read at the step mark, in one packed copy, and compared with
what has arrived. A change of whole tensors is found at once; one of a few elements may hide
between the samples, and is found by the comparison of digests between bases.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from everstep.capture.gather import Gather
from everstep.state.layout import ShardLayout
from everstep.state.tensors import byte_view, host_bytes

__all__ = ["Sample", "SpotCheck"]

_SAMPLES = 8  # of each tensor
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Kind = tuple[int, torch.device]  # what one packed copy can hold


@dataclass(frozen=True, slots=True)
class Sample:
    """What the elements were, by width and device."""

    values: Mapping[_Kind, torch.Tensor]


class SpotCheck:
    """Reads the same elements of tensors now and of their copies later.

    Args:
        layouts: of each shard, with the offset of its body in the block.
        tensors: live tensors by entry name; those that are not contiguous are left out.
        chosen: names of the entries to look at.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[ShardLayout, int]],
        tensors: Mapping[str, torch.Tensor],
        chosen: Collection[str],
    ) -> None:
        self._live: dict[_Kind, list[torch.Tensor]] = {}
        self._names: dict[_Kind, list[str]] = {}
        self._ends: dict[_Kind, list[int]] = {}
        where: dict[_Kind, list[torch.Tensor]] = {}
        host: dict[_Kind, list[npt.NDArray[Any]]] = {}
        for layout, offset in layouts:
            for place in layout.placed:
                name = place.entry.name
                if name not in chosen or place.end == place.begin:
                    continue
                tensor = tensors[name]
                if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                    continue
                width = tensor.element_size() if tensor.element_size() in _INTEGERS else 8
                elements = byte_view(tensor).view(_INTEGERS[width])
                stride = max(1, elements.numel() // _SAMPLES)
                few = elements[::stride]
                first = (offset + place.begin) // width
                places = first + stride * torch.arange(few.numel(), device="cpu")
                kind = width, tensor.device
                where.setdefault(kind, []).append(places)
                self._live.setdefault(kind, []).append(few)
                self._names.setdefault(kind, []).append(name)
                ends = self._ends.setdefault(kind, [])
                ends.append((ends[-1] if ends else 0) + few.numel())
                if tensor.device.type == "cpu":
                    whole = np.frombuffer(host_bytes(tensor), f"i{width}")
                    host.setdefault(kind, []).append(whole[::stride])
        self._where = {kind: torch.cat(parts) for kind, parts in where.items()}
        self._host = {kind: Gather(views) for kind, views in host.items()}

    def take(self) -> Sample:
        """The elements as they are now; on a device, as they will be at this point of the
        current stream."""
        packed = {
            kind: torch.from_numpy(self._host[kind].take())
            if kind in self._host
            else torch.cat(live)
            for kind, live in self._live.items()
        }
        return Sample(packed)

    def differing(self, sample: Sample, block: torch.Tensor) -> str | None:
        """The name of an entry of which ``block`` holds something else than ``sample``."""
        for kind, expected in sample.values.items():
            width = kind[0]
            whole = block[: block.numel() // width * width].view(_INTEGERS[width])
            differs = whole[self._where[kind]] != expected.cpu()
            if bool(differs.any()):
                return self.entry_at(kind, int(differs.nonzero()[0]))
        return None

    def packed(self, sample: Sample) -> list[tuple[int, bytes, bytes]]:
        """A sample for another process: of each width the places in the block, in elements, as
        int64, and the values."""
        return [
            (kind[0], bytes(host_bytes(self._where[kind])), bytes(host_bytes(values.cpu())))
            for kind, values in sample.values.items()
        ]

    def entry_at(self, kind: _Kind, index: int) -> str:
        """The name of the entry that an element of a sample is of.

        Args:
            kind: width in bytes, and device.
            index: in the values of that kind.
        """
        return self._names[kind][bisect.bisect_right(self._ends[kind], index)]
