"""Read the memory of keepers without attaching to them.

A served training process stays served, and captures of a killed one stay where they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import msgpack

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.errors import EverstepError, KeeperError
from everstep.keeper.held import recalled_from_wire
from everstep.link import Connection, KeeperInfo, connect
from everstep.link.messages import PROTOCOL
from everstep.link.registry import keepers_of
from everstep.restore.fetch import KeeperContents
from everstep.seams import FileSystem
from everstep.seams.sockets import close_descriptors

_log = logging.getLogger("everstep")
_REPLY_TIMEOUT_S = 10.0
_POLL_S = 0.02
_NO_PROGRESS_S = 5.0  # longest wait for a keeper that is writing captures of a killed process


@dataclass(frozen=True, slots=True)
class KeeperMemory:
    """Memory of the keeper of one rank.

    Attributes:
        recalled: bases and log records, with digests.
        pending: newest base of a live training process, until its first base is durable.
        trainer: id of the process being served; None if there is none.
    """

    recalled: KeeperContents
    pending: BaseId | None = None
    trainer: int | None = None


def read_keeper_memory(
    filesystem: FileSystem, run: PurePath, run_id: str, *, ranks: Collection[int] | None = None
) -> tuple[dict[int, KeeperMemory], list[str]]:
    """Return the memory of the keepers of a run on this machine, by rank, and problems in words.

    Waits until captures of a killed process that are being written have reached the disk.

    Args:
        ranks: ranks whose keepers are read; None: all.
    """
    found = dict[int, KeeperMemory]()
    problems = list[str]()
    try:
        keepers = keepers_of(run, run_id)
    except KeeperError as error:
        return found, [f"no keeper could be queried: {error.message}"]
    for info in keepers:
        if ranks is not None and info.rank not in ranks:
            continue
        try:
            found[info.rank] = _query(info, filesystem, run)
        except EverstepError as error:
            problem = (
                f"the keeper of rank {info.rank} (process {info.pid}) could not be queried, and "
                "its "
                f"memory is left out: {error.message}"
            )
            _log.warning("%s: %s", run, problem)
            problems.append(problem)
    return found, problems


def _query(info: KeeperInfo, filesystem: FileSystem, run: PurePath) -> KeeperMemory:
    """Return the memory of a keeper once it is settled, or makes no more progress."""
    seen: Sequence[int] = ()
    moved_s = time.monotonic()
    # One attempt: a keeper that is registered listens already, or has ended.
    with connect(info.key, timeout_s=0.0, send_timeout_s=_REPLY_TIMEOUT_S) as connection:
        while True:
            message, arenas = _request(connection)
            # The keeper reports counters of its progress. Wait as long as they change.
            if message["moves"] != seen:
                seen = message["moves"]
                moved_s = time.monotonic()
            if message["settled"] or time.monotonic() - moved_s > _NO_PROGRESS_S:
                return _in_memory(message, arenas, filesystem, run)
            time.sleep(_POLL_S)


def _request(connection: Connection) -> tuple[dict[str, Any], list[Arena]]:
    connection.send({"kind": "look", "protocol": PROTOCOL})
    received = connection.receive(_REPLY_TIMEOUT_S)
    if received is None:
        raise KeeperError("it has exited, or runs an older version of everstep")
    message, fds = received
    try:
        if message.get("kind") != "looked":
            raise KeeperError(f"it runs another version of everstep: {message.get('version')}")
        return message, [Arena.attach(fd) for fd in fds]
    finally:
        # Closed in any case, since they arrived with the message: a mapping does not need them.
        close_descriptors(fds)


def _in_memory(
    message: dict[str, Any], arenas: Sequence[Arena], filesystem: FileSystem, run: PurePath
) -> KeeperMemory:
    index, *others = arenas
    fields = msgpack.unpackb(
        index.view[: message["size_bytes"]], strict_map_key=False, unicode_errors="surrogatepass"
    )
    blobs = dict(enumerate(fields["blobs"]))
    recalled = recalled_from_wire({**fields, "blobs": blobs}, others)
    pending = fields["pending"]
    return KeeperMemory(
        recalled.of_history(filesystem, run),
        None if pending is None else BaseId(pending["timeline"], pending["step"]),
        message["trainer"],
    )
