"""Number and sizes of the parts of a multi-step base: each part fills its window.

Equal parts (GoCkpt section 4.2) leave the link idle in the first windows, which have few gradients
to copy, and make training wait in the last. Here a part is as large as its window leaves time for,
next to the gradients that are due in it. With gradients of ``r`` of the state, held for one step,
of which a full copy takes ``T``, the captured share ``C`` of the state grows by

    ``C_i = C_(i-1) (1 - r) + 1 / T``

per step while nothing waits, towards ``1 / (r T)``; the rest is in the last part. No other cut
waits less: a part that takes the link ``d`` longer than its window makes training wait for ``d``,
and shortens the last part by at most ``d (1 - r)``. So training waits for at least ``T - 1 / r``
steps, if that is positive, with any number of parts. The bound for equal parts ignores for how long
gradients are held; it may be less, or more.

If updates wait for gradients (``gockpt``), each captured share is waited for in each later step:
parts fill the last windows, and no part is captured earlier than ``1 / r`` steps before the last,
from where it is cheaper to wait for it. That is optimal, too, if copies end before the update
begins. If copies overlap their update, if the next backward waits, or if gradients are held for
more than a step, the result is no worse than equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.plan.multistep import Overlap, Pipeline, overlap

_HALVINGS = 24  # of how full windows are
_NEAR = 0.02
_NEAR_S = 1e-6


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts of certain sizes, and the cost of a base in them.

    Attributes:
        shares: share of the state in each part.
    """

    shares: Sequence[float]
    overlap: Overlap


def best_cut(pipeline: Pipeline, parts: int, held_steps: int | None) -> Cut:
    """Return the best sizes for this number of parts; equal ones if no others wait less.

    Args:
        parts: number of parts, from 1.
        held_steps: see :func:`.multistep.overlap`.

    Raises:
        OptionError: an argument is out of range.
    """
    even = overlap(pipeline, parts, held_steps)
    equal = Cut((1 / parts,) * parts, even)
    if parts == 1:
        return equal
    found = [
        Cut(shares, overlap(pipeline, parts, held_steps, shares))
        for shares in filling_shares(pipeline, parts, held_steps)
    ]
    # Rounded to nanoseconds: differences by rounding of floats decide nothing.
    return min([*found, equal], key=lambda cut: round(cut.overlap.stall_s, 9))


def fewest(losses_s: Sequence[float]) -> int:
    """Return the fewest parts that cost training at most 2 % (and a microsecond) more than the
    least.

    Each additional part takes memory for gradients, and a step of time.

    Args:
        losses_s: cost of a base in 1, 2, ... parts.
    """
    enough_s = (1 + _NEAR) * min(losses_s) + _NEAR_S
    return 1 + next(number for number, loss_s in enumerate(losses_s) if loss_s <= enough_s)


def fewest_of(lost_s: Callable[[int], float], parts_max: int, part_s: float) -> int:
    """Return :func:`fewest` for up to ``parts_max`` parts, computing no more costs than necessary.

    Each computation takes training a tenth of a millisecond.

    Args:
        lost_s: returns the cost of a base in a number of parts.
        part_s: training's own work per part, which is included in that.
    """
    losses_s: list[float] = []
    enough_s = math.inf
    for parts in range(1, parts_max + 1):
        if part_s * parts > enough_s or enough_s <= 2 * _NEAR_S:
            break  # nor is it worth while with more
        losses_s.append(lost_s(parts))
        enough_s = (1 + _NEAR) * min(losses_s) + _NEAR_S
    return fewest(losses_s)


def filling_shares(
    pipeline: Pipeline, parts: int, held_steps: int | None
) -> list[tuple[float, ...]]:
    """Return candidate shares for parts that fill their windows; the caller takes the best."""
    state_s = pipeline.state_s
    gradients_s = pipeline.gradients_s
    if not state_s:
        return []
    worth = parts if not gradients_s else min(parts, 1 + int(state_s / gradients_s))
    if held_steps is None:
        return [_late(pipeline, parts, worth)]
    if held_steps or not gradients_s:
        return [_early(pipeline, parts, parts, 1.0)]
    # The next backward waits: what the link does not manage until then is better not captured
    # before it pays to wait for it.
    most = (pipeline.update_s + pipeline.part_s / 2 + pipeline.forward_s) / gradients_s
    return [_early(pipeline, parts, full, most) for full in sorted({0, 1, worth, parts})]


def _late(pipeline: Pipeline, parts: int, worth: int) -> tuple[float, ...]:
    """Return shares that fill the last windows."""
    window = (pipeline.forward_s + pipeline.backward_s) / pipeline.state_s
    shares = [0.0] * parts
    left = 1.0
    for step in range(parts - 1, parts - 1 - worth, -1):
        shares[step] = min(left, window)
        left -= shares[step]
    shares[-1] += left
    return tuple(shares)


def _early(pipeline: Pipeline, parts: int, full: int, most: float) -> tuple[float, ...]:
    """Return shares that fill all windows equally, and only as much as necessary.

    Args:
        full: number of last steps that may be waited for; before them at most ``most`` of the state
            is captured.
    """
    shares = _filled(pipeline, parts, full, most, 1.0)
    least = 0.0
    fullness = 1.0
    if sum(shares) >= 1:
        for _ in range(_HALVINGS):
            middle = (least + fullness) / 2
            tried = _filled(pipeline, parts, full, most, middle)
            if sum(tried) >= 1:
                fullness = middle
                shares = tried
            else:
                least = middle
    # All of the state is copied: the last part takes the rest, however long training waits.
    shares[-1] += 1 - sum(shares)
    return tuple(shares)


def _filled(pipeline: Pipeline, parts: int, full: int, most: float, fullness: float) -> list[float]:
    """Return shares with which the link is busy for this share of each window, up to the whole
    state.
    """
    window_s = fullness * (pipeline.forward_s + pipeline.backward_s)
    captured = 0.0
    shares = []
    for step in range(parts):
        between_s = pipeline.update_s + pipeline.part_s / 2
        gradients_s = max(0.0, pipeline.gradients_s * captured - between_s)
        limit = min(most, 1.0) if step < parts - full else 1.0
        share = max(0.0, window_s - gradients_s) / pipeline.state_s
        share = max(0.0, min(share, limit - captured))
        shares.append(share)
        captured += share
    return shares
