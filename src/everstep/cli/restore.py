"""``everstep restore``: write the state of any logged step into a new run folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.output import console, count_of, in_words, label, say
from everstep.cli.common.runs import (
    RUN_ARGUMENT,
    absolute,
    filesystem_of,
    kind_of,
    open_run,
    reading,
)
from everstep.commit import describe_abandoned
from everstep.commit.lineage import BaseId
from everstep.errors import OptionError
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import FileSystem

if TYPE_CHECKING:
    from everstep.format.writer import ChunkRing
    from everstep.restore.offline.rebuild import Rebuilder, Rebuilt
    from everstep.run.scan import Inventory


_TIMEOUT_S = 120.0


def restore(
    run: Annotated[str, RUN_ARGUMENT],
    step: Annotated[int, typer.Option(help="Step to restore.", show_default=False)],
    out: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder of the new run; missing or empty."),
    ],
    timeline: Annotated[
        int | None, typer.Option(help="Timeline of the step, if several have it.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Writes the state of a step into a new run folder, from base and log.

    The new run holds one base, which Checkpointer(DIR).resume() loads. Every byte read is verified,
    and the written base is read back. DIR appears complete or not at all. The training program is
    not needed, but its optimizer must be one of torch's (else exit status 3).

    A run of several ranks becomes a run of one rank: tensors are assembled from all shards.
    Per-rank state (random generators, batch statistics) is taken from rank 0; this is reported, and
    the state is not exact then. The run folder must have the files of all ranks.
    """
    from everstep.convert.run_folder import write_run

    filesystem = filesystem_of(run)
    start_s = time.monotonic()
    inventory = open_run(filesystem, run)
    folder = check_out(out, inventory)
    with rebuilding(filesystem, inventory) as (rebuilder, ring):
        rebuilt = rebuilder.state_at(step, timeline)
        written = write_run(PosixFileSystem(), folder, rebuilt, ring)
    at = BaseId(rebuilt.timeline, rebuilt.step)
    # Of a step that was requested with its timeline, this is known.
    abandoned = describe_abandoned(at, inventory.branches) if timeline is None else None
    found: dict[str, Any] = {
        "path": inventory.path,
        "run": inventory.run,
        "out": folder,
        "out_run": written,
        "step": rebuilt.step,
        "timeline": rebuilt.timeline,
        "lsn": rebuilt.state.lsn,
        "base": rebuilt.base,
        "replayed": rebuilt.replayed,
        "exact": rebuilt.exact,
        "why": rebuilt.why,
        "entries": len(rebuilt.state.entries) + len(rebuilt.state.objects),
        "size_bytes": rebuilt.state.size_bytes,
        "skipped": rebuilt.skipped,
        "notes": rebuilt.notes,
        "given_up": abandoned,
        "seconds": time.monotonic() - start_s,
    }
    if json_output:
        emit(found)
        return
    _show(rebuilt, found)


def _show(rebuilt: Rebuilt, found: dict[str, Any]) -> None:
    at = BaseId(rebuilt.timeline, rebuilt.step)
    show = console()
    for one in rebuilt.skipped:
        say(show, f"passed over {BaseId(one.timeline, one.step)}: {one.reason}", "yellow")
    replayed = f" and {count_of(rebuilt.replayed, 'step')} of the log" if rebuilt.replayed else ""
    show.print(
        label(
            f"{at}, from base {rebuilt.base.step}{replayed}: {found['entries']} entries, "
            f"{in_words(found['size_bytes'])}, " + ("exact" if rebuilt.exact else "not exact")
        )
    )
    if found["given_up"]:
        say(show, found["given_up"], "yellow")
    if rebuilt.why and rebuilt.why not in rebuilt.notes:
        show.print(label(f"not exact: {rebuilt.why}", "yellow"), soft_wrap=True)
    for note in rebuilt.notes:
        show.print(label(f"of several ranks: {note}", "yellow"), soft_wrap=True)
    show.print(label(f"written to {found['out']}: resume() there goes on from it"), soft_wrap=True)


@contextlib.contextmanager
def rebuilding(
    filesystem: FileSystem, inventory: Inventory
) -> Iterator[tuple[Rebuilder, ChunkRing]]:
    """Make a rebuilder of states of a run, which uses all cores of this process."""
    from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
    from everstep.restore.offline.rebuild import Rebuilder
    from everstep.restore.offline.run_log import RunLog
    from everstep.seams.processes.processes import available_cores

    with reading(inventory.path):
        log = RunLog.of(filesystem, inventory)
    threads = len(available_cores())
    with contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        yield Rebuilder(filesystem, log, ring, timeout_s=_TIMEOUT_S, threads=threads), ring


def check_out(out: str, inventory: Inventory) -> PurePath:
    """Return the folder of the new run.

    Raises:
        OptionError: it is not empty, or cannot hold a run.
        PermissionDeniedError, StorageError: it cannot be examined.
    """
    folder = new_folder(out)
    run = PurePath(os.path.realpath(inventory.path))
    if run == folder or run in folder.parents:
        hint = "choose a folder outside of the run"
        raise OptionError(f"{folder} lies in the run itself", path=folder, hint=hint)
    return folder


def new_folder(out: str) -> PurePath:
    """Return a folder in which nothing is yet.

    Raises:
        OptionError: it is not empty, or cannot hold a run.
        PermissionDeniedError, StorageError: it cannot be examined.
    """
    if not out or "://" in out:
        raise OptionError(f"{out!r} is no folder", hint="a directory on this machine")
    folder = absolute(out, real=True)
    if (kind := kind_of(folder)) is not None:
        if kind != "directory":
            hint = "choose a folder that is not there yet"
            raise OptionError(f"{folder} is no folder", path=folder, hint=hint)
        with reading(folder):
            held = os.listdir(folder)
        if held:
            raise OptionError(
                f"{folder} is not empty: it holds {held[0]!r}"
                + (f" and {len(held) - 1} more" if len(held) > 1 else ""),
                path=folder,
                hint="choose a folder that is not there yet; nothing is written over",
            )
    return folder
