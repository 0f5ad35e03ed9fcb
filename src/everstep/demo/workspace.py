"""Where a demo lives: a folder that is gone afterwards, a meeting place for its keepers, and
signals that end it in good order."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from everstep.errors import OptionError
from everstep.seams.network.sockets import SOCKET_PATH_BYTES_MAX, listen_at
from everstep.seams.processes.runtime import RUNTIME_DIR_VARIABLE

__all__ = ["interruptible", "private_keepers", "workspace"]


@contextlib.contextmanager
def workspace(folder: Path | None, what: str = "demo") -> Iterator[Path]:
    """``folder``, made if need be and kept; or a temporary one, removed at the end.

    Args:
        what: is done there, for the temporary one's name.

    Raises:
        OptionError: when ``folder`` holds something already.
    """
    if folder is not None:
        folder = folder.absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OptionError(f"{folder} holds something already", hint="name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    temporary = Path(tempfile.mkdtemp(prefix=f"everstep-{what}-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary)


@contextlib.contextmanager
def private_keepers(place: Path) -> Iterator[None]:
    """Gives this process and its children a runtime folder in ``place``, so that keepers of the
    demo meet nobody else's; where there can be no sockets, everything stays as it is."""
    folder = place / "keepers"
    if not _holds_sockets(folder):
        yield
        return
    earlier = os.environ.get(RUNTIME_DIR_VARIABLE)
    os.environ[RUNTIME_DIR_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if earlier is None:
            del os.environ[RUNTIME_DIR_VARIABLE]
        else:
            os.environ[RUNTIME_DIR_VARIABLE] = earlier


def _holds_sockets(folder: Path) -> bool:
    """Whether ``folder``, which is made, is private and can hold the socket of a keeper: its
    path is short enough, and its file system knows sockets."""
    path = folder / f"{'0' * 16}.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        return False
    try:
        folder.mkdir(mode=0o700)
        listen_at(path).close()
        path.unlink()
        return not folder.stat().st_mode & 0o077
    except OSError:
        return False


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: in good order."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    earlier = {
        number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
