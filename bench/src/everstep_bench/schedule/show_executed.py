"""Executed plans as people see them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from everstep_bench.schedule.executed import CLOSE, CLOSE_S, ExecutedReport

__all__ = ["present"]


def present(report: ExecutedReport, console: Console) -> None:
    """Prints everything."""
    options = report.options
    first = report.rows[0]
    pace = "as fast as this machine computes them"
    if not options.compute:
        pace = f"PACED: {options.layer_s * 1e3:g} ms forward, twice as long backward"
    console.print(
        f"{options.layers} linear layers of {options.width}, {pace}; AdamW, "
        f"{first.state_bytes / 1e6:.1f} MB captured at every step; the link is EMULATED"
    )
    made = Table(box=None, pad_edge=False)
    made.add_column("updates", no_wrap=True)
    for column in ("link", "GB/s", "alone", "predicted", "waited", "", "step"):
        made.add_column(column, justify="right", no_wrap=True)
    for column in ("copies late", "most", "duplicated", "plans", "followed", "torn"):
        made.add_column(column, justify="right", no_wrap=True)
    for row in report.rows:
        made.add_row(
            f"{row.order} backward",
            f"{row.factor:.0%}",
            f"{row.link_bytes_per_s / 1e9:.3f}",
            *(f"{s * 1e3:.1f}" for s in (row.alone_s, row.predicted_wait_s, row.waited_s)),
            "yes" if row.met else "NO",
            *(f"{s * 1e3:.1f}" for s in (row.step_s, *row.late_s)),
            f"{row.duplicated_bytes / 1e6:.1f} MB",
            *(str(n) for n in (row.plans, row.followed_steps)),
            f"{row.torn} of {row.compared}",
        )
    console.print(made)
    console.print(
        "milliseconds. link: of what moves the state within a step alone. predicted, waited: how "
        f"long a step waits for copies; yes: within {CLOSE:.0%} or {CLOSE_S * 1e3:g} ms, and no "
        "capture differs from the state at its mark. step: with captures, the mark included. late: "
        "after the planned end of a tensor's copy"
    )
