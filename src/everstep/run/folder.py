"""Creation and checks of the run folder when a process starts, and of the timeline it opens."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.job.offers import recovery_hint
from everstep.commit.lineage import describe_missing_steps
from everstep.errors import OptionError, StateError, StorageError
from everstep.format import TimelineRecord, timeline_dir
from everstep.format.names import RUN_RECORD, TIMELINE_RECORD, parse_timeline
from everstep.format.records import RunRecord
from everstep.run.scan import Inventory, scan_run
from everstep.seams import FileSystem, Seams
from everstep.seams.fingerprint import fingerprint, process_name
from everstep.seams.machine import real_path
from everstep.tiers import ensure_dir, storage_errors
from everstep.tiers.durable_files import create_exclusive, ensure_dirs, sync_if_allowed

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a single slash, since pathlib collapses two


def open_run_folder(filesystem: FileSystem, run: PurePath) -> Inventory:
    """Create the run folder if needed, and check that it can be written.

    Raises:
        ForeignDirectoryError: it contains files that are not of everstep.
        StorageError: it cannot be written, or is damaged beyond use.
    """
    with storage_errors("open the run folder", run):
        ensure_dirs(filesystem, run)
        # Before the run's record is created: where it exists, the directories above are durable.
        # Whoever created the folder or its parents may have crashed before they were durable.
        if RUN_RECORD not in {entry.name for entry in filesystem.scan(run)}:
            for directory in run.parents:
                sync_if_allowed(filesystem, directory)
        inventory = scan_run(filesystem, run)
        record = RunRecord(run=inventory.run or uuid.uuid4().hex)
        path = run / RUN_RECORD
        # Exclusive creation also proves that the folder is writable.
        created = create_exclusive(
            filesystem, path, record.encode(), unique=f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        )
        # Scanned again: if another process was first, its id counts.
        if created or inventory.run is None:
            inventory = scan_run(filesystem, run)
    if inventory.run is None:
        empty = not inventory.timelines and not inventory.bases
        raise StateError(
            f"{path} cannot be read, and no other file records the id of the run",
            path=path,
            hint="remove it: the folder holds nothing to recover"
            if empty
            else "everstep verify lists the unreadable files: restore them",
        )
    return inventory


def refuse_unresumed(filesystem: FileSystem, run: PurePath, held: BaseId | None) -> Inventory:
    """Check that a training that starts without ``resume()`` discards nothing.

    Args:
        held: base in the memory of a keeper.

    Raises:
        StateError: there is something to resume, or has been.
    """
    inventory = scan_run(filesystem, run)
    # Damaged bases included: they may have been good, or have intact copies.
    usable = {b.id for b in inventory.bases if b.is_usable or b.status == "damaged"}
    if usable := usable | ({held} if held is not None else set()):
        raise StateError(
            f"this run has {len(usable)} base(s), the newest of {max(usable)}, and "
            "resume() was not called: training would silently start over",
            path=run,
            hint="call ckpt.resume() before the loop (resume(step=0) starts from scratch)",
        )
    if had := describe_missing_steps(inventory.timelines, inventory.branches):
        raise StateError(
            f"{had}, and resume() was not called: training would silently start over",
            path=run,
            hint=recovery_hint(),
        )
    return inventory


def open_timeline(
    seams: Seams,
    run: PurePath,
    inventory: Inventory,
    *,
    parent: BaseId | None,
    exact: bool,
    base: BaseId | None = None,
) -> int:
    """Take a run of one rank over: from now on every process of an older timeline is fenced off.

    Args:
        parent: timeline and step where the new timeline forks.
        base: base that was restored, if ``parent`` was reached by replay.
    """
    filesystem = seams.filesystem
    assert inventory.run is not None
    number = inventory.next_timeline
    # Process ids are not unique among containers that share storage
    unique = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    # Exclusive creation decides between processes that open the same number at the same moment: one
    # of them gets it, and the other one takes the next number, which fences the first off.
    while True:
        record = TimelineRecord(
            run=inventory.run,
            timeline=number,
            parent=None if parent is None else parent.timeline,
            fork_step=0 if parent is None else parent.step,
            exact=exact,
            world=1,
            base=None if base is None else (base.timeline, base.step),
            fingerprint={**fingerprint(), "process": process_name()},
            created_unix_s=seams.clock.unix_s(),
        )
        directory = timeline_dir(run, number)
        if parse_timeline(directory.name) != number:
            raise StorageError(
                f"{timeline_dir(run, number - 1)} has the largest possible number",
                path=run,
                hint="remove it: everstep did not create it",
            )
        # The name of the directory is made durable before its record is created: a timeline that a
        # power loss removes would fence nobody off.
        ensure_dir(filesystem, directory)
        path = directory / TIMELINE_RECORD
        if create_exclusive(filesystem, path, record.encode(), unique=unique):
            return number
        number += 1


def run_path(path: str | os.PathLike[str]) -> PurePath:
    """Return the real path of the run folder that the user gave; ``~`` is expanded.

    Keepers are found by the real path, whichever links lead there, and training stays in this
    folder even if a link is changed later.

    Raises:
        OptionError: not a path, or a URL.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"the run folder must be a path, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{path!r} is not a valid path for a run folder")
    if _URL.match(text):
        raise OptionError(
            f"{text}: a run folder must be a local directory",
            hint=f"give a directory on this machine, and tiers=[{text!r}] for copies there",
        )
    try:
        return real_path(text)
    except FileNotFoundError:
        raise OptionError(
            f"{text}: the relative path is invalid because the working directory was removed",
            hint="use an absolute path",
        ) from None
