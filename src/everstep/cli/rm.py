"""``everstep rm``: delete one base, but not the last one that is known to be good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from everstep.cli.common.errors import JsonFlag, emit
from everstep.cli.common.log import run_log, steps_in_words
from everstep.cli.common.output import console, in_words, label, plain, table
from everstep.cli.common.runs import RUN_ARGUMENT, open_run, reading, select_base
from everstep.cli.ls import STATUS_WORDS
from everstep.cli.verify import check_base
from everstep.errors import OptionError, StorageError
from everstep.format.names import (
    MANIFEST,
    PIN_RECORD,
    RECORDS_OF_BASE,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_shard,
)
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import DirEntry, FileSystem
from everstep.seams.progress import progress

if TYPE_CHECKING:
    from everstep.run.scan import BaseFound, Inventory


@dataclass(frozen=True, slots=True)
class _Plan:
    """Planned deletion.

    Attributes:
        files: files to delete.
        stays: names in the directory that everstep did not write.
        refusal: reason why ``--force`` is needed; None if it is not.
    """

    base: BaseFound
    files: tuple[DirEntry, ...]
    stays: tuple[str, ...]
    refusal: str | None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def kept_bytes(self) -> int:
        """Bytes of files with other names: static entries, in other bases."""
        return sum(file.size_bytes for file in self.files if file.links > 1)

    @property
    def allocated_bytes(self) -> int:
        return sum(file.allocated_bytes for file in self.files)


def rm(
    run: Annotated[str, RUN_ARGUMENT],
    step: Annotated[int, typer.Option(help="Step of the base to delete.", show_default=False)],
    timeline: Annotated[
        int | None, typer.Option(help="Timeline of the base, if several have the step.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the files to delete; delete nothing."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even if it is still needed, or unfinished.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Deletes one base, in two steps that any crash survives.

    Refuses, unless forced, to delete the newest good base of the current history. To find it, bases
    are read back, newest first, until one verifies. Also refuses if steps of the log can be
    restored from this base only.
    """
    filesystem = PosixFileSystem()
    inventory = open_run(filesystem, run)
    base = select_base(inventory, step, timeline)
    plan = _plan(base, None if force else _refusal(filesystem, inventory, base))
    if plan.refusal is not None and not dry_run:
        raise OptionError(
            plan.refusal, step=step, path=base.path, hint="--force deletes it nevertheless"
        )
    left: list[str] = []
    if not dry_run:
        left = _delete(filesystem, inventory, base)
    if json_output:
        emit(
            {
                "path": inventory.path,
                "timeline": base.id.timeline,
                "step": base.id.step,
                "status": base.status,
                "dry_run": dry_run,
                "deleted": not dry_run,
                "refusal": plan.refusal,
                "files": [
                    {
                        "path": base.path / file.name,
                        "size_bytes": file.size_bytes,
                        "allocated_bytes": file.allocated_bytes,
                    }
                    for file in plan.files
                ],
                "size_bytes": plan.size_bytes,
                "allocated_bytes": plan.allocated_bytes,
                "kept_bytes": plan.kept_bytes,
                "stays": left if not dry_run else plan.stays,
            }
        )
    else:
        _show(console(), plan, left, dry_run)


# --- Deciding ---------------------------------------------------------------------------


def _refusal(filesystem: FileSystem, inventory: Inventory, base: BaseFound) -> str | None:
    """Return the reason why ``base`` should stay, or None if it may be deleted."""
    newest = max(inventory.timelines, default=0)
    if base.status == "incomplete" and base.id.timeline >= newest:
        return f"{base.id} is unfinished: a process may be writing it right now"
    if base.status in ("incomplete", "condemned") and not base.is_usable:
        return None
    if base.is_pinned:
        return f"{base.id} is pinned (everstep pin --remove ends that)"
    good = _newest_good(filesystem, inventory)
    if good is None:
        return f"no base of the run is good: {base.id} may be all there is to save"
    if good.id == base.id:
        return f"{base.id} is the newest good base: resume() needs it"
    return _log_lost(filesystem, inventory, base)


def _log_lost(filesystem: FileSystem, inventory: Inventory, base: BaseFound) -> str | None:
    """Describe the steps that the log can restore only from ``base``; None if there are none."""
    log = run_log(filesystem, inventory)
    if log is None or base.id not in log.usable:
        return None
    older = [one for one in inventory.bases if one.id in log.usable and one.id.step <= base.id.step]
    bad = tuple(one.id for one in older if _first_good(filesystem, inventory, [one]) is None)
    if base.id in bad:
        return None  # nothing can be restored from it
    with reading(inventory.path):
        lost = log.replayable(without=bad) - log.replayable(without=(base.id, *bad))
    if not lost:
        return None
    steps = steps_in_words(sorted({step for _, step in lost}))
    return f"the log leads to {steps} only from {base.id}: without it they cannot be restored"


def _newest_good(filesystem: FileSystem, inventory: Inventory) -> BaseFound | None:
    """Return the newest base of the current history that verifies, read back now."""
    from everstep.run.scan import candidates

    return _first_good(filesystem, inventory, candidates(inventory).ordered)


def _first_good(
    filesystem: FileSystem, inventory: Inventory, bases: Iterable[BaseFound]
) -> BaseFound | None:
    """Return the first base that verifies, read back now."""
    import everstep.restore.load.load  # noqa: F401  # load torch before the progress bar starts
    from everstep.format.writer import CHUNKS, WRITERS, ChunkRing

    with contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        for base in bases:
            with progress(f"verify {base.id}", base.size_bytes) as bar:
                checked = check_base(filesystem, inventory, base, ring, bar)
            if checked.usable:
                return base
    return None


def _plan(base: BaseFound, refusal: str | None) -> _Plan:
    def goes(file: DirEntry) -> bool:
        records = RECORDS_OF_BASE
        if parse_marker(file.name) is not None or file.name in records:
            return file.kind != "dir"
        ours = parse_shard(file.name) is not None or file.name.endswith(TEMPORARY_SUFFIX)
        return ours and file.kind == "file"

    files = tuple(file for file in base.files if goes(file))
    stays = tuple(file.name for file in base.files if not goes(file))
    return _Plan(base, files, stays, refusal)


# --- Doing ------------------------------------------------------------------------------


def _delete(filesystem: FileSystem, inventory: Inventory, base: BaseFound) -> list[str]:
    """Delete ``base``; return the names that remain."""
    from everstep.keeper.retain.retention import delete_base, delete_files
    from everstep.tiers import remove_if_there
    from everstep.tiers.durable_files import storage_errors, write_durably

    with storage_errors("delete the base", base.path, step=base.id.step):
        # A deletion leaves pinned bases alone.
        remove_if_there(filesystem, base.path / PIN_RECORD)
        if base.status == "complete":
            # Deletion begins by renaming the manifest: a base without one gets it first.
            assert base.manifest is not None
            write_durably(filesystem, base.path / MANIFEST, base.manifest.encode())
        if base.status == "complete" or any(file.name == MANIFEST for file in base.files):
            # No timeline: a person at the command line may delete from any timeline.
            delete_base(filesystem, inventory.path, base, None, timeline=None)
        else:
            delete_files(filesystem, base, None)
    try:
        return [entry.name for entry in filesystem.scan(base.path)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(
            f"deleted, but the directory cannot be read: {error.strerror or error}", path=base.path
        ) from error


# --- Showing ----------------------------------------------------------------------------


def _show(out: Console, plan: _Plan, left: list[str], dry_run: bool) -> None:
    base = plan.base
    verb = "would delete" if dry_run else "deleted"
    if dry_run:
        made = table(("file", "bytes", "allocated"), right=("bytes", "allocated"))
        for file in plan.files:
            made.add_row(label(file.name), f"{file.size_bytes:,}", f"{file.allocated_bytes:,}")
        out.print(label(str(base.path)), soft_wrap=True)
        out.print(made)
    out.print(
        f"{verb} {base.id} ({STATUS_WORDS[base.status]}): {len(plan.files)} files, "
        f"{in_words(plan.size_bytes)}"
        + (f", {in_words(plan.kept_bytes)} of it in other bases, too" if plan.kept_bytes else "")
    )
    stays = list(plan.stays) if dry_run else left
    if stays:
        shown = ", ".join(plain(name, 60) for name in stays[:10])
        out.print(label(f"not written by everstep: {shown}", "yellow"), soft_wrap=True)
    if plan.refusal is not None:
        out.print(label(f"it would be refused without --force: {plan.refusal}", "yellow"))
