"""Reads what keepers have in memory without attaching to them: a training process that is served
stays served, and what a killed one has left stays where it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import msgpack

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, KeeperError
from everstep.keeper.log.held import recalled_from_wire
from everstep.link.messages import PROTOCOL
from everstep.link.registry import KeeperInfo, keepers_of
from everstep.link.spawn import connect
from everstep.link.wire import Connection
from everstep.restore.fetch.held import Recalled
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.network.sockets import close_descriptors

__all__ = ["KeeperMemory", "read_keeper_memory"]

_log = logging.getLogger("everstep")
_ANSWER_S = 10.0
_LOOK_AGAIN_S = 0.02
_STANDSTILL_S = 5.0  # of a keeper that is still writing what a killed process has left


@dataclass(frozen=True, slots=True)
class KeeperMemory:
    """What the keeper of one rank has in memory.

    Attributes:
        recalled: with digests.
        pending: the newest base of a training process that lives, as long as it has none.
        trainer: the process that is served; None: it is gone.
    """

    recalled: Recalled
    pending: BaseId | None = None
    trainer: int | None = None


def read_keeper_memory(
    filesystem: FileSystem, run: PurePath, run_id: str
) -> tuple[dict[int, KeeperMemory], list[str]]:
    """Return what the keepers of a run on this machine have in memory, by rank, and in words which
    of them could not be asked.

    What a killed process has left may still be on its way to the disk: that is waited for.
    """
    found = dict[int, KeeperMemory]()
    problems = list[str]()
    try:
        keepers = keepers_of(run, run_id)
    except KeeperError as error:
        return found, [f"no keeper could be asked: {error.message}"]
    for info in keepers:
        try:
            found[info.rank] = _asked(info, filesystem, run)
        except EverstepError as error:
            problem = (
                f"the keeper of rank {info.rank} (process {info.pid}) could not be asked, and what "
                f"it has in memory is left out: {error.message}"
            )
            _log.warning("%s: %s", run, problem)
            problems.append(problem)
    return found, problems


def _asked(info: KeeperInfo, filesystem: FileSystem, run: PurePath) -> KeeperMemory:
    """Return what a keeper has in memory, when it is settled, or gets nowhere."""
    seen: Sequence[int] = ()
    moved_s = time.monotonic()
    with connect(info.key, timeout_s=0.0, send_timeout_s=_ANSWER_S) as connection:
        while True:
            message, arenas = _answer(connection)
            if message["moves"] != seen:
                seen = message["moves"]
                moved_s = time.monotonic()
            if message["settled"] or time.monotonic() - moved_s > _STANDSTILL_S:
                return _in_memory(message, arenas, filesystem, run)
            time.sleep(_LOOK_AGAIN_S)


def _answer(connection: Connection) -> tuple[dict[str, Any], list[Arena]]:
    connection.send({"kind": "look", "protocol": PROTOCOL})
    received = connection.receive(_ANSWER_S)
    if received is None:
        raise KeeperError("it has ended, or is of an older version of everstep")
    message, fds = received
    try:
        if message.get("kind") != "looked":
            raise KeeperError(f"it is of another version of everstep: {message.get('version')}")
        return message, [Arena.attach(fd) for fd in fds]
    finally:
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
