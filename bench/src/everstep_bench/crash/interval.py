"""Interval of saves of an arm, and the share of training that should remain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.errors import InfeasibleError
from everstep.plan.interval import Costs, best_choice
from everstep_bench.stall.figures import Interval, Row


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """Costs of a save.

    Attributes:
        step_s: seconds of a step that nobody saves in.
        save_s: that a save takes from training [T_ckpt].
        durable_s: until it is durable; the next one begins no sooner.
        replay_s: to redo a step from a log, where there is one.
    """

    step_s: float
    save_s: float
    durable_s: float
    replay_s: float | None = None


def costs_of(interval: Interval, row: Row) -> SaveCosts | None:
    """From measured rounds of an arm; None where there are none.

    A save takes what the training thread spends in the library, or what it slows steps down by
    (they share cores, memory and disk with it), where in the median of the rounds this is more.
    """
    step = interval.step_s()
    slowdown = interval.slowdown_s(row)
    stall_s = row.median(lambda block: block.stall_s)
    durable_s = row.median(lambda block: block.durable_s)
    if step is None or stall_s is None or durable_s is None:
        return None
    save_s = stall_s if slowdown is None else max(stall_s, slowdown.median)
    return SaveCosts(step.median, save_s, durable_s)


def interval_of(costs: SaveCosts, mtbf_s: float) -> int:
    """Steps from save to save: ``floor(sqrt(2 T_ckpt / p) / T_step)`` for ``p = 1 / mtbf_s``
    failures in a second (GoCkpt section 3.1 and Table 1, its N_best), but one save is durable
    before the next begins."""
    best = math.floor(math.sqrt(2 * costs.save_s * mtbf_s) / costs.step_s)
    return max(1, best, math.ceil(costs.durable_s / costs.step_s))


def logged_interval_of(costs: SaveCosts, mtbf_s: float, *, state_bytes: int, batch: int) -> int:
    """Steps from base to base where a log brings back the steps between them.

    What a failure then costs is replay, not training; so bases may be further apart
    (:func:`everstep.plan.interval.best_choice`).

    Args:
        batch: steps that the log writes at a time.
    """
    assert costs.replay_s is not None
    model = Costs(
        state_bytes=state_bytes,
        write_bytes_per_s=state_bytes / costs.durable_s,
        replay_s=costs.replay_s,
        mtbf_s=mtbf_s,
        step_s=costs.step_s,
        base_cost_s=costs.save_s,
    )
    try:
        return best_choice(model, batch_max=batch).interval_steps
    except InfeasibleError:  # a replay as slow as training: as if there were no log
        return interval_of(costs, mtbf_s)


def share_of(costs: SaveCosts, every: int, mtbf_s: float, load_s: float) -> float:
    """The share of training's speed that is left with saves every so many steps: ``1 / (1 + P)``
    with ``P = T_ckpt / (N T_step) + p N T_step / 2 + p T_load`` (GoCkpt section 3.1)."""
    between_s = every * costs.step_s
    again_s = between_s / 2
    if costs.replay_s is not None:
        again_s *= costs.replay_s / costs.step_s
    return 1 / (1 + costs.save_s / between_s + (again_s + load_s) / mtbf_s)
