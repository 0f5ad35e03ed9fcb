"""Which part of the state is copied in which step of a base that takes several (GoCkpt 4.2).

A *unit* is what must be captured at one step: a parameter, and all the state that its optimizer
has of it. Parts are runs of units in the order of the state, so that small tensors which lie side
by side in the file are still copied together. Parts are equal, and no larger than they must be, or
of sizes that fill their windows (:mod:`everstep.plan.multistep_cut`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Unit", "cut_by_shares", "cut_parts"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A parameter and its optimizer's state of it; or, without either, entries that never change.

    Attributes:
        optimizer: key of the optimizer that updates it; "" if none does.
        parameter: its name, as the optimizer knows it.
        entries: names of its entries.
        size_bytes: of these.
        gradient_bytes: of the parameter's gradient, if it gets any.
    """

    optimizer: str
    parameter: str
    entries: tuple[str, ...]
    size_bytes: int
    gradient_bytes: int = 0


def cut_parts(units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """Cuts units into at most ``count`` runs, none of them empty, the largest of them as small as
    it can be.

    Args:
        units: in the order of the state.
        count: from 1.
    """
    if not units:
        return [[]]
    count = min(count, len(units))
    least = max(unit.size_bytes for unit in units)
    most = sum(unit.size_bytes for unit in units)
    while least < most:
        middle = (least + most) // 2
        if len(_runs(units, middle)) <= count:
            most = middle
        else:
            least = middle + 1
    runs = _runs(units, least)
    while len(runs) < count:  # equals are left over: more, smaller ones do no harm
        large = max((run for run in runs if len(run) > 1), key=_size_bytes)
        at = runs.index(large)
        runs[at : at + 1] = _halves(large)
    return runs


def cut_by_shares(units: Sequence[Unit], shares: Sequence[float]) -> list[list[Unit]]:
    """Cuts units into runs, none of them empty, that end as close as can be to where parts of
    these shares would: as many as there are shares, or units if these are fewer.

    Args:
        units: in the order of the state.
        shares: of the bytes of all units; their sum is 1.
    """
    count = min(len(shares), len(units))
    whole = _size_bytes(list(units))
    ends = [0]  # bytes of all units before each
    for unit in units:
        ends.append(ends[-1] + unit.size_bytes)
    runs: list[list[Unit]] = []
    begin = 0
    wanted = 0.0
    for number in range(count - 1):
        wanted += shares[number] * whole
        last = len(units) - (count - 1 - number)  # one is left for each of the others
        end = min(max(bisect_left(ends, wanted), begin + 1), last)
        if end - 1 > begin and wanted - ends[end - 1] < ends[end] - wanted:
            end -= 1
        runs.append(list(units[begin:end]))
        begin = end
    return [*runs, list(units[begin:])]


def _runs(units: Sequence[Unit], size_bytes: int) -> list[list[Unit]]:
    """As few runs as can be of which none is larger."""
    runs: list[list[Unit]] = []
    left = 0
    for unit in units:
        if not runs or unit.size_bytes > left:
            runs.append([])
            left = size_bytes
        runs[-1].append(unit)
        left -= unit.size_bytes
    return runs


def _halves(run: list[Unit]) -> list[list[Unit]]:
    """Two runs of which the larger is as small as it can be."""
    whole = _size_bytes(run)
    first = 0
    best = (float("inf"), 1)
    for at in range(1, len(run)):
        first += run[at - 1].size_bytes
        best = min(best, (max(first, whole - first), at))
    return [run[: best[1]], run[best[1] :]]


def _size_bytes(run: list[Unit]) -> int:
    return sum(unit.size_bytes for unit in run)
