"""Place of a run: its folder, the ranks that train it, and the places for copies of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.config.options import Options
from everstep.run.folder import open_run_folder
from everstep.seams import Seams
from everstep.state.ranks.rank_info import ONE_RANK, RankInfo
from everstep.tiers.options import PeerOptions, TierOptions, split_peers, validate_tiers
from everstep.trainer.job.job import Job, join_job
from everstep.trainer.job.option_check import (
    refuse_unaudited,
    refuse_unsupported,
    shared_options,
)
from everstep.trainer.job.peer_nodes import refuse_peer_without_ranks


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
