"""Copies in the memory of another node: a keeper's duty to send its own and to hold those of
others.

Exchange bases and logs with the keepers of other ranks, in one thread of the keeper.

It sends this rank's bases and log (:mod:`.senders`) to the memory of its
peer, and receives those of other ranks (:mod:`everstep.keeper.held`). The receiver verifies the
digests. Rank 0 decides which base is sent when (:class:`everstep.commit.peer_copies.CopyRounds`).
Training is not involved.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR, Message, Send
from everstep.commit.job.messages import (
    PeerCopyAck,
    PeerCopyBegin,
    PeerCopyChunk,
    PeerLogAck,
    PeerLogBegin,
    PeerLogChunk,
    PeerMessage,
    PeerRound,
    PeerRoundReply,
)
from everstep.commit.peer_copies import CopyRounds
from everstep.errors import EverstepError
from everstep.format import Marker, timeline_dir
from everstep.format.names import TIMELINE_RECORD
from everstep.format.reader import read_record_bytes
from everstep.keeper.held import IsPast, MemoryBases, PeerBaseStore, PeerLogStore
from everstep.keeper.held.newest_capture import log_to_wire
from everstep.keeper.ship.senders import REPEAT_S, BaseSender, LogSender, Pace, PeerLink, Source
from everstep.link.messages import JobSession, KeeperStats
from everstep.restore.fetch import HeldBase
from everstep.restore.fetch.held import files_over
from everstep.run import scan_base
from everstep.seams import Seams
from everstep.tiers import PeerOptions

if TYPE_CHECKING:
    from everstep.keeper.persist.job_link import JobLink
    from everstep.keeper.process.duty import Handler, ServedTimeline


class PeerCopies:
    """Copies that this keeper holds for other ranks, and the exchange with its own peer.

    Args:
        on_everywhere: called with each base that all peers hold completely, in a thread.

    Attributes:
        store: bases of other ranks (and, with bases in memory, of this one).
        logs: logs of other ranks.
        exchange: sends to the peer and receives from others; None: nothing is exchanged.
        bases: bases of this rank if they live in memory; None: they live on disk.
    """

    handlers: Mapping[str, Handler] = {}

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        on_everywhere: Callable[[ServedTimeline, BaseId], None],
    ) -> None:
        self._clock = seams.clock
        self._filesystem = seams.filesystem
        self._on_everywhere = on_everywhere
        self._run = run
        self._rank = 0
        self.store = PeerBaseStore()
        self.logs = PeerLogStore()
        self.exchange: PeerExchange | None = None
        self.bases: MemoryBases | None = None

    def serve(self, timeline: ServedTimeline) -> None:
        """Start a timeline.

        Its ``peers`` setting has ``bound_bytes`` and ``log_bytes``: memory for other ranks' bases
        and logs; ``bytes_per_s``: maximum rate; ``sends_log``: True if this rank's log is sent, as
        the ``log`` options say; ``holds``: True if bases of this rank live in memory. Without it no
        rank sends or holds anything.
        """
        settings = timeline.settings.get("peers")
        link = timeline.link
        holds = settings is not None and bool(settings.get("holds"))
        sends = link is not None and link.session.peer is not None
        if settings is None or not (holds or sends):
            # Nothing is held any more: return the memory.
            self.store = PeerBaseStore()
            self.logs = PeerLogStore()
        elif link is None:
            self._rank = 0
            self.store.new_start(settings["bound_bytes"], (), timeline.verified)
            timeline.memory_bases = self.bases = self._memory_bases(timeline, None)
        else:
            self._rank = link.session.rank
            self._prepare_stores(settings, link.session)
            self._start_exchange(timeline, settings, link)

    def _prepare_stores(self, settings: Mapping[str, Any], job_session: JobSession) -> None:
        holds = settings.get("holds")
        recovered = job_session.recovered
        own = (job_session.rank,) if holds and recovered is None else ()
        sources = (*job_session.sources, *own)
        spare = job_session.spare if holds else None
        self.store.new_start(settings["bound_bytes"], sources, recovered, spare)
        self.logs.new_start(settings["log_bytes"], job_session.sources)

    def _start_exchange(
        self, timeline: ServedTimeline, settings: Mapping[str, Any], link: JobLink
    ) -> None:
        from everstep.keeper.ship.log_copies import shrinking

        holds = bool(settings.get("holds"))
        to_peer = PeerLink(
            link.session,
            self._clock,
            link.send,
            timeline.notify,
            timeout_s=timeline.timeout_s,
        )
        pace = Pace(settings["bytes_per_s"], at_once=holds)
        exchange = PeerExchange(
            to_peer,
            self.store,
            self.logs,
            pace,
            self._find,
            lambda base: self._on_everywhere(timeline, base),
        )
        self.exchange = exchange
        if settings["sends_log"]:
            exchange.log = LogSender(
                to_peer,
                timeline.log,
                timeline.number,
                self._record_of,
                bytes_per_s=settings["bytes_per_s"],
                shrink=shrinking(PeerOptions(**settings.get("log", {}))),
                on_step=lambda step: timeline.trainer.send(
                    {
                        "kind": "peered",
                        "of_timeline": timeline.number,
                        "base": None,
                        "step": step,
                    }
                ),
            )
            timeline.log.listeners.append(exchange.logged)
        link.subscribe(PeerMessage, exchange.receive)
        # Also valid after the end of the exchange: retention runs until the last base is written.
        if not holds:
            timeline.spared = exchange.needed
        # Only now: the thread must not handle messages before everything is in place.
        exchange.start()
        if holds:
            timeline.memory_bases = self.bases = self._memory_bases(timeline, exchange.is_past)
        if link.session.recovered is not None:
            # A replaced node has lost its copies: send the recovered base again.
            exchange.durable(link.session.recovered)

    def _memory_bases(self, timeline: ServedTimeline, is_past: IsPast | None) -> MemoryBases:
        return MemoryBases(
            self._filesystem,
            self._run,
            self.store,
            self._clock,
            is_past,
            self.base_durable,
            timeout_s=timeline.timeout_s,
        )

    def base_durable(self, base: BaseId) -> None:
        """Send a base of this rank, which is durable or complete in memory."""
        exchange = self.exchange  # read once: close() in another thread sets it to None
        if exchange is not None:
            exchange.durable(base)

    def recall(self) -> tuple[list[dict[str, Any]], list[Arena]]:
        """Return the copies held for other ranks, encoded for a message, and the arenas they lie
        in.
        """
        # Nothing is copied: the trainer maps the arenas, whose memory lives as long as a reference.
        found = []
        arenas = []
        for copy, arena in self.store.whole():
            found.append({"marker": copy.marker.encode(), "record": copy.record})
            arenas.append(arena)
        return found, arenas

    def recall_logs(self) -> tuple[list[dict[str, Any]], Arena | None]:
        """Return the logs held for other ranks, encoded for a message, and their arena."""
        logs, arena = self.logs.whole()
        return [log_to_wire(log, offset) for log, offset in logs], arena

    @property
    def sends_log(self) -> bool:
        """True if this rank's log is sent to its peer."""
        exchange = self.exchange  # read once, as above
        return exchange is not None and exchange.log is not None

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures since the start of the timeline to ``stats``."""
        exchange = self.exchange  # read once, as above
        if exchange is None:
            return
        sent = exchange.bases.stats
        stats.peered = sent.copied
        stats.peered_bytes = sent.copied_bytes
        stats.peers_passed_over = sent.missed
        if exchange.log is not None:
            stats.peer_missed = exchange.log.stats.missed

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Stop sending. Copies that are held stay."""
        bases = self.bases
        self.bases = None
        if bases is not None:
            bases.release()
        exchange = self.exchange
        self.exchange = None
        if exchange is not None:
            exchange.close()

    def _record_of(self, timeline: int) -> bytes | None:
        try:
            path = timeline_dir(self._run, timeline) / TIMELINE_RECORD
            return read_record_bytes(self._filesystem, path)
        except (OSError, EverstepError):
            return None

    def _find(self, base: BaseId) -> Source | None:
        """Return a base of this rank from wherever it can be read; None: it cannot be read yet."""
        record = self._record_of(base.timeline)
        if record is None:
            return None
        try:
            found = self._in_peer_store(base) or self._on_disk(base)
        except (OSError, EverstepError):
            # Not there yet, or deleted by retention: the sender tries again until its timeout.
            return None
        return None if found is None else (found, record)

    def _in_peer_store(self, base: BaseId) -> HeldBase | None:
        copy = self.store.find(self._rank, base)
        if copy is None:
            return None
        return HeldBase(copy.marker, files_over(copy.marker, copy.memory), durable=False)

    def _on_disk(self, base: BaseId) -> HeldBase | None:
        found = scan_base(self._filesystem, self._run, base)
        if found.status != "committed" or found.manifest is None:
            return None
        if self._rank >= len(found.manifest.markers):
            return None
        marker: Marker = found.manifest.markers[self._rank]
        files = tuple(
            (self._filesystem.open(found.path / record.name), record) for record in marker.files
        )
        return HeldBase(marker, files, durable=True)


_log = logging.getLogger("everstep.keeper")
_IDLE_S = 0.1
_BUSY_S = 0.01


class PeerExchange:
    """One rank's exchange with its peer, for one start of the job.

    Args:
        store: bases of other ranks that are held.
        logs: steps of other ranks' logs that are held.
        find: returns a base of this rank from wherever it can be read; None: it cannot be read yet.
        on_everywhere: called in the thread with each base that all peers hold completely.

    Attributes:
        bases: sends this rank's bases.
        log: sends this rank's log; None: it is not sent.
    """

    def __init__(
        self,
        link: PeerLink,
        store: PeerBaseStore,
        logs: PeerLogStore,
        pace: Pace,
        find: Callable[[BaseId], Source | None],
        on_everywhere: Callable[[BaseId], None],
    ) -> None:
        self.link = link
        self.logs = logs
        self.bases = BaseSender(link, pace, find, self._deliver)
        self.log: LogSender | None = None
        self._store = store
        self._rounds: CopyRounds | None = None
        if link.rank == COORDINATOR:
            self._rounds = CopyRounds(link.world, repeat_s=REPEAT_S, late_s=2 * link.timeout_s)
        self._on_everywhere = on_everywhere
        self._everywhere: BaseId | None = None
        # Everything happens in one thread, so that no state here needs a lock: messages, durable
        # bases and steps of the log come through this queue.
        self._events: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        # The base that all ranks send, as far as this rank has been notified.
        self._round: BaseId | None = None
        # The newest base of earlier rounds.
        self._past: BaseId | None = None
        # Announcements that came before the news of their round, by sender.
        self._early: dict[int, PeerCopyBegin] = {}
        self._thread: threading.Thread | None = None

    # From any thread.

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="everstep-peers", daemon=True)
        self._thread.start()

    def receive(self, sender: int, message: PeerMessage) -> None:
        """Queue a message that has arrived."""
        self._events.put(lambda: self._handle(sender, message))

    def durable(self, base: BaseId) -> None:
        """Queue a base that is durable on all ranks."""
        self._events.put(lambda: self._durable(base))

    def logged(self) -> None:
        """Wake the thread: a step of the log is complete."""
        self._events.put(lambda: None)

    def is_past(self, base: BaseId) -> bool:
        """Return True if all peers hold a base completely, or will never do so."""
        # Polled by another thread, without a lock: a value that changes now is seen the next time.
        over = self._past
        now = self._round
        return (over is not None and base <= over) or (now is not None and base < now)

    def needed(self) -> list[BaseId]:
        """Return bases that disks must keep in case a node is lost: peers hold its files of these.

        Empty except on rank 0, which decides about deletions.
        """
        if self._rounds is None:
            return []
        return self._rounds.needed(self._store.bases)

    def close(self) -> None:
        """End the thread. Transfers in progress are abandoned."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(self.link.timeout_s)

    # The thread.

    def _run(self) -> None:
        while True:
            busy = self.bases.busy or (self.log is not None and self.log.busy)
            try:
                if not self.turn(_BUSY_S if busy else _IDLE_S):
                    return
            except BaseException as error:
                # Must not end this thread: all later copies would be missing without a report.
                _log.exception("internal error while sending bases to a peer")
                self.link.report(
                    EverstepError(f"internal error while sending to a peer: {error!r}")
                )

    def turn(self, timeout_s: float) -> bool:
        """Handle events that arrive within ``timeout_s``, then send; return False after
        :meth:`close`.
        """
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if event is None:
                    return False
                event()
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        if self._rounds is not None:
            self._send_all(self._rounds.tick(self.link.now_s))
        self.bases.turn()
        # The log after the base: what it sends counts against the rate of the base.
        if self.log is not None:
            self.bases.charge(self.log.turn())
        return True

    def _send_all(self, sends: list[Send]) -> None:
        for one in sends:
            self._deliver(one.rank, one.message)

    def _deliver(self, rank: int, message: Message) -> None:
        if rank == self.link.rank:
            assert isinstance(message, PeerMessage)
            self._handle(rank, message)
        else:
            self.link.send(rank, message)

    def _handle(self, sender: int, message: PeerMessage) -> None:
        if isinstance(message, PeerCopyBegin):
            self._on_begun(sender, message)
        elif isinstance(message, PeerCopyChunk):
            self._deliver(sender, self._store.part(sender, message))
        elif isinstance(message, PeerLogBegin):
            self._deliver(sender, self.logs.begun(sender, message))
        elif isinstance(message, PeerLogChunk):
            self._deliver(sender, self.logs.part(sender, message))
        elif isinstance(message, PeerLogAck):
            if self.log is not None:
                self.log.on_reply(message)
        elif isinstance(message, PeerCopyAck):
            self.bases.on_ack(message)
        elif isinstance(message, PeerRoundReply):
            if self._rounds is not None:
                now_s = self.link.now_s
                self._send_all(self._rounds.on_reply(sender, message.base, message.state, now_s))
        elif isinstance(message, PeerRound):
            self._on_round(message)

    def _durable(self, base: BaseId) -> None:
        self.bases.durable(base)
        if self._rounds is not None:
            self._send_all(self._rounds.durable(base, self.link.now_s))

    def _on_begun(self, sender: int, message: PeerCopyBegin) -> None:
        """Handle the announcement of a base by another rank.

        If the store holds two complete bases of that rank, only the news of the current round tells
        which one must stay: the reply waits for it.
        """
        base = BaseId(message.marker.record.timeline, message.marker.record.step)
        if base != self._round and self._store.holds_two(sender):
            self._early[sender] = message
            return
        self._early.pop(sender, None)
        self._deliver(sender, self._store.begun(sender, message))

    def _on_round(self, message: PeerRound) -> None:
        over = [one for one in (self._past, message.everywhere) if one is not None]
        if self._round is not None and self._round != message.base:
            over.append(self._round)
        self._past = max(over, default=None)
        self._round = message.base
        if message.everywhere is not None:
            self._base_everywhere(message.everywhere)
            if message.base is None:
                self._deliver(COORDINATOR, PeerRoundReply(message.everywhere, "noted"))
        if message.base is None:
            self.bases.end()
        else:
            self.bases.begin(message.base)
        early = self._early
        self._early = {}
        for sender, begun in early.items():
            # Announcements of another round are dropped: their senders repeat them.
            if BaseId(begun.marker.record.timeline, begun.marker.record.step) == message.base:
                self._on_begun(sender, begun)

    def _base_everywhere(self, everywhere: BaseId) -> None:
        """Handle the news that all peers hold a base completely."""
        self._store.passed(everywhere)
        self.logs.passed(everywhere, self._store.ranks_of(everywhere))
        if self._everywhere is None or everywhere > self._everywhere:
            self._everywhere = everywhere
            if self.log is not None:
                self.log.passed(everywhere)
            self._on_everywhere(everywhere)
