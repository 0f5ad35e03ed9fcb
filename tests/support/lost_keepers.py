"""Keepers that are killed or stopped while a training runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import everstep
from everstep.errors import KeeperError
from everstep.link.pool import CapturePool
from everstep.link.registry import list_keepers
from everstep.seams.processes.processes import process_ended
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.following import until
from tests.support.world import TIMEOUT_S


def kill_keeper() -> None:
    (keeper,) = list_keepers()
    os.kill(keeper.pid, signal.SIGKILL)
    assert process_ended(keeper.pid, TIMEOUT_S)


def lost_of(pool: CapturePool) -> KeeperError:
    """What its reader says of the keeper of this pool, once it has noticed."""
    keeper = pool.keeper
    assert keeper is not None
    until(lambda: keeper.lost is not None, "the loss of the keeper")
    assert isinstance(keeper.lost, KeeperError)
    return keeper.lost


def kill_noticed(ckpt: Any) -> None:
    kill_keeper()
    noticed(ckpt)


def remote_of(ckpt: everstep.Checkpointer) -> RemoteKeeper:
    """Its keeper process, also before the first timeline."""
    remote = inspect(ckpt).keepers.pool.keeper
    assert isinstance(remote, RemoteKeeper)
    return remote


def keeper_of(ckpt: everstep.Checkpointer) -> int:
    return remote_of(ckpt).pid


def cut(ckpt: everstep.Checkpointer) -> RemoteKeeper:
    """The connection breaks, the keeper does not; all that waits for it is told."""
    remote = remote_of(ckpt)
    remote.disconnect(TIMEOUT_S)
    assert remote.lost is not None
    return remote


def noticed(ckpt: everstep.Checkpointer) -> None:
    """The end of its keeper has been noticed, and all that waits for it has been told."""
    until(lambda: inspect(ckpt).keepers.lost is not None, "the loss of the keeper")
    cut(ckpt)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still in the block, but not for ever."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T", "the process goes on")
    goes_on = threading.Timer(TIMEOUT_S, lambda: os.kill(pid, signal.SIGCONT))
    goes_on.start()
    try:
        yield
    finally:
        goes_on.cancel()
        os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    text = Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0]
