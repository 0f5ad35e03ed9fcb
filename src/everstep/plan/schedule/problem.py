"""Data types of the planning problem, and the constraints that a plan must satisfy.

The model is that of Checkflow, section III-A; see :mod:`.schedule` for it and for the algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from everstep.errors import OptionError
from everstep.plan.schedule.steps import StepTrace

__all__ = [
    "Chunk",
    "Item",
    "Mode",
    "Placement",
    "Problem",
    "Schedule",
    "memory_of",
    "peak_of",
    "problem_of",
    "validate",
]

Mode = Literal["paper", "direct"]


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of the state.

    Attributes:
        update: operator that first writes to it; the number of operators if none does.
    """

    name: str
    size_bytes: int
    update: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A step, and the items to offload while it runs.

    Attributes:
        seconds: duration of each operator.
        live_bytes: device memory of the step itself while each operator runs.
        items: tensors to offload.
        link_bytes_per_s: bandwidth from device to host.

    Raises:
        OptionError: the values are inconsistent.
    """

    seconds: tuple[float, ...]
    live_bytes: tuple[int, ...]
    items: tuple[Item, ...]
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        count = len(self.seconds)
        if not count or len(self.live_bytes) != count:
            raise OptionError(
                "a problem needs the time and the memory of each operator, and one at least"
            )
        if not 0 < self.link_bytes_per_s < math.inf:
            raise OptionError("times and bandwidth must be positive, and finite")
        if any(not 0 <= s < math.inf for s in self.seconds):
            raise OptionError("times and bandwidth must be positive, and finite")
        if any(not 0 <= item.update <= count or item.size_bytes < 0 for item in self.items):
            raise OptionError("an item has a negative size, or is written by a missing operator")

    @property
    def size_bytes(self) -> int:
        """Bytes of a checkpoint."""
        return sum(item.size_bytes for item in self.items)

    @property
    def step_s(self) -> float:
        """Duration of the step, in seconds."""
        return sum(self.seconds)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step alone."""
        return max(self.live_bytes)

    def capacities(self, mode: Mode) -> list[int]:
        """Return the bytes that the link moves during each operator."""
        found = [int(self.link_bytes_per_s * s) for s in self.seconds]
        return [0, *found[1:]] if mode == "paper" else found

    def needed_bytes_per_s(self, mode: Mode) -> float:
        """Return the bandwidth that moves all items within the step, if bytes were divisible."""
        usable_s = self.step_s - (self.seconds[0] if mode == "paper" else 0.0)
        return self.size_bytes / usable_s if usable_s else float("inf")

    def written_before(self) -> list[int]:
        """Return for each operator the bytes of items first written by it or before; the last value
        is that of all items."""
        found = [0] * (len(self.seconds) + 1)
        for item in self.items:
            found[item.update] += item.size_bytes
        for number in range(1, len(found)):
            found[number] += found[number - 1]
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes ``[begin, end)`` of an item, offloaded in one piece."""

    item: int
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Placement:
    """The times at which a chunk is duplicated and offloaded.

    Attributes:
        snapshot: operator during which it is duplicated; None: it is offloaded directly.
        offload: operator during which it is offloaded.
    """

    chunk: Chunk
    snapshot: int | None
    offload: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan.

    Attributes:
        peak_bytes: maximum device memory, including that of the step itself.
        bound_bytes: lower bound of the peak, for chunks of any size.
        chunk_bytes: maximum size of a chunk.
    """

    mode: Mode
    placements: tuple[Placement, ...]
    peak_bytes: int
    bound_bytes: int
    chunk_bytes: int

    @property
    def gap(self) -> float:
        """Distance of the peak from the bound, as a share of the bound."""
        return self.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


def problem_of(trace: StepTrace, seconds: Sequence[float], link_bytes_per_s: float) -> Problem:
    """Return the planning problem of a traced step.

    If the first operator writes to the state (as that of a model that begins with a BatchNorm and
    its counter of batches), the step mark precedes it as an operator that takes no time: the item
    is duplicated there, as training does. The paper does not cover this (its Eq. 8 skips the first
    operator).

    Args:
        seconds: duration of each operator (:func:`everstep.plan.schedule.devices.seconds_of`).
    """
    marked = any(tensor.first_write == 0 for tensor in trace.state)
    seconds = list(seconds)
    live_bytes = trace.live_bytes()
    if marked:
        seconds.insert(0, 0.0)
        live_bytes.insert(0, sum(x.size_bytes for x in trace.tensors if x.begin < 0))
    writes = [len(trace.operators) if (w := x.first_write) is None else w for x in trace.state]
    items = tuple(
        Item(tensor.name, tensor.size_bytes, write + marked)
        for tensor, write in zip(trace.state, writes, strict=True)
    )
    return Problem(tuple(seconds), tuple(live_bytes), items, link_bytes_per_s)


def validate(problem: Problem, plan: Schedule) -> list[str]:
    """Return descriptions of violated constraints, checked directly without a solver."""
    found = _unreadable(problem, plan)
    if found:
        return found
    carried = [0] * len(problem.seconds)
    covered: dict[int, list[tuple[int, int]]] = {}
    for place in plan.placements:
        item = problem.items[place.chunk.item]
        covered.setdefault(place.chunk.item, []).append((place.chunk.begin, place.chunk.end))
        carried[place.offload] += place.chunk.size_bytes
        if place.snapshot is None:
            if plan.mode == "paper" or place.offload >= item.update:
                found.append(f"{item.name}: offloaded without a snapshot after its first write")
        elif not 0 <= place.snapshot < min(item.update, place.offload):
            found.append(f"{item.name}: its snapshot is too late")
    for number, size in enumerate(carried):
        if size > problem.link_bytes_per_s * problem.seconds[number]:
            found.append(f"operator {number}: more bytes than the link moves")
    for number, item in enumerate(problem.items):
        position = 0
        for begin, end in sorted(covered.get(number, [])):
            if begin != position:
                found.append(f"{item.name}: byte {position} is not offloaded exactly once")
            position = end
        if position != item.size_bytes:
            found.append(f"{item.name}: not offloaded completely")
    if peak_of(problem, plan.placements) != plan.peak_bytes:
        found.append("the peak is not the stated one")
    if plan.bound_bytes > plan.peak_bytes:
        found.append("the peak is below its stated bound")
    if any(place.chunk.size_bytes > plan.chunk_bytes for place in plan.placements):
        found.append("a chunk is larger than stated")
    return found


def _unreadable(problem: Problem, plan: Schedule) -> list[str]:
    """Return descriptions of placements of missing operators, items or bytes."""
    found = []
    for place in plan.placements:
        chunk = place.chunk
        if not 0 <= chunk.item < len(problem.items):
            found.append(f"there is no item {chunk.item}")
        elif not 0 <= chunk.begin < chunk.end <= problem.items[chunk.item].size_bytes:
            name = problem.items[chunk.item].name
            found.append(f"{name}: it has no bytes {chunk.begin} to {chunk.end}")
        if not 0 <= place.offload < len(problem.seconds):
            found.append(f"there is no operator {place.offload}")
    return found


def peak_of(problem: Problem, placements: Sequence[Placement]) -> int:
    """Return the maximum bytes at any operator."""
    return max(memory_of(problem, placements))


def memory_of(problem: Problem, placements: Sequence[Placement]) -> list[int]:
    """Return the bytes while each operator runs: the step's own and all snapshots."""
    change = [0] * (len(problem.seconds) + 1)
    for place in placements:
        if place.snapshot is not None:
            change[place.snapshot] += place.chunk.size_bytes
            change[place.offload + 1] -= place.chunk.size_bytes
    found = []
    extra = 0
    for number, live in enumerate(problem.live_bytes):
        extra += change[number]
        found.append(live + extra)
    return found
