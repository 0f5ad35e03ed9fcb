"""The beginning and the end of a training process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Protocol

from everstep.errors import (
    DeadlineError,
    EverstepError,
    StateError,
    UnavailableError,
)
from everstep.keeper.recorder import Recorder
from everstep.keeper.saver import Keeper, Saver
from everstep.keeper.scheduled_saver import ScheduledSaver
from everstep.recover.nonfinite import nonfinite_parameter
from everstep.state.image import State

__all__ = [
    "AtExit",
    "Closing",
    "check_platform",
    "check_usable",
    "close_earlier",
    "finish_at_exit",
    "no_last_base",
    "wait_through",
]


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


def check_usable(is_open: bool, pid: int, run: PurePath | None) -> None:
    """Refuses calls of a Checkpointer that is closed, or of another process.

    Args:
        pid: of the process that made it.

    Raises:
        StateError: with the reason.
    """
    if not is_open:
        raise StateError(
            "this Checkpointer is closed",
            path=run,
            hint="a second Checkpointer on the same run closes the first",
        )
    if os.getpid() != pid:
        raise StateError(
            "this Checkpointer belongs to the process that this one was forked from",
            path=run,
            hint="make a Checkpointer (on a run folder of its own) in this process",
        )


class AtExit:
    """A script that ends without ``close()`` still gets its last base."""

    def __init__(self) -> None:
        self._job: Callable[[], None] | None = None

    def watch(self, saver: Saver, keeper: Keeper) -> None:
        """From now on ``keeper`` is finished at the end of this process."""
        self.forget()
        pid, shown = os.getpid(), sys.stderr
        self._job = lambda: finish_at_exit(saver, keeper, pid, shown)
        atexit.register(self._job)

    def forget(self) -> None:
        """Nothing is left to be done at exit."""
        if self._job is not None:
            atexit.unregister(self._job)
        self._job = None


def wait_through(wait: Callable[[], None], gave_up: Callable[[], bool]) -> list[EverstepError]:
    """Waits until everything is durable or has failed; returns what failed.

    Args:
        wait: raises one failure at a time: one failed base is no reason to abandon those
            behind it.
        gave_up: whether nobody is left to wait for.
    """
    failed: list[EverstepError] = []
    while True:
        try:
            wait()
            return failed
        except EverstepError as error:
            failed.append(error)
            if isinstance(error, DeadlineError) or gave_up():
                return failed


def finish_at_exit(saver: Saver, keeper: Keeper, pid: int, shown: Any) -> None:
    """For a script that ends without ``close()``: its last base becomes durable all the same."""
    if os.getpid() != pid:
        return  # a forked child owns nothing here
    while True:
        try:
            saver.finish_captures()
            if isinstance(saver, ScheduledSaver):
                saver.persist_parked()
            keeper.wait(None)
            break
        except EverstepError as error:
            print(f"everstep: a base was lost at exit: {error}", file=shown)
            if isinstance(error, DeadlineError):
                break
    keeper.close()


def no_last_base(run: PurePath, step: int, recorder: Recorder | None, state: State) -> bool:
    """Whether the end of training takes no base, since nobody would want to go on from it: its
    parameters are not finite. Says so."""
    bad = None if recorder is None else recorder.nonfinite
    if bad is None or not nonfinite_parameter(state):
        return False
    before = "" if bad.step is None else f"; ckpt.rewind({bad.step - 1}) before it keeps what was"
    print(
        f"everstep: {run}: no last base is taken of step {step}, whose parameters are not finite "
        f"({bad.message}); ckpt.save() before it would{before}",
        file=sys.stderr,
    )
    return True


def close_earlier(earlier: Closing | None, run: PurePath) -> None:
    """A notebook cell that is run again replaces the Checkpointer of its first run."""
    if earlier is None:
        return
    try:
        earlier.close()
    except EverstepError as error:
        print(f"everstep: the earlier Checkpointer of {run}: {error}", file=sys.stderr)
