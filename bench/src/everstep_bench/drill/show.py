"""Output for people: a bar on a terminal or plain lines elsewhere; then TierCheck's Table 3."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from everstep_bench.drill.arms import ARMS
from everstep_bench.drill.plan import DrillPlan
from everstep_bench.drill.report import DrillReport, Outcome

__all__ = ["Display", "introduce", "present", "progress_display"]

_LINE_EVERY_S = 10.0
_PLAIN_WIDTH = 110
_DIFFERENCES_SHOWN = 12


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


class _Lines:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._start_s = self._last_s = time.monotonic()

    def event(self, text: str) -> None:
        self._say(text)

    def progress(self, name: str, step: int) -> None:
        if time.monotonic() - self._last_s >= _LINE_EVERY_S:
            self._say(f"{name}: step {step} of {self._steps}")

    def _say(self, text: str) -> None:
        self._last_s = time.monotonic()
        print(f"[{self._last_s - self._start_s:5.1f} s] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_display(steps: int) -> Iterator[Display]:
    """A bar on a terminal, plain lines elsewhere; both on standard error."""
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
    when = f"after step {_of_arms(plan, plan.kill_step)}"
    if plan.into:
        when = f"{plan.into:g} of a step {when}"
    if plan.at_point is not None:
        when = f"at {plan.at_point} in the base of step {plan.at_step}"
    return [
        f"{plan.hosts} hosts: {network}",
        f"a GPT of {plan.model.params:,} parameters under {plan.parallel}, {plan.steps} steps, a "
        f"base every {_of_arms(plan, plan.every_of)}; killed {when}; seed {plan.seed}",
        f"arms {', '.join(plan.arms)}; kills {', '.join(plan.kills)}; first a run that nobody "
        "disturbs",
    ]


def _of_arms(plan: DrillPlan, number: Callable[[str], int]) -> str:
    """``"10"``, if it is the same for all arms; else ``"11 (gemini), 21 (checkfreq)"``."""
    found = {arm: number(arm) for arm in plan.arms}
    if len(set(found.values())) == 1:
        return str(found.popitem()[1])
    return ", ".join(f"{value} ({arm})" for arm, value in found.items())


def present(report: DrillReport, console: Console | None = None) -> None:
    """Prints tables and verdict to standard output."""
    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    plan = report.plan
    for kill in plan.kills:
        rows = [outcome for outcome in report.outcomes if outcome.kill == kill]
        dead = plan.dead_hosts(kill)
        what = (
            f"host(s) {', '.join(map(str, dead))}" if dead else f"the trainer of host {plan.victim}"
        )
        console.print(f"\nkill {kill}: {what}", highlight=False)
        console.print(_table(rows))
        for row in rows:
            if row.refused is not None:
                console.print(f"{row.arm} refused: {row.refused}", highlight=False, markup=False)
    for line in (*_notes(report), *_scale(report), *_ratios(report)):
        console.print(line, highlight=False, markup=False)
    _verdict(report, console)


def _table(rows: list[Outcome]) -> Table:
    table = Table(box=box.HORIZONTALS, padding=(0, 1, 0, 0))
    table.add_column("arm", no_wrap=True)
    numbers = ("detect\ns", "restore\ns", "rollback\ns", "lost\nsteps", "re-run\ns", "total\ns")
    for heading in (*numbers, "start\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("from", "claims\nexact", "same\nbits"):
        table.add_column(heading)
    for row in rows:
        if not row.ran:
            table.add_row(row.arm, *["-"] * 7, "refused", "-", "-")
            continue
        table.add_row(
            row.arm,
            "never" if row.detect_s is None else f"{row.detect_s:.2f}",
            f"{row.restore_s:.2f}",
            f"{row.rollback_s:.2f}",
            f"{row.lost:g}",
            f"{row.rerun_s:.2f}",
            f"{row.total_s:.2f}",
            f"{row.launch_s:.1f}",
            row.from_words,
            "yes" if row.exact else "no",
            "yes" if row.same else "[bold red]NO[/]" if row.exact else "near",
        )
    return table


def _notes(report: DrillReport) -> list[str]:
    plan = report.plan
    used = [name for name in plan.arms if any(o.arm == name and o.ran for o in report.outcomes)]
    return [
        f"hosts: {report.network}",
        *(f"{name}: {ARMS[name].words}" for name in used),
        "rollback = detect (until the last living rank knows) + restore (resume() of all)",
        "re-run = lost steps x median step of that run; total = both (TierCheck, Table 3)",
        "start: torchrun, Python and torch of the new start; in none of them",
        f"undisturbed: {1e3 * report.step_s:.0f} ms a step, loss {report.losses[0]:.4f} -> "
        f"{report.losses[1]:.4f}; {report.seconds:.0f} s in all",
        *(
            f"undisturbed, consuming {name} gradients: {1e3 * step_s:.0f} ms a step, loss "
            f"{first:.4f} -> {last:.4f}"
            for name, (step_s, first, last) in report.others.items()
        ),
    ]


def _scale(report: DrillReport) -> list[str]:
    """Return links and intervals in steps, beside TierCheck's."""
    if report.scale is None:
        return []
    plan = report.plan
    (store, peer) = report.scale
    slower = [
        f"{arm} {statistics.median(times) / report.step_s:.2f}"
        for arm in plan.arms
        if (times := [o.step_s for o in report.outcomes if o.arm == arm and o.ran])
    ]
    return [
        f"scale: a host's state, {plan.host_bytes / 1e6:.1f} MB, takes {store:.2f} undisturbed "
        f"steps from the store and {peer:.2f} from another host (TierCheck, Table 3, less what "
        "its local memory takes: 3.3 and 1.5)",
        f"bases every {_of_arms(plan, plan.every_of)} steps",
        f"steps before the kill, in undisturbed ones: {', '.join(slower)}",
    ]


def _ratios(report: DrillReport) -> list[str]:
    """Print the ratio for each kill, and its target if there is one."""
    lines = []
    for ratio in report.ratios:
        asked = ""
        if ratio.asked is not None:
            asked = f"; asked {ratio.asked:g}: {'met' if ratio.met else 'NOT MET'}"
        lines.append(
            f"ratio {ratio.kill}: best other {ratio.best} {ratio.best_s:.2f} s / {ratio.ours} "
            f"{ratio.ours_s:.2f} s = {ratio.times:.2f}{asked}"
        )
    there = {ratio.kill for ratio in report.ratios}
    lines += [
        f"ratio {kill}: asked {asked:g}: NOT MET, there is none"
        for kill, asked in report.plan.checks.items()
        if kill not in there
    ]
    return lines


def _verdict(report: DrillReport, console: Console) -> None:
    for outcome in report.outcomes:
        if not outcome.ran or outcome.same:
            continue
        if outcome.as_claimed:
            undisturbed, here = outcome.losses
            console.print(
                f"[bold]NEAR[/]: {outcome.arm}, {outcome.kill}, as it says itself: loss at the end "
                f"{here:.4f}, undisturbed {undisturbed:.4f}",
                highlight=False,
            )
            continue
        console.print(
            f"[bold red]DIFFERENT[/]: {outcome.arm}, {outcome.kill}: {len(outcome.differences)} "
            "differences (undisturbed != recovered)"
        )
        for item in outcome.differences[:_DIFFERENCES_SHOWN]:
            console.print(
                f"  {escape(f'{item.witness}: {item.name}: {item.detail}')}", highlight=False
            )
    if not report.ran:
        console.print("[bold]NOTHING RAN[/]: every arm was refused")
    elif report.same:
        count = sum(outcome.same for outcome in report.outcomes)
        console.print(
            f"[bold green]IDENTICAL[/]: {count} recoveries, and every rank of each ended in the "
            "bits of the run that nobody disturbed"
        )
