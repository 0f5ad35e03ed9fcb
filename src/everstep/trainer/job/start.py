"""One start of all ranks of a job: meet, agree on a base, restore it, and open the timeline.

A start has three exchanges between the trainers. First every rank reports its addresses and how it
starts. Then the ranks agree on a base and restore it (:func:`resume_all_ranks`), over mailboxes
that belong to this start only. Finally every rank reports the data it has read.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

from everstep.commit.job import Choice, Needs, Offer
from everstep.commit.job.messages import StartFailed
from everstep.errors import DeadlineError
from everstep.link.messages import mailbox_error
from everstep.restore.fetch import FetchCopies, Meeting, StartChannel
from everstep.restore.fetch.peers import FetchResult, OfferExtras, fetch_from_peers, run_file_opener
from everstep.restore.fetch.start_channel import failure_reason, remote_failure
from everstep.restore.start import (
    RankLog,
    Resumed,
    ResumeRequest,
    doubted,
    needs_on_disk,
    recovery_report,
    resume_all_ranks,
    with_ranks,
)
from everstep.seams.fingerprint import fingerprint
from everstep.seams.machine import memory_available_bytes
from everstep.seams.mailbox import TcpMailbox
from everstep.state.ranks import RankInfo
from everstep.state.training_state import State
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.job.option_check import refuse_other_calls
from everstep.trainer.job.run_folder import Exchange, SharedRun

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StartResult:
    """Result of a start, the same on all ranks except for ``resumed``.

    Attributes:
        resumed: restored state of this rank.
        choice: base that the ranks have chosen.
        session: name of the start.
        keepers: addresses of the keepers' mailboxes, by rank.
    """

    resumed: Resumed
    choice: Choice
    session: str
    keepers: tuple[tuple[str, int], ...]


class JobStart:
    """Drive one start of a job on this rank.

    Args:
        host: address of this machine for the other ranks.
        exchange: collective call of all ranks.
        timeout_s: seconds without progress after which a rank is reported.
    """

    def __init__(
        self, host: str, exchange: Exchange, info: RankInfo, shared: SharedRun, *, timeout_s: float
    ) -> None:
        self._host = host
        self._exchange = exchange
        self._info = info
        self._shared = shared
        self._timeout_s = timeout_s

    def start(self, request: ResumeRequest, keeper: Keepers, log: RankLog | None) -> StartResult:
        """Start with all ranks.

        Args:
            keeper: keeper of this rank.
            log: log of this rank; None on a fresh start.
        """
        step = request.step
        purpose = "take the first step"
        if request.restores:
            purpose = f"call resume({'' if step is None else step})"
        with contextlib.ExitStack() as opened:
            # Until the exchange, the other ranks wait for this rank's message, whatever it says.
            with reporting_failure(self._exchange):
                mailbox = self._open_mailbox()
                opened.callback(mailbox.close)
                mine = self._message(request, keeper, purpose, mailbox)
                node = self._shared.node_start(
                    request.run, self._info.rank, request.seams.clock, self._timeout_s
                )
                opened.callback(node.close)
                mine["window"] = node.offer(mine["name"]) if request.restores else None
            found = self._exchange(purpose, mine)
            self._refuse_failed(found, request.run)
            refuse_other_calls(found, self._info.rank)
            # Every rank has sent a random name; that of rank 0 names this start.
            session = found[0]["name"]
            # From here on the mailbox accepts messages of this start only.
            mailbox.open(
                session, self._info.rank, [_address(message["trainer"]) for message in found]
            )
            meeting = Meeting(
                session,
                self._info.rank,
                self._shared.disks,
                mailbox,
                tuple(message["fingerprint"] for message in found),
                strict=all(message["strict"] for message in found),
            )
            shared = [bool(message["shared"]) for message in found]
            needs = needs_on_disk(request.state, self._shared.disks, shared)
            resumed, choice = resume_all_ranks(
                request,
                meeting,
                needs=needs,
                copies=self._shared.copies,
                log=log,
                node=node.join(found, needs) if request.restores else None,
                fetch=self._fetch(request, needs),
                ready=keeper.ready,
            )
            # After this exchange every rank knows the result. Until then the mailbox stays open,
            # because rank 0 may still wait for an answer.
            resumed = self._report(request.state, resumed)
            if self._shared.copies is not None:
                self._shared.copies.forget()
        keepers = tuple(_address(message["keeper"]) for message in found)
        return StartResult(resumed, choice, session, keepers)

    def _message(
        self, request: ResumeRequest, keeper: Keepers, purpose: str, mailbox: TcpMailbox
    ) -> dict[str, Any]:
        return {
            "name": uuid.uuid4().hex,
            "what": purpose,
            "trainer": mailbox.address,
            "keeper": keeper.listen(self._host),
            "shared": request.state.is_shared(),
            "strict": request.strict,
            "fingerprint": fingerprint(),
            "error": None,
        }

    def _fetch(self, request: ResumeRequest, needs: Needs) -> FetchCopies | None:
        """Return the function that fetches copies from other nodes; None if no rank has any."""
        if not (self._shared.fetches or self._shared.has_several_disks):
            return None

        def fetch(others: StartChannel, offer: Offer, extras: OfferExtras) -> FetchResult:
            several = self._shared.has_several_disks
            return fetch_from_peers(
                others,
                request.seams.clock,
                self._exchange,
                offer,
                request.recalled.copies,
                needs,
                extras=extras if several else OfferExtras(extras.planned),
                step=request.step,
                logs=request.recalled.logs if request.restores else (),
                opens=run_file_opener(request.seams.filesystem, request.run) if several else None,
                # All ranks of this node may fetch at once, into half of what is available.
                room_bytes=memory_available_bytes() // (2 * self._info.here) if several else 0,
            )

        return fetch

    def _report(self, state: State, resumed: Resumed) -> Resumed:
        """Exchange reports of the data read, and complete the state that ranks restore together."""
        mine = recovery_report(resumed)
        mine["buckets"] = [] if resumed.base is None else state.buckets.rehearsals()
        reports = self._exchange("tell what was read", mine)
        resumed = with_ranks(resumed, reports)
        if resumed.base is not None:
            self._collectively(state.sync_zero_parameters, "hand each other what they replayed")
            rebuild = partial(state.buckets.rebuild, [report["buckets"] for report in reports])
            notes = self._collectively(rebuild, "rehearse a backward of DDP")
            resumed = doubted(resumed, notes)
        return resumed

    def _collectively(self, do: Callable[[], _T], purpose: str) -> _T:
        """Call a function that uses torch's collectives on all ranks.

        Raises:
            DeadlineError: A rank has died.
        """
        try:
            return do()
        except RuntimeError as error:  # raised by torch's backends
            raise DeadlineError(
                f"ranks {purpose}: {error}",
                rank=self._info.rank,
                hint="see the output of the other ranks",
            ) from error

    def _open_mailbox(self) -> TcpMailbox:
        try:
            return TcpMailbox(self._host)
        except OSError as error:
            raise mailbox_error(self._host, 0, error) from error

    def _refuse_failed(self, found: Sequence[dict[str, Any]], run: PurePath) -> None:
        for rank, message in enumerate(found):
            if message["error"] is not None:
                raise remote_failure(StartFailed(rank, message["error"]), self._info.rank, run)


@contextlib.contextmanager
def reporting_failure(exchange: Exchange) -> Iterator[None]:
    """Send an error of this rank to the others, which would otherwise wait for it at a start."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(DeadlineError):  # the first error is the cause
            exchange("start together", {"error": failure_reason(error)})
        raise


def _address(message: Sequence[Any]) -> tuple[str, int]:
    return str(message[0]), int(message[1])
