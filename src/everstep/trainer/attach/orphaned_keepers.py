"""Keepers on this machine that serve no rank of this job: of ranks that trained in another number,
or of this one, if it makes do without a keeper process now. What they have in memory is looked at,
and left with them (``adr/033``). One whose training process lives is left to it: that is another
job on this path, or a part of this one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import PurePath

from everstep.errors import EverstepError
from everstep.format.log import LogRecord
from everstep.link.channel import BackgroundChannel
from everstep.link.registry import KeeperInfo, keepers_left_by_a_move, keepers_of
from everstep.restore.fetch.held import Recalled
from everstep.restore.fetch.peer_log import PeerLog
from everstep.restore.relaid.old_logs import InMemory
from everstep.seams import Seams
from everstep.trainer.attach.attach import attach_to

__all__ = ["orphaned_by_move", "orphaned_logs", "orphaned_state"]

_log = logging.getLogger("everstep")
_ARENA_BYTES = 1 << 16  # nothing is captured into it


def orphaned_logs(
    run: PurePath, run_id: str, rank: int, near: Collection[int], seams: Seams, *, timeout_s: float
) -> InMemory:
    """What this rank looks at of them: the ranks of a machine share them out. One that cannot be
    asked leaves what is on disk.

    Args:
        near: the ranks of this job on this machine, this one among them.
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
    return InMemory(found, tuple(held))


def orphaned_state(
    run: PurePath, run_id: str, rank: int, seams: Seams, *, timeout_s: float
) -> Recalled:
    """What the keeper of a process that trained before has of this very rank, for one that makes
    do without a keeper process."""
    for info in keepers_of(run, run_id):
        if info.rank == rank:
            return _recalled(info, run, seams, timeout_s) or Recalled()
    return Recalled()


def orphaned_by_move(
    run: PurePath, run_id: str, rank: int, seams: Seams, *, timeout_s: float
) -> Recalled:
    """Return what a keeper has of this rank that knows the run by a path where it is no more: the
    folder was moved, or renamed, while the keeper lived. It cannot write there; what it has in
    memory is as good as if the folder had stayed."""
    for info in keepers_left_by_a_move(run_id):
        if info.rank != rank:
            continue
        recalled = _recalled(info, run, seams, timeout_s)
        if recalled is not None:
            _log.warning(
                "%s was moved from %s while keeper process %d had it: what that has in memory "
                "counts here, and stays there until it ends (everstep stop ends it)",
                run,
                info.run,
                info.pid,
            )
            return recalled
    return Recalled()


def _recalled(info: KeeperInfo, run: PurePath, seams: Seams, timeout_s: float) -> Recalled | None:
    """What a keeper has; None: it cannot be asked."""
    channel = BackgroundChannel("warn", seams.clock, progress_timeout_s=timeout_s)
    try:
        keeper = attach_to(info.key, _ARENA_BYTES, channel, seams.clock, timeout_s=timeout_s)
        if keeper is None:
            _log.info("the keeper of rank %d serves somebody else, or ends", info.rank)
            return None
        try:
            keeper.settle(timeout_s)
            return keeper.recall(timeout_s).of_history(seams.filesystem, run)
        finally:
            keeper.close(stay=True)
    except EverstepError as error:
        _log.warning("the keeper of rank %d, which trained before: %s", info.rank, error)
        return None
