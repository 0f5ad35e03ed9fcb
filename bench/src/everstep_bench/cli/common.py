"""Options of the verbs of ``everstep bench``, and their common start and end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console

from everstep.cli.common.errors import ExitCode, emit
from everstep.cli.common.output import console
from everstep.cli.common.paths import checked_path

__all__ = [
    "Arms",
    "Batch",
    "Check",
    "Folder",
    "FreeCore",
    "Link",
    "Params",
    "Repeats",
    "Seed",
    "measured",
    "tell",
]

_Report = TypeVar("_Report")

Params = Annotated[str, typer.Option(help="Of the model, like 25M or 1G.")]
Repeats = Annotated[int, typer.Option(help="Rounds, or saves, that count; others warm up.")]
Arms = Annotated[str | None, typer.Option(help="Only these, like lazy,checkfreq,torch.save.")]
Seed = Annotated[int, typer.Option(help="Of weights, data, and the order of arms.")]
FreeCore = Annotated[
    bool,
    typer.Option(
        "--free-core/--no-free-core",
        help="Training on one core and everything else on the others, or all on one.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        callback=checked_path,
        help="Where to write [default: here]; nothing is left there.",
    ),
]
Check = Annotated[bool, typer.Option(help="Exit with 3 if a target is missed.")]
Batch = Annotated[int, typer.Option(help="Sequences of 64 bytes in a step.")]
Link = Annotated[
    str | None,
    typer.Option(help="EMULATE a link of this bandwidth, like 2GB/s, for everstep's copies."),
]


class _Outcome(Protocol):
    def as_json(self) -> Any: ...


_Told = TypeVar("_Told", bound=_Outcome)


def tell(
    report: _Told,
    present: Callable[[_Told, Console], None],
    *,
    json_output: bool,
    failed: bool = False,
) -> None:
    """One document, or tables; exits with 3 if a target that was to be checked is missed."""
    if json_output:
        emit(report.as_json())
    else:
        present(report, console())
    if failed:
        raise typer.Exit(ExitCode.INFEASIBLE)


def measured(run: Callable[[Any, Any], _Report], options: object) -> _Report:
    """Runs a benchmark; an interruption ends it in good order."""
    from everstep_bench.persist.show import progress_display

    try:
        with progress_display() as display:
            return run(options, display)
    except KeyboardInterrupt:
        typer.echo("interrupted: processes are ended, what was written is removed", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
