"""Rows of a table: arms, and what each is told."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everstep_bench.options import COMPRESSED, NONE, STEP_ARMS, FrequencyOptions, StepOptions

_USES = {
    COMPRESSED: {"ratio"},
    "logged": {"every"},
    "lowdiff": {"ratio", "batch_steps", "every"},
    "lowdiff_plus": {"every"},
}
_OTHERS = (NONE, COMPRESSED, "torch.save")


@dataclass(frozen=True, slots=True)
class Setting:
    """An arm, and what it is told: one row of a table.

    Attributes:
        every: steps from one whole state that is saved to the next.
        ratio: the share of a gradient's elements that is kept.
        batch_steps: steps that are written to disk at a time.
        block_steps: steps of a timed block.
        tiers: places in which bases are copied, too; everstep's arms alone can.
        link_bytes_per_s: of an emulated link of everstep's copies; None: there is none.
        log_on_disk: a log is on disk, since no keeper outlives the failure.
    """

    arm: str
    every: int
    ratio: float = 1.0
    batch_steps: int = 1
    block_steps: int = 1
    tiers: tuple[str, ...] = ()
    link_bytes_per_s: float | None = None
    log_on_disk: bool = False

    @property
    def compresses(self) -> bool:
        """True if training consumes compressed gradients."""
        return self.arm in (COMPRESSED, "lowdiff")

    @property
    def is_reference(self) -> bool:
        """True if nothing is saved."""
        return self.arm in (NONE, COMPRESSED)

    def words(self, usual: Setting) -> str:
        """Return the arm, and what it is told otherwise than in its ``usual`` setting."""
        found = [self.arm]
        if self.ratio != usual.ratio:
            found.append(f"ratio {self.ratio:g}")
        if self.batch_steps != usual.batch_steps:
            found.append(f"batch {self.batch_steps}")
        if self.every != usual.every:
            found.append(f"every {self.every}")
        return " ".join(found)


def usual(options: StepOptions, arm: str) -> Setting:
    """Return the default setting of an arm."""
    every = options.every[0] if "every" in _USES.get(arm, ()) else 1
    return Setting(arm, every, options.ratio[0], options.batch_steps[0], options.every[0])


def settings(options: StepOptions) -> list[Setting]:
    """Return all settings, each once, in the order of arms; references first."""
    chosen = {NONE, *(STEP_ARMS if options.arms is None else options.arms)}
    if "lowdiff" in chosen:
        chosen.add(COMPRESSED)
    found: dict[Setting, None] = {}
    for arm in (name for name in STEP_ARMS if name in chosen):
        own = usual(options, arm)
        uses = _USES.get(arm, ())
        found[own] = None
        if "ratio" in uses:
            found |= dict.fromkeys(replace(own, ratio=ratio) for ratio in options.ratio)
        if "batch_steps" in uses:
            found |= dict.fromkeys(replace(own, batch_steps=n) for n in options.batch_steps)
        if "every" in uses:
            found |= dict.fromkeys(replace(own, every=n, block_steps=n) for n in options.every)
    return list(found)


def probed(options: FrequencyOptions, arm: str, every: int, block_steps: int) -> Setting:
    """Return an arm with this interval."""
    tiers = () if arm in _OTHERS else options.tiers
    return Setting(arm, every, options.ratio, options.batch_steps, block_steps, tiers)
