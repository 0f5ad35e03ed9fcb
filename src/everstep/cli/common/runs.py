"""Find a run and its bases from the argument of a user; check paths that users give."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

import typer

from everstep.cli.common.output import plain
from everstep.commit.lineage import BaseId, split_by_history
from everstep.errors import (
    EverstepError,
    ForeignDirectoryError,
    OptionError,
    PermissionDeniedError,
    StorageError,
)
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import FileSystem

if TYPE_CHECKING:
    from everstep.run.scan import BaseFound, Inventory


_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NEVER_THERE = {
    errno.ENAMETOOLONG: "choose a shorter path: most file systems end a name at 255 bytes",
    errno.ELOOP: "symbolic links on the way lead in a circle: choose another path",
}


def absolute(text: PurePath | str, *, real: bool = False) -> PurePath:
    """Return an absolute path.

    Args:
        text: path as the user gave it.
        real: follow links.

    Raises:
        OptionError: it is relative to a removed directory.
    """
    try:
        led = os.path.realpath(text)
        named = os.path.abspath(text)
        # The system resolves ".." after a link from the link's target, unlike abspath.
        return PurePath(led if real or os.path.realpath(named) != led else named)
    except OSError as error:
        raise OptionError(
            f"{text} is relative to a working directory that was removed: {error.strerror}",
            hint="change to an existing directory, or give an absolute path",
        ) from error


def kind_of(path: PurePath) -> Literal["directory", "other"] | None:
    """Return the kind of a path, links followed; None if it does not exist. A dangling link exists.

    Unlike ``os.path.isdir`` it distinguishes missing paths from unreadable ones.

    Raises:
        OptionError: the path can never exist.
        PermissionDeniedError: a directory on the way is closed to this user.
        StorageError: any other error of the system.
    """
    with _looking_at(path):
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            return "other" if os.path.lexists(path) else None
    return "directory" if stat.S_ISDIR(mode) else "other"


def refuse_irregular(path: PurePath) -> None:
    """Check that a path is a regular file: links and pipes are not opened.

    Raises:
        OptionError: it is something else.
    """
    with _looking_at(path):
        mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
        raise OptionError(f"{path} is {what}", path=path, hint="name the file itself")


def checked_path(path: Path | None) -> Path | None:
    """Check an option's path before any work is done; a typer callback. Errors are those of
    :func:`kind_of`.
    """
    if path is not None:
        kind_of(absolute(path))
    return path


@contextlib.contextmanager
def _looking_at(path: PurePath) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise PermissionDeniedError(
            f"may not look at {path}: {error.strerror}",
            path=path,
            hint="a directory on the way is closed to this user: run folders are private, read "
            "them as the user who trained",
        ) from error
    except OSError as error:
        why = f"{path}: {error.strerror or error}"
        if error.errno in _NEVER_THERE:
            raise OptionError(why, path=path, hint=_NEVER_THERE[error.errno]) from error
        hint = "look at the disk or the network file system (dmesg, df, mount)"
        raise StorageError(f"could not look at {why}", path=path, hint=hint) from error


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


def select_base(inventory: Inventory, step: int, timeline: int | None) -> BaseFound:
    """Return the base of a step.

    Raises:
        OptionError: there is none, there are several, or its directory is unreadable.
    """
    bases = select_bases(inventory, step=step, timeline=timeline)
    if len(bases) > 1:
        timelines = ", ".join(str(base.id.timeline) for base in bases)
        raise OptionError(
            f"timelines {timelines} have a base of step {step}",
            step=step,
            path=inventory.path,
            hint=f"say which one: --timeline {bases[-1].id.timeline}",
        )
    if bases[0].status == "damaged" and not bases[0].files:
        raise OptionError(
            f"{bases[0].id} cannot be used: {bases[0].problem}",
            step=step,
            path=bases[0].path,
            hint="make its directory readable; of a link, remove the link, or put back what it "
            "leads to",
        )
    return bases[0]


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
