"""Checkflow's integer program as it is printed, equation by equation (section III-A): an oracle for
:mod:`everstep.plan.schedule.exact`.

A binary for every item, operator and action: for small problems only (BERT has 562 000 of them).
Two things are put right, else it admits plans that save nothing: nothing is offloaded at the first
operator, for which Eq. 7 asks no snapshot; and Eq. 8, which begins at the second, holds at the
first, too. The package solves the same with an integer for many of these binaries, and must come to
the same peaks.

Needs PySCIPOpt (``pip install "everstep[plan]"``).
"""

from __future__ import annotations

import importlib
from typing import Any

from everstep.plan.schedule.schedule import Problem, Schedule, peak_of

__all__ = ["literal", "obeys"]

_STEPS_MAX = 2000  # binaries


def literal(problem: Problem, *, limit_s: float = 60.0) -> int | None:
    """The lowest peak for items that leave whole, as the paper duplicates and offloads them.

    Returns:
        Bytes; None if there is no plan.
    """
    scip: Any = importlib.import_module("pyscipopt")
    items = problem.items
    steps = range(len(problem.seconds))
    assert 3 * len(items) * len(steps) <= _STEPS_MAX, "for small problems"
    model = scip.Model()
    model.hideOutput()
    model.setParam("limits/time", limit_s)

    def binaries(name: str) -> list[list[Any]]:
        return [[model.addVar(f"{name}{e}.{t}", "B") for t in steps] for e in range(len(items))]

    create, preserve, offload, held = map(binaries, ("C", "P", "S", "alpha"))  # Eq. 1
    peak_mem = model.addVar("peak_mem", lb=0, ub=problem.peak_bytes + problem.size_bytes)
    for e, item in enumerate(items):
        c = create[e]
        p = preserve[e]
        s = offload[e]
        for t in steps:
            model.addCons(c[t] + p[t] + s[t] <= 1)  # Eq. 2
            # Eq. 6: what is checkpointed is there all the time.
            for action in (c[t], p[t], s[t]):
                model.addCons(held[e][t] >= action)  # Eq. 11
        for t in steps[1:]:
            model.addCons(p[t] <= c[t - 1] + p[t - 1])  # Eq. 3
            model.addCons(s[t] <= c[t - 1] + p[t - 1])  # Eq. 7
        model.addCons(s[0] == 0)  # Eq. 7 at the first operator
        model.addCons(scip.quicksum(s) == 1)  # Eq. 4
        model.addCons(scip.quicksum(c) == 1)
        model.addCons(p[0] == 0)  # Eq. 5
        if item.update < len(steps):
            if not item.update:
                return None  # Eq. 8 at the first operator
            model.addCons(scip.quicksum(c[: item.update]) >= 1)  # Eq. 8
    for t in steps:
        sizes = [item.size_bytes for item in items]
        moved = scip.quicksum(size * offload[e][t] for e, size in enumerate(sizes))
        model.addCons(moved <= problem.link_bytes_per_s * problem.seconds[t])  # Eq. 9
        snapshots = scip.quicksum(size * held[e][t] for e, size in enumerate(sizes))
        model.addCons(peak_mem >= snapshots + problem.live_bytes[t])  # Eq. 10
    model.setObjective(peak_mem)  # Eq. 12
    model.optimize()
    if model.getStatus() == "infeasible":
        return None
    assert model.getStatus() == "optimal", model.getStatus()
    peak: float = model.getObjVal()
    return round(peak)


def obeys(problem: Problem, found: Schedule) -> bool:
    """Check all constraints of a plan directly, operator by operator and slice by slice."""
    slices: list[list[tuple[int, int]]] = [[] for _ in problem.items]
    moved = [0] * len(problem.seconds)
    for place in found.placements:
        chunk, snapshot, offload = place.chunk, place.snapshot, place.offload
        item = problem.items[chunk.item]
        if snapshot is None and (found.mode == "paper" or offload >= item.update):
            return False
        if snapshot is not None and not 0 <= snapshot < min(item.update, offload):
            return False
        if not 0 < chunk.size_bytes <= found.chunk_bytes:
            return False
        slices[chunk.item].append((chunk.begin, chunk.end))
        moved[offload] += chunk.size_bytes
    for item, mine in zip(problem.items, slices, strict=True):
        ends = [0, *(end for _, end in sorted(mine))]
        if [begin for begin, _ in sorted(mine)] != ends[:-1] or ends[-1] != item.size_bytes:
            return False
    if any(m > problem.link_bytes_per_s * t for m, t in zip(moved, problem.seconds, strict=True)):
        return False
    return peak_of(problem, found.placements) == found.peak_bytes >= found.bound_bytes
