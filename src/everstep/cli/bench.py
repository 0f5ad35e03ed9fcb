"""``everstep bench``: measurements, next to the hardware's limit and to what others do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli._common import ExitCode, JsonFlag, console, emit

__all__ = ["app", "persist", "stall"]

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measures, next to the hardware's limit and to others.",
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


@app.command()
def stall(
    params: Annotated[str, typer.Option(help="Of the model, like 25M or 1G.")] = "10M",
    every: Annotated[
        str, typer.Option(help="Steps of a block, each with one save: one number, or 1,10,50.")
    ] = "8",
    repeats: Annotated[int, typer.Option(help="Rounds that count; one more warms up.")] = 5,
    seed: Annotated[int, typer.Option(help="Of weights, data, and the order of arms.")] = 1234,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    link: Annotated[
        str | None,
        typer.Option(help="EMULATE a link of this bandwidth, like 2GB/s, for everstep's copies."),
    ] = None,
    writers: Annotated[int, typer.Option(help="Other processes that flush as much.")] = 0,
    free_core: Annotated[
        bool,
        typer.Option(
            "--free-core/--no-free-core",
            help="Training on one core and everything else on the others, or all on one.",
        ),
    ] = True,
    python_heavy: Annotated[
        bool, typer.Option("--python-heavy", help="Add pure Python to each step.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also with each mechanism off in turn.")
    ] = False,
    arms: Annotated[
        str | None, typer.Option(help="Only these, like lazy,dcp-warm,torch.save.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to write [default: here]; nothing stays behind."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a save of lazy and of DCP (needs matplotlib).")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write all blocks as Chrome trace events.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Exit with 3 if a target is missed.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains and saves: everstep's methods, torch.save, DCP, torchsnapshot, no checkpoint.

    All arms take turns in rounds. For each save: how long the training thread is held up,
    by cause; what training loses by the clock on the wall, next to the same steps without a
    save; how long until the state is durable, and how fast the loop goes meanwhile.
    """
    from everstep.bench.persist.show import progress_display
    from everstep.bench.stall import timeline
    from everstep.bench.stall.options import (
        StallOptions,
        parse_arms,
        parse_every,
        parse_link,
        parse_params,
    )
    from everstep.bench.stall.run import run_stall
    from everstep.bench.stall.show import present

    options = StallOptions(
        params=parse_params(params),
        every=parse_every(every),
        repeats=repeats,
        seed=seed,
        device=device,
        link_bytes_per_s=None if link is None else parse_link(link),
        writers=writers,
        free_core=free_core,
        python_heavy=python_heavy,
        ablate=ablate,
        arms=parse_arms(arms),
        folder=folder,
    )
    if picture is not None:
        timeline.check_picture(picture)
    if trace is not None:
        timeline.check_target(trace)
    try:
        with progress_display() as display:
            report = run_stall(options, display)
    except KeyboardInterrupt:
        typer.echo("interrupted: processes are ended, what was written is removed", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if trace is not None:
        timeline.trace(report, trace)
    if picture is not None:
        timeline.picture(report, picture)
    if json_output:
        emit(report.as_json())
    else:
        present(report, console())
    if check and not report.all_met():
        raise typer.Exit(ExitCode.INFEASIBLE)
