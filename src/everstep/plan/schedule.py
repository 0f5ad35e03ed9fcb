"""When each tensor of the state leaves the device, so that the peak of memory stays low.

Checkflow section III-A as a problem over the operators of one step (0-based): item ``e`` of ``n_e``
bytes is first written by operator ``u_e``. A *snapshot* of it is made before that, and kept until
it has been *offloaded*, whole, behind one operator ``s``, which carries at most what the link moves
while it runs (Eq. 9). The peak counts the step's own memory and all snapshots (Eq. 10).

``mode="paper"``: what is offloaded at ``s`` is a snapshot made at ``s - 1`` or before (Eq. 7), so
it takes memory from ``c = min(u, s) - 1`` to ``s``; a later creation is never worse, so there is
nothing else to choose. ``mode="direct"``: a tensor is offloaded as it lies as long as nothing has
written to it; only what leaves later needs a snapshot, from ``u - 1`` to ``s``. The paper has no
such case.

What is put right: nothing can be offloaded at the first operator (Eq. 7 begins at the second), nor
be snapshotted before it if that is what writes (Eq. 8 skips it); chunks are refined until the peak
meets the bound of divisible items, or no longer falls (Algorithm 1 can split for ever); not every
step can be split until it fits: the link may be too slow (its own Table I).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from everstep.errors import InfeasibleError, OptionError
from everstep.plan.trace import StepTrace

__all__ = [
    "Chunk",
    "Group",
    "Item",
    "Mode",
    "Placement",
    "Problem",
    "Schedule",
    "bound",
    "greedy",
    "groups_of",
    "memory_of",
    "peak_of",
    "problem_of",
    "schedule",
    "validate",
]

Mode = Literal["paper", "direct"]

_CHUNKS_BYTES = (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10)
_MET = 1.005  # of the bound: refining further is not worth the time
_CLOSE = 1e-4  # of the bound: bisecting further is not


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of the state.

    Attributes:
        update: the operator that first writes to it; the number of operators if none does.
    """

    name: str
    size_bytes: int
    update: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A step, and what must leave the device while it runs.

    Attributes:
        seconds: of each operator.
        live_bytes: of the step itself while each operator runs.
        items: what is to be offloaded.
        link_bytes_per_s: from device to host.

    Raises:
        OptionError: parts do not fit each other.
    """

    seconds: tuple[float, ...]
    live_bytes: tuple[int, ...]
    items: tuple[Item, ...]
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        count = len(self.seconds)
        if not count or len(self.live_bytes) != count:
            raise OptionError("a problem needs times and memory of at least one operator")
        if self.link_bytes_per_s <= 0 or any(s < 0 for s in self.seconds):
            raise OptionError("times and bandwidth must be positive")
        if any(not 0 <= item.update <= count or item.size_bytes < 0 for item in self.items):
            raise OptionError("an item is written by an operator that is not there")

    @property
    def size_bytes(self) -> int:
        """Of a checkpoint."""
        return sum(item.size_bytes for item in self.items)

    @property
    def step_s(self) -> float:
        """Of the step."""
        return sum(self.seconds)

    @property
    def peak_bytes(self) -> int:
        """Of the step alone."""
        return max(self.live_bytes)

    def capacities(self, mode: Mode) -> list[int]:
        """Bytes that the link moves behind each operator."""
        found = [int(self.link_bytes_per_s * s) for s in self.seconds]
        return [0, *found[1:]] if mode == "paper" else found

    def needed_bytes_per_s(self, mode: Mode) -> float:
        """The bandwidth that moves all items within the step."""
        usable_s = self.step_s - (self.seconds[0] if mode == "paper" else 0.0)
        return self.size_bytes / usable_s if usable_s else float("inf")

    def written_before(self) -> list[int]:
        """Bytes of items whose first write is by operator ``t`` or before, for each ``t``, and for
        all of them at last."""
        found = [0] * (len(self.seconds) + 1)
        for item in self.items:
            found[item.update] += item.size_bytes
        for number in range(1, len(found)):
            found[number] += found[number - 1]
        return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an item that leaves in one piece."""

    item: int
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Placement:
    """When a chunk leaves.

    Attributes:
        snapshot: behind which operator it is duplicated; None: it leaves as it lies.
        offload: the operator behind which it leaves.
    """

    chunk: Chunk
    snapshot: int | None
    offload: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan.

    Attributes:
        peak_bytes: of memory, the step's own included.
        bound_bytes: no plan of any chunks has a lower peak.
        chunk_bytes: largest chunk.
    """

    mode: Mode
    placements: tuple[Placement, ...]
    peak_bytes: int
    bound_bytes: int
    chunk_bytes: int

    @property
    def gap(self) -> float:
        """How far the peak is from the bound, as a share of it."""
        return self.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


def problem_of(trace: StepTrace, seconds: Sequence[float], link_bytes_per_s: float) -> Problem:
    """The problem of a traced step.

    Args:
        seconds: of each operator (see :func:`everstep.plan.devices.seconds_of`).
    """
    last = len(trace.operators)
    items = tuple(
        Item(tensor.name, tensor.size_bytes, last if (w := tensor.first_write) is None else w)
        for tensor in trace.state
    )
    return Problem(tuple(seconds), tuple(trace.live_bytes()), items, link_bytes_per_s)


def bound(problem: Problem, mode: Mode) -> int:
    """The lowest peak of divisible items; no chunks have a lower one.

    All items are there from the beginning, so one order is best at every operator at once, and what
    has left in total is all that matters. ``direct``: in closed form. ``paper``: for a given peak
    the most that can have left, operator by operator; then bisection.

    Raises:
        InfeasibleError: the link is too slow; with the bandwidth that would be needed.
    """
    _check(problem, mode)
    written, capacities = problem.written_before(), problem.capacities(mode)
    if mode == "direct":
        left = peak = 0
        for number, live in enumerate(problem.live_bytes):
            late, soon = written[number], written[number + 1]
            kept = max(0, late - left)
            # What the next operator writes goes first: late ones take memory here all the same.
            duplicated = max(0, soon - max(late, left) - capacities[number])
            peak = max(peak, live + kept + duplicated)
            left = min(problem.size_bytes, left + capacities[number])
        return peak
    low, high = problem.peak_bytes, problem.peak_bytes + problem.size_bytes
    while low < high:
        middle = (low + high) // 2
        if _fits(problem, written, capacities, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _check(problem: Problem, mode: Mode) -> None:
    """Raises:
    InfeasibleError: no plan exists, whatever memory there is.
    """
    first = [item.name for item in problem.items if item.update == 0 and item.size_bytes]
    if first:
        raise InfeasibleError(
            f"the first operator of the step writes {first[0]!r}: there is no time to save it",
            quantity="link_bytes_per_s",
            needed=float("inf"),
        )
    if sum(problem.capacities(mode)) < problem.size_bytes:
        needed = problem.needed_bytes_per_s(mode)
        raise InfeasibleError(
            f"{problem.size_bytes / 1e9:.3g} GB do not leave within a step of "
            f"{problem.step_s * 1e3:.3g} ms at {problem.link_bytes_per_s / 1e9:.3g} GB/s: "
            f"that takes {needed / 1e9:.3g} GB/s",
            quantity="link_bytes_per_s",
            needed=needed,
        )


def _fits(problem: Problem, written: list[int], capacities: list[int], peak: int) -> bool:
    """Whether divisible items leave below a peak, each snapshot made one operator ahead.

    With ``Y_t`` bytes offloaded by the end of operator ``t``, snapshots at ``t`` take
    ``max(Y_{t+1}, W_{t+1}) - Y_{t-1}``, where ``W`` are those that must have been made. Each bound
    on ``Y_t`` grows with the ones before, so taking the most at each operator is best.
    """
    before = earlier = 0  # Y_{t-1}, Y_{t-2}
    room_before = peak
    for number, live in enumerate(problem.live_bytes):
        room = peak - live
        if room < 0 or written[min(number + 1, len(written) - 2)] - before > room:
            return False
        now = min(
            problem.size_bytes,
            before + min(capacities[number], room),
            earlier + room_before,
        )
        earlier, before, room_before = before, max(before, now), room
    return before >= problem.size_bytes


@dataclass(slots=True)
class Group:
    """Chunks of one size and one deadline, of which the first ``gone`` have left."""

    update: int
    size_bytes: int
    chunks: list[Chunk] = field(default_factory=list)
    gone: int = 0

    @property
    def count(self) -> int:
        return len(self.chunks) - self.gone


def greedy(problem: Problem, mode: Mode, chunk_bytes: int) -> Schedule | None:
    """The earliest deadline first, first fit, at the lowest peak at which that succeeds.

    Args:
        chunk_bytes: largest chunk.

    Returns:
        None if these chunks do not fit behind the operators.
    """
    low = lowest = bound(problem, mode)
    high = problem.peak_bytes + problem.size_bytes
    best = _Greedy(problem, mode, chunk_bytes, lowest).run()
    if best is None:
        best = _Greedy(problem, mode, chunk_bytes, high).run()
        if best is None:
            return None
        while high - low > lowest * _CLOSE:
            middle = (low + high) // 2
            found = _Greedy(problem, mode, chunk_bytes, middle).run()
            if found is None:
                low = middle + 1
            else:
                best, high = found, middle
    return Schedule(mode, tuple(best), peak_of(problem, best), lowest, chunk_bytes)


def schedule(problem: Problem, mode: Mode) -> Schedule:
    """A plan, with chunks as large as they may be for a peak at the bound.

    Raises:
        InfeasibleError: the link is too slow; with the bandwidth that would be needed.
    """
    best: Schedule | None = None
    for chunk_bytes in _CHUNKS_BYTES:
        found = greedy(problem, mode, chunk_bytes)
        if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
            best = found
        if best is not None and best.peak_bytes <= best.bound_bytes * _MET:
            return best
    if best is None:
        needed = problem.needed_bytes_per_s(mode)
        raise InfeasibleError(
            f"chunks of {_CHUNKS_BYTES[-1]} bytes do not fit behind the operators of this step",
            quantity="link_bytes_per_s",
            needed=needed,
        )
    return best


def validate(problem: Problem, plan: Schedule) -> list[str]:
    """What a plan violates, in words, from the constraints themselves and no solver."""
    found = []
    carried = [0] * len(problem.seconds)
    covered: dict[int, list[tuple[int, int]]] = {}
    for place in plan.placements:
        item = problem.items[place.chunk.item]
        covered.setdefault(place.chunk.item, []).append((place.chunk.begin, place.chunk.end))
        carried[place.offload] += place.chunk.size_bytes
        if place.snapshot is None:
            if plan.mode == "paper" or place.offload >= item.update:
                found.append(f"{item.name}: leaves as it lies, after it was written")
        elif not 0 <= place.snapshot < min(item.update, place.offload):
            found.append(f"{item.name}: its snapshot comes too late")
    for number, size in enumerate(carried):
        if size > problem.link_bytes_per_s * problem.seconds[number]:
            found.append(f"operator {number}: the link is asked for more than it moves")
    for number, item in enumerate(problem.items):
        position = 0
        for begin, end in sorted(covered.get(number, [])):
            if begin != position:
                found.append(f"{item.name}: byte {position} leaves not once")
            position = end
        if position != item.size_bytes:
            found.append(f"{item.name}: not all of it leaves")
    if peak_of(problem, plan.placements) != plan.peak_bytes:
        found.append("the peak is not as stated")
    return found


def peak_of(problem: Problem, placements: Sequence[Placement]) -> int:
    """Most bytes at any operator."""
    return max(memory_of(problem, placements))


def memory_of(problem: Problem, placements: Sequence[Placement]) -> list[int]:
    """Bytes while each operator runs: the step's own and all snapshots."""
    change = [0] * (len(problem.seconds) + 1)
    for place in placements:
        if place.snapshot is not None:
            change[place.snapshot] += place.chunk.size_bytes
            change[place.offload + 1] -= place.chunk.size_bytes
    found, extra = [], 0
    for number, live in enumerate(problem.live_bytes):
        extra += change[number]
        found.append(live + extra)
    return found


def groups_of(problem: Problem, chunk_bytes: int) -> list[Group]:
    """All chunks, the earliest deadline first, and of equals the largest."""
    found: dict[tuple[int, int], Group] = {}
    for number, item in enumerate(problem.items):
        for begin in range(0, item.size_bytes, chunk_bytes):
            chunk = Chunk(number, begin, min(begin + chunk_bytes, item.size_bytes))
            key = (item.update, -chunk.size_bytes)
            found.setdefault(key, Group(item.update, chunk.size_bytes)).chunks.append(chunk)
    return [found[key] for key in sorted(found)]


class _Greedy:
    """One pass over the operators, below a given peak."""

    def __init__(self, problem: Problem, mode: Mode, chunk_bytes: int, peak: int) -> None:
        self._paper = mode == "paper"
        self._peak = peak
        self._live = problem.live_bytes
        self._capacities = problem.capacities(mode)
        self._groups = groups_of(problem, chunk_bytes)
        self._least = min((group.size_bytes for group in self._groups), default=0)
        self._late = 0  # bytes of snapshots that were made and have not left
        self._placements: list[Placement] = []

    def run(self) -> list[Placement] | None:
        """Placements; None if it runs out of memory, or of operators."""
        forced: dict[int, list[Group]] = {}
        for group in self._groups:
            forced.setdefault(group.update - 1, []).append(group)
        room_before = 0
        for number, live in enumerate(self._live):
            new = forced.get(number, ())
            room = self._peak - live - self._late
            # In the paper's mode they are duplicated now, whether they leave now or later.
            room -= sum(group.count * group.size_bytes for group in new) if self._paper else 0
            if room < 0:
                return None
            room = self._offload(number, room_before, room)
            stay = sum(group.count * group.size_bytes for group in new)
            self._late += stay
            room -= 0 if self._paper else stay
            if room < 0:
                return None
            room_before = room
        done = all(not group.count for group in self._groups)
        return self._placements if done else None

    def _offload(self, number: int, room_before: int, room: int) -> int:
        """Fills the link behind an operator; returns the memory that is left at it."""
        capacity = self._capacities[number]
        if capacity < self._least:
            return room
        order = self._groups
        if not self._paper:  # see bound()
            order = sorted(order, key=lambda group: group.update != number + 1)
        for group in order:
            if capacity < self._least:
                break
            late = group.update <= number
            limits = [group.count, capacity // group.size_bytes]
            if self._paper and not late:
                limits.append(room_before // group.size_bytes)
                if group.update > number + 1:
                    limits.append(room // group.size_bytes)
            count = min(limits)
            size = count * group.size_bytes
            capacity -= size
            if late:
                self._late -= size
            elif self._paper:
                room_before -= size
                room -= size if group.update > number + 1 else 0
            self._put(group, count, number, late=late)
        self._groups = [group for group in self._groups if group.count]
        return room

    def _put(self, group: Group, count: int, number: int, *, late: bool) -> None:
        snapshot: int | None = None
        if late:
            snapshot = group.update - 1
        elif self._paper:
            snapshot = number - 1
        for chunk in group.chunks[group.gone : group.gone + count]:
            self._placements.append(Placement(chunk, snapshot, number))
        group.gone += count
