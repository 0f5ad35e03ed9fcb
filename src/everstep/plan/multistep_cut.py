"""How large the parts of a base over several steps are: so that each fills its window.

Equal parts (GoCkpt section 4.2) leave the link idle in the first windows, in which there are few
gradients to copy, and make training wait in the last. Here a part is as large as its window leaves
time for, besides the gradients that are due in it. With gradients of ``r`` of the state, held for
one step, of which a full copy takes ``T``, the share ``C`` of the state that is captured goes

    ``C_i = C_(i-1) (1 - r) + 1 / T``

from step to step while nothing waits, towards ``1 / (r T)``; what is missing then is in the last
part. No cut waits less: a part that takes the link ``d`` longer than its window makes training wait
for ``d``, and makes the last part shorter by no more than ``d (1 - r)``. So training waits for
``T - 1 / r`` steps at least, if that is more than 0, in however many parts; the bound of equal
parts, which does not ask for how long gradients are held, may be less, or more.

Where updates wait for gradients (``gockpt``) each captured share is waited for in each step to
come: parts fill the last windows, and no part is captured earlier than ``1 / r`` steps before the
last, from where on it is cheaper to wait for it. That, too, is the least where the update does not
begin before. Where gradients are copied behind their update, too, where the next backward
waits, or gradients are held for more than a step, what is found is no worse than equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.plan.multistep import PARTS_MAX, Overlap, Pipeline, overlap

__all__ = [
    "Cut",
    "best_cut",
    "best_parts",
    "fewest",
    "fewest_of",
    "filling_shares",
    "least_wait_s",
]

_HALVINGS = 24  # of how full windows are
_NEAR = 0.02
_NEAR_S = 1e-6


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts of a size, and what a base in them costs.

    Attributes:
        shares: of the state, in each part.
    """

    shares: Sequence[float]
    overlap: Overlap


def least_wait_s(pipeline: Pipeline) -> float:
    """What training waits for at least, in however many parts of whatever sizes, where gradients
    are held for one step: ``T - 1 / r`` steps, or nothing."""
    if not pipeline.gradients_s:
        return 0.0
    return max(0.0, pipeline.state_s * (1 - pipeline.step_s / pipeline.gradients_s))


def best_cut(pipeline: Pipeline, parts: int, held_steps: int | None) -> Cut:
    """So many parts, as large as they should be; equal ones where others wait longer.

    Args:
        parts: from 1.
        held_steps: as for :func:`.multistep.overlap`.

    Raises:
        OptionError: for no parts, or fewer than no steps.
    """
    even = overlap(pipeline, parts, held_steps)
    equal = Cut((1 / parts,) * parts, even)
    if parts == 1:
        return equal
    found = [
        Cut(shares, overlap(pipeline, parts, held_steps, shares))
        for shares in filling_shares(pipeline, parts, held_steps)
    ]
    return min([*found, equal], key=lambda cut: round(cut.overlap.stall_s, 9))


def best_parts(pipeline: Pipeline, held_steps: int | None, parts_max: int = PARTS_MAX) -> Overlap:
    """The number of parts to take, see :func:`fewest`; one, a lazy base, is among them."""
    found = [best_cut(pipeline, parts, held_steps).overlap for parts in range(1, parts_max + 1)]
    return found[fewest([item.lost_s for item in found]) - 1]


def fewest(losses_s: Sequence[float]) -> int:
    """The fewest parts that cost training no more than 2 % (and a microsecond) above the least:
    each part more takes memory for gradients, and the base a step longer.

    Args:
        losses_s: what a base costs in 1, 2, ... parts.
    """
    enough_s = (1 + _NEAR) * min(losses_s) + _NEAR_S
    return 1 + next(number for number, loss_s in enumerate(losses_s) if loss_s <= enough_s)


def fewest_of(lost_s: Callable[[int], float], parts_max: int, part_s: float) -> int:
    """What :func:`fewest` finds for up to ``parts_max`` parts, asking for no more than it needs: it
    takes training a tenth of a millisecond for each number of parts.

    Args:
        lost_s: what a base costs in so many parts.
        part_s: of training's own work for each part, which is in that.
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
    """Shares of the state in parts that fill their windows: of several ways the best is to be
    taken."""
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
    """The last windows are full."""
    window = (pipeline.forward_s + pipeline.backward_s) / pipeline.state_s
    shares = [0.0] * parts
    left = 1.0
    for step in range(parts - 1, parts - 1 - worth, -1):
        shares[step] = min(left, window)
        left -= shares[step]
    shares[-1] += left
    return tuple(shares)


def _early(pipeline: Pipeline, parts: int, full: int, most: float) -> tuple[float, ...]:
    """All windows are equally full, and fuller than they must be only if not all fits.

    Args:
        full: so many of the last steps may be waited for; before them no more than ``most`` of the
            state is captured.
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
    shares[-1] += 1 - sum(shares)
    return tuple(shares)


def _filled(pipeline: Pipeline, parts: int, full: int, most: float, fullness: float) -> list[float]:
    """Shares with which the link is busy for so much of each window, until there is no more."""
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
