"""Messages between this rank's keeper and those of the other ranks, for one start of a job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

from everstep.commit.job import CopyMessage, Message
from everstep.commit.job.messages import DiskProgress, Envelope, PeerMessage, accept, encode_message
from everstep.errors import FormatError
from everstep.link.messages import JobSession
from everstep.seams import Clock
from everstep.seams.mailbox import Mailbox

_log = logging.getLogger("everstep.keeper")
_M = TypeVar("_M", bound=Message)
# Heartbeats within the time after which a silent rank is reported.
_BEATS = 20


class JobLink:
    """Link of one rank's keeper to the others, over an open mailbox.

    Messages about copies go to their subscribers, which have state machines of their own; commits
    know nothing of them. A subscriber is called in the thread that reads the mailbox, and must not
    make it wait.

    Args:
        session: place of this rank in this start of the job.
        mailbox: connects to the other ranks of the same start; closed together with this object.
        timeout_s: seconds after which a silent rank is reported.

    Attributes:
        last_receive_s: time at which the mailbox was last read.
    """

    def __init__(
        self, session: JobSession, mailbox: Mailbox, clock: Clock, *, timeout_s: float
    ) -> None:
        mailbox.open(session.session, session.rank, session.peers)
        self.session = session
        self._mailbox = mailbox
        self._clock = clock
        # Messages about copies that arrive before anybody has subscribed to them are dropped: their
        # senders repeat them.
        self._subscribers: dict[type[Message], Callable[[int, Any], None]] = {
            PeerMessage: lambda sender, message: None,
            CopyMessage: lambda sender, message: None,
        }
        self._beat_s = timeout_s / _BEATS
        self._beat_not_before_s = -math.inf
        self.last_receive_s = clock.running_s()

    @property
    def port(self) -> int:
        """Port at which this rank's mailbox listens."""
        return self.session.peers[self.session.rank][1]

    def subscribe(self, kind: type[_M], receiver: Callable[[int, _M], None]) -> None:
        """Pass messages of one kind to ``receiver`` from now on.

        Args:
            kind: :class:`PeerMessage` for copies in peers' memory, :class:`CopyMessage` for copies
                in other tiers.
        """
        self._subscribers[kind] = receiver

    def send(self, rank: int, message: Message) -> None:
        """Send a message to the keeper of another rank, without waiting; from any thread."""
        envelope = Envelope(self.session.session, self.session.rank, message)
        self._mailbox.send(rank, encode_message(envelope))

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message; None if none has arrived within ``timeout_s``."""
        data = self._mailbox.receive(timeout_s)
        # Clock of the copy rounds: while nobody reads the mailbox, other ranks must not count as
        # silent.
        self.last_receive_s = self._clock.running_s()
        return data

    def deliver(self, data: bytes) -> Envelope | None:
        """Pass a message about copies to its subscriber; return a message about commits."""
        try:
            envelope = accept(data, self.session.session)
        except FormatError as error:
            _log.warning("an invalid message of another rank was ignored: %s", error)
            return None
        # None: from an earlier start of the job, whose sender knows nothing of this one.
        if envelope is not None:
            for kind, receiver in self._subscribers.items():
                if isinstance(envelope.message, kind):
                    receiver(envelope.sender, envelope.message)
                    return None
        return envelope

    def storage_progressed(self) -> None:
        """Send the other ranks a heartbeat, now and then: a disk operation has completed.

        Takes no lock, as any thread calls this, whichever locks it holds.
        """
        now_s = self._clock.monotonic_s()
        # Two threads may pass this check together; a heartbeat too many does no harm.
        if now_s >= self._beat_not_before_s:
            self._beat_not_before_s = now_s + self._beat_s
            for rank in range(len(self.session.disks)):
                if rank != self.session.rank:
                    self.send(rank, DiskProgress())

    def is_disconnected(self, rank: int) -> bool:
        """Return True if the keeper of a rank was connected and has ended."""
        return self._mailbox.is_disconnected(rank)

    def close(self) -> None:
        """Close the mailbox, so that another one can use its port."""
        self._mailbox.close()
