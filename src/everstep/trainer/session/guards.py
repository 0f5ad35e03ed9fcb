"""Checks before a call of a Checkpointer does anything: platform, process, arguments."""

from __future__ import annotations

import os
import sys
from pathlib import PurePath
from typing import NoReturn

from everstep.config.given import is_int, is_number
from everstep.errors import (
    OptionError,
    StateError,
    UnavailableError,
)


def check_platform() -> None:
    """Check that this version runs on the platform.

    Raises:
        UnavailableError: It does not.
    """
    if sys.platform == "win32":
        raise UnavailableError(
            "everstep does not run on Windows", hint="Linux, WSL 2, or macOS on the CPU"
        )


def check_usable(is_open: bool, pid: int, run: PurePath, replaced: bool) -> None:
    """Check that a Checkpointer is open and belongs to this process.

    Args:
        pid: process that made the Checkpointer.
        replaced: True if a later Checkpointer of this process has the run.

    Raises:
        StateError: It is closed, or belongs to another process.
    """
    if not is_open and replaced:
        raise StateError(
            "this Checkpointer is closed: a later one in this process has replaced it",
            path=run,
            hint="use the later one; two Checkpointers at the same time need a run folder each",
        )
    if not is_open:
        raise StateError(
            "this Checkpointer is closed",
            path=run,
            hint="to continue, make a new one for the same run and call its resume()",
        )
    if os.getpid() != pid:
        raise StateError(
            "this Checkpointer belongs to the parent process, from which this one was forked",
            path=run,
            hint="make a Checkpointer with a run folder of its own in this process",
        )


def refuse_pickling(checkpointer: object) -> NoReturn:
    """Refuse to pickle or copy a Checkpointer, which is bound to its process.

    Raises:
        StateError: Always.
    """
    raise StateError(
        "a Checkpointer cannot be pickled or copied: it belongs to the process that made it",
        hint="do not pass it to another process; if that process trains, too, make a Checkpointer "
        "with a run folder of its own there",
    )


def check_resume(step: int | None) -> None:
    """Check the argument of :meth:`Checkpointer.resume`.

    Raises:
        OptionError: It is not a step number.
    """
    if step is not None and (not is_int(step) or step < 0):
        raise OptionError(f"resume(step={step!r}): step must be an integer >= 0, or None")


def check_timeout(timeout_s: float | None) -> None:
    """Check the argument of :meth:`Checkpointer.wait`.

    Raises:
        OptionError: It is not a number of seconds.
    """
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s >= 0):
        raise OptionError(
            f"wait(timeout_s={timeout_s!r}): timeout_s must be a number >= 0, or None"
        )
