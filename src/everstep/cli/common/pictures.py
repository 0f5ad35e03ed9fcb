"""Pictures: check that one can be drawn, and draw the memory of a step."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.errors import OptionError, UnavailableError

if TYPE_CHECKING:
    from everstep.plan.schedule.planned import Planned


_INCHES = (10.0, 4.0)
_DPI = 150


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn, before anything is computed for it.

    Raises:
        UnavailableError: matplotlib is missing.
        OptionError: there is no such folder, or no such kind of picture.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError(
            "a picture needs matplotlib, which is not installed",
            hint="pip install matplotlib, or leave out --picture",
        )
    check_target(path)
    canvas: Any = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    kinds = canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise OptionError(
            f"--picture: no picture is drawn as {path.suffix!r}", hint=f"one of {', '.join(kinds)}"
        )


def check_target(path: Path) -> None:
    """Check that a file can be written to ``path``, before anything is computed for it.

    Raises:
        OptionError: there is no such folder, or it is one.
    """
    if not path.absolute().parent.is_dir():
        raise OptionError(f"there is no folder {path.absolute().parent}", hint="make it first")
    if path.is_dir():
        raise OptionError(f"{path} is a folder", hint="name a file in it")


def draw_memory(found: Planned, title: str, path: Path) -> None:
    """Draw memory over the time of a step, with the plan's snapshots and without."""
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
