"""Cost of checkpointing and recovery: LowDiff's model of wasted time, with corrections.

Training loses time in two ways: to failures (load the newest base, replay the log, train again the
steps that are not in it) and to checkpointing itself. LowDiff section V-C adds both up (Eq. 8) for
an interval ``i = 1 / f`` between bases and an interval ``b`` between log segments. Per second of
training, with the symbols of :class:`Costs`::

    waste = ( b/2 + R_F + (i/b - 1)/2 * (R_D + r * b/t) ) / M  +  C / i  +  g / b
              |     |     |                                       |         |
              |     |     replaying half an interval              |         writing the log
              |     loading a base                                writing bases
              half a segment is lost and trained again

Eq. 8 is the case ``r = 0``, ``g = 0``, ``C = S / W``. Corrections:

- ``f`` is in 1/s and ``b`` in *seconds*, though Table I counts iterations; the text confuses
  "frequency" and "interval". A segment cannot be longer than the interval: ``1 / (f b) >= 1`` is a
  constraint that Eq. 10 ignores.
- Eq. 8 omits the cost of writing a segment, ``g / b``, and with it the reason for batching.
- Eq. 8 merges a whole batch at the cost of one differential, because LowDiff *sums* it. That is
  right only for SGD without momentum; Adam's moments depend on the order of gradients. Here each
  step has a record and is replayed by itself: ``r`` seconds each, and ``R_D`` per segment.
  :meth:`Costs.summed` returns LowDiff's case.

Like Eq. 8 this is a first-order model: it ignores failures during the loading or writing of a base,
and so holds where the waste is a small share of the time. The restart of the job itself
(scheduling, imports, data loading) is the same for all choices and not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from everstep.errors import InfeasibleError, OptionError

EQUAL = 1e-12
"""Relative difference below which values count as equal."""

# Wide enough for anything real, and products of four stay far from the ends of a float.
_LEAST = 1e-9
_MOST = 1e18
_SECONDS_MOST = 1e12
_SECONDS = ("replay_s", "step_s", "merge_s", "batch_write_s", "base_cost_s")
_MAY_BE_ZERO = ("replay_s", "merge_s", "batch_write_s")


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of checkpointing and recovery; symbols of LowDiff section V-C in brackets.

    Attributes:
        state_bytes: size of a base [S].
        write_bytes_per_s: bandwidth at which a base becomes durable [W].
        replay_s: seconds to replay one step from the log [r; 0 in the paper].
        mtbf_s: mean time between failures of the whole job, in seconds [M].
        step_s: seconds of a training step [t].
        load_bytes_per_s: bandwidth at which a base is loaded; None: as it is written.
        merge_s: seconds that recovery spends per segment regardless of its steps: opening it, or
            merging it where batches are summed [R_D].
        batch_write_s: seconds of training that writing a segment costs regardless of its steps [g].
            Costs that grow with the number of steps are the same for all choices.
        base_cost_s: seconds of training that a base costs [C]; None: its whole write, as in Eq. 8.
            Less if the write overlaps with training.
        accelerators: number of accelerators that wait together [N]. It scales the waste of a run
            and does not change the optimum.

    Raises:
        OptionError: a value is not a finite number in range, or replay takes no time at all.
    """

    state_bytes: float
    write_bytes_per_s: float
    replay_s: float
    mtbf_s: float
    step_s: float
    load_bytes_per_s: float | None = None
    merge_s: float = 0.0
    batch_write_s: float = 0.0
    base_cost_s: float | None = None
    accelerators: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if value == 0 and field.name in _MAY_BE_ZERO and is_number(value):
                continue
            most = _SECONDS_MOST if field.name in _SECONDS else _MOST
            if not is_number(value) or not _LEAST <= value <= most:
                raise OptionError(
                    f"Costs.{field.name} must be a number from {_LEAST:g} to {most:g}, "
                    f"not {value!r}"
                )
        if self.replay_s == 0 and self.merge_s == 0:
            raise OptionError("Costs.replay_s and merge_s are both 0: replay takes some time")
        if not isinstance(self.accelerators, int):
            raise OptionError(f"Costs.accelerators must be a count, not {self.accelerators!r}")

    @property
    def write_s(self) -> float:
        """Seconds until a base is durable [S / W]."""
        return self.state_bytes / self.write_bytes_per_s

    @property
    def load_s(self) -> float:
        """Seconds to load a base [R_F]."""
        return self.state_bytes / (self.load_bytes_per_s or self.write_bytes_per_s)

    def summed(self) -> Costs:
        """Return the costs if batches were summed, as LowDiff does: replayed at the cost of one
        step.
        """
        return replace(self, merge_s=self.merge_s + self.replay_s, replay_s=0.0)

    def wasted_accelerator_s(self, waste: Waste, run_s: float) -> float:
        """Return the accelerator-seconds wasted in a run of ``run_s`` seconds [T_wasted of Eq.
        8].
        """
        return self.accelerators * run_s * waste.total


@dataclass(frozen=True, slots=True)
class Waste:
    """Shares of the run time that are wasted; 0.01 is one percent.

    Attributes:
        lost: steps after the newest segment, trained again [b / 2M].
        load: loading bases [R_F / M].
        replay: replaying steps from the log.
        bases: writing bases [C / i].
        batches: writing the log [g / b].
    """

    lost: float
    load: float
    replay: float
    bases: float
    batches: float

    @property
    def total(self) -> float:
        """Sum of all shares."""
        return self.lost + self.load + self.replay + self.bases + self.batches


def waste(costs: Costs, interval_s: float, batch_s: float, *, write_cost: bool = True) -> Waste:
    """Return the waste with a base every ``interval_s`` and a log segment every ``batch_s``
    seconds.

    Args:
        write_cost: False: the right side of Eq. 8 as printed: writing the log is free, and a base
            costs its whole write. LowDiff's own figure, divided by ``N T``, is
            ``waste(costs.summed(), 1 / f, b, write_cost=False)``.

    Raises:
        OptionError: unless ``0 < batch_s <= interval_s``.
    """
    # With the tolerance: both may be multiples of step_s that were rounded differently.
    if not (0 < batch_s <= interval_s * (1 + EQUAL) and interval_s < math.inf):
        raise OptionError(
            f"a batch of {batch_s!r} s does not fit into an interval of {interval_s!r} s",
            hint="0 < batch_s <= interval_s",
        )
    base_s, batch_write_s = write_costs(costs, write_cost)
    # Rounding may make the quotient slightly less than 1.
    batches = max(0.0, interval_s / batch_s - 1) / 2  # to be redone, on average
    redo_s = batches * (costs.merge_s + costs.replay_s * batch_s / costs.step_s)
    return Waste(
        lost=batch_s / 2 / costs.mtbf_s,
        load=costs.load_s / costs.mtbf_s,
        replay=redo_s / costs.mtbf_s,
        bases=base_s / interval_s,
        batches=batch_write_s / batch_s,
    )


def write_costs(costs: Costs, write_cost: bool = True) -> tuple[float, float]:
    """Return the seconds of training that a base and a segment cost; see :func:`waste`."""
    if not write_cost:
        return costs.write_s, 0.0
    base_s = costs.write_s if costs.base_cost_s is None else costs.base_cost_s
    return base_s, costs.batch_write_s


def check_transfers(costs: Costs) -> None:
    """Bases can be written and loaded between two failures.

    Raises:
        InfeasibleError: one of both takes longer than the MTBF.
    """
    needed = costs.state_bytes / costs.mtbf_s
    for what, took_s, quantity in (
        ("writing", costs.write_s, "write_bytes_per_s"),
        ("loading", costs.load_s, "load_bytes_per_s"),
    ):
        if took_s >= costs.mtbf_s:
            raise InfeasibleError(
                f"{what} a base takes {took_s:.4g} s, and something fails every "
                f"{costs.mtbf_s:.4g} s: no base would be of use",
                quantity=quantity,
                needed=needed,
                hint=f"more than {needed:.4g} bytes/s, or an MTBF above {took_s:.4g} s",
            )


def check_batches(costs: Costs, batch_max: int | None) -> None:
    """The log can be written in less time than training takes for what is in it.

    Raises:
        InfeasibleError: writing the largest batch costs all of that time.
    """
    _, batch_write_s = write_costs(costs)
    if batch_max is not None and batch_write_s >= batch_max * costs.step_s:
        needed_s = batch_max * costs.step_s
        raise InfeasibleError(
            f"writing a batch costs {batch_write_s:.4g} s, and the steps in it take "
            f"{needed_s:.4g} s: no time is left for training",
            quantity="batch_write_s",
            needed=needed_s,
            hint=f"batches of more than {math.floor(batch_write_s / costs.step_s)} steps, or "
            f"writes in less than {needed_s:.4g} s",
        )


def is_number(value: object) -> bool:
    """Return True for a finite number; False for booleans."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
