"""A table, and a picture: what was where in each step, and what was announced."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from everstep_bench.stall.show import machine_facts, plain_table, titled
from everstep_bench.tiers.report import TIERS, TiersReport, words_of

__all__ = ["picture", "present"]

_INCHES = (10.0, 6.5)
_DPI = 150
_MB = 1e6
_COLUMNS = ("what", "announced", "at most", "share", "at the end", "steps above")


def present(report: TiersReport, console: Console) -> None:
    """Prints facts, tables and targets."""
    options = report.options
    facts = machine_facts(report.machine, report.folder, free_core=True)
    facts[0] = facts[0].replace(
        "training on a core of its own, everything else on the others; ", ""
    )
    copies = options.place or "a folder of this machine"
    for line in (
        *facts,
        f"{options.ranks} rank(s), {words_of(report.state_bytes)} of parameters and moments each; "
        f"{options.steps} steps, a base every {options.every}, keep {options.keep}; copies in "
        f"{copies}; seed {options.seed}; load {report.load_before:.1f} before and "
        f"{report.load_after:.1f} after; {report.seconds:.0f} s",
        *report.labels(),
    ):
        console.print(line, soft_wrap=True)
    table = plain_table(_COLUMNS, _COLUMNS[:1])
    for one in report.with_tiers.occupied:
        last = one.most[max(one.most)]
        table.add_row(
            f"{one.tier}: {TIERS[one.tier]}",
            words_of(one.bound_bytes),
            words_of(one.peak_bytes),
            f"{100 * one.peak_bytes / one.bound_bytes:.1f} %",
            words_of(last),
            f"{len(one.above)} of {len(one.most)}",
        )
    _titled(console, f"Bytes over {options.steps} steps", report)
    console.print(table)
    cost = plain_table(
        ("training", "thread ms per step", "of a step", "trainers, CPU s", "keepers, CPU s"),
        ("training",),
    )
    for arm in (report.without, report.with_tiers):
        cost.add_row(
            "with tiers" if arm.tiers else "without",
            f"{1e3 * arm.thread_s:.3f}",
            f"{100 * arm.thread_s / arm.step_s:.2f} %",
            f"{arm.trainer_cpu_s:.2f}",
            f"{arm.keeper_cpu_s:.2f}",
        )
    _titled(console, "What they cost", report)
    console.print(cost)
    console.print()
    for verdict in report.verdicts():
        said = "met" if verdict.met else "MISSED"
        console.print(f"{said}: {verdict.target}: {verdict.figure}", soft_wrap=True)
    console.print(
        f"looked at {report.with_tiers.looked} times, in each step and between; files by their "
        "sizes, memory by the pages that the kernel has given. of each step the most on any rank. "
        "at the end: the last step, until the keepers have ended, at most. thread: processor time "
        "of the training thread in ckpt.step(), on the rank with the most; a step: its processor "
        "time without that.",
        soft_wrap=True,
    )


def _titled(console: Console, title: str, report: TiersReport) -> None:
    console.print()
    console.print(Text(titled(title, report.labels()), style="bold"), soft_wrap=True)


def picture(report: TiersReport, path: Path) -> None:
    """Bytes in each tier over the steps, below the line that was announced."""
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=_INCHES, layout="constrained")
    found = report.with_tiers.occupied
    panels = figure.subplots(-(-len(found) // 2), 2, sharex=True, squeeze=False).flatten()
    for axes, one in zip(panels, found, strict=False):
        steps = sorted(one.most)
        axes.step(steps, [one.most[step] / _MB for step in steps], where="mid", label="measured")
        bound_mb = one.bound_bytes / _MB
        axes.axhline(bound_mb, color="tab:red", linestyle="--", label="announced")
        top = max(bound_mb, one.peak_bytes / _MB)
        axes.set(title=f"{one.tier}: {TIERS[one.tier]}", ylabel="MB", ylim=(0, 1.1 * top))
        axes.legend(loc="lower right", fontsize="small")
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    for axes in panels[-2:]:
        axes.set_xlabel("step")
    labels = "".join(f" [{label.split(':', 1)[0]}]" for label in report.labels())
    figure.suptitle(f"{report.options.ranks} rank(s), keep {report.options.keep}{labels}")
    agg.FigureCanvasAgg(figure).print_figure(str(path), dpi=_DPI)
