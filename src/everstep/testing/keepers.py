"""The keeper of a run, as the demo sees it: what it has in memory, and its end.

A keeper is nobody's child. It is found by its key, and told to stop like ``everstep stop``
does it; what does not stop is killed.
"""

from __future__ import annotations

import time
from pathlib import Path

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.format.names import RUN_RECORD
from everstep.format.records import RunRecord
from everstep.link.registry import (
    KeeperInfo,
    find_keeper,
    keeper_files,
    keeper_key,
    kill_keeper,
)
from everstep.link.spawn import connect
from everstep.run.folder import run_path
from everstep.seams.files.locks import lock_file
from everstep.seams.network.sockets import close_descriptors
from everstep.seams.processes.processes import PidWatch

__all__ = ["end_keeper", "held_step"]

_ANSWER_S = 15.0
_END_S = 20.0
_KILLED_S = 10.0
_LOOK_AGAIN_S = 0.05


def held_step(run: Path) -> int | None:
    """Step of the base that the keeper of ``run`` has whole in memory; None if it has none.

    Raises:
        KeeperError: there is no keeper, or it does not answer.
    """
    key = _key_of(run)
    if key is None or find_keeper(key) is None:
        raise KeeperError(f"{run} has no keeper")
    with connect(key, timeout_s=_ANSWER_S) as connection:
        connection.send({"kind": "status"})
        received = connection.receive(_ANSWER_S)
    if received is None:
        raise KeeperError(f"the keeper of {run} has hung up")
    message, descriptors = received
    close_descriptors(descriptors)
    return max(message["held"], default=None)


def end_keeper(run: Path, *, timeout_s: float = _END_S) -> None:
    """Ends the keeper of ``run``, also one that is just starting; returns when it is gone.

    It first makes durable what it has captured. One that takes longer than ``timeout_s`` is
    killed, and so is one if the waiting is interrupted.

    Raises:
        KeeperError: it cannot be killed.
    """
    key = _key_of(run)
    if key is None:
        return
    told: list[KeeperInfo] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline_s:
            keeper = find_keeper(key)
            if keeper is not None and keeper not in told:
                told.append(keeper)
                _tell_to_stop(key, deadline_s)
            if keeper is None and not _is_starting(key):
                return
            time.sleep(_LOOK_AGAIN_S)
    finally:
        keeper = find_keeper(key)
        if keeper is not None and kill_keeper(keeper):
            told.append(keeper)
        for keeper in told:
            _see_it_gone(keeper)
    if _is_starting(key):
        raise KeeperTimeoutError(
            f"a keeper of {run} is starting, and has not come up within {timeout_s:g} s",
            hint="everstep ps lists it once it is up, everstep stop ends it",
        )


def _key_of(run: Path) -> str | None:
    """The key of the run's keeper; None if the run has never begun."""
    try:
        data = (run / RUN_RECORD).read_bytes()
    except FileNotFoundError:
        return None
    return keeper_key(str(run_path(run)), RunRecord.decode(data, run / RUN_RECORD).run, 0)


def _tell_to_stop(key: str, deadline_s: float) -> None:
    try:
        with connect(key, timeout_s=max(0.0, deadline_s - time.monotonic())) as connection:
            connection.send({"kind": "stop"})
            connection.receive(max(0.0, deadline_s - time.monotonic()))  # it has understood
    except KeeperError:
        pass  # it is gone already; or it hangs, and is killed at the end


def _is_starting(key: str) -> bool:
    """Return True if a process started as the keeper is alive, even if it does not listen yet."""
    try:
        # Every process that can print into the log has a share in its lock.
        log = lock_file(keeper_files(key, create=False).log, create=False)
    except FileNotFoundError:
        return False
    if log is None:
        return True
    log.release()
    return False


def _see_it_gone(keeper: KeeperInfo) -> None:
    """Its files are gone, or it was killed: the process follows within moments."""
    with PidWatch(keeper.pid) as watch:
        if not watch.gone(_KILLED_S):
            raise KeeperTimeoutError(
                f"the keeper {keeper.pid} of {keeper.run} is still there {_KILLED_S:g} s after "
                "its end",
                hint="the disk that it writes to hangs (dmesg, df, iostat)",
            )
