"""Measured step times for the choice of the number of steps of a base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import everstep
from everstep.options import Options, validate_options
from everstep.seams import ManualClock
from everstep.trainer.multistep.measurements import MultistepStats
from everstep.trainer.multistep.partition import Partitioner, Unit

ARENA_BYTES = 1 << 40


def options(
    parts: int | str = "auto", every: int | None = 100, held_steps: int = 1, **about: Any
) -> Options:
    method = everstep.Method(
        base="multistep",
        parts=parts,
        overlap_forward=held_steps > 1,
        held_steps=held_steps,
        **about,
    )
    return validate_options(
        method=method,
        every=every,
        keep=3,
        budget=None,
        on_failure="raise",
        progress_timeout_s=120.0,
    )


class Bench:
    """Steps of 1 s, of which updates take some; and a link."""

    def __init__(self, *, update_s: float = 0.0, link: float | None = None, **about: Any) -> None:
        self.clock = ManualClock()
        self.stats = MultistepStats(self.clock, {})
        self.choice = Partitioner(options(**about), self.clock, self.stats)
        for _ in range(8):
            self.choice.steps.marked(0.0)
            self.clock.advance(1.0 - update_s)
            self.choice.steps.gated(0.0, quiet=True)
            self.clock.advance(update_s)
        self.choice.steps.marked(0.0)
        if link is not None:
            timed = self.choice.timed(1 << 20)
            self.clock.advance((1 << 20) / link)
            timed.ended()

    def parts(
        self, state: int, gradients: int, *, waits: bool = True, arena: int = ARENA_BYTES
    ) -> int:
        """For a state of 48 parameters."""
        units = [Unit("o", str(n), (), state // 48, gradients // 48) for n in range(48)]
        return self.choice.parts(units, state, arena, waits=waits)

    def cut(self, units: Sequence[Unit], *, waits: bool) -> Sequence[Sequence[Unit]]:
        state = sum(unit.size_bytes for unit in units)
        return self.choice.cut(units, state, ARENA_BYTES, waits=waits, now=None)
