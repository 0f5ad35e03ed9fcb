"""Which units are copied in which step of a base over several: parts that fill their windows."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.capture.multistep import Unit, cut_as, cut_parts
from everstep.plan.multistep import Overlap, Pipeline, overlap
from everstep.plan.multistep_cut import Cut, best_cut

__all__ = ["cut_units", "modelled", "shares_of"]


def cut_units(
    units: Sequence[Unit],
    pipeline: Pipeline,
    parts: int,
    held_steps: int | None,
    gradients_s_max: float = float("inf"),
    best: Cut | None = None,
) -> list[list[Unit]]:
    """Cuts units so that a base holds training up least: into parts that fill their windows, as
    far as units can, or into equal ones.

    Args:
        units: in the order of the state.
        held_steps: as for :func:`everstep.plan.multistep.overlap`.
        gradients_s_max: copy seconds of all gradients that there is host memory for; equal parts
            are taken where others need more.
        best: what :func:`~everstep.plan.multistep_cut.best_cut` finds for so many parts, if that is
            known.
    """
    equal = cut_parts(units, parts)
    if len(equal) <= 1:
        return equal
    best = best or best_cut(pipeline, len(equal), held_steps)
    filling = cut_as(units, best.shares)
    found = modelled(filling, pipeline, held_steps)
    if found.gradients_s > gradients_s_max:
        return equal
    return equal if modelled(equal, pipeline, held_steps).stall_s < found.stall_s else filling


def modelled(cut: Sequence[Sequence[Unit]], pipeline: Pipeline, held_steps: int | None) -> Overlap:
    """What a base in these parts costs."""
    return overlap(pipeline, len(cut), held_steps, shares_of(cut))


def shares_of(cut: Sequence[Sequence[Unit]]) -> list[float]:
    """Of the bytes of all parts, in each."""
    sizes = [sum(unit.size_bytes for unit in run) for run in cut]
    whole = sum(sizes)
    return [size / whole if whole else 1 / len(sizes) for size in sizes]
