"""``everstep bench tiers``: what TierCheck's experiment 9 measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.common._common import JsonFlag
from everstep.cli.common._paths import looked_at
from everstep_bench.cli.common import Batch, Check, Folder, Params, Seed, measured, tell

__all__ = ["tiers"]


def tiers(
    steps: Annotated[int, typer.Option(help="Of each of the two trainings.")] = 200,
    ranks: Annotated[int, typer.Option(help="Processes that train together.")] = 2,
    every: Annotated[int, typer.Option(help="Steps from base to base.")] = 10,
    keep: Annotated[int, typer.Option(help="Bases, and copies.")] = 2,
    params: Params = "500k",
    batch: Batch = 4,
    seed: Seed = 1234,
    tier: Annotated[
        str | None,
        typer.Option(help="Where copies go: a URL or an empty folder [default: one of its own]."),
    ] = None,
    folder: Folder = None,
    picture: Annotated[
        Path | None,
        typer.Option(callback=looked_at, help="Draw bytes over steps (needs matplotlib)."),
    ] = None,
    check: Check = False,
    json_output: JsonFlag = False,
) -> None:
    """Trains with bases in memory, peers, disks and copies, and looks how many bytes are where.

    In each step, and between, against what was announced at the start (TierCheck, experiment 9);
    and what tiers add to the training thread and to the processors, next to the same training
    without them. Nodes are EMULATED: processes and folders of this machine.
    """
    from everstep.cli.common._pictures import check_picture
    from everstep_bench.stall.options import parse_params
    from everstep_bench.tiers import show
    from everstep_bench.tiers.options import TiersOptions
    from everstep_bench.tiers.run import run_tiers

    options = TiersOptions(
        steps=steps,
        ranks=ranks,
        every=every,
        keep=keep,
        params=parse_params(params),
        batch=batch,
        seed=seed,
        place=tier,
        folder=folder,
    )
    if picture is not None:
        check_picture(picture)
    report = measured(run_tiers, options)
    if picture is not None:
        show.picture(report, picture)
    tell(report, show.present, json_output=json_output, failed=check and not report.all_met())
