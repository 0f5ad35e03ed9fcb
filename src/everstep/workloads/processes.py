"""Processes that train: their folder, their environment, and signals that end them cleanly."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from everstep.errors import OptionError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def training_environment(failpoints: str = "") -> dict[str, str]:
    """Return the environment of a training process: one thread, no GPU, fixed hash seed.

    Args:
        failpoints: value of ``EVERSTEP_FAILPOINTS``.
    """
    environment = dict(os.environ)
    # The libraries read these once, when they are loaded, so they are set before the start.
    environment.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    # The order of sets of strings depends on it.
    environment["PYTHONHASHSEED"] = "0"
    environment["CUDA_VISIBLE_DEVICES"] = ""  # bits are compared: all runs use the CPU
    environment["EVERSTEP_FAILPOINTS"] = failpoints
    if "PYTHONPATH" in environment:  # the process has another working directory
        parts = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return environment


@contextlib.contextmanager
def workspace(folder: Path | None, purpose: str) -> Iterator[Path]:
    """Provide ``folder``, created if it is missing, and kept; or a temporary one, then removed.

    Args:
        purpose: part of the temporary folder's name.

    Raises:
        OptionError: when ``folder`` is not empty.
    """
    if folder is not None:
        folder = folder.absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OptionError(f"{folder} is not empty", hint="name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    temporary = Path(tempfile.mkdtemp(prefix=f"everstep-{purpose}-"))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary)


@contextlib.contextmanager
def interruptible() -> Iterator[Sequence[int]]:
    """Turn SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt, so that cleanup runs.

    A signal whose handler was not installed from Python keeps it, as it could not be restored.

    Yields:
        The signals received so far. A library may catch the KeyboardInterrupt and raise another
        error: that, too, leaves as KeyboardInterrupt.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # only the main thread may set handlers
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt(f"signal {number}")

    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not None
    ]
    earlier = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield seen
    except BaseException as error:
        if seen:
            raise KeyboardInterrupt(f"signal {seen[0]}") from error
        raise
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
