"""Closed-form models of checkpointing, as published: for comparisons, and to check simulations.

All times are in seconds, intervals in steps where the name says so. The planning itself uses
:mod:`.interval` and :mod:`.multistep`, which find the best whole numbers.

- Young, *A first order approximation to the optimum checkpoint interval* (1974).
- Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps* (2006).
- GoCkpt sections 3.1 and 4.2.3.
- TierCheck section 3.2 and experiment 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.errors import OptionError


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval between two checkpoints, ``sqrt(2 C M)``.

    Args:
        cost_s: time for which a checkpoint stops training [C].
        mtbf_s: mean time between failures [M].
    """
    _check(cost_s=cost_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval of higher order (Eq. 37), the time of training between checkpoints.

    It differs from Young's where a checkpoint takes a notable part of the time between failures.
    Arguments as for :func:`young_interval_s`.
    """
    _check(cost_s=cost_s, mtbf_s=mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def daly_run_s(
    work_s: float, interval_s: float, cost_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return the expected time of a run with exponentially distributed failures, which may also
    come while a checkpoint is written or a run restarts (Daly's complete model)::

        T = M exp(R / M) (exp((i + C) / M) - 1) W / i

    Args:
        work_s: time of the run without checkpoints and failures [W].
        interval_s: time of training between two checkpoints [i].
        cost_s: time for which a checkpoint stops training [C].
        restart_s: time from a failure until training continues [R].
        mtbf_s: mean time between failures [M].
    """
    _check(work_s=work_s, interval_s=interval_s, cost_s=cost_s, mtbf_s=mtbf_s)
    _check_not_negative(restart_s=restart_s)
    again = math.expm1((interval_s + cost_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * again * work_s / interval_s


def gockpt_waste(
    interval_steps: float, step_s: float, cost_s: float, load_s: float, mtbf_s: float
) -> float:
    """Return the share ``P`` of useful time that is wasted (GoCkpt section 3.1)::

        P = C / (N t) + N t / (2 M) + L / M

    Args:
        interval_steps: steps between two checkpoints [N].
        step_s: duration of a step [T_step, t].
        cost_s: time for which a checkpoint stops training [T_ckpt, C].
        load_s: time to load a checkpoint [T_load, L].
        mtbf_s: mean time between failures [1/p, M].
    """
    _check(interval_steps=interval_steps, step_s=step_s, cost_s=cost_s, mtbf_s=mtbf_s)
    _check_not_negative(load_s=load_s)
    interval_s = interval_steps * step_s
    return cost_s / interval_s + interval_s / (2 * mtbf_s) + load_s / mtbf_s


def gockpt_interval_steps(step_s: float, cost_s: float, mtbf_s: float) -> int:
    """Return the best interval of GoCkpt's Table 1, ``N* = sqrt(2 C M) / t``, rounded down as
    there; at least 1. Arguments as for :func:`gockpt_waste`."""
    _check(step_s=step_s)
    return max(1, math.floor(young_interval_s(cost_s, mtbf_s) / step_s))


def async_overlap_stall_steps(copy_steps: float) -> float:
    """Return the steps for which training waits for one copy of the state that overlaps a step
    (Async-O, GoCkpt section 4.2.3; everstep's ``lazy``).

    Args:
        copy_steps: time of the copy, in steps.
    """
    _check(copy_steps=copy_steps)
    return max(0.0, copy_steps - 1)


def gockpt_stall_steps(parts: int, gradient_share: float = 1 / 7) -> float:
    """Return the steps for which training waits for gradients if a state that takes ``parts`` steps
    to copy is copied in as many parts (GoCkpt section 4.2.3): ``r N (N - 1) / 2``.

    The paper prints the difference to :func:`async_overlap_stall_steps` with the wrong sign and a
    saving of 4 steps. It is 3 steps, for 7 and for 8 parts.

    Args:
        parts: parts of the state, one for each step [N].
        gradient_share: size of all gradients, divided by that of the state [r]: 1/7 for 2 bytes of
            gradient and 14 bytes of state for each parameter.
    """
    _check(parts=parts, gradient_share=gradient_share)
    return gradient_share * parts * (parts - 1) / 2


@dataclass(frozen=True, slots=True)
class TierRecovery:
    """Time of a recovery from one tier (TierCheck, experiment 4).

    Attributes:
        rollback_s: fetching the base.
        rerun_s: fetching and replaying the log, and training the lost steps again.
    """

    rollback_s: float
    rerun_s: float

    @property
    def total_s(self) -> float:
        """Sum of both."""
        return self.rollback_s + self.rerun_s


def tier_recovery(
    base_bytes: float,
    log_step_bytes: float,
    read_bytes_per_s: float,
    *,
    interval_steps: float,
    lag_steps: float,
    replay_s: float,
    step_s: float,
) -> TierRecovery:
    """Return the expected time of a recovery: the mean of the best case, a failure right after a
    base, and the worst, one right before the next base.

    A step of the log is fetched while the one before it is replayed.

    Args:
        base_bytes: bytes of a base that one rank reads.
        log_step_bytes: bytes of a step of the log that it reads.
        read_bytes_per_s: bandwidth of the nearest tier that has survived.
        interval_steps: steps between two bases in that tier.
        lag_steps: steps at the end that are not in that tier.
        replay_s: time to replay one step.
        step_s: duration of a step of training.
    """
    _check(base_bytes=base_bytes, read_bytes_per_s=read_bytes_per_s, step_s=step_s)
    _check(interval_steps=interval_steps, replay_s=replay_s)
    _check_not_negative(log_step_bytes=log_step_bytes, lag_steps=lag_steps)
    each_s = max(log_step_bytes / read_bytes_per_s, replay_s)
    replayed = max(0.0, interval_steps / 2 - lag_steps)
    rerun_s = replayed * each_s + lag_steps * step_s
    return TierRecovery(base_bytes / read_bytes_per_s, rerun_s)


def batch_lag_steps(
    batch_steps: int, log_step_bytes: float, write_bytes_per_s: float, step_s: float
) -> float:
    """Return the most steps that are not in a tier to which the log goes in batches (TierCheck
    section 3.2); infinite if the log comes faster than the link takes it.

    A failure right before a batch has arrived loses that batch, and the steps since it was begun to
    be sent.

    Args:
        batch_steps: steps of a batch [N].
        log_step_bytes: bytes of a step.
        write_bytes_per_s: bandwidth to the tier.
        step_s: duration of a step of training.
    """
    _check(batch_steps=batch_steps, write_bytes_per_s=write_bytes_per_s, step_s=step_s)
    _check_not_negative(log_step_bytes=log_step_bytes)
    sent_steps = batch_steps * log_step_bytes / write_bytes_per_s / step_s
    return math.inf if sent_steps > batch_steps else batch_steps + sent_steps


def base_flush_steps(base_bytes: float, chunk_bytes: float) -> int:
    """Return the steps that a base takes to reach a tier if one chunk is sent in each step
    (TierCheck section 3.2).

    With the paper's 14.25 GiB for each rank and chunks of 256 MiB that are 57 steps, more than its
    interval of 50: bases would queue up.
    """
    _check(base_bytes=base_bytes, chunk_bytes=chunk_bytes)
    return math.ceil(base_bytes / chunk_bytes)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise OptionError(f"{name} must be a positive number, not {value!r}")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise OptionError(f"{name} must be a number from 0 on, not {value!r}")
