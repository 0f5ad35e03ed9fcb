"""``everstep cp``: copy a run that may be training."""

from __future__ import annotations

import os
import time
from pathlib import PurePath
from typing import Annotated

import typer

from everstep.cli.common.errors import ExitCode, JsonFlag, emit
from everstep.cli.common.output import console, count_of, in_words, say
from everstep.cli.common.runs import (
    RUN_ARGUMENT,
    absolute,
    filesystem_of,
    kind_of,
    open_run,
    reading,
)
from everstep.errors import OptionError
from everstep.format.names import RUN_RECORD
from everstep.seams import PosixFileSystem
from everstep.seams.progress import progress


def cp(
    run: Annotated[str, RUN_ARGUMENT],
    dest: Annotated[
        str,
        typer.Argument(
            metavar="DEST",
            help="New or empty folder, an earlier copy of the run, or s3://bucket/prefix.",
            show_default=False,
        ),
    ],
    json_output: JsonFlag = False,
) -> None:
    """Copies a run, whole, while it may be training.

    Copies timelines, bases and the log on disk; not the memory of its keeper. Every byte read is
    verified. The copy is a run of its own: resume() and all commands read it, and a repeated cp
    brings it up to date. Damaged bases and segments are left out; the exit status is then 1.
    """
    from everstep.look.copy_run import copy_run
    from everstep.tiers.options import is_url, open_tier

    start_s = time.monotonic()
    filesystem = filesystem_of(run)
    inventory = open_run(filesystem, run)
    where = dest if is_url(dest) else str(absolute(dest))
    if str(inventory.path) == where:
        raise OptionError(f"{where} is the run itself", path=where)
    if not is_url(dest):
        _refuse_foreign(absolute(dest))
    tier = open_tier(where, PosixFileSystem())
    size_bytes = sum(base.size_bytes for base in inventory.bases)
    with reading(inventory.path), progress(f"copy {run}", size_bytes) as shown:
        done = copy_run(filesystem, inventory.path, tier, shown=shown)
    if json_output:
        emit(
            {
                "path": inventory.path,
                "out": where,
                "bases": done.bases,
                "segments": done.segments,
                "size_bytes": done.size_bytes,
                "copied_bytes": done.copied_bytes,
                "seconds": time.monotonic() - start_s,
                "damaged": [{"path": path, "problem": why} for path, why in done.damaged],
            }
        )
    else:
        out = console()
        log = f", {count_of(done.segments, 'segment')} of the log" if done.segments else ""
        say(out, f"{count_of(done.bases, 'base')}{log}, {in_words(done.size_bytes)} in {where}")
        for path, why in done.damaged:
            say(out, f"left out: {path}: {why}", "yellow")
    raise typer.Exit(ExitCode.DIFFERENT if done.damaged else ExitCode.OK)


def _refuse_foreign(path: PurePath) -> None:
    """Refuse a folder that holds something else than a run.

    Raises:
        OptionError: it is a file, or a folder with other contents.
    """
    kind = kind_of(path)
    if kind == "other":
        raise OptionError(f"{path} is not a directory", path=path)
    if kind == "directory" and (names := os.listdir(path)) and RUN_RECORD not in names:
        raise OptionError(
            f"{path} is not empty, and holds no run",
            path=path,
            hint="name a folder that does not exist yet, or an earlier copy of this run",
        )
