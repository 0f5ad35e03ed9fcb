"""The keeper of a run: its newest base in memory, and its end.

A keeper is not a child of the process that started it. It is found by its key, and asked to stop as
``everstep stop`` does. A keeper that does not stop is killed.
"""

from __future__ import annotations

import time
from pathlib import Path

from everstep.errors import KeeperError, KeeperTimeoutError
from everstep.format.names import RUN_RECORD
from everstep.format.records import RunRecord
from everstep.link import KeeperInfo, connect
from everstep.link.registry import find_keeper, keeper_files, keeper_key, kill_keeper
from everstep.run.folder import run_path
from everstep.seams.locks import lock_file
from everstep.seams.processes.processes import process_ended
from everstep.seams.sockets import close_descriptors

_ANSWER_S = 15.0
_END_S = 20.0
_KILLED_S = 10.0
_LOOK_AGAIN_S = 0.05


def held_step(run: Path) -> int | None:
    """Return the step of the newest complete base in the memory of ``run``'s keeper, or None.

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
        raise KeeperError(f"the keeper of {run} closed the connection without an answer")
    message, descriptors = received
    close_descriptors(descriptors)
    return max(message["held"], default=None)


def end_keeper(run: Path, *, timeout_s: float = _END_S) -> None:
    """End the keeper of ``run``, even one that is just starting; return after its end.

    The keeper first makes its captured bases durable. It is killed if that takes longer than
    ``timeout_s``, or if the wait is interrupted.

    Raises:
        KeeperError: it cannot be killed.
    """
    key = _key_of(run)
    if key is None:
        return
    asked_to_stop: list[KeeperInfo] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline_s:
            keeper = find_keeper(key)
            if keeper is not None and keeper not in asked_to_stop:
                asked_to_stop.append(keeper)
                _ask_to_stop(key, deadline_s)
            if keeper is None and not _is_starting(key):
                return
            time.sleep(_LOOK_AGAIN_S)
    finally:
        keeper = find_keeper(key)
        if keeper is not None and kill_keeper(keeper):
            asked_to_stop.append(keeper)
        for keeper in asked_to_stop:
            _wait_for_end(keeper)
    if _is_starting(key):
        raise KeeperTimeoutError(
            f"a keeper of {run} is starting, and did not answer within {timeout_s:g} s",
            hint="everstep ps lists it once it answers, everstep stop ends it",
        )


def _key_of(run: Path) -> str | None:
    """Return the key of the run's keeper; None if the run has not begun."""
    try:
        data = (run / RUN_RECORD).read_bytes()
    except FileNotFoundError:
        return None
    return keeper_key(str(run_path(run)), RunRecord.decode(data, run / RUN_RECORD).run, 0)


def _ask_to_stop(key: str, deadline_s: float) -> None:
    try:
        with connect(key, timeout_s=max(0.0, deadline_s - time.monotonic())) as connection:
            connection.send({"kind": "stop"})
            connection.receive(max(0.0, deadline_s - time.monotonic()))  # its acknowledgement
    except KeeperError:
        pass  # it has ended already; or it hangs, and is killed at the end


def _is_starting(key: str) -> bool:
    """Return True if a process started as the keeper is alive, even if it does not listen yet."""
    try:
        # The keeper process shares the lock of its log file from its start to its end.
        log = lock_file(keeper_files(key, create=False).log, create=False)
    except FileNotFoundError:
        return False
    if log is None:
        return True
    log.release()
    return False


def _wait_for_end(keeper: KeeperInfo) -> None:
    """Wait for the end of the process, whose files are removed already, or which was killed."""
    if not process_ended(keeper.pid, _KILLED_S):
        raise KeeperTimeoutError(
            f"the keeper process {keeper.pid} of {keeper.run} still exists {_KILLED_S:g} s "
            "after it was stopped or killed",
            hint="the disk that it writes to hangs (dmesg, df, iostat)",
        )
