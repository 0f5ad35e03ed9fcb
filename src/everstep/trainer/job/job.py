"""One rank of a job of several ranks: its run folder, its starts, and exchanges with the others.

:mod:`~everstep.trainer.job.run_folder` opens the folders when the Checkpointers are made.

A start has three exchanges between the trainers. First every rank reports its addresses and how it
starts. Then the ranks agree on a base and restore it (:func:`resume_all_ranks`), over mailboxes
that belong to this start only. Finally every rank reports the data it has read.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import msgpack

from everstep.commit.job import Choice, Needs, Offer
from everstep.commit.job.messages import StartFailed
from everstep.errors import DeadlineError
from everstep.link.messages import JobSession, mailbox_error
from everstep.restore.fetch import FetchCopies, Meeting, StartChannel
from everstep.restore.fetch.peers import FetchResult, OfferExtras, fetch_from_peers, run_file_opener
from everstep.restore.fetch.start_channel import failure_reason, remote_failure
from everstep.restore.start import (
    RankLog,
    Resumed,
    ResumeRequest,
    doubted,
    needs_on_disk,
    resume_all_ranks,
    with_causes,
)
from everstep.seams import Seams
from everstep.seams.fingerprint import fingerprint
from everstep.seams.group import Group
from everstep.seams.machine import memory_available_bytes
from everstep.seams.mailbox import TcpMailbox
from everstep.state.ranks import RankInfo
from everstep.state.training_state import State
from everstep.tiers import PeerOptions, TierOptions
from everstep.trainer.attach.attach import orphaned_logs
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.job.memory import memory_of, with_memory
from everstep.trainer.job.run_folder import SharedRun, open_shared_run, refuse_other_calls

_T = TypeVar("_T")


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
            log = rank_log(request, self.shared.run_id, self.info.rank, near)
        with contextlib.closing(log):
            return self._start(request, keeper, log)

    def start_fresh(self, request: ResumeRequest, keeper: Keepers) -> Resumed:
        """Begin without a resume.

        Raises:
            StateError: The run has something to resume.
        """
        return self._start(request, keeper, None)

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Send an error of this rank before a start to the others, which would otherwise wait."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(DeadlineError):  # the first error is the cause
                self.exchange("start together", {"error": failure_reason(error)})
            raise

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

    # --- A start ------------------------------------------------------------------------

    def _start(self, request: ResumeRequest, keeper: Keepers, log: RankLog | None) -> Resumed:
        """Start with all ranks.

        Args:
            keeper: keeper of this rank.
            log: log of this rank; None on a fresh start.
        """
        step = request.step
        rank = self.info.rank
        run = self.shared
        purpose = "take the first step"
        if request.restores:
            purpose = f"call resume({'' if step is None else step})"
        with contextlib.ExitStack() as opened:
            # Until the exchange, the other ranks wait for this rank's message, whatever it says.
            with self.reporting_failure():
                mailbox = self.open_mailbox()
                opened.callback(mailbox.close)
                mine = self._message(request, keeper, purpose, mailbox)
                node = run.node_start(request.run, rank, request.seams.clock, self._timeout_s)
                opened.callback(node.close)
                mine["window"] = node.offer(mine["name"]) if request.restores else None
            found = self.exchange(purpose, mine)
            for other, message in enumerate(found):
                if message["error"] is not None:
                    raise remote_failure(StartFailed(other, message["error"]), rank, request.run)
            refuse_other_calls(found, rank)
            # Every rank has sent a random name; that of rank 0 names this start.
            session = found[0]["name"]
            # From here on the mailbox accepts messages of this start only.
            mailbox.open(session, rank, [_address(message["trainer"]) for message in found])
            meeting = Meeting(
                session,
                rank,
                run.disks,
                mailbox,
                tuple(message["fingerprint"] for message in found),
                strict=all(message["strict"] for message in found),
            )
            shared = [bool(message["shared"]) for message in found]
            near = run.ranks_with_memory_of(rank)
            request = with_memory(request, keeper, self.exchange, found, run.run_id, rank, near)
            needs = needs_on_disk(request.state, run.disks, shared)
            resumed, choice = resume_all_ranks(
                request,
                meeting,
                needs=needs,
                copies=run.copies,
                log=log,
                node=node.join(found, needs) if request.restores else None,
                fetch=self._fetch(request, needs),
                ready=keeper.ready,
            )
            # After this exchange every rank knows the result. Until then the mailbox stays open,
            # because rank 0 may still wait for an answer.
            resumed, from_disk = self._report(request.state, resumed)
            if run.copies is not None:
                run.copies.forget()
        self.resumed_durable = choice.durable or choice.base is None
        keepers = tuple(_address(message["keeper"]) for message in found)
        self.job_session = self._session_of(session, choice, keepers, from_disk=from_disk)
        return resumed

    def _session_of(
        self,
        name: str,
        choice: Choice,
        keepers: tuple[tuple[str, int], ...],
        *,
        from_disk: bool,
    ) -> JobSession:
        """Return this rank's place in a start.

        Retention must not rely on a base that is partly in copies only. Its files on the disks are
        not removed, either.

        Args:
            name: name of the start.
            choice: base that the ranks have chosen.
            keepers: addresses of the keepers' mailboxes, by rank.
            from_disk: every rank has read its share of the base from its disk.
        """
        on_disks = choice.durable and choice.base not in choice.elsewhere
        return JobSession(
            name,
            self.info.rank,
            self.shared.disks,
            keepers,
            choice.base if on_disks else None,
            None if on_disks else choice.base,
            tuple(sorted({*choice.unreadable, *choice.elsewhere})),
            nodes=self.info.nodes,
            unread=not from_disk,
        )

    def _message(
        self, request: ResumeRequest, keeper: Keepers, purpose: str, mailbox: TcpMailbox
    ) -> dict[str, Any]:
        return {
            "name": uuid.uuid4().hex,
            "what": purpose,
            "trainer": mailbox.address,
            "keeper": keeper.listen(self._group.host),
            "shared": request.state.is_shared(),
            "strict": request.strict,
            **memory_of(request),
            "fingerprint": fingerprint(),
            "error": None,
        }

    def _fetch(self, request: ResumeRequest, needs: Needs) -> FetchCopies | None:
        """Return the function that fetches copies from other nodes; None if no rank has any."""
        if not (self.shared.fetches or self.shared.has_several_disks):
            return None

        def fetch(others: StartChannel, offer: Offer, extras: OfferExtras) -> FetchResult:
            several = self.shared.has_several_disks
            return fetch_from_peers(
                others,
                request.seams.clock,
                self.exchange,
                offer,
                request.recalled.copies,
                needs,
                extras=extras if several else OfferExtras(extras.planned),
                step=request.step,
                logs=request.recalled.logs if request.restores else (),
                opens=run_file_opener(request.seams.filesystem, request.run) if several else None,
                # All ranks of this node may fetch at once, into half of what is available.
                room_bytes=memory_available_bytes() // (2 * self.info.here) if several else 0,
            )

        return fetch

    def _report(self, state: State, resumed: Resumed) -> tuple[Resumed, bool]:
        """Exchange reports of the restored states, and complete what ranks restore together.

        Returns:
            The restored state, and True if every rank has read its share of the base from its disk.
        """
        mine = {
            "source": resumed.source,
            "exact": resumed.own_exact,
            "buckets": [] if resumed.base is None else state.buckets.rehearsals(),
        }
        reports = self.exchange("tell what was restored", mine)
        resumed = with_causes(resumed, [report["exact"] for report in reports])
        if resumed.base is not None:
            self.collectively(state.sync_zero_parameters, "hand each other what they replayed")
            rebuild = partial(state.buckets.rebuild, [report["buckets"] for report in reports])
            notes = self.collectively(rebuild, "rehearse a backward of DDP")
            resumed = doubted(resumed, notes)
        return resumed, all(report["source"] == "disk" for report in reports)

    def collectively(self, do: Callable[[], _T], purpose: str) -> _T:
        """Call a function that uses torch's collectives on all ranks.

        Raises:
            DeadlineError: A rank has died.
        """
        try:
            return do()
        except RuntimeError as error:  # raised by torch's backends
            raise DeadlineError(
                f"ranks {purpose}: {error}",
                rank=self.info.rank,
                hint="see the output of the other ranks",
            ) from error

    def open_mailbox(self) -> TcpMailbox:
        """Open the mailbox of this rank for the start.

        Raises:
            KeeperError: It cannot be opened.
        """
        host = self._group.host
        try:
            return TcpMailbox(host)
        except OSError as error:
            raise mailbox_error(host, 0, error) from error


def _address(message: Sequence[Any]) -> tuple[str, int]:
    return str(message[0]), int(message[1])


def rank_log(request: ResumeRequest, run_id: str, rank: int, near: Sequence[int]) -> RankLog:
    """Return the log of this rank, with what orphaned keepers on this machine have of others.

    Args:
        near: ranks of this job on this machine.
    """
    left = orphaned_logs(
        request.run, run_id, rank, near, request.seams, timeout_s=request.timeout_s
    )
    return RankLog(request, replace(left, held=(*request.recalled.logs, *left.held)))
