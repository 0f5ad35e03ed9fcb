"""Paths given by users: resolve them and report their kind, or the reason why that is
impossible.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Literal

from everstep.errors import OptionError, PermissionDeniedError, StorageError

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
