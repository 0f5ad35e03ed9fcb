"""``everstep bench``: measurements, next to the hardware's limit and to what others do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli._common import ExitCode, JsonFlag, console, emit

__all__ = ["app", "persist"]

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measures, next to the disk's limit and to others.",
)


@app.callback()
def _group() -> None:
    pass


@app.command()
def persist(
    size: Annotated[str, typer.Option(help="Of the state: parameters and moments.")] = "1GiB",
    repeats: Annotated[int, typer.Option(help="Rounds that count; one more warms up.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the state, and of the order of arms.")] = 1234,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to write [default: here]; nothing stays behind."),
    ] = None,
    check: Annotated[bool, typer.Option(help="Exit with 3 if a target is missed.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Saves and loads one state: everstep, the raw disk, torch.save, safetensors, DCP.

    All arms take turns in rounds. Columns: GB/s, CPU seconds per GB from live tensors to
    durable, the share of what the disk gives to raw O_DIRECT transfers, and the speed next
    to torch.save with fsync. Loading is uncached, and ours verifies every byte.
    """
    from everstep.bench.persist.run import PersistOptions, parse_size, run_persist
    from everstep.bench.persist.show import present, progress_display

    options = PersistOptions(parse_size(size), repeats, seed, folder)
    try:
        with progress_display() as display:
            report = run_persist(options, display)
    except KeyboardInterrupt:
        typer.echo("interrupted: what was written is removed", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if json_output:
        emit(report.as_json())
    else:
        present(report, console())
    if check and not all(verdict.met for verdict in report.verdicts()):
        raise typer.Exit(ExitCode.INFEASIBLE)
