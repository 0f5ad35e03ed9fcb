"""Resumes in a single process a run that several ranks have trained (``docs/design/ranks.md``).

The process continues from the last step that all of these ranks have logged, as a job of one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Sequence
from pathlib import PurePath

from everstep.format.writer import ChunkRing
from everstep.restore.fetch.copies import RunWithCopies
from everstep.restore.fetch.held import KeeperContents
from everstep.restore.fetch.peers import FetchedBase
from everstep.restore.fetch.rank_copies import Copies
from everstep.restore.start.rank_loader import loader, make_comparer, needs_on_disk
from everstep.restore.start.rank_log import RankLog
from everstep.restore.start.resume import Resumed
from everstep.restore.start.resume_job import Meeting, resume_all_ranks
from everstep.run.candidates import refuse_unreachable
from everstep.run.scan import scan_run
from everstep.seams import Seams
from everstep.state.training_state import State
from everstep.trainer.attach.orphaned_keepers import orphaned_logs

__all__ = ["resume_from_several_ranks"]

_RANK = 0
_DISKS = ("0",)


class _EmptyMailbox:
    """Mailbox of a job with a single rank: there is nobody to exchange messages with."""

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None: ...

    def send(self, rank: int, message: bytes) -> None: ...

    def receive(self, timeout_s: float) -> bytes | None:
        return None

    def is_disconnected(self, rank: int) -> bool:
        return False

    def close(self) -> None: ...


def resume_from_several_ranks(
    seams: Seams,
    run: PurePath,
    run_id: str,
    state: State,
    ring: ChunkRing,
    recalled: KeeperContents,
    *,
    step: int | None,
    strict: bool,
    timeout_s: float,
    on_touch: Callable[[], None],
    ready: Callable[[], None],
    trained: bool,
) -> tuple[Resumed, bool]:
    """Resume from a base and the logs of several ranks.

    Args:
        ready: function that waits until this process's keeper is ready.

    Returns:
        The restored state, and True if its base is on no disk yet.

    Raises:
        RecoveryError, MismatchError
    """
    if step is None:
        refuse_unreachable(scan_run(seams.filesystem, run))
    copies = Copies((), run)
    filesystem = seams.filesystem
    if isinstance(filesystem, RunWithCopies):  # a job reads its disk and the copies separately
        copies = Copies(filesystem.tiers, run)
        seams = dataclasses.replace(seams, filesystem=filesystem.local)
    load = loader(state, ring, strict=strict, timeout_s=timeout_s, on_touch=on_touch)
    left = orphaned_logs(run, run_id, _RANK, [_RANK], seams, timeout_s=timeout_s)
    left = dataclasses.replace(left, held=(*recalled.logs, *left.held))
    log = RankLog(
        seams,
        run,
        state,
        ring,
        recalled.records,
        strict=strict,
        timeout_s=timeout_s,
        left=left,
    )
    meeting = Meeting(uuid.uuid4().hex, _RANK, _DISKS, _EmptyMailbox(), trained=trained)
    with contextlib.closing(log):
        resumed, choice = resume_all_ranks(
            seams,
            run,
            state,
            meeting,
            recalled.base,
            load,
            own=[FetchedBase.of_own(one) for one in recalled.copies],  # also copies of other ranks
            step=step,
            needs=needs_on_disk(state, _DISKS),
            timeout_s=timeout_s,
            copies=copies,
            log=log,
            ready=ready,
            compare=None
            if strict
            else make_comparer(state, ring, strict=False, timeout_s=timeout_s),
        )
    copies.forget()
    resumed = dataclasses.replace(resumed, reads=())  # for jobs: which rank has read from where
    return resumed, choice.base is not None and not choice.durable
