"""This process among the ranks that train together: where they meet, and what they resume."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, Protocol, TypeVar

import msgpack

from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import StartFailed
from everstep.commit.job.offers import Choice, Offer
from everstep.config.options import Options
from everstep.errors import (
    DeadlineError,
    EverstepError,
    OptionError,
)
from everstep.format.names import RUN_RECORD, TEMPORARY_SUFFIX
from everstep.format.records import Manifest, RunRecord
from everstep.format.writer import ChunkRing
from everstep.link.job_session import JobSession, mailbox_error
from everstep.restore.fetch.held import Recalled
from everstep.restore.fetch.lent_files import opens_in
from everstep.restore.fetch.node_reads import NodeStart, memory_name
from everstep.restore.fetch.others import failed_there, in_words
from everstep.restore.fetch.peer_copy import PeerCopy
from everstep.restore.fetch.peers import Brought, Fetched, Lent, Meanwhile, fetch_from_peers
from everstep.restore.fetch.rank_copies import Copies
from everstep.restore.start.folder import open_run_folder
from everstep.restore.start.loading import Compares, comparer, loader, needs_here
from everstep.restore.start.outcome import doubted, told_back, with_ranks
from everstep.restore.start.ranklog import RankLog
from everstep.restore.start.resume import Resumed
from everstep.restore.start.together import Meeting, resume_together
from everstep.run.decide import refuse_unreachable
from everstep.run.scan import scan_run
from everstep.seams import Seams
from everstep.seams.fingerprint import fingerprint
from everstep.seams.machine import memory_available_bytes, on_own_device
from everstep.seams.network.group import Group, group_of_job, keeps_store_over_restarts
from everstep.seams.network.peers import PeerMailbox
from everstep.state.image import State
from everstep.state.ranks.apart import Apart
from everstep.state.ranks.ranks import ONE_RANK, RankInfo
from everstep.tiers.disk import create_exclusive, ensure_dirs, remove_if_there, storage_errors
from everstep.tiers.options import PeerOptions, TierOptions
from everstep.trainer.attach.orphaned_keepers import orphaned_logs
from everstep.trainer.job.copies import open_places
from everstep.trainer.job.option_check import (
    refuse_errors,
    refuse_other_calls,
    refuse_other_options,
    refuse_unaudited,
    refuse_unsupported,
    same_as_copies,
    same_run,
    shared_options,
)
from everstep.trainer.job.peer_nodes import node_name, node_names, refuse_peer_without_ranks

__all__ = [
    "Job",
    "KeeperOfRank",
    "apply_own_parameters",
    "join_job",
    "own_parameters_message",
    "prepare_run",
    "warn_of_different_layers",
]

_log = logging.getLogger("everstep")
_T = TypeVar("_T")


class KeeperOfRank(Protocol):
    """This rank's keeper, which may still be starting."""

    def listen(self, host: str) -> tuple[str, int]:
        """Its mailbox's address at a host; it is opened when the keeper is ready."""
        ...

    def ready(self) -> None:
        """Waits for it, before a timeline is opened."""
        ...


class Job:
    """One rank's part in a job of several, from the making of a Checkpointer on.

    Args:
        group: all ranks; whatever is called here, every one of them calls.
        timeout_s: a rank that says nothing for so long is reported.

    Attributes:
        info: which rank this is.
        job_session: its place in the start of the job that was agreed on last.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self.info = RankInfo(group.rank, group.world)
        self.job_session: JobSession | None = None
        self.resumed_durable = True
        self._group = group
        self._timeout_s = timeout_s
        self._disks: tuple[str, ...] = ()
        self._memories: tuple[str, ...] = ()  # by rank: what it shares with those of the same
        self._copies: Copies | None = None
        self._fetches = False  # what is in other ranks' memory
        self._run_id = ""
        self._apart: Apart | None = None
        self._parts = False  # any rank has what DDP does not reduce

    def open_run(
        self,
        seams: Seams,
        run: PurePath,
        tiers: Sequence[TierOptions] = (),
        peers: PeerOptions | None = None,
        options: Mapping[str, str] | None = None,
    ) -> str:
        """Makes the folder of each rank a run, the same one; returns its id.

        Args:
            tiers: places that keep copies of the run; a folder that is new becomes one of the
                run whose copies they hold.
            peers: what was said of the memory of other nodes.
            options: that have to be the same on all ranks.

        Raises:
            ForeignDirectoryError, StorageError: a folder or place cannot be used.
            OptionError: a place is none, or is not the same one for all ranks; options differ.
            RecoveryError: the folders are of different runs.
            DeadlineError: not all ranks are there.
        """
        what = "make a Checkpointer"
        rank = self.info.rank
        filesystem = seams.filesystem
        mine: dict[str, Any] = {"name": uuid.uuid4().hex, "run": None, "error": None}
        mine["host"] = platform.node()
        mine["tiers"] = [tier.where for tier in tiers]
        mine["node"], mine["options"] = node_name(peers), dict(options or {})
        mine["memory"] = memory_name(mine["node"])
        failed: EverstepError | None = None
        try:
            self._copies = copies = Copies(open_places(tiers, seams, run), run)
            with storage_errors("open the run folder", run, rank=rank):
                ensure_dirs(filesystem, run)
                mine["run"] = scan_run(filesystem, run).run
            mine["run"] = same_as_copies(mine["run"], copies.run_id(), run)
        except EverstepError as error:
            failed = error
            mine["error"] = error.message
        found = self._say(what, mine)
        if failed is not None:
            raise failed
        refuse_errors(found, rank)
        refuse_other_options(found, rank)
        self._fetches = any(said["node"] for said in found)
        nodes = node_names(found, rank, if_there=peers is not None and peers.if_there)
        run_id = self._run_id = same_run(found, rank)
        self._open_copies(copies, found, run_id)
        with storage_errors("open the run folder", run, rank=rank):
            self._disks = self._find_disks(seams, run, found[0]["name"])
            unique = f"{mine['name'][:8]}-{rank}"
            create_exclusive(filesystem, run / RUN_RECORD, RunRecord(run_id).encode(), unique)
        self._memories = tuple(str(said["memory"]) for said in found)
        here_too = sum(said["host"] == mine["host"] for said in found)
        self.info = replace(self.info, here=here_too, nodes=nodes)
        if len(set(self._disks)) > 1:
            here = [r for r, disk in enumerate(self._disks) if disk == self._disks[rank]]
            self.info = replace(self.info, near=tuple(here))
        return run_id

    def resume(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        ring: ChunkRing,
        recalled: Recalled,
        keeper: KeeperOfRank,
        *,
        step: int | None,
        strict: bool,
        timeout_s: float,
        on_touch: Callable[[], None],
        trained: bool = False,
    ) -> Resumed:
        """As :func:`everstep.restore.start.resume.resume`, with all ranks.

        Raises:
            RecoveryError, MismatchError, DeadlineError
            KeeperError: no mailbox can be opened.
        """
        load = loader(state, ring, strict=strict, timeout_s=timeout_s, on_touch=on_touch)
        me = self.info.rank
        memory = self._memories
        near = [other for other, name in enumerate(memory) if name == memory[me]]
        with self.reporting_failure():
            left = orphaned_logs(run, self._run_id, me, near, seams, timeout_s=timeout_s)
        left = replace(left, held=(*recalled.logs, *left.held))
        mine = seams, run, state, ring, recalled.records
        log = RankLog(*mine, strict=strict, timeout_s=timeout_s, left=left)
        compare = comparer(state, ring, strict=strict, timeout_s=timeout_s)
        about = load, log, step, trained, strict, compare
        with contextlib.closing(log):
            return self._start(seams, run, state, recalled, keeper, *about)

    def start_fresh(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        recalled: Recalled,
        keeper: KeeperOfRank,
    ) -> Resumed:
        """Begins without a resume.

        Raises:
            StateError: there is something to resume.
        """
        return self._start(seams, run, state, recalled, keeper, None, None, None, False, True)

    def _start(
        self,
        seams: Seams,
        run: PurePath,
        state: State,
        recalled: Recalled,
        keeper: KeeperOfRank,
        load: Any,
        log: RankLog | None,
        step: int | None,
        trained: bool,
        strict: bool,
        compare: Compares | None = None,
    ) -> Resumed:
        what = (
            "take the first step"
            if load is None
            else f"call resume({'' if step is None else step})"
        )
        with contextlib.ExitStack() as opened:
            with self.reporting_failure():
                if step is None:
                    with storage_errors("resume", run, rank=self.info.rank):
                        refuse_unreachable(scan_run(seams.filesystem, run))
                mailbox = self._open_mailbox()
                opened.callback(mailbox.close)
                name = uuid.uuid4().hex
                about = self.info.rank, self._memories, seams.clock
                node = NodeStart(*about, local=self._is_local(run), timeout_s=self._timeout_s)
                opened.callback(node.close)
                mine = {
                    "name": name,
                    "window": None if load is None else node.offer(name),
                    "pid": os.getpid(),
                    "what": what,
                    "trainer": mailbox.address,
                    "keeper": keeper.listen(self._group.host),
                    "shared": state.is_shared(),
                    "strict": strict,
                    "fingerprint": fingerprint(),
                    "error": None,
                }
            found = self._say(what, mine)
            self._refuse_failed(found, run)
            refuse_other_calls(found, self.info.rank)
            session = found[0]["name"]
            mailbox.open(session, self.info.rank, [_address(said["trainer"]) for said in found])
            like = tuple(said["fingerprint"] for said in found)
            meeting = Meeting(session, self.info.rank, self._disks, mailbox, like, trained)
            needs = needs_here(state, self._disks, [bool(said["shared"]) for said in found])
            joined = None if load is None else node.join(found, needs)
            if load is not None:
                load = partial(load, node=joined)

            def apart(number: int, manifest: Manifest) -> bool:
                return joined is None or joined.wants(number, manifest) < 2

            apart_disks = len(set(self._disks)) > 1

            def fetch(offer: Offer, meanwhile: Meanwhile, lent: Lent) -> Brought:
                about = offer, recalled.copies, needs
                limits: dict[str, Any] = {"step": step, "timeout_s": self._timeout_s}
                limits["logs"] = () if log is None else recalled.logs
                limits["meanwhile"] = meanwhile
                if apart_disks:
                    limits["opens"] = opens_in(seams.filesystem, run)
                    limits["lent"] = lent
                    limits["room_bytes"] = memory_available_bytes() // (2 * self.info.here)
                return fetch_from_peers(meeting, seams.clock, self._say, *about, **limits)

            resumed, choice = resume_together(
                seams,
                run,
                state,
                meeting,
                recalled.base,
                load,
                own=[Fetched.of_own(copy) for copy in recalled.copies if self._is_mine(copy)],
                step=step,
                needs=needs,
                timeout_s=self._timeout_s,
                copies=self._copies,
                log=log,
                fetch=fetch if self._fetches or apart_disks else None,
                apart=apart,
                ready=keeper.ready,
                compare=None if all(said["strict"] for said in found) else compare,
            )
            # Behind this every rank knows the end: until then rank 0 may still wait for our answer.
            back = told_back(resumed) | own_parameters_message(state.apart)
            back["buckets"] = [] if resumed.base is None else state.buckets.wishes()
            resumed = with_ranks(resumed, said := self._say("tell what was read", back))
            if resumed.base is not None:
                self._together(state.gather, "hand each other what they replayed")
                rebuild = partial(state.buckets.rebuild, [one["buckets"] for one in said])
                resumed = doubted(resumed, self._together(rebuild, "rehearse a backward of DDP"))
            self._apart = state.apart
            (self._parts, _) = apply_own_parameters(state.apart, said)
            state.apart.began()
            if self._copies is not None:
                self._copies.forget()
        keepers = tuple(_address(said["keeper"]) for said in found)
        unread = any(one.source != "disk" for one in resumed.reads)
        self.job_session = replace(self._job_session(session, keepers, choice), unread=unread)
        return resumed

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Around what a rank does before it meets the others at a start: if it fails, they are
        told why, and do not wait for it."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(DeadlineError):  # of the two, what has failed here says more
                self._say("start together", {"error": in_words(error)})
            raise

    def _together(self, do: Callable[[], _T], what: str) -> _T:
        """Do what needs torch's collectives on all ranks.

        Raises:
            DeadlineError: one of them is gone.
        """
        try:
            return do()
        except RuntimeError as error:  # of torch's backends
            text = f"ranks {what}"
            hint = "see what the others print"
            raise DeadlineError(f"{text}: {error}", rank=self.info.rank, hint=hint) from error

    def _open_mailbox(self) -> PeerMailbox:
        try:
            return PeerMailbox(self._group.host)
        except OSError as error:
            raise mailbox_error(self._group.host, 0, error) from error

    def _is_local(self, run: PurePath) -> bool:
        """Whether the run folder is on a disk of this node, and not on a network's."""
        rank = self.info.rank
        seen = {
            m for m, d in zip(self._memories, self._disks, strict=True) if d == self._disks[rank]
        }
        return seen == {self._memories[rank]} and on_own_device(run)

    def _is_mine(self, copy: PeerCopy) -> bool:
        return copy.marker.rank == self.info.rank

    def exchange(self, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank gives, by rank; all of them call it at the same steps.

        Raises:
            DeadlineError: not all ranks do.
        """
        return self._say(what, mine)

    def begin_any(self, what: str, mine: bool) -> Callable[[], bool]:
        """:meth:`.Group.begin_any`, of all ranks at the same steps."""
        return self._group.begin_any(what, mine)

    def agree_on_own_parameters(self, step: int) -> bool:
        """All ranks take a base of ``step``: what one of them has of its own, all have. Returns
        whether that was news to this one.

        Raises:
            DeadlineError: not all ranks do.
        """
        if not self._parts or self._apart is None:
            return False
        said = self._say(f"take a base of step {step}", own_parameters_message(self._apart))
        warn_of_different_layers(said, step)
        return apply_own_parameters(self._apart, said)[1]

    def _job_session(
        self, session: str, keepers: tuple[tuple[str, int], ...], choice: Choice
    ) -> JobSession:
        """What is only in copies in part is nothing that the disks' retention may rest on, and
        what they have of it is not swept away either."""
        on_disks = choice.durable and choice.base not in choice.elsewhere
        durable = choice.base if on_disks else None
        spare = None if on_disks else choice.base
        self.resumed_durable = choice.durable or choice.base is None
        unreadable = tuple(sorted({*choice.unreadable, *choice.elsewhere}))
        job_session = JobSession(
            session, self.info.rank, self._disks, keepers, durable, spare, unreadable
        )
        return replace(job_session, nodes=self.info.nodes)

    def _open_copies(self, copies: Copies, found: Sequence[dict[str, Any]], run_id: str) -> None:
        """Rank 0 makes the places those of the run, and the others look whether they see it."""
        named = [said["tiers"] for said in found]
        if any(one != named[0] for one in named):
            raise OptionError(
                "the ranks name different places for copies: "
                + "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(named)),
                rank=self.info.rank,
                hint="give every rank the same tiers=",
            )
        if not copies.places:
            return
        failed = None
        problem = ""
        for first in (True, False):
            try:
                if first == (self.info.rank == COORDINATOR) and failed is None:
                    problem = self._open_mine(copies, run_id)
            except EverstepError as error:
                failed = error
                problem = error.message
            said = self._say("open the places for copies", {"problem": problem})
        if failed is not None:
            raise failed
        for rank, one in enumerate(said):
            if one["problem"]:
                raise OptionError(
                    f"rank {rank} cannot use the places for copies: {one['problem']}",
                    rank=self.info.rank,
                    hint="tiers= must name places that every rank sees: a store, or a directory "
                    "of a network file system",
                )

    def _open_mine(self, copies: Copies, run_id: str) -> str:
        if self.info.rank == COORDINATOR:
            copies.publish(run_id)
        elif unseen := copies.unseen(run_id):
            return f"{unseen} is not the place that rank {COORDINATOR} sees under that name"
        return ""

    def _find_disks(self, seams: Seams, run: PurePath, name: str) -> tuple[str, ...]:
        """Which ranks see the same folder: each puts a file there, and looks whose it sees."""
        filesystem = seams.filesystem
        what = "look at the run folder"
        mine = run / _probe(name, self.info.rank)
        filesystem.create(mine).close()
        try:
            self._say(what, {})
            there = {entry.name for entry in filesystem.scan(run)}
            seen = [r for r in range(self.info.world) if _probe(name, r) in there]
            found = self._say(what, {"seen": min(seen, default=self.info.rank)})
        finally:
            remove_if_there(filesystem, mine)
        return tuple(str(said["seen"]) for said in found)

    def _say(self, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        data: bytes = msgpack.packb(mine)
        return [msgpack.unpackb(said) for said in self._group.exchange(what, data)]

    def _refuse_failed(self, found: Sequence[dict[str, Any]], run: PurePath) -> None:
        for rank, said in enumerate(found):
            if said["error"] is not None:
                raise failed_there(StartFailed(rank, said["error"]), self.info.rank, run)


def join_job(seams: Seams, timeout_s: float) -> Job | None:
    """The job that this process is a rank of; None: it trains alone.

    Raises:
        StateError: it was started as one of several, and cannot know the others yet.
        DeadlineError: not all ranks make a Checkpointer.
    """
    group = seams.group(timeout_s) if seams.group is not None else group_of_job(timeout_s)
    if group is not None and group.rank == COORDINATOR and keeps_store_over_restarts():
        _log.warning(
            "everstep: torchrun keeps one store over its restarts here (torch 2.13): ranks that "
            "--max-restarts starts again find in it the addresses of those that were killed, and "
            "gloo does not connect them (connectFullMesh ... Connection refused)\n  hint: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, and call it with "
            "--standalone or --rdzv-backend=c10d"
        )
    return None if group is None else Job(group, timeout_s)


def prepare_run(
    job: Job | None,
    options: Options,
    seams: Seams,
    run: PurePath,
    tiers: Sequence[TierOptions] = (),
    peers: PeerOptions | None = None,
) -> tuple[RankInfo, Callable[[], str]]:
    """Which rank this process is, and what makes the folder a run and gives its id. Several ranks
    do that first: what each of them writes depends on whose folders are the same.

    Args:
        tiers: places that keep copies.
        peers: what was said of the memory of other nodes.

    Raises:
        OptionError: of :func:`refuse_unsupported`.
        StorageError, OptionError, RecoveryError, DeadlineError: of :meth:`Job.open_run`.
    """
    refuse_unsupported(ONE_RANK if job is None else job.info, options, tiers)
    if job is None:
        refuse_peer_without_ranks(peers)
        return ONE_RANK, lambda: open_run_folder(seams.filesystem, run).run or ""
    run_id = job.open_run(seams, run, tiers, peers, shared_options(options))
    refuse_unaudited(job.info, options)
    computed = options.has_replica or options.is_multistep  # by a keeper, or at recovery
    return replace(job.info, followed=computed, logged=options.logs), lambda: run_id


def _address(said: Sequence[Any]) -> tuple[str, int]:
    return str(said[0]), int(said[1])


def _probe(name: str, rank: int) -> str:
    return f"run.{name}-{rank:05d}{TEMPORARY_SUFFIX}"


_LISTED = 3


def own_parameters_message(apart: Apart) -> dict[str, Any]:
    """What a rank says."""
    return {"own": apart.names(), "parts": not apart.is_empty}


def apply_own_parameters(apart: Apart, said: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Goes by what all ranks have said: whether one of them has any that DDP does not reduce, and
    whether that was news to this one."""
    news = apart.agree(name for one in said for name in one["own"])
    return any(one["parts"] for one in said), news


def warn_of_different_layers(said: Sequence[Mapping[str, Any]], step: int) -> None:
    """Ranks train different layers, which DDP cannot know."""
    each = [set(one["own"]) for one in said]
    if parted := sorted(set.union(*each) - set.intersection(*each)):
        names = ", ".join(parted[:_LISTED]) + (", ..." if len(parted) > _LISTED else "")
        ranks = ", ".join(str(rank) for rank, own in enumerate(each) if own & set(parted))
        _log.warning(
            "everstep: until step %d rank(s) %s trained, or changed, %d parameter(s) that the "
            "others did not (%s), and that DistributedDataParallel does not reduce, as they were "
            "frozen when it was made: from now on each rank saves its own",
            step,
            ranks,
            len(parted),
            names,
        )
