"""Options of the benchmark."""

from __future__ import annotations

import random
from dataclasses import dataclass

from everstep.errors import OptionError
from everstep_bench.stall.options import check_arm
from everstep_bench.step.options import NONE, Training

__all__ = ["ARMS", "IDEAL", "CrashOptions"]

IDEAL = "ideal"
"""Training that saves nothing, and that nothing happens to."""

ARMS = (
    NONE,
    "torch.save",
    "dcp-warm",
    "sync",
    "async",
    "checkfreq",
    "lazy",
    "gockpt",
    "gockpt_o",
    "logged",
)
"""All arms that are killed, in the order in which they are shown."""

_CRASH_S_MIN = 0.5
_CRASH_S_MAX = 86_400.0
_CRASHES_MAX = 1000
_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class CrashOptions(Training):
    """Options of ``bench crash-interval``; ``repeats`` are rounds in which costs are measured.

    Attributes:
        crash_every_s: seconds of training from one failure to the next, on average; one table
            for each number.
        crashes: failures of each arm.
        link_bytes_per_s: everstep's copies go through an emulated link of this bandwidth.
        spare_keeper: only training is killed; the keeper goes on, as on a machine that lives.
        arms: names of arms; None for all. Training without failures is always measured.

    Raises:
        OptionError: for what makes no measurement.
    """

    crash_every_s: tuple[float, ...] = (10.0,)
    crashes: int = 3
    link_bytes_per_s: float | None = None
    spare_keeper: bool = False
    arms: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        seconds = self.crash_every_s
        if not seconds or not all(_CRASH_S_MIN <= s <= _CRASH_S_MAX for s in seconds):
            raise OptionError(
                f"crash_every_s={seconds!r}: each between {_CRASH_S_MIN:g} s and a day"
            )
        if not 1 <= self.crashes <= _CRASHES_MAX:
            raise OptionError(f"crashes={self.crashes}: between 1 and {_CRASHES_MAX}")
        if self.link_bytes_per_s is not None and self.link_bytes_per_s <= 0:
            raise OptionError("a link carries more than nothing", hint="like 2GB/s")
        for name in self.arms or ():
            check_arm(name, ARMS)
        if self.arms is not None and not set(self.arms) - {NONE}:
            raise OptionError("no arm that saves was chosen", hint="like --arms lazy,torch.save")

    def names(self) -> tuple[str, ...]:
        """The arms to kill, in the order of :data:`ARMS`."""
        return tuple(name for name in ARMS if self.arms is None or name in self.arms)

    def lifetimes(self, crash_every_s: float) -> tuple[float, ...]:
        """Seconds of training until each failure, the same for all arms; then, without one, until
        the end.

        Uniform around the mean: at a fixed distance, each failure could happen right after a save
        of one arm and right before a save of another.
        """
        drawn = random.Random(self.seed)
        lives = [
            crash_every_s * drawn.uniform(1 - _JITTER, 1 + _JITTER) for _ in range(self.crashes)
        ]
        return (*lives, crash_every_s)
