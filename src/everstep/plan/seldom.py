"""The longest interval between bases that wastes hardly more than the best one."""

from __future__ import annotations

from everstep.plan.costs import Costs, waste
from everstep.plan.estimator import Recommendation
from everstep.plan.interval import Choice

__all__ = ["WASTE_OF_NO_ACCOUNT", "seldom"]

WASTE_OF_NO_ACCOUNT = 0.001
"""Share of the time: with ``every="auto"``, waste below this is not reduced by more bases."""


def seldom(costs: Costs, best: Choice | Recommendation, *, log: bool) -> tuple[int, float]:
    """Return the longest interval in steps that wastes no more than the best, and its waste.

    A waste of :data:`WASTE_OF_NO_ACCOUNT` is always accepted. If bases cost training next to
    nothing, the optimum is to write continuously, which wears out the disk and takes it from others
    for an unnoticeable gain.

    Args:
        log: True if there is a log; without one, all steps since a base are lost.
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
