"""The median of what was measured lately, in which older samples weigh less."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["weighted_median"]


def weighted_median(values: Sequence[float], half_life: float) -> float | None:
    """The weighted median of samples in the order in which they came; None of none.

    Single outliers (a stalled disk, a step that compiled something) do not move it.

    Args:
        half_life: a sample weighs half as much as one that is so many samples newer.
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
