"""What is trained, and when and where the kills fall: a function of the seed."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Literal

from everstep.config.options import presets, validate_options
from everstep.errors import OptionError
from everstep.workloads import GPTConfig

__all__ = [
    "AFTER_CAPTURED",
    "BEFORE_MANIFEST",
    "BEFORE_RENAME",
    "RANDOM_MOMENT",
    "DemoPlan",
    "KeeperKind",
    "Kill",
    "demo_plan",
    "keeper_of",
    "logs",
    "planned_kills",
]

RANDOM_MOMENT = "random moment"
BEFORE_RENAME = "save.before_rename"
BEFORE_MANIFEST = "save.before_manifest"
AFTER_CAPTURED = "capture.after_captured"
_SAVES_MIN = 9

KeeperKind = Literal["process", "thread", "none"]
KeeperFate = Literal["spared", "dies", "none"]

_FULL = (GPTConfig(layers=4, width=128, heads=4, context=128), 8, 4 << 20, 120, 10)
_QUICK = (GPTConfig(layers=2, width=64, heads=2, context=64), 16, 1 << 18, 120, 5)


@dataclass(frozen=True, slots=True)
class Kill:
    """One planned kill.

    Attributes:
        where: :data:`RANDOM_MOMENT`, or the failpoint at which the process kills itself.
        step: the step after which it falls, or the step whose base it hits.
        fraction: how far into the following step, in [0, 1); 0 at a failpoint.
        keeper: what becomes of the keeper: ``"spared"``: it is a process, and lives on;
            ``"dies"``: it is a thread of the trainer, and dies with it, as both do with
            their machine; ``"none"``: the method needs none.
    """

    where: str
    step: int
    fraction: float = 0.0
    keeper: KeeperFate = "none"

    @property
    def is_failpoint(self) -> bool:
        """Whether the process kills itself inside a save."""
        return self.where != RANDOM_MOMENT

    @property
    def died(self) -> str:
        """Who dies of it, for people."""
        return "trainer + keeper" if self.keeper == "dies" else "trainer"

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
    method: str = "logged",
    seed: int = 1234,
    quick: bool = False,
) -> DemoPlan:
    """Fills in what the user left open.

    Raises:
        OptionError: for options that a Checkpointer refuses, or that leave no room for
            the kills.
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
    kills = planned_kills(steps=steps, every=every, seed=seed, keeper=keeper_of(method))
    return DemoPlan(model, batch, text_bytes, steps, every, keep, method, seed, kills)


def keeper_of(method: str) -> KeeperKind:
    """What makes the bases of a preset durable, unless it is told otherwise."""
    if presets[method].base == "sync":
        return "none"
    return "process" if sys.platform == "linux" else "thread"


def logs(method: str) -> bool:
    """Whether a preset records every step."""
    return presets[method].log != "none"


def planned_kills(*, steps: int, every: int, seed: int, keeper: KeeperKind) -> tuple[Kill, ...]:
    """The kills, one in each third of the run, or in each quarter: inside of saves, and at any
    moment.

    Args:
        keeper: what the method has: a process is spared by the last two of four kills.

    Raises:
        OptionError: when there are fewer than nine saves in ``steps``.
    """
    if every < 1 or steps < _SAVES_MIN * every:
        raise OptionError(
            f"{steps} steps with a save every {every} leave no room for the kills",
            hint=f"take at least {_SAVES_MIN} times as many steps as there are between saves",
        )
    draw = random.Random(seed)
    inside: list[tuple[str, KeeperFate]] = [(BEFORE_RENAME, "dies"), (BEFORE_MANIFEST, "dies")]
    if keeper == "process":
        inside.append((AFTER_CAPTURED, "spared"))
    elif keeper == "none":
        inside = [(where, "none") for where, _ in inside]
    saves = steps // every
    share = saves // (len(inside) + 1)
    # In saves: [2, share], [share + 1, 2 share], and so on, and between the last of them and the
    # end. One save is whole before the first kill, and each restart takes at least one of its
    # own. What is left of the last share gives the last kill time to arrive on a busy machine.
    kills = [
        Kill(where, every * draw.randrange(max(2, number * share + 1), (number + 1) * share + 1),
             keeper=fate)
        for number, (where, fate) in enumerate(inside)
    ]  # fmt: skip
    end = saves - max(1, (share - 1) // 2)
    moment = draw.randrange((len(inside) * share + 1) * every, end * every)
    last: KeeperFate = "spared" if keeper == "process" else inside[-1][1]
    return (*kills, Kill(RANDOM_MOMENT, moment, draw.random(), keeper=last))
