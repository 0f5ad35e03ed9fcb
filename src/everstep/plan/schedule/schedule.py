"""Schedules that copy each tensor of the state to the host while a step runs, at a low memory peak.

The problem is that of Checkflow, section III-A, over the operators of one step (0-based). Item
``e`` of ``n_e`` bytes is first written by operator ``u_e``. A *snapshot*, a duplicate on the
device, is made before that, and is kept until the item has been *offloaded* to the host. All of it
is offloaded while one operator ``s`` runs, and the bytes offloaded during an operator are at most
the link's bandwidth times the operator's duration (Eq. 9). The peak is the maximum of the step's
own memory and all snapshots (Eq. 10).

``mode="paper"``: only snapshots are offloaded, and a snapshot that is offloaded at ``s`` was made
at ``s - 1`` or before (Eq. 7). It takes memory from ``c = min(u, s) - 1`` to ``s``; an earlier
creation is never better, so ``c`` needs no decision. ``mode="direct"``: before its first write a
tensor is offloaded directly; only one that is offloaded later needs a snapshot, from ``u - 1`` to
``s``. The paper does not have this case.

Corrections to the paper:

- Nothing is offloaded at the first operator (Eq. 7 begins at the second), and an item that the
  first operator writes cannot be snapshotted in time (Eq. 8 skips it). :func:`problem_of` puts
  the step mark before such an operator.
- Chunks are refined until the peak meets the bound of divisible items, or no longer falls
  (Algorithm 1 may split without end).
- A step may be infeasible, however small the chunks: the link is too slow (as in the paper's
  Table I).
- The memory limit of Algorithm 1 is in none of the equations: the peak is minimised, and the
  caller compares it with a limit.

As in the paper, a snapshot takes no time, and a plan begins with an idle link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from everstep.errors import InfeasibleError, OptionError
from everstep.plan.schedule.steps import StepTrace

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
        seconds: duration of each operator (:func:`everstep.plan.schedule.steps.seconds_of`).
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


_CHUNKS_BYTES = (4 << 20, 1 << 20, 256 << 10, 64 << 10, 16 << 10, 4 << 10, 1 << 10)
_LARGE_BYTES = 16 << 10
_CHUNKS_MAX = 1 << 16  # number of chunks smaller than _LARGE_BYTES, so that a plan stays short
_MET = 1.005  # peak relative to the bound below which chunks are not refined further
_LINK_BYTES_PER_S_MAX = 1e18
_CLOSE = 1e-4  # difference relative to the bound at which bisection ends


def bound(problem: Problem, mode: Mode) -> int:
    """Return the lowest peak of divisible items; no chunks have a lower one.

    All items exist from the beginning of the step. So one order, by first write, is best at every
    operator, and only the total of offloaded bytes matters. With ``"direct"`` the bound has a
    closed form; with ``"paper"`` it is found by bisection over the peak, where each trial computes
    the maximum bytes that can be offloaded by the end of each operator.

    Raises:
        InfeasibleError: the link is too slow; the error has the bandwidth that suffices.
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
            # Items that the next operator writes are offloaded first. Items that were written
            # before take memory here in any order.
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
            f"the first operator of the step writes {first[0]!r}: there is no time to copy it",
            quantity="link_bytes_per_s",
            needed=float("inf"),
        )
    if not _moves_all(problem, mode):
        needed = _least(problem, lambda faster: _moves_all(faster, mode))
        raise _too_slow(problem, needed)


def _too_slow(problem: Problem, needed: float, what: str = "") -> InfeasibleError:
    return InfeasibleError(
        f"{problem.size_bytes / 1e9:.3g} GB{what} cannot be copied within a step of "
        f"{problem.step_s * 1e3:.3g} ms at {problem.link_bytes_per_s / 1e9:.3g} GB/s: "
        f"that needs {_gb_up(needed)} GB/s",
        quantity="link_bytes_per_s",
        needed=needed,
    )


def _fits(problem: Problem, written: list[int], capacities: list[int], peak: int) -> bool:
    """Return True if divisible items can be offloaded below a peak in the paper's mode.

    With ``Y_t`` bytes offloaded by the end of operator ``t``, snapshots at ``t`` take
    ``max(Y_{t+1}, W_{t+1}) - Y_{t-1}``, where ``W_t`` bytes are first written by operator ``t`` or
    before. Each upper bound on ``Y_t`` grows with the previous ones, so it is best to offload the
    maximum at each operator.
    """
    before = earlier = 0  # Y_{t-1}, Y_{t-2}
    room_before = peak
    size_bytes = problem.size_bytes
    for number, live in enumerate(problem.live_bytes):
        room = peak - live
        # Never beyond the last operator: items that no operator writes need no snapshot.
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
    """Chunks of one size and one deadline, which are interchangeable.

    Attributes:
        update: operator that first writes to them.
        count: number of chunks.
        runs: consecutive chunks of one item: item, first byte, number of chunks.
    """

    update: int
    size_bytes: int
    count: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, item: int, begin: int, count: int) -> None:
        """Add ``count`` consecutive chunks of an item that start at byte ``begin``."""
        self.count += count
        self.runs.append((item, begin, count))

    def chunks(self) -> list[Chunk]:
        """Return all chunks, in the order of items."""
        size = self.size_bytes
        return [
            Chunk(item, begin, begin + size)
            for item, first, count in self.runs
            for begin in range(first, first + count * size, size)
        ]


def greedy(problem: Problem, mode: Mode, chunk_bytes: int) -> Schedule | None:
    """Return a plan by earliest deadline first and first fit, at the lowest peak that succeeds.

    Args:
        chunk_bytes: maximum size of a chunk.

    Returns:
        None if these chunks cannot all be offloaded within the step.
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
    """Return a plan with the largest chunks whose peak meets the bound.

    Raises:
        InfeasibleError: the link is too slow; the error has the bandwidth that suffices.
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
        # The error has the bandwidth for divisible items, which may not suffice for chunks.
        faster = replace(problem, link_bytes_per_s=error.needed)
        if _fit_somehow(faster, mode, groups_of(problem, least_bytes)):
            raise
    if best is not None:
        return best
    groups = groups_of(problem, least_bytes)
    needed = _least(problem, lambda faster: _fit_somehow(faster, mode, groups))
    raise _too_slow(problem, needed, f" in chunks of {least_bytes >> 10} KiB")


def _sizes_bytes(problem: Problem) -> list[int]:
    """Return chunk sizes to try, in descending order; small ones only if they are not too many."""
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
    """Return the lowest bandwidth that suffices, at most 0.1 % too high; infinity if none does."""

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
    """Return the number of GB/s with three digits, rounded up so that it suffices."""
    if not 0 < bytes_per_s < float("inf"):
        return str(bytes_per_s / 1e9)
    unit = 10.0 ** (math.floor(math.log10(bytes_per_s)) - 2)
    return f"{math.ceil(bytes_per_s / unit) * unit / 1e9:.3g}"


def groups_of(problem: Problem, chunk_bytes: int) -> list[Group]:
    """Return all chunks, earliest deadline first, then largest first."""
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
    """Chunks ``[begin, end)`` of a group that are offloaded during one operator."""

    group: Group
    begin: int
    end: int
    snapshot: int | None
    offload: int


@dataclass(slots=True)
class _Rest:
    """Chunks of a group that are not offloaded yet."""

    group: Group
    update: int
    size_bytes: int
    count: int


class _Greedy:
    """One pass over the operators that keeps memory below a given peak."""

    def __init__(self, problem: Problem, mode: Mode, groups: list[Group], peak: int) -> None:
        self._paper = mode == "paper"
        self._peak = peak
        self._live = problem.live_bytes
        self._capacities = problem.capacities(mode)
        self._rests = [_Rest(g, g.update, g.size_bytes, g.count) for g in groups]
        self._least = min((group.size_bytes for group in groups), default=0)
        self._late = 0  # bytes of snapshots that were made and are not offloaded
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
            # In the paper's mode they are duplicated now, even if they are offloaded now.
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
        """Offload as much as the link moves during an operator; return the memory left at it."""
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
            # In this mode a snapshot takes memory at its operator and at the one before.
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
