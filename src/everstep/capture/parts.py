"""Parts of the state for a base that is captured over several steps (GoCkpt, section 4.2).

A *unit* must be captured at one step: a parameter, and all of its optimizer state. Parts are runs
of units in the order of the state, so that small tensors which are adjacent in the file are copied
together. Parts are equal, and as small as possible, or sized to fill their windows
(:mod:`everstep.plan.multistep_cut`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Unit", "cut_by_shares", "cut_parts"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A parameter with its optimizer state; or, without an optimizer, entries that never change.

    Attributes:
        optimizer: key of the optimizer that updates it; "" if none does.
        parameter: name of the parameter in that optimizer.
        entries: names of its entries.
        size_bytes: size of these entries.
        gradient_bytes: size of the parameter's gradient, if it has one.
    """

    optimizer: str
    parameter: str
    entries: tuple[str, ...]
    size_bytes: int
    gradient_bytes: int = 0


def cut_parts(units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """Cut units into at most ``count`` non-empty runs, the largest as small as possible.

    Args:
        units: units in the order of the state.
        count: at least 1.
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
    # Units of equal size can give fewer runs than asked for: split the largest until the count
    # fits.
    while len(runs) < count:
        large = max((run for run in runs if len(run) > 1), key=_size_bytes)
        at = runs.index(large)
        runs[at : at + 1] = _halves(large)
    return runs


def cut_by_shares(units: Sequence[Unit], shares: Sequence[float]) -> list[list[Unit]]:
    """Cut units into non-empty runs that end as close as possible to the given shares.

    Return as many runs as there are shares, or as units if those are fewer.

    Args:
        units: units in the order of the state.
        shares: shares of the bytes of all units; their sum is 1.
    """
    count = min(len(shares), len(units))
    whole = _size_bytes(list(units))
    ends = [0]  # bytes of all units before each unit
    for unit in units:
        ends.append(ends[-1] + unit.size_bytes)
    runs: list[list[Unit]] = []
    begin = 0
    wanted = 0.0
    for number in range(count - 1):
        wanted += shares[number] * whole
        last = len(units) - (count - 1 - number)  # leave a unit for each remaining run
        end = min(max(bisect_left(ends, wanted), begin + 1), last)
        if end - 1 > begin and wanted - ends[end - 1] < ends[end] - wanted:
            end -= 1
        runs.append(list(units[begin:end]))
        begin = end
    return [*runs, list(units[begin:])]


def _runs(units: Sequence[Unit], size_bytes: int) -> list[list[Unit]]:
    """Return the fewest runs of which none is larger than ``size_bytes``."""
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
    """Cut a run in two, the larger as small as possible."""
    whole = _size_bytes(run)
    first = 0
    best = (float("inf"), 1)
    for at in range(1, len(run)):
        first += run[at - 1].size_bytes
        best = min(best, (max(first, whole - first), at))
    return [run[: best[1]], run[best[1] :]]


def _size_bytes(run: list[Unit]) -> int:
    return sum(unit.size_bytes for unit in run)
