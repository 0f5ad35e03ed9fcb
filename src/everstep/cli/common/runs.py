"""Find a run and its bases from the argument of a user."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

import typer

from everstep.cli.common.output import plain
from everstep.cli.common.paths import absolute, kind_of
from everstep.errors import (
    EverstepError,
    ForeignDirectoryError,
    OptionError,
    PermissionDeniedError,
    StorageError,
)

if TYPE_CHECKING:
    from everstep.commit.lineage import BaseId
    from everstep.run.scan import BaseFound, Inventory
    from everstep.seams.filesystem import FileSystem


RUN_ARGUMENT = typer.Argument(metavar="RUN", help="The run folder.", show_default=False)

_NEIGHBOURS_MAX = 1000


@contextlib.contextmanager
def reading(path: PurePath) -> Iterator[None]:
    """Turn an ``OSError`` while reading below ``path`` into an error with a hint."""
    try:
        yield
    except OSError as error:
        if isinstance(error.__cause__, EverstepError):  # an object store's own error
            raise error.__cause__ from None
        if isinstance(error, PermissionError):
            raise PermissionDeniedError(
                f"may not read {error.filename or path}",
                path=path,
                hint="run folders are private: read them as the user who trained",
            ) from error
        raise StorageError(
            f"could not read {error.filename or path}: {error.strerror or error}",
            path=path,
            hint="look at the disk or the network file system (dmesg, df, mount)",
        ) from error


def open_run(filesystem: FileSystem, run: str) -> Inventory:
    """Return the inventory of a run; reads records, no data.

    Raises:
        OptionError: there is no such folder, it is empty, or it is a file.
        PermissionDeniedError: this user may not look.
        ForeignDirectoryError: the folder holds something else.
        NewerFormatError: it was written by a newer everstep.
    """
    from everstep.run.scan import scan_run
    from everstep.seams import PosixFileSystem

    if not run or ("://" in run and isinstance(filesystem, PosixFileSystem)):
        hint = "a directory on this machine; ls, verify and restore take s3://bucket/prefix, too"
        raise OptionError(f"{run!r} is no run folder", hint=hint)
    if "://" in run:
        return _open_copy(filesystem, run)
    path = absolute(run)
    with reading(path):
        if (kind := kind_of(path)) != "directory":
            raise _no_folder(path, kind)
        try:
            inventory = scan_run(filesystem, path)
        except ForeignDirectoryError as error:
            if error.path == str(path):
                error.hint = _hint(path)
            raise
    return _not_empty(inventory, _hint(path))


def filesystem_of(run: str) -> FileSystem:
    """Return the file system to read a run with: local, or a copy in a store.

    Raises:
        OptionError: the URL is of an unknown kind.
        UnavailableError: the library that reads it is not installed.
    """
    from everstep.seams import PosixFileSystem
    from everstep.tiers.files import TierFileSystem
    from everstep.tiers.options import UrlPath, is_url, open_tier

    if not is_url(run):
        return PosixFileSystem()
    tier = open_tier(run, PosixFileSystem())
    return TierFileSystem(tier, UrlPath(tier.url))


def _open_copy(filesystem: FileSystem, run: str) -> Inventory:
    from everstep.run.scan import scan_run
    from everstep.tiers.options import UrlPath

    path = UrlPath(run.rstrip("/"))
    with reading(path):
        inventory = scan_run(filesystem, path)
    return _not_empty(inventory, None)


def _not_empty(inventory: Inventory, hint: str | None) -> Inventory:
    if inventory.run is None and not inventory.timelines and not inventory.problems:
        path = inventory.path
        raise OptionError(f"{path} is empty: there is no run", path=path, hint=hint)
    return inventory


def select_bases(
    inventory: Inventory, *, step: int | None = None, timeline: int | None = None
) -> list[BaseFound]:
    """Return the selected bases; those of the current history first, newest first.

    Raises:
        OptionError: a step or timeline was given and there is no such base.
    """
    from everstep.commit.lineage import split_by_history

    bases = {base.id: base for base in inventory.bases}
    here, elsewhere = split_by_history(bases, inventory.branches)
    ordered = here + elsewhere
    chosen = [
        base for base in ordered if step in (None, base.step) and timeline in (None, base.timeline)
    ]
    if not chosen and (step is not None or timeline is not None):
        what = "no base" + ("" if step is None else f" of step {step}")
        what += "" if timeline is None else f" in timeline {timeline}"
        raise OptionError(
            f"there is {what}", step=step, path=inventory.path, hint=_bases_there(ordered, step)
        )
    return [bases[base] for base in chosen]


def _bases_there(ordered: list[BaseId], step: int | None) -> str:
    if not ordered:
        return "the run holds no base yet"
    wanted = ordered[0].step if step is None else step
    near = sorted(ordered, key=lambda base: abs(base.step - wanted))[:8]
    return ("nearest: " if len(near) < len(ordered) else "there are: ") + ", ".join(map(str, near))


def _no_folder(path: PurePath, kind: str | None) -> OptionError:
    if kind is not None:
        hint = _hint(path)
        if path.suffix == ".safetensors":
            hint = f"everstep inspect {path}"
        return OptionError(f"{path} is no run folder but a file", path=path, hint=hint)
    return OptionError(f"there is no run {path}", path=path, hint=_hint(path))


def _hint(path: PurePath) -> str:
    """Return a hint at the run that was probably meant: inside, around, or beside ``path``."""
    inside = _runs_in(path)
    if inside:
        more = f", and {len(inside) - 8} more" if len(inside) > 8 else ""
        return "runs in it: " + ", ".join(plain(name) for name in sorted(inside)[:8]) + more
    for parent in list(path.parents)[:3]:
        if _is_run(parent):
            return f"the run is {parent}"
    close = difflib.get_close_matches(path.name, _runs_in(path.parent), n=1, cutoff=0.4)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    return "a run folder is one that a Checkpointer has made: run.json, timeline-00001, ..."


def _runs_in(path: PurePath) -> list[str]:
    try:
        names = os.listdir(path)[:_NEIGHBOURS_MAX]
    except OSError:
        return []
    return [name for name in names if _is_run(path / name)]


def _is_run(path: PurePath) -> bool:
    return os.path.isfile(path / "run.json")
