"""Finds the keeper of a run, or starts one, and attaches to it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import PurePath

from everstep.arena.memory import Arena
from everstep.config.options import KeeperOptions
from everstep.errors import (
    EverstepError,
    KeeperError,
    KeeperTimeoutError,
    OutOfSpaceError,
    UnavailableError,
)
from everstep.link.channel import BackgroundChannel
from everstep.link.messages import PROTOCOL
from everstep.link.registry import KeeperInfo, find_keeper, keeper_files, keepers_of
from everstep.link.spawn import SpawnOptions, connect, spawn_keeper
from everstep.link.wire import Connection, error_from_wire
from everstep.seams import Clock
from everstep.seams.files.locks import file_identity
from everstep.seams.network.sockets import close_descriptors
from everstep.trainer.attach.remote import RemoteKeeper

__all__ = ["attach", "attach_to", "is_there"]

_log = logging.getLogger("everstep")
_START_S = 30.0
_LOOK_AGAIN_S = 0.05


def is_there(run: PurePath, run_id: str, rank: int) -> bool:
    """Whether a keeper of this rank of the run lives, which an earlier training process left.

    Raises:
        KeeperError: the runtime folder cannot be used.
    """
    if find_keeper(SpawnOptions(str(run), run_id, rank).key) is not None:
        return True
    return _under_another_name(run, run_id, rank) is not None


def _under_another_name(run: PurePath, run_id: str, rank: int) -> KeeperInfo | None:
    """The keeper of this rank that knows the same folder under another name, if none knows it under
    this one: what the process before has left in its memory is lost unless it is asked."""
    for info in keepers_of(run, run_id):
        if info.rank == rank and info.run != str(run):
            return info
    return None


def attach(
    run: PurePath,
    run_id: str,
    rank: int,
    arena_bytes: int,
    options: KeeperOptions,
    channel: BackgroundChannel,
    clock: Clock,
    *,
    timeout_s: float,
) -> RemoteKeeper:
    """A keeper process with an arena of ``arena_bytes`` for us.

    One that an earlier training process left is used again; one of another protocol finishes
    what it has and makes room.

    Raises:
        KeeperError: none could be started, or it is not ours.
        OutOfSpaceError: it has not that much memory.
        UnavailableError: it, or this process, has no descriptor left.
    """
    spawn = SpawnOptions(
        str(run), run_id, rank, options.linger_s, cores=options.cores, threads=options.threads
    )
    deadline_s = clock.monotonic_s() + max(_START_S, timeout_s)
    while clock.monotonic_s() < deadline_s:
        connection, key, found = _reached(spawn)
        try:
            with _naming(key):
                about = arena_bytes, channel, clock, timeout_s
                keeper = None if connection is None else _met(connection, *about)
        except (OutOfSpaceError, UnavailableError) as error:
            if found and error.__cause__ is None:  # else it is a limit of this process
                error.hint = _of_its_own(key, error.hint)
            raise
        if keeper is not None:
            return keeper
        time.sleep(_LOOK_AGAIN_S)  # it is ending, and still has something to write
    other = _under_another_name(run, run_id, rank)
    raise KeeperError(
        f"the keeper of {run if other is None else other.run} does not let this process attach",
        path=run,
        hint="everstep stop ends it; its log is in the runtime folder (everstep doctor)",
    )


def _of_its_own(key: str, hint: str | None) -> str:
    info = None
    with contextlib.suppress(KeeperError):
        info = find_keeper(key)
    raised = "" if info is None else f"prlimit --pid {info.pid} raises them, "
    return (
        f"{hint}; the keeper that lives has the limits of the process that started it: {raised}"
        "everstep stop ends it"
    )


def _reached(spawn: SpawnOptions) -> tuple[Connection | None, str, bool]:
    """A connection to the keeper, its key, and whether it was there; else it is started.

    None: it knows the folder under another name, and is ending, or is not listening.
    """
    with contextlib.suppress(KeeperTimeoutError):  # there is none
        return connect(spawn.key, timeout_s=0.0), spawn.key, True
    other = _under_another_name(PurePath(spawn.run), spawn.run_id, spawn.rank)
    if other is None:
        spawn_keeper(spawn)
        with _naming(spawn.key):
            return connect(spawn.key, timeout_s=_START_S), spawn.key, False
    with contextlib.suppress(KeeperTimeoutError):
        connection = connect(other.key, timeout_s=0.0)
        _log.info("the keeper of %s is process %d, started in %s", spawn.run, other.pid, other.run)
        return connection, other.key, True
    return None, other.key, True


def attach_to(
    key: str, arena_bytes: int, channel: BackgroundChannel, clock: Clock, *, timeout_s: float
) -> RemoteKeeper | None:
    """The keeper with this key, if it is there and stays; none is started. One that serves a
    training process that lives is not taken from it: None.

    Raises:
        KeeperError: it hangs, or is not ours.
        OutOfSpaceError: it has not that much memory.
    """
    try:
        connection = connect(key, timeout_s=0.0)
    except KeeperTimeoutError:  # there is none
        return None
    with _naming(key):
        return _met(connection, arena_bytes, channel, clock, timeout_s, idle=True)


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """A keeper that lives and does not answer is named: no other takes its place, so somebody has
    to see to it."""
    try:
        yield
    except KeeperTimeoutError as error:
        info = None
        with contextlib.suppress(KeeperError):
            info = find_keeper(key)
        if info is None:
            raise
        raise _unanswered(info, error) from error


def _unanswered(info: KeeperInfo, error: KeeperTimeoutError) -> KeeperTimeoutError:
    pid = info.pid
    if file_identity(keeper_files(info.key, create=False).socket) is not None:
        why = f"is it stopped? kill -CONT {pid} lets it go on; everstep ps shows it"
    else:
        why = f"its socket is gone, so nobody reaches it; kill {pid} has it write its bases and end"
    return KeeperTimeoutError(
        f"the keeper of {info.run} (process {pid}) does not answer: {error.message}",
        rank=info.rank,
        path=info.run,
        hint=f"it has the steps behind the newest base in memory: {why}. "
        "everstep stop --now ends it, and these steps are lost",
    )


def _met(
    connection: Connection,
    arena_bytes: int,
    channel: BackgroundChannel,
    clock: Clock,
    timeout_s: float,
    *,
    idle: bool = False,
) -> RemoteKeeper | None:
    arena = _introduce(connection, arena_bytes, timeout_s, idle=idle)
    if arena is None:
        return None
    pid = connection.peer().pid
    return RemoteKeeper(connection, arena, pid, channel, clock, timeout_s=timeout_s)


def _introduce(
    connection: Connection, arena_bytes: int, timeout_s: float, *, idle: bool
) -> Arena | None:
    """The arena that the keeper has made for us; None if it was ending, or is of another
    version and now ends.

    Args:
        idle: None, too, if it serves somebody who lives; nothing is asked to end.
    """
    hello = {
        "kind": "attach",
        "protocol": PROTOCOL,
        "arena_bytes": arena_bytes,
        "timeout_s": timeout_s,
        "idle": idle,
    }
    try:
        try:
            connection.send(hello)
            received = connection.receive(timeout_s)
        except KeeperTimeoutError:  # it hangs
            raise
        except KeeperError:  # it ended just now
            received = None
        if received is None:
            connection.close()
            return None
        message, fds = received
        if message.get("kind") == "welcome" and len(fds) == 1:
            try:
                return Arena.attach(fds[0])
            finally:
                close_descriptors(fds)
        if message.get("error") is not None:
            raise error_from_wire(message["error"])
        if not idle:
            connection.send({"kind": "stop"})  # of another protocol: what it has becomes durable
            while connection.receive(timeout_s) is not None:
                pass
        connection.close()
        return None
    except EverstepError:
        connection.close()
        raise
