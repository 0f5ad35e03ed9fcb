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
be snapshotted before it if that is what writes (Eq. 8 skips it; :func:`.problem_of` puts the step
mark before it); chunks are refined until the peak meets the bound of divisible items, or no longer
falls (Algorithm 1 can split for ever); not every step can be split until it fits: the link may be
too slow (its own Table I). Algorithm 1's memory limit is in no equation: the peak is minimised, and
whoever has a limit compares. What is left as in the paper: making a snapshot takes no time, and a
plan is one step's, with nothing on its way from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from everstep.errors import InfeasibleError
from everstep.plan.schedule.problem import (
    Chunk,
    Item,
    Mode,
    Placement,
    Problem,
    Schedule,
    memory_of,
    peak_of,
    problem_of,
    validate,
)

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

_CHUNKS_BYTES = (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10, 1 << 10)
_LARGE_BYTES = 16 << 10
_CHUNKS_MAX = 1 << 16  # of less than that, so that a plan stays short
_MET = 1.005  # of the bound: refining further is not worth the time
_LINK_BYTES_PER_S_MAX = 1e18
_CLOSE = 1e-4  # of the bound: bisecting further is not


def bound(problem: Problem, mode: Mode) -> int:
    """The lowest peak of divisible items; no chunks have a lower one.

    All items are there from the beginning, so one order is best at every operator at once, and what
    has left in total is all that matters. ``direct``: in closed form. ``paper``: for a given peak
    the most that can have left, operator by operator; then bisection.

    Raises:
        InfeasibleError: the link is too slow; with the bandwidth that would be needed.
    """
    _check(problem, mode)
    written = problem.written_before()
    capacities = problem.capacities(mode)
    if mode == "direct":
        left = peak = 0
        for number, live in enumerate(problem.live_bytes):
            late = written[number]
            soon = written[number + 1]
            kept = max(0, late - left)
            # What the next operator writes goes first: late ones take memory here all the same.
            duplicated = max(0, soon - max(late, left) - capacities[number])
            peak = max(peak, live + kept + duplicated)
            left = min(problem.size_bytes, left + capacities[number])
        return peak
    low = problem.peak_bytes
    high = problem.peak_bytes + problem.size_bytes
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
    if not _moves_all(problem, mode):
        needed = _least(problem, lambda faster: _moves_all(faster, mode))
        raise _too_slow(problem, needed)


def _too_slow(problem: Problem, needed: float, what: str = "") -> InfeasibleError:
    return InfeasibleError(
        f"{problem.size_bytes / 1e9:.3g} GB{what} do not leave within a step of "
        f"{problem.step_s * 1e3:.3g} ms at {problem.link_bytes_per_s / 1e9:.3g} GB/s: "
        f"that takes {_gb_up(needed)} GB/s",
        quantity="link_bytes_per_s",
        needed=needed,
    )


def _fits(problem: Problem, written: list[int], capacities: list[int], peak: int) -> bool:
    """Return True if divisible items leave below a peak, each snapshot made one operator ahead.

    With ``Y_t`` bytes offloaded by the end of operator ``t``, snapshots at ``t`` take
    ``max(Y_{t+1}, W_{t+1}) - Y_{t-1}``, where ``W`` are those that must have been made. Each bound
    on ``Y_t`` grows with the previous ones, so taking the most at each operator is best.
    """
    before = earlier = 0  # Y_{t-1}, Y_{t-2}
    room_before = peak
    size_bytes = problem.size_bytes
    for number, live in enumerate(problem.live_bytes):
        room = peak - live
        if room < 0 or written[min(number + 1, len(written) - 2)] - before > room:
            return False
        now = min(
            size_bytes,
            before + min(capacities[number], room),
            earlier + room_before,
        )
        earlier = before
        before = max(before, now)
        room_before = room
    return before >= size_bytes


@dataclass(slots=True)
class Group:
    """Chunks of one size and one deadline: which of them leaves first makes no difference.

    Attributes:
        count: of them.
        runs: neighbours in one item: item, first byte, and how many.
    """

    update: int
    size_bytes: int
    count: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, item: int, begin: int, count: int) -> None:
        """So many more, one behind the other."""
        self.count += count
        self.runs.append((item, begin, count))

    def chunks(self) -> list[Chunk]:
        """All of them, in the order of items."""
        size = self.size_bytes
        return [
            Chunk(item, begin, begin + size)
            for item, first, count in self.runs
            for begin in range(first, first + count * size, size)
        ]


def greedy(problem: Problem, mode: Mode, chunk_bytes: int) -> Schedule | None:
    """The earliest deadline first, first fit, at the lowest peak at which that succeeds.

    Args:
        chunk_bytes: largest chunk.

    Returns:
        None if these chunks do not fit behind the operators.
    """
    low = lowest = bound(problem, mode)
    high = problem.peak_bytes + problem.size_bytes
    groups = groups_of(problem, chunk_bytes)
    best = _Greedy(problem, mode, groups, lowest).run()
    if best is None:
        best = _Greedy(problem, mode, groups, high).run()
        if best is None:
            return None
        while high - low > lowest * _CLOSE:
            middle = (low + high) // 2
            found = _Greedy(problem, mode, groups, middle).run()
            if found is None:
                low = middle + 1
            else:
                best = found
                high = middle
    chunks = {id(group): group.chunks() for group in groups}
    placements = [
        Placement(chunk, leaving.snapshot, leaving.offload)
        for leaving in best
        for chunk in chunks[id(leaving.group)][leaving.begin : leaving.end]
    ]
    return Schedule(mode, tuple(placements), peak_of(problem, placements), lowest, chunk_bytes)


def schedule(problem: Problem, mode: Mode) -> Schedule:
    """A plan, with chunks as large as they may be for a peak at the bound.

    Raises:
        InfeasibleError: the link is too slow; with the bandwidth that would be needed.
    """
    sizes_bytes = _sizes_bytes(problem)
    least_bytes = sizes_bytes[-1]
    best: Schedule | None = None
    try:
        for chunk_bytes in sizes_bytes:
            found = greedy(problem, mode, chunk_bytes)
            if found is not None and (best is None or found.peak_bytes < best.peak_bytes):
                best = found
            if best is not None and best.peak_bytes <= best.bound_bytes * _MET:
                return best
    except InfeasibleError as error:
        if error.needed == float("inf"):
            raise
        faster = replace(problem, link_bytes_per_s=error.needed)
        if _fit_somehow(faster, mode, groups_of(problem, least_bytes)):
            raise
    if best is not None:
        return best
    groups = groups_of(problem, least_bytes)
    needed = _least(problem, lambda faster: _fit_somehow(faster, mode, groups))
    raise _too_slow(problem, needed, f" in chunks of {least_bytes >> 10} KiB")


def _sizes_bytes(problem: Problem) -> list[int]:
    """Of chunks, falling: small ones where they are not too many."""
    least_bytes = min(_LARGE_BYTES, problem.size_bytes // _CHUNKS_MAX)
    return [chunk_bytes for chunk_bytes in _CHUNKS_BYTES if chunk_bytes >= least_bytes]


def _moves_all(problem: Problem, mode: Mode) -> bool:
    """Return True if the link can move all bytes, in whole bytes after each operator."""
    return sum(problem.capacities(mode)) >= problem.size_bytes


def _fit_somehow(problem: Problem, mode: Mode, groups: list[Group]) -> bool:
    """Return True if the chunks fit after the operators, regardless of memory."""
    most = problem.peak_bytes + problem.size_bytes
    return _Greedy(problem, mode, groups, most).run() is not None


def _least(problem: Problem, enough: Callable[[Problem], bool]) -> float:
    """The least bandwidth that is enough, at most 0.1 % too high; infinity if none is."""

    def fits(link_bytes_per_s: float) -> bool:
        return enough(replace(problem, link_bytes_per_s=link_bytes_per_s))

    low = high = problem.link_bytes_per_s
    while not fits(high):
        low = high
        high = 2 * high
        if high > _LINK_BYTES_PER_S_MAX:
            return float("inf")
    while high > 1.001 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _gb_up(bytes_per_s: float) -> str:
    """In GB/s, three digits, rounded up: what is said to be enough is."""
    if not 0 < bytes_per_s < float("inf"):
        return str(bytes_per_s / 1e9)
    unit = 10.0 ** (math.floor(math.log10(bytes_per_s)) - 2)
    return f"{math.ceil(bytes_per_s / unit) * unit / 1e9:.3g}"


def groups_of(problem: Problem, chunk_bytes: int) -> list[Group]:
    """All chunks, the earliest deadline first, and of equals the largest."""
    found: dict[tuple[int, int], Group] = {}
    for number, item in enumerate(problem.items):
        count, rest = divmod(item.size_bytes, chunk_bytes)
        for begin, size, many in ((0, chunk_bytes, count), (count * chunk_bytes, rest, 1)):
            if size and many:
                key = (item.update, -size)
                found.setdefault(key, Group(item.update, size)).add(number, begin, many)
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Chunks ``[begin, end)`` of a group, behind one operator."""

    group: Group
    begin: int
    end: int
    snapshot: int | None
    offload: int


@dataclass(slots=True)
class _Rest:
    """Chunks of a group that have not left."""

    group: Group
    update: int
    size_bytes: int
    count: int


class _Greedy:
    """One pass over the operators, below a given peak."""

    def __init__(self, problem: Problem, mode: Mode, groups: list[Group], peak: int) -> None:
        self._paper = mode == "paper"
        self._peak = peak
        self._live = problem.live_bytes
        self._capacities = problem.capacities(mode)
        self._rests = [_Rest(g, g.update, g.size_bytes, g.count) for g in groups]
        self._least = min((group.size_bytes for group in groups), default=0)
        self._late = 0  # bytes of snapshots that were made and have not left
        self._leaving: list[_Leaving] = []

    def run(self) -> list[_Leaving] | None:
        """Return the departures by operator; None if memory or operators run out."""
        forced: dict[int, list[_Rest]] = {}
        for rest in self._rests:
            forced.setdefault(rest.update - 1, []).append(rest)
        room_before = 0
        for number, live in enumerate(self._live):
            new = forced.get(number, ())
            room = self._peak - live - self._late
            # In the paper's mode they are duplicated now, whether they leave now or later.
            room -= sum(rest.count * rest.size_bytes for rest in new) if self._paper else 0
            if room < 0:
                return None
            room = self._offload(number, room_before, room)
            stay = sum(rest.count * rest.size_bytes for rest in new)
            self._late += stay
            room -= 0 if self._paper else stay
            if room < 0:
                return None
            room_before = room
        done = not any(rest.count for rest in self._rests)
        return self._leaving if done else None

    def _offload(self, number: int, room_before: int, room: int) -> int:
        """Fills the link behind an operator; returns the memory that is left at it."""
        capacity = self._capacities[number]
        least = self._least
        paper = self._paper
        if capacity < least:
            return room
        order = self._rests
        if not paper:  # see bound()
            order = sorted(order, key=lambda rest: rest.update != number + 1)
        emptied = False
        for rest in order:
            if capacity < least:
                break
            size = rest.size_bytes
            late = rest.update <= number
            count = min(rest.count, capacity // size)
            if paper and not late:
                count = min(count, room_before // size)
                if rest.update > number + 1:
                    count = min(count, room // size)
            if not count:
                continue
            moved = count * size
            capacity -= moved
            if late:
                self._late -= moved
            elif paper:
                room_before -= moved
                room -= moved if rest.update > number + 1 else 0
            self._put(rest, count, number, late=late)
            emptied |= not rest.count
        if emptied:
            self._rests = [rest for rest in self._rests if rest.count]
        return room

    def _put(self, rest: _Rest, count: int, number: int, *, late: bool) -> None:
        snapshot: int | None = None
        if late:
            snapshot = rest.update - 1
        elif self._paper:
            snapshot = number - 1
        begin = rest.group.count - rest.count
        self._leaving.append(_Leaving(rest.group, begin, begin + count, snapshot, number))
        rest.count -= count
