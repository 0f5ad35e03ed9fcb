"""Place of a run: its folder, the ranks that train it, and the places for copies of it.

Checks that the machine and the job support the options that depend on them, and makes the folder a
run. A resume can read from the places for copies, too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch

from everstep.commit.job import COORDINATOR
from everstep.config import AUTO, Options, presets
from everstep.config.given import is_sequence
from everstep.errors import EverstepError, OptionError, StorageError
from everstep.format import base_dir, digest
from everstep.format.records import RunRecord
from everstep.restore.fetch import Copies, Meeting
from everstep.restore.fetch.copies import RunWithCopies
from everstep.restore.start import Resumed, ResumeRequest, needs_on_disk, resume_all_ranks
from everstep.run.folder import open_run_folder, run_path
from everstep.seams import Seams
from everstep.seams.group import group_of_job, store_survives_restarts
from everstep.seams.mailbox import NoMailbox
from everstep.seams.processes.processes import configured_cores
from everstep.seams.progress import log_or_print
from everstep.state.ranks import ONE_RANK, RankInfo
from everstep.tiers import PeerOptions, TierOptions
from everstep.tiers.options import Place, as_options, is_url, split_peers, validate_tiers
from everstep.trainer.job.job import Job, rank_log
from everstep.trainer.job.run_folder import open_places

_log = logging.getLogger("everstep")

CACHE_VARIABLE = "EVERSTEP_CACHE"
"""Variable of the environment: directory of the folders of runs that are in stores."""

_DIGEST_LETTERS = 12


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
        tiers: Sequence[Place],
        seams: Seams,
    ) -> RunPlace:
        """Validate the places, and meet the other ranks.

        Raises:
            OptionError: A place is invalid.
            StateError, DeadlineError: The other ranks are unknown, or do not arrive in time.
            StorageError, RecoveryError: A run folder cannot be used.
        """
        places, peers = checked_places(options, tiers)
        job = join_job(seams, options.progress_timeout_s)
        refuse_unsupported(options)
        if job is None:
            refuse_peer_without_ranks(peers)

            def open_run() -> str:
                return open_run_folder(seams.filesystem, run).run or ""

            return cls(run, seams, seams, job, ONE_RANK, places, peers, open_run)
        # Several ranks open the run at once: which entries a rank writes depends on which ranks
        # share a folder.
        forms = {"TierOptions.log": repr([one.log for one in places])} if options.logs else {}
        if options.logs and peers is not None:
            forms["PeerOptions.log"] = repr(peers.log)
        run_id = job.open_run(seams, run, places, peers, shared_options(options) | forms)
        place = cls(run, seams, seams, job, job.info, places, peers, lambda: run_id)
        return place.for_options(options, tiers)

    def for_options(self, options: Options, tiers: Sequence[Place]) -> RunPlace:
        """Return the place as a method uses it: which entries ranks write, what copies hold.

        Raises:
            OptionError: A place is invalid.
        """
        places, peers = checked_places(options, tiers)
        found = replace(self, tiers=places, peers=peers)
        if self.job is None:
            return found
        refuse_unaudited(self.ranks, options)
        logs = {options.method.log, *(one.log for one in places), peers.log if peers else "none"}
        ranks = replace(
            self.ranks,
            # Bases are computed by a keeper, or at recovery.
            followed=options.has_replica or options.is_multistep,
            logged=options.logs,
            lossy=options.logs and "adaptive" in logs,
        )
        return replace(found, ranks=ranks)


def checked_places(
    options: Options, tiers: Sequence[Place]
) -> tuple[Sequence[TierOptions], PeerOptions | None]:
    """Return the places for copies and the peer options that ``tiers`` lists.

    Raises:
        OptionError: A place is invalid.
    """
    if options.method_name == TIERCHECK:
        tiers = tiercheck_tiers(tiers)
    named, peers = split_peers(tiers, options.method.tiers)
    return validate_tiers(named, options.keep.newest, peers, logs=options.logs), peers


TIERCHECK = "tiercheck"


def tiercheck_tiers(
    tiers: Sequence[Place],
) -> Sequence[Place]:
    """Return the places of TierCheck (section 3.1): the memory of the next node, if there is one,
    and each place that is given by its name get approximate gradients (3.2).

    Local memory keeps the exact ones. Places with options of their own stay as they are.
    """
    if not is_sequence(tiers):
        return tiers  # refused below
    found: list[Place] = []
    for one in tiers:
        if one == "peer":
            one = PeerOptions(log="adaptive")
        elif not isinstance(one, (TierOptions, PeerOptions)):
            one = replace(as_options(one), log="adaptive")
        found.append(one)
    if not any(isinstance(one, PeerOptions) for one in found):
        found.append(PeerOptions(log="adaptive", if_there=True))
    return found


def tiercheck_notice(place: RunPlace) -> str:
    """Return the line about the tiers of TierCheck that a run has, and what they keep."""
    peers = "the memory of the next node" if place.ranks.nodes and place.peers else ""
    stores = [f"{one.where} ({one.log})" for one in place.tiers]
    has = ", ".join(["local memory (exact)", *([peers] if peers else []), *stores])
    missing = [
        name
        for name, is_there in (("no other node", peers), ("no remote storage in tiers=", stores))
        if not is_there
    ]
    risk = "a step that comes back from approximate gradients is not exact, and says so"
    return f"tiers: {has}; {'; '.join([*missing, risk])}"


def join_job(seams: Seams, timeout_s: float) -> Job | None:
    """Return the job that this process is a rank of; None if it trains alone.

    Raises:
        StateError: The process was started as one of several, but the process group is not
            initialized yet.
        DeadlineError: Not all ranks make a Checkpointer in time.
    """
    group = seams.group(timeout_s) if seams.group is not None else group_of_job(timeout_s)
    if group is not None and group.rank == COORDINATOR and store_survives_restarts():
        _warn_of_kept_store()
    return None if group is None else Job(group, timeout_s)


@functools.cache
def _warn_of_kept_store() -> None:
    """Log, once in a process, that a restart by torchrun is likely to fail."""
    _log.warning(
        "everstep: --max-restarts may not bring this job back: torchrun (torch %s) keeps the store "
        "in which ranks meet, and restarted ranks find the addresses of the killed ones in it "
        "(connectFullMesh ... Connection refused)\n  hint: set "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, and call it with "
        "--standalone or --rdzv-backend=c10d",
        torch.__version__,
    )


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
    with contextlib.closing(rank_log(request, run_id, COORDINATOR, [COORDINATOR])) as log:
        resumed, choice = resume_all_ranks(
            request,
            meeting,
            needs=needs_on_disk(request.state, disks),
            copies=copies,
            log=log,
        )
    copies.forget()
    return resumed, choice.base is not None and not choice.durable


def seams_with_copies(tiers: Sequence[TierOptions], seams: Seams, run: PurePath) -> Seams:
    """Return seams whose file system also reads from the tiers; make the run folder.

    A new folder becomes one of the run whose copies the tiers contain. Without tiers, the seams are
    returned unchanged.

    Raises:
        ForeignDirectoryError: The tiers contain copies of another run.
        RecoveryError: The histories of the tiers and the folder have diverged.
        OptionError, UnavailableError: A tier is invalid.
        StorageError: A tier cannot be reached.
    """
    if not tiers:
        return seams
    places = open_places(tiers, seams, run)
    both = RunWithCopies(seams.filesystem, run, places)
    try:
        inventory = open_run_folder(both, run)
        both.check_run(RunRecord(run=inventory.run or "").encode())
        both.check_timelines(inventory.timelines)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            inner = error.__cause__.__cause__
            if isinstance(inner, EverstepError):  # the tier's own error is more precise
                raise inner from None
        raise
    return replace(seams, filesystem=both)


def with_source(resumed: Resumed, seams: Seams, run: PurePath) -> Resumed:
    """Set the kind of tier that a base was read from, if it was not the run folder."""
    both = seams.filesystem
    if resumed.source != "disk" or resumed.base is None or not isinstance(both, RunWithCopies):
        return resumed
    directory = base_dir(run, resumed.base.timeline, resumed.base.step)
    kind = both.source_of(directory)
    if kind is None:
        return resumed
    # Never "disk": that would mean that the base is complete on the run's own disk.
    return replace(resumed, source="copy" if kind == "disk" else kind)


def shared_options(options: Options) -> dict[str, str]:
    """Return the options that must be the same on all ranks, as text.

    Not included are options that belong to a rank's machine (cores, budgets, use of its link, size
    of segments), the failure policy, and timeouts.
    """
    every = options.every
    log = options.log
    # Options of a rank's link get one value here, so that they neither differ nor hide a preset.
    method = replace(options.method, **_LINK_OPTIONS)
    named = next((name for name, one in presets.items() if one == method), None)
    when = "auto" if every.auto else every.steps
    found = {
        "method": repr(AUTO if options.auto is not None else named or method),
        "every": repr(when if every.seconds is None else f"{every.seconds:g}s"),
        "keep": repr(options.keep),
    }
    if options.promise is not None:
        found["lose_at_most"] = repr(options.promise.in_words)
    if every.mtbf_s is not None:
        found["Every.mtbf_s"] = repr(every.mtbf_s)
    if options.logs:
        found |= {f"LogOptions.{name}": repr(getattr(log, name)) for name in _LOG_OPTIONS}
    return found


_LINK_OPTIONS: dict[str, Any] = {"parts": "auto", "held_steps": 1, "chunk_bytes": "auto"}
_LOG_OPTIONS = ("to", "history", "watch", "lag_steps", "in_flight_steps")


def refuse_unsupported(options: Options) -> None:
    """Refuse options that this machine cannot support.

    Raises:
        OptionError: Naming the option.
    """
    cores = options.keeper.cores
    if cores is not None and min(cores) >= configured_cores():
        raise OptionError(
            f"KeeperOptions.cores={cores!r}: this machine has only the cores 0 to "
            f"{configured_cores() - 1}",
            hint="cores=None uses the cores of the training process",
        )


def refuse_unaudited(info: RankInfo, options: Options) -> None:
    """Refuse audits if the ranks have different folders.

    Called after the ranks have found out which of them share a folder.

    Raises:
        OptionError: Audits are requested, and no rank sees complete bases and all logs.
    """
    if options.log.audit and info.near is not None:
        raise OptionError(
            f"this job has {info.world} ranks: LogOptions(audit=True) needs a folder that all of "
            "them share, because an audit reads complete bases and the logs of all ranks",
            rank=info.rank,
            hint="audit=None; or one folder for all ranks",
        )


def refuse_single_base_with_peer(
    peers: PeerOptions | None, info: RankInfo, options: Options
) -> None:
    """Refuse ``keep=1`` for bases on disk with a peer.

    A node may be lost while its newest base is being sent to its peer. That base exists nowhere
    else then, and the other ranks would have deleted the previous one.

    Raises:
        OptionError: one base is kept.
    """
    if options.method.in_memory or peers is None:
        return
    if len(set(info.nodes)) > 1 and options.keep.newest < 2:  # the same on all ranks
        raise OptionError(
            "keep=1 with a peer: if a node is lost before its peer has the newest base, no base is "
            "left that all ranks can read",
            hint="keep=2, or more",
        )


def refuse_peer_without_ranks(peers: PeerOptions | None) -> None:
    """Refuse peers for a process that trains alone.

    Raises:
        OptionError: A peer is required.
    """
    if peers is not None and not peers.if_there:
        raise OptionError(
            "a peer is the keeper of a rank on another node, and this process trains alone",
            hint='leave "peer" out, or train with several ranks on several nodes',
        )


# --- A run that is named by the URL of a store ----------------------------------------


def place_of_run(
    path: str | os.PathLike[str], tiers: Sequence[Place]
) -> tuple[PurePath, Sequence[Place]]:
    """Return the run folder, and the places for copies; the store is one of them, if a URL was
    given.

    Raises:
        OptionError: the path is invalid.
    """
    if not isinstance(path, str) or not is_url(path):
        return run_path(path), tiers
    url = path.rstrip("/")
    run = run_path(_folder_of(url))
    log_or_print(
        f"{url}: training writes to {run} ({CACHE_VARIABLE} sets another place), and the keeper "
        "copies from there to the store in the background",
        level=logging.INFO,
    )
    # Refused later, with the reason, if it is no list.
    return run, [TierOptions(url), *tiers] if is_sequence(tiers) else tiers


def with_log_in_store(
    path: str | os.PathLike[str], options: Options, tiers: Sequence[Place]
) -> Sequence[Place]:
    """Return the places; the store that names the run also gets the log, if the disk does."""
    named_by_url = isinstance(path, str) and is_url(path)
    if not named_by_url or not is_sequence(tiers) or not _is_log_on_disk(options):
        return tiers
    assert isinstance(path, str)
    url = path.rstrip("/")

    def complete(one: Any) -> Any:
        if isinstance(one, TierOptions) and one.where == url and one.log == "none":
            return replace(one, log="whole")
        return one

    return [complete(one) for one in tiers]


def _is_log_on_disk(options: Options) -> bool:
    return options.logs and options.log.to == "disk"


def _folder_of(url: str) -> str:
    """Return the folder of a run on this machine; the same for every process and machine."""
    cache = PurePath(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    root = os.environ.get(CACHE_VARIABLE) or cache / "everstep"
    # The digest tells runs of the same name apart.
    return str(PurePath(root) / f"{PurePath(url).name}-{digest(url.encode())[:_DIGEST_LETTERS]}")
