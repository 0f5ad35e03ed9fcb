"""Exchange bases and logs with the keepers of other ranks, in one thread of the keeper.

It sends this rank's bases (:mod:`.base_sender`) and log (:mod:`.log_sender`) to the memory of its
peer, and receives those of other ranks (:mod:`everstep.keeper.held`). The receiver verifies the
digests. Rank 0 decides which base is sent when (:class:`everstep.commit.peer_copies.CopyRounds`).
Training is not involved.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from everstep.commit.job.actions import Send
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import (
    Message,
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
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import CopyRounds
from everstep.errors import EverstepError
from everstep.keeper.held.peer_base_store import PeerBaseStore
from everstep.keeper.held.peer_log_store import PeerLogStore
from everstep.keeper.ship.base_sender import BaseSender, Pace, Source
from everstep.keeper.ship.log_sender import LogSender
from everstep.keeper.ship.transfer import REPEAT_S, PeerLink

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
