"""A picture of memory over a step, with and without checkpointing."""

from __future__ import annotations

import importlib
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.plan.schedule.planned import Planned

__all__ = ["draw"]

_INCHES = (10.0, 4.0)
_DPI = 150


def draw(found: Planned, title: str, path: Path) -> None:
    """Bytes over the time of the step: its own, and with the plan's snapshots."""
    from everstep.plan.schedule.schedule import memory_of

    assert found.schedule is not None
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    ends_ms = [s * 1e3 for s in accumulate(found.problem.seconds)]
    planned = memory_of(found.problem, found.schedule.placements)
    for label, values in (("with checkpoints", planned), ("without", found.problem.live_bytes)):
        axes.step([0.0, *ends_ms], [v / 1e6 for v in (values[0], *values)], label=label)
    at_once = found.blocking_peak_bytes / 1e6
    axes.axhline(at_once, linestyle=":", color="grey", label="all duplicated at once (peak)")
    axes.set(xlabel="ms of the step", ylabel="MB", title=title, ylim=(0, at_once * 1.05))
    axes.legend(loc="lower right")
    agg.FigureCanvasAgg(figure).print_figure(str(path), dpi=_DPI)
