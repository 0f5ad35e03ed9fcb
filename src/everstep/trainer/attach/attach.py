"""Finds the keeper of a run, or starts one, and attaches to it.

Keepers on this machine that serve no rank of this job are read and left alone. They were left by a
job with another number of ranks, by this rank if it now runs without a keeper process, or under a
path that the run folder was moved from. A keeper whose training process is alive is not touched: it
belongs to another job with this path, or to a rank of this one. See ``docs/design/ranks.md``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from everstep.arena import Arena
from everstep.errors import EverstepError, KeeperError, KeeperTimeoutError
from everstep.format.log import LogRecord
from everstep.link import BackgroundChannel, Connection, KeeperInfo, connect
from everstep.link.messages import PROTOCOL
from everstep.link.registry import find_keeper, keeper_files, keepers_left_by_a_move, keepers_of
from everstep.link.spawn import SpawnOptions, spawn_keeper
from everstep.link.wire import error_from_wire
from everstep.restore.fetch import KeeperContents, PeerLog
from everstep.restore.reshard import LogsInMemory
from everstep.seams import Clock, Seams
from everstep.seams.locks import file_identity
from everstep.seams.sockets import close_descriptors
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.attach.terms import KeeperTerms

if TYPE_CHECKING:
    from everstep.trainer.participant import Participant

_log = logging.getLogger("everstep")
_START_S = 30.0
_RETRY_S = 0.05
_ARENA_BYTES = 1 << 16  # of a keeper whose memory is only read


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
    terms: KeeperTerms, channel: BackgroundChannel, participants: Sequence[Participant] = ()
) -> RemoteKeeper:
    """Attach to a keeper process with an arena of these terms; start one if there is none.

    A keeper left by an earlier training process is used again. One with another protocol version
    finishes its work and ends first.

    Raises:
        KeeperError: No keeper could be started, or the keeper belongs to another user.
        OutOfSpaceError: The keeper cannot allocate the arena.
        UnavailableError: The keeper, or this process, has no file descriptors left.
    """
    options = terms.options.keeper
    rank = terms.ranks.rank
    clock = terms.seams.clock
    spawn = SpawnOptions(
        str(terms.run),
        terms.run_id,
        rank,
        options.linger_s,
        cores=options.cores,
        threads=options.threads,
    )
    # A keeper that is ending writes its bases first, which may take as long as other waits for
    # storage.
    deadline_s = clock.monotonic_s() + max(_START_S, terms.timeout_s)
    while clock.monotonic_s() < deadline_s:
        connection, key = _connect(spawn)
        if connection is not None:
            with _name_keeper(key):
                keeper = _attach_over(
                    connection, terms.arena_bytes, channel, clock, terms.timeout_s, participants
                )
            if keeper is not None:
                return keeper
        # The keeper is ending, and still writes bases: a new one can start only after it.
        time.sleep(_RETRY_S)
    other = _find_renamed(terms.run, terms.run_id, rank)
    raise KeeperError(
        f"the keeper of {terms.run if other is None else other.run} does not accept this process",
        path=terms.run,
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
    participants: Sequence[Participant] = (),
    *,
    idle: bool = False,
) -> RemoteKeeper | None:
    """Send the first message, and return the keeper with the arena that it has made.

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
                # The arena keeps a duplicate of the descriptor.
                arena = Arena.attach(fds[0])
            finally:
                close_descriptors(fds)
            # From the kernel, so it is the process at the other end, whatever its registration
            # says.
            pid = connection.peer().pid
            return RemoteKeeper(
                connection, arena, pid, channel, clock, participants, timeout_s=timeout_s
            )
        if message.get("error") is not None:
            raise error_from_wire(message["error"])
        if not idle:
            _end_other_version(connection, timeout_s)
        connection.close()
        return None
    except EverstepError:
        connection.close()
        raise


def _end_other_version(connection: Connection, timeout_s: float) -> None:
    """Let a keeper of another protocol version make its bases durable; wait until it ends.

    It closes the connection after its registration has ended: before that no new keeper can start.
    """
    connection.send({"kind": "stop"})
    while connection.receive(timeout_s) is not None:
        pass


# --- Keepers that serve no rank of this job -------------------------------------------


def orphaned_logs(
    run: PurePath, run_id: str, rank: int, near: Collection[int], seams: Seams, *, timeout_s: float
) -> LogsInMemory:
    """Return the logs in the memory of orphaned keepers that this rank reads.

    The ranks of a machine share the keepers among them. A keeper that does not respond is skipped:
    its log on disk remains.

    Args:
        near: ranks of this job on this machine, including this one.
    """
    served = sorted(near)
    found = dict[int, Sequence[LogRecord]]()
    held = list[PeerLog]()
    for info in keepers_of(run, run_id):
        if info.rank in served:
            continue
        # Computed alike on all ranks without a message, so each keeper is read by exactly one of
        # them.
        if served[info.rank % len(served)] != rank:
            continue
        if (recalled := _recalled(info, run, seams, timeout_s)) is not None:
            found[info.rank] = recalled.records
            held += recalled.logs
    return LogsInMemory(found, tuple(held))


def orphaned_state(terms: KeeperTerms) -> KeeperContents:
    """Return the memory of this rank's earlier keeper, for a rank without a keeper process."""
    for info in keepers_of(terms.run, terms.run_id):
        if info.rank == terms.ranks.rank:
            recalled = _recalled(info, terms.run, terms.seams, terms.timeout_s)
            return recalled or KeeperContents()
    return KeeperContents()


def orphaned_by_move(terms: KeeperTerms) -> KeeperContents:
    """Return the memory of this rank's keeper if it knows the run by a path that no longer exists.

    The folder was moved or renamed while the keeper was running. The keeper cannot write there any
    more, but its memory is as valid as before.
    """
    for info in keepers_left_by_a_move(terms.run_id):
        if info.rank != terms.ranks.rank:
            continue
        recalled = _recalled(info, terms.run, terms.seams, terms.timeout_s)
        if recalled is not None:
            _log.warning(
                "%s was moved from %s while keeper process %d was using it: the contents of its "
                "memory are used here, and stay there until it ends (everstep stop ends it)",
                terms.run,
                info.run,
                info.pid,
            )
            return recalled
    return KeeperContents()


def _recalled(
    info: KeeperInfo, run: PurePath, seams: Seams, timeout_s: float
) -> KeeperContents | None:
    """Return the memory of a keeper; None if it cannot be read.

    That is the case if there is none, or it is ending, or serves a training process that is alive.
    """
    channel = BackgroundChannel("warn", seams.clock, progress_timeout_s=timeout_s)
    connection: Connection | None = None
    keeper = None
    try:
        with contextlib.suppress(KeeperTimeoutError):  # there is none
            connection = connect(info.key, timeout_s=0.0)
        if connection is not None:
            with _name_keeper(info.key):
                keeper = _attach_over(
                    connection, _ARENA_BYTES, channel, seams.clock, timeout_s, idle=True
                )
        if keeper is None:
            _log.info("the keeper of rank %d serves another process, or is ending", info.rank)
            return None
        try:
            # Before the recall: the timeline that this start opens will fence off bases that are
            # still being written.
            keeper.settle(timeout_s)
            return keeper.recall(timeout_s).of_history(seams.filesystem, run)
        finally:
            # This start may still fail; the next one then needs the same memory.
            keeper.close(stay=True)
    except EverstepError as error:
        _log.warning(
            "cannot read the memory of the earlier keeper of rank %d: %s", info.rank, error
        )
        return None
