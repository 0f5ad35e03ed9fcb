"""``everstep bench lossy-recovery``: what TierCheck's experiment 8 measures."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.common._common import JsonFlag
from everstep_bench.cli.common import Folder, Seed, measured, tell

__all__ = ["lossy_recovery"]


def lossy_recovery(
    steps: Annotated[int, typer.Option(help="Of each training.")] = 300,
    every: Annotated[int, typer.Option(help="Steps from base to base.")] = 25,
    fail_every: Annotated[int, typer.Option(help="Steps from failure to failure.")] = 24,
    seed: Seed = 0,
    folder: Folder = None,
    json_output: JsonFlag = False,
) -> None:
    """Trains on through failures that are recovered from a log of lossy gradients.

    Loss at the end and on unseen text, next to a training without failures and to one with a dense
    log; and how far each recovered state is from the one that was lost (TierCheck, experiment 8).
    """
    from everstep_bench.lossy import LossyOptions, present, run_lossy

    options = LossyOptions(
        steps=steps, every=every, fail_every=fail_every, seed=seed, folder=folder
    )
    tell(measured(run_lossy, options), present, json_output=json_output)
