"""``everstep drill``: hosts that train together are killed, replaced, and compared bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.paths import absolute, checked_path

__all__ = ["drill"]


def drill(
    hosts: Annotated[int, typer.Option(help="Of the job, one rank each.")] = 4,
    kill: Annotated[
        str, typer.Option(help="What dies: process, node or rack, or several with commas.")
    ] = "process,node,rack",
    at: Annotated[
        str | None,
        typer.Option(
            help="When: after a step (27), at a failpoint (save.before_rename), or at that of the "
            "base of a step (save.before_rename@20).",
        ),
    ] = None,
    arms: Annotated[
        str | None, typer.Option(help="Only these, like lazy,datastates.", show_default="all")
    ] = None,
    victim: Annotated[int, typer.Option(help="Host that is hit; of a rack the first one.")] = 1,
    params: Annotated[str, typer.Option(help="Of the model, like 1M or 25M.")] = "1M",
    batch: Annotated[int, typer.Option(help="Sequences of 64 bytes of each rank in a step.")] = 8,
    parallel: Annotated[str, typer.Option(help="ddp, or fsdp2 (every rank its part).")] = "ddp",
    steps: Annotated[int, typer.Option(help="Of the training.")] = 40,
    every: Annotated[
        str,
        typer.Option(
            help="Steps between two bases: 10, or of some arms their own: gemini=11,checkfreq=21. "
            "Those are killed half an interval after a base of their own.",
        ),
    ] = "10",
    links: Annotated[
        str, typer.Option(help="auto, namespaces (needs root and iproute2), or groups.")
    ] = "auto",
    link: Annotated[str, typer.Option(help="Rate of each host's link, like 200mbit.")] = "1gbit",
    store: Annotated[
        str,
        typer.Option(
            help="The durable tier: folder (of this machine, behind no link), or seaweedfs (a real "
            "object store behind a link of each host; needs namespaces and weed).",
        ),
    ] = "folder",
    store_link: Annotated[
        str | None,
        typer.Option(help="Rate of each host's link to it.", show_default="half of --link"),
    ] = None,
    restore_steps: Annotated[
        float | None,
        typer.Option(
            help="Set links when the undisturbed run is over, so that a host's state takes so many "
            "of its steps from the store, and half as many from another host.",
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            help="How many times faster than the best of gemini, checkfreq and datastates everstep "
            "has to recover, like process=3.6,node=1.8,rack=1.3.",
        ),
    ] = None,
    into: Annotated[
        float,
        typer.Option(
            help="How much of the next step is taken when the kill falls, from 0 to below 1. It is "
            "lost in all arms.",
        ),
    ] = 0.0,
    cut: Annotated[
        bool,
        typer.Option(
            "--cut", help="Cut a dead node's link first, so that no connection is closed."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a rank is given up.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of weights, data and noise.")] = 1234,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            callback=checked_path,
            help="Keep orders, journals and logs in this new folder.",
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Kills hosts that train together, replaces them, compares every bit.

    A job of real torchrun agents trains a small GPT over gloo on several hosts of this machine:
    network namespaces with links of a stated rate where the machine allows it, else process
    groups. A trainer, a node with its keeper and its disk, or half of the nodes are killed with
    SIGKILL; the job starts again with empty hosts in their place and resumes. Printed is what that
    costs (TierCheck's Table 3) for each way to be recoverable. Exit status: 0 if every rank ends in
    the bits of a run that nobody disturbed, 1 if one bit differs, 3 if a ratio of --check is not
    reached or every arm was refused.
    """
    from everstep.tiers.durable_files import storage_errors
    from everstep_bench.drill.plan import drill_plan
    from everstep_bench.drill.run import run_drill
    from everstep_bench.drill.show import present, progress_display
    from everstep_bench.stall.options import parse_params

    plan = drill_plan(
        hosts=hosts,
        kills=kill,
        arms=arms,
        params=parse_params(params),
        batch=batch,
        parallel=parallel,
        steps=steps,
        every=every,
        at=at,
        victim=victim,
        seed=seed,
        links=links,
        link=link,
        cut=cut,
        timeout_s=timeout,
        store=store,
        store_link=store_link,
        restore_steps=restore_steps,
        check=check,
        into=into,
    )
    try:
        with (
            storage_errors("run the drill", folder or absolute(".")),
            progress_display(plan.steps) as display,
        ):
            report = run_drill(plan, display, folder=folder)
    except KeyboardInterrupt:
        typer.echo("interrupted: processes are ended, namespaces and files removed", err=True)
        raise
    if json_output:
        emit(report.as_json())
    else:
        present(report)
    if not report.same:
        raise typer.Exit(ExitCode.DIFFERENT)
    raise typer.Exit(ExitCode.OK if report.ran and report.met else ExitCode.INFEASIBLE)
