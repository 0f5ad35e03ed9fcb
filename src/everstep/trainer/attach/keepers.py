"""The keeper of one Checkpointer: a process or a thread, replaced when it is lost.

:class:`Keepers` attaches to a keeper process or makes a keeper thread, begins each timeline with
it, provides its memory for captures, and replaces a process that is lost. Each keeper process is
represented by a :class:`~everstep.trainer.attach.remote.RemoteKeeper`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.errors import EverstepError, KeeperError
from everstep.format.writer import ChunkRing
from everstep.keeper.log import LogStore, open_segments
from everstep.keeper.persist import JobLink, Timeline
from everstep.link import BackgroundChannel
from everstep.link.messages import JobSession, KeeperStats, add_stats, mailbox_error
from everstep.link.pool import CapturePool
from everstep.restore.fetch import HeldBase, KeeperContents
from everstep.run.fence import Fence
from everstep.seams import Clock
from everstep.seams.mailbox import ReservedPort, TcpMailbox
from everstep.seams.processes import IoThreads
from everstep.tiers import storage_errors
from everstep.trainer.attach.attach import attach, is_there, orphaned_by_move, orphaned_state
from everstep.trainer.attach.keeper import Keeper, Service, ThreadKeeper
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.attach.terms import KeeperTerms

if TYPE_CHECKING:
    from everstep.trainer.participant import Participant


class RankMailbox:
    """Mailbox of a keeper thread, or reserved address of a keeper process.

    This process reserves the port of a keeper process, because other ranks expect a replacement
    keeper at the same port. Without the reservation, the system might assign it to another process
    in between.

    Attributes:
        address: address of the keeper process that was announced to other ranks; None if there is
            none.
    """

    def __init__(self) -> None:
        self.address: tuple[str, int] | None = None
        self._port: ReservedPort | None = None
        self._mailbox: TcpMailbox | None = None

    def reserve(self, host: str, port: int) -> tuple[str, int]:
        """Reserve an address for a keeper process.

        Args:
            port: port that is reserved already; 0 for any free port.
        """
        if not port:
            # The new port before the old one is released: otherwise it might get the same number,
            # which other ranks connect with the earlier start.
            reserved = ReservedPort(host)
            self._release()
            self._port = reserved
            port = reserved.number
        self.address = host, port
        return self.address

    def open(self, host: str, port: int) -> tuple[str, int]:
        """Open the mailbox of a keeper thread; return its address."""
        if self._mailbox is not None:
            # Before the new one is opened, which may be given the same port.
            self._mailbox.close()
        self._mailbox = TcpMailbox(host, port)
        return self._mailbox.address

    def take(self) -> TcpMailbox | None:
        """Return the mailbox of the keeper thread, which closes it from now on."""
        mailbox = self._mailbox
        self._mailbox = None
        return mailbox

    def close(self) -> None:
        """Close the mailbox, and give the port back."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._mailbox = None
        self._release()

    def _release(self) -> None:
        before = self._port
        self._port = None
        if before is not None:
            before.close()


# Minimum pause after a failed attempt: training waits while a keeper starts.
_RETRY_S = 30.0
# Pause relative to the duration of the attempt: attempts take at most 1/5 of the training time.
_RETRY_FACTOR = 4


class ReplacementAttempts:
    """Schedule of attempts to replace a lost keeper.

    Attributes:
        why_not: error of the last attempt; None if it succeeded, or there was none.
        failed: number of failed attempts.
        replaced: number of lost keeper processes that were replaced.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_s = self._retry_at_s = 0.0
        self.why_not: EverstepError | None = None
        self.failed = 0
        self.replaced = 0

    @property
    def is_due(self) -> bool:
        """True if the last attempt succeeded, or failed long enough ago."""
        return self.why_not is None or self._clock.monotonic_s() >= self._retry_at_s

    def begin(self) -> None:
        """Note the start of an attempt."""
        self.why_not = None
        self._begun_s = self._clock.monotonic_s()

    def fail(self, why: EverstepError) -> None:
        """Note that the attempt has failed."""
        now_s = self._clock.monotonic_s()
        self.why_not = why
        self.failed = self.failed + 1
        self._retry_at_s = now_s + max(_RETRY_S, _RETRY_FACTOR * (now_s - self._begun_s))


_log = logging.getLogger("everstep")


class Keepers:
    """Manage the keeper in service, and the memory that captures go through.

    Args:
        terms: terms on which each keeper works.
        participants: participants that the keeper's reports are passed to.

    Attributes:
        service: keeper in service and its timeline; None before the first.
        pool: memory for captures; None with ``sync``.
        attempts: attempts to replace a lost keeper.
    """

    def __init__(
        self,
        terms: KeeperTerms,
        channel: BackgroundChannel,
        ring: ChunkRing,
        participants: Sequence[Participant] = (),
    ) -> None:
        self.terms = terms
        self._channel = channel
        self._ring = ring
        self._participants = participants
        self._job_session: JobSession | None = None
        # Belongs to the timeline, and outlives a keeper.
        self._fence: Fence | None = None
        self._mailbox = RankMailbox()
        self._remote: RemoteKeeper | None = None
        self._starting: Future[RemoteKeeper] | None = None
        self._past_stats = KeeperStats()  # sum over earlier keepers and timelines
        self.attempts = ReplacementAttempts(terms.seams.clock)
        self.service: Service | None = None
        self.pool: CapturePool | None = None
        self._peer_log_step: int | None = None  # at the end

    @property
    def current(self) -> Keeper | None:
        """Keeper in service; None before the first timeline."""
        return None if self.service is None else self.service.keeper

    @property
    def stats(self) -> KeeperStats:
        """Statistics of all keepers together."""
        return (
            self._past_stats
            if self.current is None
            else add_stats(self._past_stats, self.current.stats)
        )

    def open(self, *, while_ranks_meet: bool = False) -> None:
        """Attach to a keeper process, or make the memory for a keeper thread.

        Args:
            while_ranks_meet: True to start a missing keeper process in the background, until
                :meth:`ready` is called. A new process has no memory that could be restored.

        Raises:
            KeeperError, OutOfSpaceError
        """
        self.ready()
        terms = self.terms
        if terms.in_process:
            if self._remote is None or self._remote.lost is not None:
                if while_ranks_meet and not is_there(terms.run, terms.run_id, terms.ranks.rank):
                    self._remote = None
                    # In a thread of its own that ends afterwards.
                    self._starting = IoThreads(1, "everstep-keeper-start").submit(self._attach)
                else:
                    self._attached(self._attach())
        elif terms.options.method.base != "sync" and self.pool is None:
            self.pool = CapturePool(Arena.anonymous(terms.arena_bytes))

    def ready(self) -> None:
        """Wait for a keeper that is being started in the background.

        Raises:
            KeeperError, OutOfSpaceError
        """
        starting = self._starting
        if starting is None:
            return
        try:
            # Without a timeout: attach() has a deadline of its own.
            self._attached(starting.result())
        finally:
            if starting.done():  # otherwise the wait was interrupted, and the start continues
                self._starting = None
        if self._mailbox.address is not None:
            host, port = self._mailbox.address
            self.listen(host, port)

    def _attached(self, remote: RemoteKeeper) -> None:
        self._remote = remote
        # Bound to this keeper, whichever is in service later: a keeper that counts as lost may
        # still write from its arena, so no block of it is handed out again (I1).
        self.pool = CapturePool(remote.arena, remote)

    def recall_leftovers(self, *, own: bool = False) -> KeeperContents:
        """Return the captures and log in the memory of the keeper of an earlier process.

        Captures that were not written yet are durable or have failed when this returns. If the
        keeper is lost meanwhile (it was killed, or serves another process now), only the data on
        disk remains.

        Args:
            own: True to include captures of this very process.

        Raises:
            DeadlineError: The keeper makes no progress.
        """
        found = self._recall_here(own=own)
        if own or found.base is not None or found.records or not self.terms.may_be_kept:
            return found
        moved = orphaned_by_move(self.terms)
        return found if moved.base is None and not moved.records else moved

    def _recall_here(self, *, own: bool) -> KeeperContents:
        """Return the memory of the keeper that knows the run by its current path."""
        terms = self.terms
        remote = self._remote
        timeout_s = terms.timeout_s
        if remote is None:
            thread = None if self.service is None else self.service.thread
            store = None if thread is None else thread.records
            if not own and terms.may_be_kept:
                return orphaned_state(terms)
            if not own or store is None:
                return KeeperContents()
            store.flush()  # before the new timeline, which fences this one off
            store.settle(timeout_s)
            return KeeperContents(None, tuple(store.records()))
        try:
            remote.settle(timeout_s)
            recalled = remote.recall(timeout_s, own=own)
            recalled = recalled.of_history(terms.seams.filesystem, terms.run)
            # The folder may have been emptied for another run: drop copies of the previous one.
            mine = tuple(copy for copy in recalled.copies if copy.marker.run == terms.run_id)
            return dataclasses.replace(recalled, copies=mine)
        except KeeperError:
            if remote.lost is None:
                raise
            _log.warning("%s", remote.lost)
            return KeeperContents(missed=is_there(terms.run, terms.run_id, terms.ranks.rank))

    def hold_at(self, agreed: BaseId) -> HeldBase | None:
        """Return the state in the keeper's memory at a step on which all ranks have agreed: that of
        the replica, or a capture.

        The memory stays unchanged until this process records a log of its own.

        Returns:
            The state; None if there is none.
        """
        remote = self._remote
        if remote is None:
            return None
        try:
            base = remote.recall(self.terms.timeout_s, at=agreed).base
        # The other ranks wait for an answer, whatever happens here.
        except (EverstepError, OSError) as error:
            _log.warning("the state in the keeper's memory is not used: %s", error)
            return None
        return base if base is not None and base.id == agreed else None

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Open the keeper's mailbox for the keepers of other ranks; return its address.

        Args:
            port: port number; 0 for any free port.

        Raises:
            KeeperError: The mailbox cannot be opened.
        """
        try:
            if self._remote is None and self._starting is None:
                return self._mailbox.open(host, port)
            host, port = self._mailbox.reserve(host, port)
            if self._remote is None:  # ready() opens it
                return host, port
            return host, self._remote.listen(host, port, self.terms.timeout_s)
        except OSError as error:
            raise mailbox_error(host, port, error) from error

    def serve(
        self,
        timeline: int,
        verified: BaseId | None = None,
        job_session: JobSession | None = None,
        *,
        opened: bool = True,
    ) -> None:
        """Begin a timeline with the keeper.

        Args:
            verified: base on disk that was just read and verified.
            job_session: place of this rank in the job; None for a single rank.
            opened: True for a new timeline; False if a replacement keeper continues one.
        """
        self.ready()
        terms = self.terms
        # A thread keeper serves one timeline. It ends before the fence of the next one is set, as
        # it may still commit bases that were taken before.
        if self._remote is None and self.current is not None:
            self.current.close()
        if opened:
            # It holds the bytes of timeline.json, so only a new timeline gets a new fence
            # (adr/048).
            self._fence = Fence(terms.seams.filesystem, terms.run, timeline)
            self._channel.took_over(timeline)
            self.attempts.why_not = None
        self._job_session = job_session
        # Before the service is replaced: the sum includes the keeper in service.
        self._past_stats = self.stats
        if opened:  # otherwise durable bases of the timeline stay valid
            self._past_stats.durable_step = None
        if self._remote is not None:
            if not terms.options.logs:  # a log may still need the memory
                self._remote.forget_all()
            self._remote.serve(terms, timeline, verified, job_session)
            self.service = Service(self._remote, self._remote, None, self.pool, timeline)
            return
        keeper = self._thread_keeper(timeline, verified, job_session)
        self.service = Service(keeper, None, keeper, self.pool, timeline)

    def _thread_keeper(
        self, timeline: int, verified: BaseId | None, job_session: JobSession | None
    ) -> ThreadKeeper:
        terms = self.terms
        mailbox = self._mailbox.take()
        link = None
        timeout_s = terms.timeout_s
        if job_session is not None:
            assert mailbox is not None
            link = JobLink(job_session, mailbox, terms.seams.clock, timeout_s=timeout_s)
        records = None
        if terms.options.logs and self.pool is not None:
            segments = open_segments(
                terms.seams,
                terms.run,
                self._ring,
                terms.log(),
                terms.identity(timeline),
                self._channel.post,
                self._log_on_disk,
                timeout_s=timeout_s,
            )
            records = LogStore(self.pool.arena, segments)
        keeper = ThreadKeeper(
            Timeline(
                terms.seams,
                terms.run,
                timeline,
                self._ring,
                timeout_s,
                keep=terms.options.keep,
                history=terms.options.log.history,
                verified=verified,
                link=link,
            ),
            self._channel,
            self.pool.arena if self.pool is not None else None,
            records=records,
        )
        if self.pool is not None:
            self.pool.keeper = keeper
        keeper.sweep()
        return keeper

    def _log_on_disk(self, number: int) -> None:
        """Note that the keeper thread has written log records up to ``number``."""
        for participant in self._participants:
            participant.log_on_disk(number)

    @property
    def replica_step(self) -> int | None:
        """Step of the keeper's replica, as last reported; None without one."""
        return None if self.current is None else self.current.replica_step

    @property
    def peer_log_step(self) -> int | None:
        """Newest step of this timeline whose log this rank's peer holds, as last reported."""
        return self._peer_log_step if self.current is None else self.current.peer_log_step

    @property
    def host_bytes(self) -> int:
        """Host memory in use for captures and the log (with plain data) and for a replica."""
        replica_bytes = 0 if self.current is None else self.current.replica_bytes
        return replica_bytes + (self.pool.taken_bytes if self.pool else 0)

    @property
    def lost(self) -> EverstepError | None:
        """Error that describes why the keeper in service is lost; None if it is not."""
        return None if self.current is None else self.current.lost

    @property
    def unavailable(self) -> bool:
        """True if there is no keeper: the last attempt to replace it failed, or its replacement is
        lost, too."""
        return self.attempts.why_not is not None or self.lost is not None

    def replace_if_lost(
        self, timeline: int, again: int | None = None, *, insist: bool = False
    ) -> bool:
        """Replace the keeper process if it is lost, and warn about the loss.

        The new keeper reports the lost bases to other ranks.

        Args:
            again: step whose base may be taken now, and is not reported as lost.
            insist: True to try at once even if an attempt has failed recently, because there may be
                no next opportunity.

        Returns:
            True if a keeper was replaced.

        Raises:
            EverstepError: It could not be replaced, and the policy is to raise: FencedError if it
                serves another training process, KeeperError if no new one could be started.
        """
        if self.current is None:
            return False
        if self.current.lost is None:
            self.current.look()
            return False
        attempts = self.attempts
        if insist or attempts.is_due:
            attempts.begin()
            try:
                self._replace(timeline, again)
                return True
            except EverstepError as error:
                attempts.fail(error)
        elif self.terms.options.on_failure != "raise":
            return False  # already reported; each attempt reports it again
        assert attempts.why_not is not None
        self._channel.post(attempts.why_not)
        self._channel.check()
        return False

    def _replace(self, timeline: int, again: int | None) -> None:
        lost = self.lost
        job_session = self._job_session
        steps = () if self._remote is None else tuple(sorted(self._remote.lost_steps - {again}))
        assert self._fence is not None, "a keeper was lost before its first timeline"
        # Before a new keeper starts: the run may belong to another process by now.
        with storage_errors("look for newer timelines", self.terms.run):
            self._fence.check()
        self.open()
        assert self._remote is not None
        try:
            self._remote.settle(self.terms.timeout_s)  # it may still write our captures
            if job_session is not None:  # at the address that other ranks know
                self.listen(*job_session.peers[job_session.rank])
        except KeeperError:
            # If it is lost, too, the next call replaces it. One that is not marked lost has refused
            # something: that is a real error.
            if self._remote.lost is None:
                raise
        self.attempts.replaced += 1
        again_there = job_session and dataclasses.replace(job_session, again=True, lost=steps)
        self.serve(timeline, job_session=again_there, opened=False)
        _log.warning("%s", lost)
        # After the replacement: a filter may turn the warning into an exception.
        warnings.warn(f"everstep: {lost}", RuntimeWarning, stacklevel=6)
        if callable(self.terms.options.on_failure) and lost is not None:
            self.terms.options.on_failure(lost)

    def close(self, *, stay: bool = False) -> None:
        """Release the keeper; it finishes its work.

        Args:
            stay: True to leave a keeper process with its memory, as if this process had crashed.
        """
        # A keeper that is still starting must be released, too; an error of its start no longer
        # matters.
        with contextlib.suppress(EverstepError):
            self.ready()
        if self.current is not None:
            self._past_stats = self.stats
            self._peer_log_step = self.peer_log_step
            self.current.close(stay=stay)
        if self._remote is not None and self._remote is not self.current:
            self._remote.close(stay=stay)
        self._mailbox.close()
        self.service = self._remote = None
        if self.pool is not None:
            self.pool.close()

    def _attach(self) -> RemoteKeeper:
        return attach(self.terms, self._channel, self._participants)
