"""Where a demo lives: a folder that is gone afterwards, and signals that end it in good order."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from everstep.errors import OptionError

__all__ = ["interruptible", "workspace"]


@contextlib.contextmanager
def workspace(folder: Path | None) -> Iterator[Path]:
    """``folder``, made if need be and kept; or a temporary one, removed at the end.

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
    temporary = Path(tempfile.mkdtemp(prefix="everstep-demo-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary)


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
