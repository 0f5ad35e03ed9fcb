"""Bases as seldom as makes no difference: where they cost next to nothing, the best would be to
write all the time."""

from __future__ import annotations

from everstep.plan.costs import Costs, waste
from everstep.plan.estimator import Recommendation
from everstep.plan.interval import Choice

__all__ = ["WASTE_OF_NO_ACCOUNT", "seldom"]

WASTE_OF_NO_ACCOUNT = 0.001
"""Of the time: with ``every="auto"`` bases are not taken more often to waste less than that."""


def seldom(costs: Costs, best: Choice | Recommendation, *, log: bool) -> tuple[int, float]:
    """The longest interval that wastes no more than the best one, or no more than
    :data:`WASTE_OF_NO_ACCOUNT`; in steps, and what it wastes.

    Where bases cost training next to nothing, the best is to write all the time, which wears a
    disk out and takes it away from others, for a gain that nobody would notice.

    Args:
        log: there is one; without, all since a base is lost.
    """

    def wasted(steps: int) -> float:
        interval_s = steps * costs.step_s
        batch_s = costs.step_s if log else interval_s
        return waste(costs, interval_s, batch_s).total

    allowed = max(best.waste.total, WASTE_OF_NO_ACCOUNT)
    least = best.interval_steps
    beyond = 2 * best.interval_steps
    while wasted(beyond) <= allowed:
        least = beyond
        beyond = 2 * beyond
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if wasted(middle) <= allowed else (least, middle)
    return least, wasted(least)
