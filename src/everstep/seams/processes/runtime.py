"""Folder for sockets and locks of this user's processes on this machine.

``$EVERSTEP_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/everstep``, else ``everstep-<uid>`` in the folder
for temporary files. It must belong to this user and be private: anybody who can connect to a socket
there can read weights and gradients.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePath

from everstep.errors import KeeperError

RUNTIME_DIR_VARIABLE = "EVERSTEP_RUNTIME_DIR"

_HINT = f"set {RUNTIME_DIR_VARIABLE} to a folder of your own, the same for all your programs"


def runtime_folder(*, create: bool = True) -> Path:
    """Return the folder. With ``create`` it is made if it is missing.

    Raises:
        KeeperError: it cannot be made, is a symbolic link, belongs to another user, or is open to
            others.
    """
    path = _chosen()
    try:
        if create:
            _make(path)
        # Check owner and mode on a descriptor: the name could be replaced between two calls.
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        if create:
            raise _refused(path, "cannot be made: its parent folder is missing") from None
        return path
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "is a symbolic link; it is not followed") from None
        raise _refused(path, f"cannot be used: {error.strerror}") from error
    try:
        info = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if info.st_uid != os.geteuid():
        raise _refused(path, f"belongs to another user (uid {info.st_uid})")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise KeeperError(
            f"the runtime folder {path} is open to other users",
            path=path,
            hint=f"chmod 700 {path}, if its contents are yours",
        )
    return path


def _chosen() -> Path:
    named = os.environ.get(RUNTIME_DIR_VARIABLE)
    if named:
        return Path(os.path.abspath(named))
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.path.isabs(session) and os.path.isdir(session):
        # After su or sudo the variable may still name the folder of another user.
        usable = os.access(session, os.W_OK | os.X_OK)
        if usable:
            return Path(session) / "everstep"
    return Path(tempfile.gettempdir()) / f"everstep-{os.geteuid()}"


def _make(path: Path) -> None:
    if os.environ.get(RUNTIME_DIR_VARIABLE):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def _refused(path: Path, why: str) -> KeeperError:
    return KeeperError(f"the runtime folder {path} {why}", path=path, hint=_HINT)


def refresh_times(paths: Iterable[PurePath]) -> None:
    """Update the times of files and folders, so that cleaners of temporary folders (systemd: ten
    days untouched) keep them. Missing ones are skipped.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, follow_symlinks=False)
