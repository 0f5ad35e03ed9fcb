"""Pictures of benches, drawn with matplotlib where it is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everstep.cli.plan.schedule import check_picture
from everstep.errors import PermissionDeniedError

_DPI = 150


@contextlib.contextmanager
def drawn(
    path: Path, title: str, inches: tuple[float, float], *, rows: int, columns: int = 1
) -> Iterator[Any]:
    """A picture of panels, saved at the end of the block; yields their axes, row by row.

    Raises:
        UnavailableError: matplotlib is missing.
        PermissionDeniedError: it cannot be written.
    """
    check_picture(path)
    agg: Any = importlib.import_module("matplotlib.backends.backend_agg")
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=inches, dpi=_DPI, layout="constrained")
    agg.FigureCanvasAgg(figure)  # no window, whatever the user has configured
    yield figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise PermissionDeniedError(f"cannot write {path}: {error.strerror}", path=path) from error
