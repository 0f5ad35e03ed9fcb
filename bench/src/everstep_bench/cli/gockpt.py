"""``everstep bench multistep`` and ``crash-interval``: what GoCkpt's paper measures."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.common._common import JsonFlag
from everstep.cli.common._units import parse_bytes, parse_bytes_per_s, parse_seconds
from everstep_bench.cli.common import (
    Arms,
    Batch,
    Check,
    Folder,
    FreeCore,
    Link,
    Params,
    Repeats,
    Seed,
    measured,
    tell,
)

__all__ = ["crash_interval", "multistep"]


def multistep(
    copies: Annotated[
        str, typer.Option(help="Steps that a copy of the whole state takes: 4, or 4,8.")
    ] = "4,8",
    ratios: Annotated[
        str, typer.Option(help="Bytes of gradients to bytes of state: 2/14, or 2/14,4/12.")
    ] = "2/14,4/12",
    parts: Annotated[
        str, typer.Option("--parts", "--k", help="Numbers of parts: 1-24, or 1,2,4,7,12,24.")
    ] = "1-24",
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a step.")] = 100.0,
    state_bytes: Annotated[str, typer.Option(help="Of parameters and moments.")] = "48MB",
    layers: Annotated[int, typer.Option(help="Parameters that are trained.")] = 48,
    held_steps: Annotated[
        int, typer.Option(help="Steps for which gockpt_o keeps gradients, in device memory.")
    ] = 1,
    repeats: Repeats = 3,
    seed: Seed = 1234,
    free_core: FreeCore = True,
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Bases over several steps: how long each number of parts holds training up, and the model.

    Steps are as long as is asked for; copies go through an EMULATED link that takes so many of
    them for the whole state. The model is that of everstep plan multistep. How long all of it
    takes is said before it begins.
    """
    from everstep_bench.multistep.options import (
        MultistepOptions,
        parse_copies,
        parse_parts,
        parse_ratios,
    )
    from everstep_bench.multistep.run import about_s, run_multistep
    from everstep_bench.multistep.show import present

    options = MultistepOptions(
        copies=parse_copies(copies),
        ratios=parse_ratios(ratios),
        parts=parse_parts(parts),
        repeats=repeats,
        step_s=step_ms / 1e3,
        state_bytes=int(parse_bytes("--state-bytes", state_bytes)),
        layers=layers,
        held_steps=held_steps,
        seed=seed,
        free_core=free_core,
        folder=folder,
    )
    typer.echo(f"this takes about {about_s(options) / 60:.1f} minutes", err=True)
    report = measured(run_multistep, options)
    tell(report, present, json_output=json_output, failed=check and not report.all_met())


def crash_interval(
    params: Params = "10M",
    batch: Batch = 4,
    crash_every: Annotated[
        str, typer.Option(help="Seconds from failure to failure: 10s, or 10s,30s,60s.")
    ] = "10s",
    crashes: Annotated[int, typer.Option(help="Failures of each arm.")] = 3,
    link: Link = None,
    spare_keeper: Annotated[
        bool, typer.Option("--spare-keeper", help="Kill training only, not its keeper.")
    ] = False,
    repeats: Repeats = 5,
    seed: Seed = 1234,
    free_core: FreeCore = True,
    arms: Arms = None,
    folder: Folder = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains, is killed every so many seconds, and resumes: GoCkpt's Table 1.

    Each arm saves at its own best interval, which follows from what a save of it costs. Counted
    are the steps that are there in the end, for each second of training and resuming.
    """
    from everstep_bench.crash.options import ARMS, CrashOptions
    from everstep_bench.crash.run import run_crash
    from everstep_bench.crash.show import present
    from everstep_bench.stall.options import parse_arms, parse_params

    options = CrashOptions(
        params=parse_params(params),
        batch=batch,
        repeats=repeats,
        seed=seed,
        free_core=free_core,
        folder=folder,
        crash_every_s=tuple(
            dict.fromkeys(parse_seconds("--crash-every", word) for word in crash_every.split(","))
        ),
        crashes=crashes,
        link_bytes_per_s=None if link is None else parse_bytes_per_s("--link", link),
        spare_keeper=spare_keeper,
        arms=parse_arms(arms, ARMS),
    )
    report = measured(run_crash, options)
    tell(report, present, json_output=json_output, failed=check and not report.all_met())
