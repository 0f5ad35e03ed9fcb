"""Runs of everstep inside a benchmark: without their own announcements, and ended for certain."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

from everstep.checkpointer import Checkpointer
from everstep.errors import KeeperTimeoutError
from everstep.link.registry import kill_keeper, list_keepers
from everstep.link.save import Save
from everstep.seams.processes.processes import process_ended
from everstep.testing import inspect

LINGER_S = 10.0
"""A keeper whose benchmark is gone stays so long."""


def keepers_of(run: Path) -> list[int]:
    """Process ids of the keepers of a run folder."""
    name = str(run.resolve())
    return [info.pid for info in list_keepers() if info.run == name]


def kill_keepers(run: Path) -> None:
    """Kill the keepers of a run folder, and with them the bases in their memory.

    Raises:
        KeeperTimeoutError: one goes on.
    """
    for info in list_keepers():
        if info.run == str(run.resolve()) and kill_keeper(info):
            _await_end(info.pid, str(run))


def close_run(checkpointer: Checkpointer, keepers: list[int], name: str) -> None:
    """Closes the run, and waits until its keepers have ended: they may still be clearing up.

    Raises:
        KeeperTimeoutError: one goes on.
    """
    with quiet():
        checkpointer.close()
    for pid in keepers:
        _await_end(pid, name)


def _await_end(pid: int, name: str) -> None:
    if not process_ended(pid, LINGER_S):
        raise KeeperTimeoutError(f"the keeper (process {pid}) of {name} goes on")


def take_due(checkpointer: Checkpointer) -> Save:
    """Takes the base that ``every`` would take at this step mark: over several steps, where the
    method does. :meth:`~everstep.Checkpointer.save` takes one of this very step.

    Raises:
        EverstepError: what failed, now or in the background, by the policy.
    """
    return inspect(checkpointer).take_due()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No announcement and no progress bar of its own inside the benchmark's."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
