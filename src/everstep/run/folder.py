"""Opens the run folder: makes it if it is not there, refuses it if it cannot be used."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from pathlib import PurePath

from everstep.commit.job.nothing import way_back
from everstep.commit.lineage import BaseId, had_steps
from everstep.errors import OptionError, StateError
from everstep.format.names import RUN_RECORD
from everstep.format.records import RunRecord
from everstep.run.candidates import newest_unreachable
from everstep.run.scan import Inventory, scan_run
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.machine import real_path, with_home
from everstep.tiers.disk import create_exclusive, ensure_dirs, storage_errors

__all__ = ["open_run_folder", "refuse_unresumed", "run_path"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # pathlib makes one slash of two


def open_run_folder(filesystem: FileSystem, run: PurePath) -> Inventory:
    """Makes the folder a run, and finds out now whether it can be written.

    Raises:
        ForeignDirectoryError: when it holds other people's files.
        StorageError: when it cannot be written, or is damaged beyond use.
    """
    with storage_errors("open the run folder", run):
        ensure_dirs(filesystem, run)
        if RUN_RECORD not in {entry.name for entry in filesystem.scan(run)}:
            _keep_names(filesystem, run)
        inventory = scan_run(filesystem, run)
        hidden = newest_unreachable(inventory)
        if inventory.run is None and hidden is not None:  # a new id would make it another run's
            raise StateError(
                f"{hidden.told}, and nothing else tells the id of the run",
                path=hidden.path,
                hint="put it back in its place (a link to the whole run folder works)",
            )
        record = RunRecord(run=inventory.run or uuid.uuid4().hex)
        path = run / RUN_RECORD
        # Creating it exclusively also tells whether the folder can be written.
        created = create_exclusive(
            filesystem, path, record.encode(), unique=f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        )
        if created or inventory.run is None:
            inventory = scan_run(filesystem, run)
    if inventory.run is None:
        empty = not inventory.timelines and not inventory.bases
        raise StateError(
            f"{path} cannot be read, and nothing else in the run tells its id",
            path=path,
            hint="remove it: there is nothing to recover here"
            if empty
            else "everstep verify names what cannot be read: bring that back",
        )
    return inventory


def _keep_names(filesystem: FileSystem, run: PurePath) -> None:
    """Makes the names that lead to a folder durable: whoever made it, or a folder above it, may
    have died before it could."""
    for directory in run.parents:
        with contextlib.suppress(PermissionError):  # not made by us: its owner's affair
            filesystem.sync_dir(directory)


def refuse_unresumed(filesystem: FileSystem, run: PurePath, held: BaseId | None) -> Inventory:
    """For a training that begins without ``resume()``: there may be nothing to resume.

    Args:
        held: what a keeper has in memory.

    Raises:
        StateError: there is, or has been.
    """
    inventory = scan_run(filesystem, run)
    usable = {b.id for b in inventory.bases if b.is_usable or b.status == "damaged"}
    if usable := usable | ({held} if held is not None else set()):
        raise StateError(
            f"this run has {len(usable)} base(s), the newest of {max(usable)}, and "
            "resume() was not called: training would start over unnoticed",
            path=run,
            hint="call ckpt.resume() before the loop (resume(step=0) starts from scratch)",
        )
    if hidden := newest_unreachable(inventory):
        raise StateError(
            f"{hidden.told}, and resume() was not called: training would start over unnoticed",
            path=hidden.path,
            hint=hidden.hint,
        )
    if had := had_steps(inventory.timelines, inventory.branches):
        raise StateError(
            f"{had}, and resume() was not called: training would start over unnoticed",
            path=run,
            hint=way_back(),
        )
    return inventory


def run_path(path: str | os.PathLike[str]) -> PurePath:
    """The real path of the run folder that the user gave; ``~`` is a home, as in a shell.

    The keeper of a run is found by it, whatever links lead there, and training stays in this folder
    where one of them is made to lead to another.

    Raises:
        OptionError: for what is no path, or a URL.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"the run folder must be a path, not {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise OptionError(f"{path!r} is no path of a run folder")
    if _URL.match(text):
        raise OptionError(
            f"{text}: a run is written to a directory",
            hint=f"a directory on this machine, and tiers=[{text!r}] for copies there",
        )
    try:
        return real_path(with_home(text))
    except FileNotFoundError:
        raise OptionError(
            f"{text}: a relative path leads nowhere, since the working directory was removed",
            hint="an absolute path",
        ) from None
