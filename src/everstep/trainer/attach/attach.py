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
)
from everstep.link.channel import BackgroundChannel
from everstep.link.messages import PROTOCOL
from everstep.link.registry import KeeperInfo, find_keeper, keeper_files, keepers_of
from everstep.link.spawn import SpawnOptions, connect, spawn_keeper
from everstep.link.wire import Connection, error_from_wire
from everstep.seams import Clock
from everstep.seams.files.locks import file_identity
from everstep.seams.network.sockets import close_descriptors
from everstep.trainer.attach.remote import KeeperEvents, RemoteKeeper

__all__ = ["attach", "attach_to", "is_there"]

_log = logging.getLogger("everstep")
_START_S = 30.0
_RETRY_S = 0.05


def is_there(run: PurePath, run_id: str, rank: int) -> bool:
    """Return True if a keeper that an earlier training process has left for this rank is alive.

    Raises:
        KeeperError: The runtime folder cannot be used.
    """
    if find_keeper(SpawnOptions(str(run), run_id, rank).key) is not None:
        return True
    return _find_renamed(run, run_id, rank) is not None


def _find_renamed(run: PurePath, run_id: str, rank: int) -> KeeperInfo | None:
    """Return the keeper of this rank that knows the same run folder by another path, if any.

    Its memory may hold the steps of the previous process, which would be lost otherwise.
    """
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
    events: KeeperEvents | None = None,
) -> RemoteKeeper:
    """Attach to a keeper process with an arena of ``arena_bytes``; start one if there is none.

    A keeper left by an earlier training process is used again. One with another protocol version
    finishes its work and ends first.

    Raises:
        KeeperError: No keeper could be started, or the keeper belongs to another user.
        OutOfSpaceError: The keeper cannot allocate the arena.
        UnavailableError: The keeper, or this process, has no file descriptors left.
    """
    spawn = SpawnOptions(
        str(run), run_id, rank, options.linger_s, cores=options.cores, threads=options.threads
    )
    deadline_s = clock.monotonic_s() + max(_START_S, timeout_s)
    while clock.monotonic_s() < deadline_s:
        connection, key = _connect(spawn)
        if connection is not None:
            with _name_keeper(key):
                keeper = _attach_over(
                    connection, arena_bytes, channel, clock, timeout_s, events=events
                )
            if keeper is not None:
                return keeper
        # The keeper is ending, and still writes bases: a new one can start only after it.
        time.sleep(_RETRY_S)
    other = _find_renamed(run, run_id, rank)
    raise KeeperError(
        f"the keeper of {run if other is None else other.run} does not accept this process",
        path=run,
        hint="everstep stop ends it; its log is in the runtime folder (everstep doctor)",
    )


def _connect(spawn: SpawnOptions) -> tuple[Connection | None, str]:
    """Connect to the keeper, and start it if there is none.

    Returns:
        The connection and the keeper's key. The connection is None if the keeper knows the folder
        by another path and is ending or not listening.
    """
    with contextlib.suppress(KeeperTimeoutError):  # raised if there is no keeper
        return connect(spawn.key, timeout_s=0.0), spawn.key
    other = _find_renamed(PurePath(spawn.run), spawn.run_id, spawn.rank)
    if other is None:
        spawn_keeper(spawn)
        with _name_keeper(spawn.key):
            return connect(spawn.key, timeout_s=_START_S), spawn.key
    with contextlib.suppress(KeeperTimeoutError):
        connection = connect(other.key, timeout_s=0.0)
        _log.info("the keeper of %s is process %d, started in %s", spawn.run, other.pid, other.run)
        return connection, other.key
    return None, other.key


def attach_to(
    key: str, arena_bytes: int, channel: BackgroundChannel, clock: Clock, *, timeout_s: float
) -> RemoteKeeper | None:
    """Attach to the keeper with this key; never start one.

    Returns:
        None if there is none, if it is ending, or if it serves a training process that is alive.

    Raises:
        KeeperError: It hangs, or belongs to another user.
        OutOfSpaceError: It cannot allocate the arena.
    """
    try:
        connection = connect(key, timeout_s=0.0)
    except KeeperTimeoutError:  # there is no keeper
        return None
    with _name_keeper(key):
        return _attach_over(connection, arena_bytes, channel, clock, timeout_s, idle=True)


@contextlib.contextmanager
def _name_keeper(key: str) -> Iterator[None]:
    """Name the keeper in the error if it is alive but does not respond.

    No other keeper can take its place, so the user has to act.
    """
    try:
        yield
    except KeeperTimeoutError as error:
        info = None
        with contextlib.suppress(KeeperError):
            info = find_keeper(key)
        if info is None:
            raise
        raise _unresponsive(info, error) from error


def _unresponsive(info: KeeperInfo, error: KeeperTimeoutError) -> KeeperTimeoutError:
    pid = info.pid
    if file_identity(keeper_files(info.key, create=False).socket) is not None:
        why = f"if it is stopped, kill -CONT {pid} continues it (see everstep ps)"
    else:
        why = f"its socket is missing; kill {pid} lets it write its bases and end"
    return KeeperTimeoutError(
        f"the keeper of {info.run} (process {pid}) does not respond: {error.message}",
        rank=info.rank,
        path=info.run,
        hint=f"it has the steps after the newest base in memory: {why}. "
        "everstep stop --now ends it, and these steps are lost",
    )


def _attach_over(
    connection: Connection,
    arena_bytes: int,
    channel: BackgroundChannel,
    clock: Clock,
    timeout_s: float,
    *,
    idle: bool = False,
    events: KeeperEvents | None = None,
) -> RemoteKeeper | None:
    arena = _introduce(connection, arena_bytes, timeout_s, idle=idle)
    if arena is None:
        return None
    pid = connection.peer().pid
    return RemoteKeeper(connection, arena, pid, channel, clock, timeout_s=timeout_s, events=events)


def _introduce(
    connection: Connection, arena_bytes: int, timeout_s: float, *, idle: bool
) -> Arena | None:
    """Send the first message and return the arena that the keeper has made.

    Args:
        idle: True to attach only if the keeper serves no live process, and never end it.

    Returns:
        None if the keeper is ending, or has another protocol version and ends now.
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
        except KeeperTimeoutError:  # it hangs, which is an error
            raise
        except KeeperError:  # it has just ended: the caller tries again
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
            # Another protocol version: it makes its bases durable, and closes the connection.
            connection.send({"kind": "stop"})
            while connection.receive(timeout_s) is not None:
                pass
        connection.close()
        return None
    except EverstepError:
        connection.close()
        raise
