"""The training, and when and where it is killed: a function of the seed."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Literal

from everstep.config import presets
from everstep.config.options import validate_options
from everstep.errors import OptionError
from everstep.workloads import GPTConfig, TrainingConfig

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
        step: the step after which it happens, or the step of the base that it interrupts.
        fraction: position in the following step, in [0, 1); 0 at a failpoint.
        keeper: fate of the keeper: ``"spared"``: a process, which survives; ``"dies"``: a
            thread of the trainer, which dies with it, as both do when their machine fails;
            ``"none"``: the method needs no keeper.
    """

    where: str
    step: int
    fraction: float = 0.0
    keeper: KeeperFate = "none"

    @property
    def is_failpoint(self) -> bool:
        """True if the process kills itself inside a save."""
        return self.where != RANDOM_MOMENT

    @property
    def died(self) -> str:
        """The processes that die, in words."""
        return "trainer + keeper" if self.keeper == "dies" else "trainer"

    def describe(self) -> str:
        """``random moment, step 37 + 0.62``, or the failpoint and the base that it interrupts."""
        if self.is_failpoint:
            return f"{self.where}, base {self.step}"
        return f"{self.where}, step {self.step} + {self.fraction:.2f}"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """All choices of a demo, fixed before it begins.

    Attributes:
        model: size of the model.
        training: steps of either run, batch size, seed of weights, data order and dropout.
        text_bytes: length of the text.
        every: steps between the bases of the run that is killed.
        method: preset of the run that is killed.
        kills: in the order of their steps.
    """

    model: GPTConfig
    training: TrainingConfig
    text_bytes: int
    every: int
    method: str
    kills: tuple[Kill, ...]


def demo_plan(
    *,
    steps: int | None = None,
    every: int | None = None,
    method: str = "logged",
    seed: int = 1234,
    quick: bool = False,
) -> DemoPlan:
    """Fill in the options that the user did not give.

    Raises:
        OptionError: for options that a Checkpointer refuses, or with too few saves for the
            kills.
    """
    model, batch, text_bytes, default_steps, default_every = _QUICK if quick else _FULL
    steps = default_steps if steps is None else steps
    every = default_every if every is None else every
    validate_options(
        method=method,
        every=every,
        keep=3,  # as a Checkpointer has it
        budget=None,
        on_failure="raise",
        progress_timeout_s=1.0,
    )
    kills = planned_kills(steps=steps, every=every, seed=seed, keeper=keeper_of(method))
    training = TrainingConfig(steps, batch=batch, seed=seed, warmup_steps=max(1, steps // 8))
    return DemoPlan(model, training, text_bytes, every, method, kills)


def keeper_of(method: str) -> KeeperKind:
    """Return the kind of keeper that a preset has by default."""
    if presets[method].base == "sync":
        return "none"
    return "process" if sys.platform == "linux" else "thread"


def logs(method: str) -> bool:
    """Return True if a preset records every step."""
    return presets[method].log != "none"


def planned_kills(*, steps: int, every: int, seed: int, keeper: KeeperKind) -> tuple[Kill, ...]:
    """Draw the kills: all but the last inside saves, one in each third or quarter of the run.

    Args:
        keeper: of the method; the last two of four kills spare a keeper process.

    Raises:
        OptionError: when there are fewer than nine saves in ``steps``.
    """
    if every < 1 or steps < _SAVES_MIN * every:
        raise OptionError(
            f"{steps} steps with a save every {every} are too few for the kills",
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
    # In saves: [2, share], [share + 1, 2 share], and so on, and the last between those and the end.
    # One save is complete before the first kill, and each restart completes one of its own. The
    # rest of the last share gives the last kill time to arrive on a busy machine.
    kills = []
    for number, (where, fate) in enumerate(inside):
        save = draw.randrange(max(2, number * share + 1), (number + 1) * share + 1)
        kills.append(Kill(where, every * save, keeper=fate))
    end = saves - max(1, (share - 1) // 2)
    moment = draw.randrange((len(inside) * share + 1) * every, end * every)
    last: KeeperFate = "spared" if keeper == "process" else inside[-1][1]
    return (*kills, Kill(RANDOM_MOMENT, moment, draw.random(), keeper=last))
