"""Body of a base taken straight from live tensors (``sync``).

Each chunk of the file is copied when it is needed. Training stands still until the last one is
taken, and the host memory needed is a few chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from everstep.capture.lanes.lane import Lane
from everstep.seams.memory import copy_view
from everstep.state.layout.shards import Placed, Seen, ShardLayout, append_objects, overlaps, pieces
from everstep.state.values.tensors import host_bytes


class LiveBody:
    """Body read from live tensors, which must not change meanwhile.

    Args:
        layout: the tensors in file order.
        tensors: live tensors by entry name.
        objects: encoded objects after the tensors, by entry name.
        lane: fetches tensors that are not in host memory.
    """

    def __init__(
        self,
        layout: ShardLayout,
        tensors: Mapping[str, torch.Tensor],
        objects: Mapping[str, bytes],
        lane: Lane,
    ) -> None:
        self._sizes = {name: len(data) for name, data in objects.items()}
        placed = append_objects(layout, self._sizes).placed
        self._placed = [place for place in placed if place.end > place.begin]
        self._ends = [place.end for place in self._placed]
        self._tensors = tensors
        self._objects = objects
        self._lane = lane
        self._flat: tuple[str, torch.Tensor] | None = None

    def fill(self, begin: int, chunk: memoryview, seen: Seen) -> None:
        for place, start, stop in overlaps(self._placed, self._ends, begin, chunk.nbytes):
            live = self._bytes(place)[start - place.begin : stop - place.begin]
            copied = chunk[start - begin : stop - begin]
            for source, target in zip(pieces(live), pieces(copied), strict=True):
                copy_view(target, source)
                seen(target)

    def held(self, begin: int, end: int) -> memoryview | None:
        return None

    def objects_bytes(self) -> Mapping[str, int]:
        return self._sizes

    def _bytes(self, place: Placed) -> memoryview:
        """Return an entry's row-major bytes; the last converted tensor is kept for the next
        chunk."""
        name = place.entry.name
        if name in self._objects:
            return memoryview(self._objects[name])
        if self._flat is not None and self._flat[0] == name:
            return host_bytes(self._flat[1])
        host = self._lane.in_host_memory(self._tensors[name])
        flat = host.resolve_conj().resolve_neg().contiguous()
        self._flat = (name, flat)
        return host_bytes(flat)
