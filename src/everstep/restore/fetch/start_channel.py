"""Channel to the other ranks of a job during a start.

A rank that is silent for too long is reported, with its last known activity; a rank that failed
sends the reason, so that no other waits for it. Silence counts only the time in which this rank
listened: messages that arrive while it reads a base wait in its mailbox.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from everstep.commit.job import COORDINATOR, ChunkReply, ChunkRequest, Message
from everstep.commit.job.messages import (
    Answer,
    Command,
    Envelope,
    FetchProgress,
    StartFailed,
    accept,
    encode_message,
)
from everstep.errors import DeadlineError, EverstepError, FormatError, RecoveryError
from everstep.seams import Clock
from everstep.seams.mailbox import Mailbox

_log = logging.getLogger("everstep")
_TICK_S = 0.1
_LISTENED_S_MAX = 1.0  # per look; in longer intervals this rank was busy or stopped
_ALIVE_EVERY_S = 1.0
_GONE_S = 30.0  # a connection may break, and a busy rank reconnects late
_REASON_CHARACTERS_MAX = 2000

CHUNK_BYTES = 1 << 20
_IN_FLIGHT_MAX = 8  # chunks requested ahead
_RETRY_S = 2.0  # at least
_RETRY_MAX_S = 30.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks at one start of their job, as one of them sees it.

    Attributes:
        session: unique name of the start.
        rank: this rank.
        disks: by rank: name of the disk that it writes to.
        mailbox: to the training processes of the other ranks.
        fingerprints: of each rank; results of ranks that train differently are not compared.
        strict: False if state that does not match the base may be left out, on any rank.
    """

    session: str
    rank: int
    disks: tuple[str, ...]
    mailbox: Mailbox
    fingerprints: tuple[Mapping[str, str], ...] = ()
    strict: bool = True

    @property
    def world(self) -> int:
        return len(self.disks)


class StartChannel:
    """Messages to and from the other ranks while all of them agree on a restore.

    Args:
        meeting: all ranks at this start.
        clock: source of time.
        run: run folder, for errors.
        timeout_s: a rank that is silent for longer is reported.

    Attributes:
        doing: this rank's activity, sent every second to ranks that wait for it.
        chunks: requested and received parts of copies and logs, by sender, which are no part of the
            agreement; :func:`.peers.fetch_from_peers` and :class:`.rank_log.LogExchange` take
            them.
    """

    def __init__(self, meeting: Meeting, clock: Clock, run: PurePath, *, timeout_s: float) -> None:
        self._meeting = meeting
        self._clock = clock
        self._run = run
        self._timeout_s = timeout_s
        self._listened_s = 0.0
        self._looked_s = clock.monotonic_s()
        self._heard_s = dict.fromkeys(range(meeting.world), 0.0)  # by what was listened then
        self._does: dict[int, str] = {}
        self._failed: StartFailed | None = None
        self._said_s = clock.monotonic_s()
        self.doing = "begins"
        self.chunks: deque[tuple[int, ChunkRequest | ChunkReply | FetchProgress]] = deque()
        self._later: deque[tuple[int, Message]] = deque()

    def listen(self) -> tuple[int, Message] | None:
        """Return the sender and message of another rank, if one arrives soon.

        Raises:
            RecoveryError: a rank has failed.
        """
        # Messages of the agreement may have arrived while this rank exchanged log records.
        if not self._later:
            self.attend(_TICK_S)
        self.raise_failed()
        return self._later.popleft() if self._later else None

    def attend(self, timeout_s: float = 0.0) -> bool:
        """Process one message, if one arrives within ``timeout_s``; messages of the agreement are
        queued for :meth:`listen`. Return True if one arrived."""
        data = self._meeting.mailbox.receive(timeout_s)
        # Only time in which this rank listened counts as silence of others. While it read a base or
        # was stopped, their messages waited in its mailbox.
        before_s = self._looked_s
        self._looked_s = self._clock.monotonic_s()
        self._listened_s += min(_LISTENED_S_MAX, self._looked_s - before_s)
        try:
            envelope = None if data is None else accept(data, self._meeting.session)
        except FormatError as error:
            _log.warning("a message was ignored: %s", error)
            return True
        if envelope is None:
            # A message of another start of the job. It counts as arrived, as others may follow it.
            return data is not None
        sender = envelope.sender
        message = envelope.message
        self._heard_s[sender] = self._listened_s
        if isinstance(message, StartFailed):
            self._failed = message
        elif isinstance(message, ChunkRequest | ChunkReply | FetchProgress):
            self.chunks.append((sender, message))
        else:
            self._later.append((sender, message))
        # Number 0 is a sign of life. It is queued like the others, and the agreement ignores it.
        if isinstance(message, Command | Answer) and not message.number:
            self._does[sender] = message.payload.decode("utf-8", "replace")
        return True

    def raise_failed(self) -> None:
        """Raise the failure of another rank, if there is one.

        Raises:
            RecoveryError: a rank has failed.
        """
        if self._failed is not None:
            raise remote_failure(self._failed, self._meeting.rank, self._run)

    def expect(self, ranks: Iterable[int]) -> None:
        """Count the silence of these ranks from now on: they may have had nothing to send
        before."""
        self._heard_s |= dict.fromkeys(ranks, self._listened_s)

    def tell(self, rank: int, message: Message) -> None:
        """Send a message to another rank; does not wait."""
        envelope = Envelope(self._meeting.session, self._meeting.rank, message)
        self._meeting.mailbox.send(rank, encode_message(envelope))

    def begin(self, doing: str) -> None:
        """Announce an activity that may take long, or hang."""
        self.doing = doing
        self._say()

    def is_alive(self) -> None:
        """Send a sign of life every second to the ranks that wait for this one."""
        if self._clock.monotonic_s() - self._said_s >= _ALIVE_EVERY_S:
            self._say()

    def _say(self) -> None:
        """Send the activity, with number 0, which is no step of an agreement and no answer."""
        self._said_s = self._clock.monotonic_s()
        words = self.doing.encode("utf-8", "replace")
        # In the agreement, ranks wait for rank 0 only, and rank 0 for all of them.
        if self._meeting.rank != COORDINATOR:
            self.tell(COORDINATOR, Answer(0, words))
            return
        for rank in range(1, self._meeting.world):
            self.tell(rank, Command(0, "", words))

    def check(self, waits_for: Iterable[int]) -> None:
        """Check that the ranks that have to send something next are alive.

        Raises:
            DeadlineError: some are not; names them and their last known activity.
        """
        waits = [rank for rank in waits_for if rank != self._meeting.rank]
        # A closed connection alone proves nothing: it may break, and a busy rank reconnects late.
        mailbox = self._meeting.mailbox
        quiet = [rank for rank in waits if self._silent_s(rank) > _GONE_S]
        gone = [rank for rank in quiet if mailbox.is_disconnected(rank)]
        silent = [rank for rank in waits if self._silent_s(rank) > self._timeout_s]
        if not gone and not silent:
            return
        which = gone
        problem = "closed the connection and did not reconnect"
        if silent:
            which = silent
            problem = f"were silent for {self._timeout_s:g} s"
        raise DeadlineError(
            f"rank(s) {', '.join(map(str, which))} {problem} while the ranks agreed on a "
            f"restore; {'; '.join(map(self._last, which))}",
            rank=self._meeting.rank,
            path=self._run,
            hint="they died, hang, or raised an error: look at their output",
        )

    def leave(self, error: BaseException) -> None:
        """Send the failure of this rank to the ranks that wait for it. If the message is lost, they
        notice its silence."""
        # Pass on the first failure: the error that it caused here would hide the reason.
        failed = self._failed or StartFailed(self._meeting.rank, failure_reason(error))
        if self._meeting.rank == COORDINATOR:
            for rank in range(1, self._meeting.world):
                if rank != failed.rank:
                    self.tell(rank, failed)
        elif self._failed is None:
            self.tell(COORDINATOR, failed)

    def _silent_s(self, rank: int) -> float:
        return self._listened_s - self._heard_s[rank]

    def _last(self, rank: int) -> str:
        if rank not in self._does:
            return f"nothing was received from rank {rank}"
        return f"last activity of rank {rank}: {self._does[rank]}"


class IncomingBytes:
    """Bytes that arrive in chunks, in order, from one rank.

    Requests are repeated if nothing arrived for longer than the last two chunks took. Chunks may be
    in flight on a slow link, and each repeated request sends them again.

    Args:
        size_bytes: total size; None: known after the first chunk.

    Attributes:
        data: bytes that have arrived.
        size_bytes: see above; set by the owner.
    """

    def __init__(self, now_s: float, size_bytes: int | None = None) -> None:
        self.data = bytearray()
        self.size_bytes = size_bytes
        self._requested = 0
        self._requested_s = now_s
        self._arrived_s = now_s
        self._retry_after_s = _RETRY_S

    @property
    def is_complete(self) -> bool:
        return self.size_bytes is not None and len(self.data) >= self.size_bytes

    def next_requests(self, now_s: float) -> Iterator[tuple[int, int]]:
        """Yield offset and size of the chunks to request now."""
        arrived = len(self.data)
        if self._requested > arrived and now_s - self._requested_s > self._retry_after_s:
            # A message may have been lost: request again from the last byte that arrived.
            self._requested = arrived
            self._retry_after_s = min(2 * self._retry_after_s, _RETRY_MAX_S)
        # If the total size is unknown, the first chunk contains it: request no more until then.
        end = CHUNK_BYTES if self.size_bytes is None else self.size_bytes
        end = min(end, arrived + _IN_FLIGHT_MAX * CHUNK_BYTES)
        while self._requested < end:
            size = min(end - self._requested, CHUNK_BYTES)
            yield self._requested, size
            self._requested += size
            self._requested_s = now_s

    def add(self, offset: int, data: bytes, now_s: float) -> bool:
        """Add a chunk that arrived; return False if it is not the next one."""
        # Earlier chunks, requested twice, count as signs of life as well: others follow them.
        self._retry_after_s = max(_RETRY_S, 2 * (now_s - self._arrived_s))
        self._requested_s = now_s
        self._arrived_s = now_s
        # A chunk that follows a lost one is dropped, and requested again together with it.
        if offset != len(self.data):
            return False
        self.data += data
        return True


def remote_failure(failed: StartFailed, rank: int, run: PurePath | None = None) -> RecoveryError:
    """Return the error that rank ``rank`` raises when another one has failed."""
    return RecoveryError(
        f"rank {failed.rank} could not resume: {failed.reason}",
        rank=rank,
        path=run,
        hint=f"look at the output of rank {failed.rank}",
    )


def failure_reason(error: BaseException) -> str:
    """Return the reason of a failure, as sent to the other ranks."""
    words = error.message if isinstance(error, EverstepError) else f"{error!r}"
    return words[:_REASON_CHARACTERS_MAX]
