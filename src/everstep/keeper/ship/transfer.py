"""Send one payload to the peer's keeper, with a window of unacknowledged bytes.

Used for bases (:mod:`.senders`) and for steps of the log (:mod:`.senders`). Messages may be
lost or late: the sender asks how much has arrived, and continues from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from everstep.commit.job import Message
from everstep.errors import EverstepError, KeeperError
from everstep.link.messages import JobSession
from everstep.seams import Clock

_log = logging.getLogger("everstep.keeper")
CHUNK_BYTES = 1 << 20
REPEAT_S = 2.0
"""Seconds until an unanswered message is repeated."""
_CHUNKS_IN_FLIGHT_MAX = 4
"""Chunks sent before the first of them is acknowledged."""


@dataclass(slots=True)
class SendStats:
    """Figures about bases, or steps of the log, since the start.

    Attributes:
        sent: bases or steps that the peer has received completely.
        sent_bytes: their bytes.
        step: newest step of the log that the peer has received.
        missed: bases that became durable while an older one was being sent and were overtaken by a
            newer one: the interval is too short for the link. Or steps that the peer will not get,
            as they were released before they could be sent or did not fit into its memory: later
            steps are useless to it until the next base.
        failed: bases that could not be sent.
    """

    sent: int = 0
    sent_bytes: int = 0
    step: int | None = None
    missed: int = 0
    failed: int = 0


class PeerLink:
    """Connection of this rank to the keepers of the other ranks.

    Args:
        send: sends a message to the keeper of a rank, without waiting; it may be lost.
        notify: called with errors; training goes on.

    Attributes:
        rank: this rank.
        peer: rank whose keeper holds this rank's copies.
        world: number of ranks.
        timeout_s: seconds without progress after which a peer is reported.
    """

    def __init__(
        self,
        job_session: JobSession,
        clock: Clock,
        send: Callable[[int, Message], None],
        notify: Callable[[EverstepError], None],
        *,
        timeout_s: float,
    ) -> None:
        peer = job_session.peer
        self.rank = job_session.rank
        self.peer = job_session.rank if peer is None else peer
        self.world = len(job_session.disks)
        self.clock = clock
        self.timeout_s = timeout_s
        self.send = send
        self._notify = notify
        self._reported: set[str] = set()

    @property
    def now_s(self) -> float:
        """Time of the clock."""
        return self.clock.monotonic_s()

    def report(self, error: EverstepError, kind: str = "") -> None:
        """Report an error, once for each kind."""
        _log.warning("%s", error)
        if (kind or error.message) not in self._reported:
            self._reported.add(kind or error.message)
            self._notify(error)

    def report_not_sent(self, what: str, reason: str, step: int, hint: str, kind: str) -> None:
        """Report that ``what`` (a base, steps of the log) is not sent to the peer."""
        message = f"{what} not sent to the peer, rank {self.peer}: {reason}"
        self.report(KeeperError(message, step=step, rank=self.rank, tier="peer", hint=hint), kind)


class WindowedTransfer:
    """Transfer of one payload; subclasses say what is sent.

    Args:
        announcement: message that begins the transfer, and asks how much has arrived.
        rate: maximum bytes per second; None: full speed.
        free_s: time before which no chunk is sent, because of the rate.

    Attributes:
        size_bytes: size of the payload.
        progress_s: time of the last progress.
        free_s: time at which the rate allows the next chunk.
    """

    def __init__(
        self,
        link: PeerLink,
        announcement: Message,
        size_bytes: int,
        *,
        rate: float | None,
        free_s: float = 0.0,
    ) -> None:
        self.size_bytes = size_bytes
        self._link = link
        self._announcement = announcement
        self._rate = rate
        self.progress_s = self._reply_s = link.now_s
        self.free_s = max(self.progress_s, free_s)
        self._sent_bytes = 0
        self._acked_bytes = 0
        self.query()

    def chunk(self, offset: int, size_bytes: int) -> Message:
        """Return the message with these bytes.

        Raises:
            OSError, EverstepError: they cannot be read any more.
        """
        raise NotImplementedError

    @property
    def silent(self) -> bool:
        """True if there was no progress for the timeout of the link."""
        return self._link.now_s - self.progress_s > self._link.timeout_s

    def query(self) -> None:
        """Announce the payload, or ask how much of it has arrived."""
        # Nothing is sent before the reply: after lost chunks the peer needs earlier bytes first.
        self._answered = False
        self._queried_s = self._link.now_s
        self._link.send(self._link.peer, self._announcement)

    def watch(self) -> None:
        """Ask again if a reply is late."""
        now_s = self._link.now_s
        if self._answered and self._sent_bytes > self._acked_bytes:
            # Chunks or replies were lost: ask how much has arrived.
            if now_s - self._reply_s > REPEAT_S:
                self.query()
        elif self._answered:
            # Everything sent is acknowledged: only the pace delays the rest, not the peer.
            self.progress_s = now_s
        elif now_s - self._queried_s > REPEAT_S:
            self.query()

    def send(self) -> int:
        """Send the chunks that window and rate allow; return the bytes sent.

        Raises:
            OSError, EverstepError: the payload cannot be read any more.
        """
        now_s = self._link.now_s
        before_bytes = self._sent_bytes
        while (
            self._answered
            and self._sent_bytes < self.size_bytes
            # The window bounds the memory of both keepers, and what a slow link must deliver
            # before a query.
            and self._sent_bytes - self._acked_bytes < _CHUNKS_IN_FLIGHT_MAX * CHUNK_BYTES
            and now_s >= self.free_s
        ):
            count = min(self.size_bytes - self._sent_bytes, CHUNK_BYTES)
            chunk = self.chunk(self._sent_bytes, count)
            if self._sent_bytes == self._acked_bytes:
                # Start the timeout with the first chunk in flight.
                self._reply_s = now_s
            self._link.send(self._link.peer, chunk)
            self._sent_bytes += count
            self.charge(count)
        return self._sent_bytes - before_bytes

    def charge(self, size_bytes: int) -> None:
        """Count bytes that were sent against the rate."""
        if self._rate is not None:
            # Added to the planned time, not to the current one: chunks that were sent late are
            # caught up, so that the average holds.
            self.free_s += size_bytes / self._rate

    def acknowledge(self, received_bytes: int) -> None:
        """Handle a reply: the peer has received so many bytes from the start."""
        now_s = self._link.now_s
        further = received_bytes > self._acked_bytes
        if further or not self._answered:
            self.progress_s = now_s
        # Replies come in order. One that acknowledges more belongs to a chunk; later chunks may
        # still be on their way, and sending them again would slow a slow link down for ever. Only
        # a reply to a query without progress says that chunks were lost.
        if received_bytes > self._sent_bytes or not (self._answered or further):
            self._sent_bytes = received_bytes
        self._answered = True
        self._reply_s = now_s
        self._acked_bytes = received_bytes
