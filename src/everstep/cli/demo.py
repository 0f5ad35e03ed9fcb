"""``everstep demo``: train on real text, get killed, resume, compare every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from everstep.bench.demo.plan import demo_plan
from everstep.bench.demo.show import as_json, introduce, present, progress_display
from everstep.bench.demo.supervisor import run_demo
from everstep.errors import (
    EverstepError,
    OptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    UnavailableError,
)

__all__ = ["demo"]

_EXIT_DIFFERENT = 1
_EXIT_USAGE = 2
_EXIT_ENVIRONMENT = 4
_EXIT_INTERRUPTED = 130


def demo(
    steps: Annotated[int | None, typer.Option(help="Steps of either run.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data order, dropout and kills.")] = 1234,
    every: Annotated[int | None, typer.Option(help="Steps between two bases.")] = None,
    method: Annotated[str, typer.Option(help="How bases are taken.")] = "async",
    run: Annotated[
        Path | None,
        typer.Option("--run", "--keep", help="Keep everything in this new folder."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    quick: Annotated[bool, typer.Option(help="A tiny model and few steps.")] = False,
) -> None:
    """Trains a small GPT twice from one seed, kills one of the runs three times, compares.

    The one that is killed has only its checkpoints to go on. At the end every tensor, the
    optimizer, the random generators, the data order and every loss must be the same, bit
    for bit. Exit status: 0 if so, 1 if one bit differs.
    """
    try:
        plan = demo_plan(steps=steps, every=every, method=method, seed=seed, quick=quick)
        with progress_display(plan.steps) as display:
            for line in introduce(plan):
                display.event(line)
            report = run_demo(plan, display, folder=run)
    except KeyboardInterrupt:
        typer.echo("interrupted: the children are ended, temporary files are removed", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    except EverstepError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_status(error)) from None
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_EXIT_ENVIRONMENT) from None
    if json_output:
        typer.echo(json.dumps(as_json(report), indent=2))
    else:
        present(report)
        if run is not None:
            typer.echo(f"kept in {run}: try  everstep ls {run / 'killed'}")
    raise typer.Exit(0 if report.verdict.identical else _EXIT_DIFFERENT)


def _status(error: EverstepError) -> int:
    if isinstance(error, OptionError):
        return _EXIT_USAGE
    if isinstance(error, (UnavailableError, OutOfSpaceError, PermissionDeniedError)):
        return _EXIT_ENVIRONMENT
    return _EXIT_DIFFERENT
