"""Paths as users name them: what is there, or in words why nobody can tell."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Literal

from everstep.errors import OptionError, PermissionDeniedError, StorageError

__all__ = ["absolute", "checked_path", "kind_of", "refuse_irregular"]

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NEVER_THERE = {
    errno.ENAMETOOLONG: "choose a shorter path: most file systems end a name at 255 bytes",
    errno.ELOOP: "symbolic links on the way lead in a circle: choose another path",
}


def absolute(text: PurePath | str, *, real: bool = False) -> PurePath:
    """A path from the root on.

    Args:
        real: links are followed.

    Raises:
        OptionError: it is relative to a directory that is gone.
    """
    try:
        led = os.path.realpath(text)
        named = os.path.abspath(text)
        # Behind a link ".." is what the system takes it for, and not the name before.
        return PurePath(led if real or os.path.realpath(named) != led else named)
    except OSError as error:
        raise OptionError(
            f"{text} is relative to a working directory that is gone: {error.strerror}",
            hint="change to a directory that is there, or name the path from / on",
        ) from error


def kind_of(path: PurePath) -> Literal["directory", "other"] | None:
    """What is at a path, links followed; None: nothing. A link that leads nowhere is something.

    Unlike ``os.path.isdir`` it does not call absent what it may not see.

    Raises:
        OptionError: nothing can ever be there.
        PermissionDeniedError: a directory on the way is closed to this user.
        StorageError: the system says something else.
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
    """What is at a path must be a file: none is opened through a link, nor a pipe.

    Raises:
        OptionError: it is something else.
    """
    with _looking_at(path):
        mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "no regular file"
        raise OptionError(f"{path} is {what}", path=path, hint="name the file itself")


def checked_path(path: Path | None) -> Path | None:
    """The callback of an option that names a file or a folder: what can never be there is refused
    before anything is done, as :func:`kind_of` says it."""
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
