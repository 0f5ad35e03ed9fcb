"""TODO."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import NoReturn, Protocol

from everstep.config.given import is_int, is_number
from everstep.errors import (
    EverstepError,
    OptionError,
    StateError,
    UnavailableError,
)
from everstep.seams.messages import say

__all__ = [
    "Closing",
    "check_platform",
    "check_resume",
    "check_timeout",
    "check_usable",
    "close_earlier",
    "refuse_pickling",
]


_MANY = 4  # Checkpointers that nobody has closed: so many are rarely meant


class Closing(Protocol):
    """What can be closed."""

    def close(self) -> None: ...


def check_platform() -> None:
    """Refuses where this version does not run.

    Raises:
        UnavailableError: with the reason.
    """
    if sys.platform == "win32":
        raise UnavailableError(
            "everstep does not run on Windows", hint="Linux, WSL 2, or macOS on the CPU"
        )


def check_usable(is_open: bool, pid: int, run: PurePath, replaced: bool) -> None:
    """Refuses calls of a Checkpointer that is closed, or of another process.

    Args:
        pid: of the process that made it.
        replaced: another one of this process has the run.

    Raises:
        StateError: with the reason.
    """
    if not is_open and replaced:
        raise StateError(
            "this Checkpointer is closed: a later one of this process has replaced it",
            path=run,
            hint="use the later one; two that live side by side need a run folder each",
        )
    if not is_open:
        raise StateError(
            "this Checkpointer is closed",
            path=run,
            hint="make a new one on the same run, and call its resume(), to go on",
        )
    if os.getpid() != pid:
        raise StateError(
            "this Checkpointer belongs to the process that this one was forked from",
            path=run,
            hint="make a Checkpointer (on a run folder of its own) in this process",
        )


def refuse_pickling(checkpointer: object) -> NoReturn:
    """What is pickled for another process (``spawn``), or copied, would be of no use there.

    Raises:
        StateError
    """
    raise StateError(
        "a Checkpointer cannot be pickled or copied: it belongs to the process that made it",
        hint="leave it out of what is handed to the other process; make a Checkpointer (on a run "
        "folder of its own) there if that one trains, too",
    )


def check_resume(step: int | None) -> None:
    """Refuses what :meth:`Checkpointer.resume` cannot mean.

    Raises:
        OptionError
    """
    if step is not None and (not is_int(step) or step < 0):
        raise OptionError(f"resume(step={step!r}): steps are whole numbers from 0")


def check_timeout(timeout_s: float | None) -> None:
    """Refuses what :meth:`Checkpointer.wait` cannot mean.

    Raises:
        OptionError
    """
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s >= 0):
        raise OptionError(f"wait(timeout_s={timeout_s!r}): seconds from 0, or None")


def close_earlier(live: Mapping[tuple[PurePath, int], Closing], key: tuple[PurePath, int]) -> None:
    """A notebook cell that is run again replaces the Checkpointer of its first run.

    Of other runs as many as liked may be open. None that is merely dropped is ever closed (it still
    has a last base to take), and whoever trains again and again in a process hears what that keeps.

    Args:
        live: the Checkpointers of this process that are open, by run and rank.
        key: of the one that is being made.
    """
    earlier = live.get(key)
    run = key[0]
    if earlier is not None:
        try:
            earlier.close()
        except EverstepError as error:
            say(f"everstep: the earlier Checkpointer of {run}: {error}")
    others = sorted({str(other) for other, _ in list(live)} - {str(run)})
    if len(others) >= _MANY and len(others).bit_count() == 1:  # 4, 8, 16: not at each
        say(
            f"everstep: {len(others)} Checkpointers of other runs are open in this process, the "
            f"first of {others[0]}: each keeps its state, a keeper and the keeper's memory until "
            "its close(); use `with everstep.Checkpointer(...) as ckpt:` where trainings end"
        )
