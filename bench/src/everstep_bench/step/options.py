"""Options of the benchmark, and parsers of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.errors import OptionError
from everstep.tiers.urls import is_url
from everstep_bench.stall.options import check_arm, check_training

__all__ = [
    "ARMS",
    "COMPRESSED",
    "NONE",
    "FrequencyOptions",
    "Setting",
    "StepOptions",
    "Training",
    "copies",
    "parse_ratios",
    "parse_share",
    "parse_tiers",
]

NONE = "none"
"""Training that saves nothing."""

COMPRESSED = "compressed"
"""Training that consumes compressed gradients, and saves nothing."""

ARMS = (
    NONE,
    COMPRESSED,
    "torch.save",
    "checkfreq",
    "lazy",
    "naive-diff",
    "logged",
    "lowdiff",
    "lowdiff_plus",
)
"""All arms, in the order in which they are shown."""

_USES = {
    COMPRESSED: {"ratio"},
    "naive-diff": {"ratio", "every"},
    "logged": {"every"},
    "lowdiff": {"ratio", "batch_steps", "every"},
    "lowdiff_plus": {"every"},
}
_OTHERS = (NONE, COMPRESSED, "torch.save", "naive-diff")
_EVERY_MAX = 1000
_BATCH_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """An arm, and what it is told: one row of a table.

    Attributes:
        every: steps from one whole state that is saved to the next.
        ratio: the share of a gradient's, or a difference's, elements that is kept.
        batch_steps: steps that are written to disk at a time.
        block_steps: steps of a timed block.
        tiers: places in which bases are copied, too; everstep's arms alone can.
    """

    arm: str
    every: int
    ratio: float
    batch_steps: int
    block_steps: int
    tiers: tuple[str, ...] = ()

    @property
    def compresses(self) -> bool:
        """True if training consumes compressed gradients."""
        return self.arm in (COMPRESSED, "lowdiff")

    @property
    def is_reference(self) -> bool:
        """True if nothing is saved."""
        return self.arm in (NONE, COMPRESSED)

    def words(self, usual: Setting) -> str:
        """The arm, and what it is told otherwise than in its ``usual`` setting."""
        found = [self.arm]
        if self.ratio != usual.ratio:
            found.append(f"ratio {self.ratio:g}")
        if self.batch_steps != usual.batch_steps:
            found.append(f"batch {self.batch_steps}")
        if self.every != usual.every:
            found.append(f"every {self.every}")
        return " ".join(found)


@dataclass(frozen=True, slots=True)
class Training:
    """Options common to all benchmarks of steps.

    Attributes:
        params: of the model, about.
        batch: sequences of 64 bytes in a step.
        repeats: rounds that count.
        seed: of weights, data, the order of arms, and the moments of kills.
        free_core: training on one core, everything else on the others; otherwise all on one.
        folder: a folder is made in it, and removed at the end.

    Raises:
        OptionError: for what makes no measurement.
    """

    params: int = 10_000_000
    batch: int = 4
    repeats: int = 5
    seed: int = 1234
    free_core: bool = True
    folder: Path | None = None

    device = "cpu"
    python_heavy = False

    def __post_init__(self) -> None:
        check_training(self.params, self.repeats, self.seed)
        if not 1 <= self.batch <= _BATCH_MAX:
            raise OptionError(f"batch={self.batch}: between 1 and {_BATCH_MAX:,}")


@dataclass(frozen=True, slots=True)
class StepOptions(Training):
    """Options of ``bench step``.

    The first of several values is the usual one; every other is tried with the usual ones of
    the rest, in the arms that it means anything to.

    Attributes:
        every: steps from one base to the next; the first is also the length of a block.
        ratio: see :class:`Setting`.
        batch_steps: see :class:`Setting`.
        kills: for each arm.
        replay: whether replay itself is timed.
        arms: names of arms; None for all. Training alone is always among them.
    """

    every: tuple[int, ...] = (10,)
    ratio: tuple[float, ...] = (0.01,)
    batch_steps: tuple[int, ...] = (5,)
    kills: int = 1
    replay: bool = True
    arms: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        if not self.every or not all(2 <= every <= _EVERY_MAX for every in self.every):
            raise OptionError(f"every={self.every!r}: each between 2 and {_EVERY_MAX}")
        if not self.ratio or not all(0 < ratio <= 1 for ratio in self.ratio):
            raise OptionError(f"ratio={self.ratio!r}: shares lie above 0, and at most at 1")
        if not self.batch_steps or not all(1 <= n <= _EVERY_MAX for n in self.batch_steps):
            raise OptionError(f"batch_steps={self.batch_steps!r}: between 1 and {_EVERY_MAX}")
        if not 0 <= self.kills <= _EVERY_MAX:
            raise OptionError(f"kills={self.kills}: between 0 and {_EVERY_MAX}")
        _check_arms(self.arms)

    def usual(self, arm: str) -> Setting:
        """Return the default setting of an arm."""
        every = self.every[0] if "every" in _USES.get(arm, ()) else 1
        return Setting(arm, every, self.ratio[0], self.batch_steps[0], self.every[0])

    def settings(self) -> tuple[Setting, ...]:
        """Return all settings, each once, in the order of :data:`ARMS`; references first."""
        chosen = set(ARMS if self.arms is None else self.arms) | {NONE}
        if "lowdiff" in chosen:
            chosen.add(COMPRESSED)
        found: dict[Setting, None] = {}
        for arm in (name for name in ARMS if name in chosen):
            usual = self.usual(arm)
            uses = _USES.get(arm, ())
            found[usual] = None
            if "ratio" in uses:
                found |= dict.fromkeys(replace(usual, ratio=ratio) for ratio in self.ratio)
            if "batch_steps" in uses:
                found |= dict.fromkeys(replace(usual, batch_steps=n) for n in self.batch_steps)
            if "every" in uses:
                found |= dict.fromkeys(replace(usual, every=n, block_steps=n) for n in self.every)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class FrequencyOptions(Training):
    """Options of ``bench frequency``.

    Attributes:
        within: how much slower training may be, as a share.
        ratio: see :class:`Setting`.
        batch_steps: see :class:`Setting`.
        every_max: no interval above is tried.
        arms: names of arms that save; None for all.
        tiers: URLs, and absolute paths of folders, in which everstep's arms copy their bases.
    """

    within: float = 0.035
    ratio: float = 0.01
    batch_steps: int = 5
    every_max: int = 64
    arms: tuple[str, ...] | None = None
    tiers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        if not 0 < self.within < 1:
            raise OptionError(f"within={self.within:g}: a share between 0 and 1", hint="like 3.5%")
        if not 0 < self.ratio <= 1:
            raise OptionError(f"ratio={self.ratio:g}: a share above 0, and at most 1")
        if not 1 <= self.batch_steps <= _EVERY_MAX:
            raise OptionError(f"batch_steps={self.batch_steps}: between 1 and {_EVERY_MAX}")
        if not 1 <= self.every_max <= _EVERY_MAX:
            raise OptionError(f"every_max={self.every_max}: between 1 and {_EVERY_MAX}")
        _check_arms(self.arms)
        for place in self.tiers:
            if not is_url(place) and not os.path.isdir(place):
                raise OptionError(
                    f"there is no folder {place}", hint="make it first, or name a URL"
                )

    def names(self) -> tuple[str, ...]:
        """The arms that save, in the order of :data:`ARMS`."""
        chosen = ARMS if self.arms is None else self.arms
        return tuple(name for name in ARMS if name in chosen and name not in (NONE, COMPRESSED))

    def setting(self, arm: str, every: int, block_steps: int) -> Setting:
        """The arm with this interval."""
        tiers = self.tiers if copies(arm) else ()
        return Setting(arm, every, self.ratio, self.batch_steps, block_steps, tiers)


def _check_arms(arms: Collection[str] | None) -> None:
    """Refuses arms that do not exist, and a choice in which none saves.

    Raises:
        OptionError: naming the nearest arm.
    """
    for name in arms or ():
        check_arm(name, ARMS)
    if arms is not None and not set(arms) - {NONE, COMPRESSED}:
        raise OptionError("no arm that saves was chosen", hint="like --arms lowdiff,torch.save")


def parse_ratios(text: str) -> tuple[float, ...]:
    """Shares: ``"0.01"``, ``"0.001,1%"``.

    Raises:
        OptionError: for anything else.
    """
    return tuple(dict.fromkeys(parse_share(word) for word in text.split(",")))


def copies(arm: str) -> bool:
    """Return True if an arm can copy its bases to other places."""
    return arm not in _OTHERS


def parse_tiers(text: str | None) -> tuple[str, ...]:
    """Places: ``"/mnt/other,s3://bucket/prefix"``; folders with their absolute paths."""
    places = [place.strip() for place in (text or "").split(",")]
    return tuple(dict.fromkeys(p if is_url(p) else str(Path(p).absolute()) for p in places if p))


def parse_share(text: str) -> float:
    """A share: ``"3.5%"`` or ``"0.035"``.

    Raises:
        OptionError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*", text)
    if match is None:
        raise OptionError(f"{text!r} is no share", hint="like 3.5% or 0.035")
    return float(match[1]) / (100 if match[2] else 1)
