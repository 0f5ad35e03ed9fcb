"""One rank of a job: its run folder, its starts, and exchanges with the other ranks.

:mod:`~everstep.trainer.job.run_folder` opens the folders when the Checkpointers are made, and
:mod:`~everstep.trainer.job.start` drives a resume.

Place of a run: its folder, the ranks that train it, and the places for copies of it.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import msgpack

from everstep.commit.job import COORDINATOR, Choice
from everstep.config import Options
from everstep.link.messages import JobSession
from everstep.restore.fetch import Copies, Meeting
from everstep.restore.fetch.copies import RunWithCopies
from everstep.restore.start import RankLog, Resumed, ResumeRequest, needs_on_disk, resume_all_ranks
from everstep.run.folder import open_run_folder
from everstep.seams import Seams
from everstep.seams.group import Group, group_of_job, store_survives_restarts
from everstep.seams.mailbox import NoMailbox
from everstep.state.ranks import ONE_RANK, RankInfo
from everstep.tiers import PeerOptions, TierOptions
from everstep.tiers.options import split_peers, validate_tiers
from everstep.trainer.attach.attach import orphaned_logs
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.job.option_check import refuse_unaudited, refuse_unsupported, shared_options
from everstep.trainer.job.run_folder import SharedRun, open_shared_run, refuse_peer_without_ranks
from everstep.trainer.job.start import JobStart, StartResult, reporting_failure

_log = logging.getLogger("everstep")


class Job:
    """One rank of a job of several ranks.

    All ranks call every method, in the same order.

    Args:
        group: communication with all ranks.
        timeout_s: seconds without progress after which a rank is reported.

    Attributes:
        info: number of this rank, and the ranks that it shares folders and nodes with.
        job_session: place of this rank in the last start.
        shared: run folders of the ranks, and places for copies.
        resumed_durable: False if the last start has restored a base that is on no disk yet.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self.info = RankInfo(group.rank, group.world)
        self.job_session: JobSession | None = None
        # A fresh start rests on nothing that could be lost.
        self.resumed_durable = True
        self._group = group
        self._timeout_s = timeout_s
        self.shared = SharedRun()

    def open_run(
        self,
        seams: Seams,
        run: PurePath,
        tiers: Sequence[TierOptions] = (),
        peers: PeerOptions | None = None,
        options: Mapping[str, str] | None = None,
    ) -> str:
        """Make the folder of each rank a run, the same one on all ranks; return its id.

        Args:
            tiers: places for copies. A new folder becomes one of the run whose copies they contain.
            peers: options for the memory of other nodes.
            options: options that must be the same on all ranks.

        Raises:
            ForeignDirectoryError, StorageError: A folder or place cannot be used.
            OptionError: A place is invalid or not the same for all ranks, or options differ.
            RecoveryError: The folders belong to different runs.
            DeadlineError: Not all ranks arrive in time.
        """
        rank = self.info.rank
        self.shared = shared = open_shared_run(
            self.exchange, rank, self.info.world, seams, run, tiers, peers, options
        )
        here = shared.hosts.count(shared.hosts[rank])
        self.info = replace(self.info, here=here, nodes=shared.nodes)
        if shared.has_several_disks:
            self.info = replace(self.info, near=shared.ranks_with_disk_of(rank))
        return shared.run_id

    def resume(self, request: ResumeRequest, keeper: Keepers) -> Resumed:
        """Resume with all ranks.

        Raises:
            RecoveryError, MismatchError, DeadlineError
            KeeperError: No mailbox can be opened.
        """
        with self.reporting_failure():
            near = self.shared.ranks_with_memory_of(self.info.rank)
            log = _rank_log(request, self.shared.run_id, self.info.rank, near)
        with contextlib.closing(log):
            return self._start(request, keeper, log)

    def start_fresh(self, request: ResumeRequest, keeper: Keepers) -> Resumed:
        """Begin without a resume.

        Raises:
            StateError: The run has something to resume.
        """
        return self._start(request, keeper, None)

    def _start(self, request: ResumeRequest, keeper: Keepers, log: RankLog | None) -> Resumed:
        start = JobStart(
            self._group.host, self.exchange, self.info, self.shared, timeout_s=self._timeout_s
        )
        result = start.start(request, keeper, log)
        self.resumed_durable = result.choice.durable or result.choice.base is None
        self.job_session = self._session_of(result)
        return result.resumed

    def _session_of(self, result: StartResult) -> JobSession:
        """Return this rank's place in a start.

        Retention must not rely on a base that is partly in copies only. Its files on the disks are
        not removed, either.
        """
        choice: Choice = result.choice
        on_disks = choice.durable and choice.base not in choice.elsewhere
        return JobSession(
            result.session,
            self.info.rank,
            self.shared.disks,
            result.keepers,
            choice.base if on_disks else None,
            None if on_disks else choice.base,
            tuple(sorted({*choice.unreadable, *choice.elsewhere})),
            nodes=self.info.nodes,
            unread=any(read.source != "disk" for read in result.resumed.reads),
        )

    def reporting_failure(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an error before a start is sent to the other ranks."""
        return reporting_failure(self.exchange)

    def exchange(self, purpose: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a message to all ranks, and return those of all ranks, by rank.

        Args:
            purpose: description, the same on all ranks; part of the error if a rank is missing.

        Raises:
            DeadlineError: Not all ranks make this call in time.
        """
        data: bytes = msgpack.packb(mine)
        return [msgpack.unpackb(message) for message in self._group.exchange(purpose, data)]

    def begin_any(self, purpose: str, mine: bool) -> Callable[[], bool]:
        """Start a vote without waiting; see :meth:`.Group.begin_any`."""
        return self._group.begin_any(purpose, mine)


def join_job(seams: Seams, timeout_s: float) -> Job | None:
    """Return the job that this process is a rank of; None if it trains alone.

    Raises:
        StateError: The process was started as one of several, but the process group is not
            initialized yet.
        DeadlineError: Not all ranks make a Checkpointer in time.
    """
    group = seams.group(timeout_s) if seams.group is not None else group_of_job(timeout_s)
    if group is not None and group.rank == COORDINATOR and store_survives_restarts():
        _log.warning(
            "everstep: torchrun keeps one store over its restarts here (torch 2.13): ranks that "
            "--max-restarts starts again find in it the addresses of those that were killed, and "
            "gloo does not connect them (connectFullMesh ... Connection refused)\n  hint: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, and call it with "
            "--standalone or --rdzv-backend=c10d"
        )
    return None if group is None else Job(group, timeout_s)


def resume_as_job_of_one(request: ResumeRequest, run_id: str) -> tuple[Resumed, bool]:
    """Resume, in a process that trains alone, a run that several ranks have trained
    (``docs/design/ranks.md``). It continues from the last step that all of them have logged.

    Returns:
        The restored state, and True if its base is on no disk yet.

    Raises:
        RecoveryError, MismatchError
    """
    copies = Copies((), request.run)
    filesystem = request.seams.filesystem
    if isinstance(filesystem, RunWithCopies):  # a job reads its disk and the copies separately
        copies = Copies([place.tier for place in filesystem.places], request.run)
        request = replace(request, seams=replace(request.seams, filesystem=filesystem.local))
    disks = ("0",)
    meeting = Meeting(uuid.uuid4().hex, COORDINATOR, disks, NoMailbox(), strict=request.strict)
    with contextlib.closing(_rank_log(request, run_id, COORDINATOR, [COORDINATOR])) as log:
        resumed, choice = resume_all_ranks(
            request,
            meeting,
            needs=needs_on_disk(request.state, disks),
            copies=copies,
            log=log,
        )
    copies.forget()
    # What each rank has read, and from where, is reported for jobs of several ranks only.
    resumed = replace(resumed, reads=())
    return resumed, choice.base is not None and not choice.durable


def _rank_log(request: ResumeRequest, run_id: str, rank: int, near: Sequence[int]) -> RankLog:
    """Return the log of this rank, with what orphaned keepers on this machine have of others.

    Args:
        near: ranks of this job on this machine.
    """
    left = orphaned_logs(
        request.run, run_id, rank, near, request.seams, timeout_s=request.timeout_s
    )
    return RankLog(request, replace(left, held=(*request.recalled.logs, *left.held)))


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Folder, ranks and places for copies of one Checkpointer.

    Attributes:
        reading: seams whose file system also reads from the places for copies.
        job: ranks that train together; None if this process trains alone.
        ranks: number of this rank, and the ranks that it shares folders and nodes with.
        tiers: places for copies.
        peers: options for the memory of other nodes; None to send nothing there.
        open_run: function that makes the folder a run and returns its id. It is called only after
            the budgets were checked, so that a refused start leaves no trace.
    """

    run: PurePath
    seams: Seams
    reading: Seams
    job: Job | None
    ranks: RankInfo
    tiers: Sequence[TierOptions]
    peers: PeerOptions | None
    open_run: Callable[[], str]

    @classmethod
    def find(
        cls,
        options: Options,
        run: PurePath,
        tiers: Sequence[str | PurePath | TierOptions | PeerOptions],
        seams: Seams,
    ) -> RunPlace:
        """Validate the places, and meet the other ranks.

        Raises:
            OptionError: A place is invalid.
            StateError, DeadlineError: The other ranks are unknown, or do not arrive in time.
            StorageError, RecoveryError: A run folder cannot be used.
        """
        named, peers = split_peers(tiers, options.method.tiers)
        places = validate_tiers(named, options.keep, peers, logs=options.logs)
        job = join_job(seams, options.progress_timeout_s)
        refuse_unsupported(ONE_RANK if job is None else job.info, options, places)
        if job is None:
            refuse_peer_without_ranks(peers)

            def open_run() -> str:
                return open_run_folder(seams.filesystem, run).run or ""

            return cls(run, seams, seams, job, ONE_RANK, places, peers, open_run)
        # Several ranks open the run at once: which entries a rank writes depends on which ranks
        # share a folder.
        run_id = job.open_run(seams, run, places, peers, shared_options(options))
        refuse_unaudited(job.info, options)
        computed = options.has_replica or options.is_multistep  # by a keeper, or at recovery
        ranks = replace(job.info, followed=computed, logged=options.logs)
        return cls(run, seams, seams, job, ranks, places, peers, lambda: run_id)
