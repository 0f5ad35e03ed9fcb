"""Median of recent samples, with less weight for older ones."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["weighted_median"]


def weighted_median(values: Sequence[float], half_life: float) -> float | None:
    """Return the weighted median of samples in the order of their arrival; None if there are none.

    Single outliers (a stalled disk, a step that compiled something) do not change it.

    Args:
        half_life: number of newer samples after which a sample's weight is halved.
    """
    newest = len(values) - 1
    weighted = sorted(
        (value, 0.5 ** ((newest - place) / half_life)) for place, value in enumerate(values)
    )
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in weighted:
        half -= weight
        if half <= 0:
            return value
    return weighted[-1][0] if weighted else None
