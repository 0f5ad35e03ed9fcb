"""Rank processes whose bases are captured over several steps."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.ranks.trainings import Run, Said, compare, steps_of

STEPS = 8


Does = dict[int, str]


class Job(Run):
    """Jobs of two ranks on one run folder. Bases are due at steps 2, 4, ..., in 3 parts: those that
    begin at steps 2 and 6 end at 4 and 8, where the next would be due."""

    def train(
        self,
        layout: str,
        options: Any,
        *does: Does,
        last: int = STEPS,
        methods: tuple[dict[str, Any], ...] = ({}, {}),
    ) -> Said:
        """What each rank says.

        Args:
            does: what each rank does at the end of which step.
            methods: what of the method is its own.
        """
        environments = [
            {"DOES": json.dumps(one), "METHOD": json.dumps(own)}
            for one, own in zip(does or ({}, {}), methods, strict=True)
        ]
        return self.ended(layout, options, last, *environments)


def over(parts: int = 3, *, overlap: int = 0, **options: Any) -> dict[str, Any]:
    """Gradients are held for so many steps; 0: updates wait for them."""
    about = {"overlap_forward": overlap > 0, "held_steps": max(1, overlap)}
    method = {"base": "multistep", "parts": parts, **about}
    return {"method": method, "keep": 50, **options}


@cache
def wanted(layout: str, folder: Path) -> list[dict[int, Any]]:
    """What nobody has disturbed, and no checkpoint was taken of."""
    (folder / f"undisturbed-{layout}").mkdir()
    return steps_of(Job(folder / f"undisturbed-{layout}").train(layout, None, last=STEPS + 2))


def report(said: Said) -> list[dict[str, Any]]:
    return [lines[-1]["multistep"] for lines in said]


def check_resumed(job: Job, layout: str, step: int, wanted: list[dict[int, Any]]) -> None:
    """Another start finds the base of ``step``, bit for bit, and goes on as if nothing had been."""
    assert max(job.committed()) == step
    said = job.train(layout, {"method": "lazy"}, last=step + 2)
    assert compare(said, wanted) == step
