"""Progress of a drill: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from everstep_bench.drill.plan import DrillPlan
from everstep_bench.drill.report import of_arms
from everstep_bench.harness.display import Lines

_LINE_EVERY_S = 10.0


class Display(Protocol):
    """Receiver of the progress of a drill."""

    def event(self, text: str) -> None:
        """Something happened that is worth a line."""
        ...

    def progress(self, name: str, step: int) -> None:
        """Show the position of the start of this name; called often."""
        ...


class _Bar:
    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=steps)

    def event(self, text: str) -> None:
        self._progress.console.print(escape(text), highlight=False)

    def progress(self, name: str, step: int) -> None:
        self._progress.update(self._task, description=name, completed=step)


class _Lines(Lines):
    def __init__(self, steps: int) -> None:
        super().__init__(_LINE_EVERY_S)
        self._steps = steps

    def event(self, text: str) -> None:
        self.say(text)

    def progress(self, name: str, step: int) -> None:
        self.say_sometimes(f"{name}: step {step} of {self._steps}")


@contextlib.contextmanager
def progress_display(steps: int) -> Iterator[Display]:
    """Show progress on standard error until the end of the block."""
    if not sys.stderr.isatty():
        yield _Lines(steps)
        return
    with Progress(
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        yield _Bar(progress, steps)


def introduce(plan: DrillPlan, network: str) -> list[str]:
    """Return the lines that announce the plan."""
    when = f"after step {of_arms(plan, plan.kill_step)}"
    if plan.into:
        when = f"{plan.into:g} of a step {when}"
    if plan.at_point is not None:
        when = f"at {plan.at_point} in the base of step {plan.at_step}"
    return [
        f"{plan.hosts} hosts: {network}",
        f"a GPT of {plan.model.params:,} parameters under {plan.parallel}, {plan.steps} steps, a "
        f"base every {of_arms(plan, plan.every_of)}; killed {when}; seed {plan.seed}",
        f"arms {', '.join(plan.arms)}; kills {', '.join(plan.kills)}; first a run that nobody "
        "disturbs",
    ]
