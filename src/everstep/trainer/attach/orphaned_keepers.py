"""Reads the memory of keepers on this machine that serve no rank of this job.

They were left by a job with another number of ranks, by this rank if it now runs without a keeper
process, or under a path that the run folder was moved from. Their memory is read and left to them.
A keeper whose training process is alive is not touched: it belongs to another job with this path,
or to a rank of this one. See ``docs/design/ranks.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import PurePath

from everstep.errors import EverstepError
from everstep.format.log import LogRecord
from everstep.link.channel import BackgroundChannel
from everstep.link.registry import KeeperInfo, keepers_left_by_a_move, keepers_of
from everstep.restore.fetch.held import KeeperContents
from everstep.restore.fetch.peer_log import PeerLog
from everstep.restore.reshard.logs import LogsInMemory
from everstep.seams import Seams
from everstep.trainer.attach.attach import attach_to

__all__ = ["orphaned_by_move", "orphaned_logs", "orphaned_state"]

_log = logging.getLogger("everstep")
_ARENA_BYTES = 1 << 16  # small: nothing is captured into it


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
        if served[info.rank % len(served)] != rank:
            continue
        if (recalled := _recalled(info, run, seams, timeout_s)) is not None:
            found[info.rank] = recalled.records
            held += recalled.logs
    return LogsInMemory(found, tuple(held))


def orphaned_state(
    run: PurePath, run_id: str, rank: int, seams: Seams, *, timeout_s: float
) -> KeeperContents:
    """Return the memory of this rank's earlier keeper, for a rank without a keeper process."""
    for info in keepers_of(run, run_id):
        if info.rank == rank:
            return _recalled(info, run, seams, timeout_s) or KeeperContents()
    return KeeperContents()


def orphaned_by_move(
    run: PurePath, run_id: str, rank: int, seams: Seams, *, timeout_s: float
) -> KeeperContents:
    """Return the memory of this rank's keeper if it knows the run by a path that no longer exists.

    The folder was moved or renamed while the keeper was running. The keeper cannot write there any
    more, but its memory is as valid as before.
    """
    for info in keepers_left_by_a_move(run_id):
        if info.rank != rank:
            continue
        recalled = _recalled(info, run, seams, timeout_s)
        if recalled is not None:
            _log.warning(
                "%s was moved from %s while keeper process %d was using it: the contents of its "
                "memory are used here, and stay there until it ends (everstep stop ends it)",
                run,
                info.run,
                info.pid,
            )
            return recalled
    return KeeperContents()


def _recalled(
    info: KeeperInfo, run: PurePath, seams: Seams, timeout_s: float
) -> KeeperContents | None:
    """Return the memory of a keeper; None if it cannot be read."""
    channel = BackgroundChannel("warn", seams.clock, progress_timeout_s=timeout_s)
    try:
        keeper = attach_to(info.key, _ARENA_BYTES, channel, seams.clock, timeout_s=timeout_s)
        if keeper is None:
            _log.info("the keeper of rank %d serves another process, or is ending", info.rank)
            return None
        try:
            keeper.settle(timeout_s)
            return keeper.recall(timeout_s).of_history(seams.filesystem, run)
        finally:
            keeper.close(stay=True)
    except EverstepError as error:
        _log.warning(
            "cannot read the memory of the earlier keeper of rank %d: %s", info.rank, error
        )
        return None
