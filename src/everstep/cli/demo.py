"""``everstep demo``: train on real text, get killed, resume, compare every bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.runs import checked_path


def demo(
    steps: Annotated[int | None, typer.Option(help="Steps of each run (default 120).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data, dropout and kills.")] = 1234,
    every: Annotated[
        int | None, typer.Option(help="Steps between two bases (default 10, quick 5).")
    ] = None,
    method: Annotated[str, typer.Option(help="Checkpointing method.")] = "logged",
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "--keep", callback=checked_path, help="Keep everything in this new folder."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains, gets killed, resumes, compares every bit.

    A small GPT is trained twice from one seed, side by side. One of the runs is killed with SIGKILL
    four times, twice together with its keeper and twice without it, and continues from its
    checkpoints only. At the end every tensor, the optimizer, the random generators, the data order
    and every loss must be equal, bit for bit. Exit status: 0 if so, 1 if one bit differs.
    """
    from everstep.demo.plan import demo_plan
    from everstep.demo.show import Display, introduce, present
    from everstep.demo.supervisor import run_demo
    from everstep.tiers.durable_files import storage_errors

    plan = demo_plan(steps=steps, every=every, method=method, seed=seed, quick=quick)
    place = run if run is not None else Path(tempfile.gettempdir())
    try:
        with storage_errors("run the demo", place):
            display = Display(plan.training.steps)
            for line in introduce(plan):
                display.event(line)
            report = run_demo(plan, display, folder=run)
    except KeyboardInterrupt:
        typer.echo("interrupted: processes ended, temporary files removed", err=True)
        raise
    if json_output:
        emit(report.as_json())
    else:
        present(report)
        if run is not None:
            typer.echo(f"kept in {run}; look at it with: everstep ls {run / 'killed'}")
    raise typer.Exit(ExitCode.DIFFERENT if report.differences else ExitCode.OK)
