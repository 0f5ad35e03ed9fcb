"""What is trained, and when and where the kills fall: a function of the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from everstep.bench.workloads import GPTConfig
from everstep.errors import OptionError
from everstep.options import validate_options

__all__ = ["RANDOM_MOMENT", "DemoPlan", "Kill", "demo_plan", "planned_kills"]

RANDOM_MOMENT = "random moment"
_BEFORE_RENAME = "save.before_rename"
_BEFORE_MANIFEST = "save.before_manifest"
_SAVES_MIN = 8

_FULL = (GPTConfig(layers=4, width=128, heads=4, context=128), 16, 4 << 20, 120, 10)
_QUICK = (GPTConfig(layers=2, width=64, heads=2, context=64), 16, 1 << 18, 120, 5)


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned kill.

    Attributes:
        where: :data:`RANDOM_MOMENT`, or the failpoint at which the process kills itself.
        step: the step after which it falls, or the step whose save it hits.
        fraction: how far into the following step, in [0, 1); 0 at a failpoint.
    """

    where: str
    step: int
    fraction: float = 0.0

    @property
    def is_failpoint(self) -> bool:
        """Whether the process kills itself inside a save."""
        return self.where != RANDOM_MOMENT

    def describe(self) -> str:
        """``random moment, step 37 + 0.62``, or the failpoint and the base that it is in."""
        when = (
            f"base {self.step}" if self.is_failpoint else f"step {self.step} + {self.fraction:.2f}"
        )
        return f"{self.where}, {when}"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Everything that a demo does, fixed before it begins.

    Attributes:
        model: the model.
        batch: sequences in a batch.
        text_bytes: how much of the text is used.
        steps: steps of either run.
        every: steps between the bases of the run that is killed.
        keep: bases kept.
        method: preset of the run that is killed.
        seed: of everything.
        kills: in the order of their steps.
    """

    model: GPTConfig
    batch: int
    text_bytes: int
    steps: int
    every: int
    keep: int
    method: str
    seed: int
    kills: tuple[Kill, ...]


def demo_plan(
    *,
    steps: int | None = None,
    every: int | None = None,
    keep: int = 3,
    method: str = "async",
    seed: int = 1234,
    quick: bool = False,
) -> DemoPlan:
    """Fills in what the user left open.

    Raises:
        OptionError: for options that a Checkpointer refuses, or that leave no room for
            three kills.
    """
    model, batch, text_bytes, default_steps, default_every = _QUICK if quick else _FULL
    steps = default_steps if steps is None else steps
    every = default_every if every is None else every
    if not 0 <= seed < 2**32:
        raise OptionError(f"seed must be in [0, 2**32), not {seed}")
    validate_options(
        method=method,
        every=every,
        keep=keep,
        budget=None,
        on_failure="raise",
        progress_timeout_s=1.0,
    )
    kills = planned_kills(steps=steps, every=every, seed=seed)
    return DemoPlan(model, batch, text_bytes, steps, every, keep, method, seed, kills)


def planned_kills(*, steps: int, every: int, seed: int) -> tuple[Kill, ...]:
    """Three kills: at any moment of the first part, and inside one save of the second and third.

    Raises:
        OptionError: when there are fewer than eight saves in ``steps``.
    """
    if every < 1 or steps < _SAVES_MIN * every:
        raise OptionError(
            f"{steps} steps with a save every {every} leave no room for three kills",
            hint=f"take at least {_SAVES_MIN} times as many steps as there are between saves",
        )
    draw = random.Random(seed)
    saves = steps // every
    # Thirds, in saves: [1, third), [third + 1, 2 third), [2 third + 1, saves). The saves left
    # out between them keep the kills apart: each restart takes at least one base of its own.
    third = saves // 3
    moment = draw.randrange(every, third * every)
    return (
        Kill(RANDOM_MOMENT, moment, draw.random()),
        Kill(_BEFORE_RENAME, every * draw.randrange(third + 1, 2 * third + 1)),
        Kill(_BEFORE_MANIFEST, every * draw.randrange(2 * third + 2, saves)),
    )
