"""``everstep restore``: write the state of any logged step into a new run folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePath
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
from everstep.errors import OptionError, StorageError
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.names import SLOTS_DIR, timeline_dir
from everstep.seams import PosixFileSystem, Seams
from everstep.seams.filesystem import FileSystem
from everstep.seams.progress import progress

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
    if abandoned:
        say(show, abandoned, "yellow")
    if rebuilt.why and rebuilt.why not in rebuilt.notes:
        show.print(label(f"not exact: {rebuilt.why}", "yellow"), soft_wrap=True)
    for note in rebuilt.notes:
        show.print(label(f"of several ranks: {note}", "yellow"), soft_wrap=True)
    show.print(label(f"written to {folder}: resume() there goes on from it"), soft_wrap=True)


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


def write_run(filesystem: FileSystem, out: PurePath, rebuilt: Rebuilt, ring: ChunkRing) -> str:
    """Write a run whose only base is ``rebuilt``; return its id.

    It is made beside ``out`` and renamed at the end: resume() would take an incomplete run for one
    without a base, and start afresh.

    Raises:
        StorageError: the error of the file system; no files remain.
    """
    from everstep.tiers.durable_files import ensure_dirs, storage_errors

    staged = out.with_name(f"{out.name}.partial-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with storage_errors("write the restored run", out, step=rebuilt.step):
            ensure_dirs(filesystem, staged.parent)
            run = _write(filesystem, staged, rebuilt, ring)
            filesystem.rename(staged, out)
            filesystem.sync_dir(out.parent)
        return run
    finally:
        shutil.rmtree(Path(staged), ignore_errors=True)


def _write(filesystem: FileSystem, run: PurePath, rebuilt: Rebuilt, ring: ChunkRing) -> str:
    from everstep.capture.lane import LiveBody
    from everstep.keeper.persist.committer import OneRankCommit
    from everstep.keeper.persist.shard_writer import ShardWriter
    from everstep.restore.load.load import check_contents
    from everstep.run.fence import Fence
    from everstep.run.folder import open_run_folder, open_timeline
    from everstep.run.scan import scan_base
    from everstep.run.verify import verify_base
    from everstep.tiers.durable_files import SlotStore

    state = rebuilt.state
    inventory = open_run_folder(filesystem, run)
    assert inventory.run is not None
    number = open_timeline(
        Seams(filesystem=filesystem), run, inventory, parent=None, exact=rebuilt.exact
    )
    identity = ShardIdentity(inventory.run, number, state.step, state.lsn, 0, 1, rebuilt.exact)
    sizes = {name: len(data) for name, data in state.objects.items()}
    shards = plan_files(identity, list(state.entries.values()), state.aliases, sizes)
    plan = BasePlan(identity, shards)
    slots = SlotStore(filesystem, timeline_dir(run, number) / SLOTS_DIR)
    bodies = [
        LiveBody(shard.layout, state.tensors, state.objects if shard is shards[-1] else {})
        for shard in shards
    ]
    with progress("write", plan.size_bytes) as bar:
        writer = ShardWriter(filesystem, run, ring, slots, timeout_s=_TIMEOUT_S)
        OneRankCommit(writer, plan, Fence(filesystem, run, number)).run(bodies, bar)
    base = scan_base(filesystem, run, BaseId(number, state.step))
    with progress("verify", plan.size_bytes) as bar:
        verdict = verify_base(
            filesystem, base, ring, timeout_s=_TIMEOUT_S, progress=bar, contents=check_contents
        )
    if verdict.damages:
        raise StorageError(
            f"what was written reads back damaged: {verdict.damages[0].problem}",
            path=run,
            hint="the disk or memory of this machine may be failing",
        )
    return inventory.run
