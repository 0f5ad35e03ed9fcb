"""The other ranks at a start of the job: what this one hears of them, and tells them meanwhile.

A rank that says nothing for too long is named, with what it was last heard to do; one that has
failed says why, so that nobody waits for it. Silence is counted in time that was listened: what was
said while this rank read a base lies in its mailbox.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import (
    Answer,
    Command,
    Envelope,
    Message,
    StartFailed,
    accept,
    encode_message,
)
from everstep.errors import DeadlineError, EverstepError, FormatError, RecoveryError
from everstep.seams import Clock
from everstep.seams.network.mailbox import Mailbox

__all__ = ["Meeting", "StartChannel", "failure_reason", "remote_failure"]

_log = logging.getLogger("everstep")
_TICK_S = 0.1
_LISTENED_S_MAX = 1.0  # between two looks: in the rest of it this rank was busy, or stood still
_ALIVE_EVERY_S = 1.0
_GONE_S = 30.0  # a connection may break, and a rank that is busy makes another one late
_REASON_CHARACTERS_MAX = 2000


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks at one start of their job, as one of them sees it.

    Attributes:
        session: names the start; no other has the same.
        disks: by rank: a name of the disk that it writes to.
        mailbox: to the other ranks' training processes.
        fingerprints: of each rank; of those that train differently nothing is proven.
        trained: these processes have trained: their state is not that of a fresh start.
    """

    session: str
    rank: int
    disks: tuple[str, ...]
    mailbox: Mailbox
    fingerprints: tuple[Mapping[str, str], ...] = ()
    trained: bool = False

    @property
    def world(self) -> int:
        return len(self.disks)


class StartChannel:
    """The other ranks of a meeting, while all of them agree.

    Args:
        run: the run folder, for errors.
        timeout_s: a rank that says nothing for so long is reported.

    Attributes:
        doing: what this rank does, in words; those who wait for it are told every second.
        aside: takes what is no part of the agreement; returns whether it was such.
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
        self.aside: Callable[[int, Message], bool] = lambda sender, message: False
        self._later: deque[tuple[int, Message]] = deque()

    def listen(self) -> tuple[int, Message] | None:
        """What another rank says, and which, if anything comes within a moment.

        Raises:
            RecoveryError: a rank has failed.
        """
        if not self._later:
            self.attend(_TICK_S)
        self.raise_failed()
        return self._later.popleft() if self._later else None

    def attend(self, timeout_s: float = 0.0) -> bool:
        """Looks at one message, if one comes within ``timeout_s``; what is of the agreement waits
        until somebody listens. Returns whether one has come."""
        data = self._meeting.mailbox.receive(timeout_s)
        before_s = self._looked_s
        self._looked_s = self._clock.monotonic_s()
        self._listened_s += min(_LISTENED_S_MAX, self._looked_s - before_s)
        try:
            envelope = None if data is None else accept(data, self._meeting.session)
        except FormatError as error:
            _log.warning("a message was passed over: %s", error)
            return True
        if envelope is None:
            return data is not None
        sender = envelope.sender
        message = envelope.message
        self._heard_s[sender] = self._listened_s
        if isinstance(message, StartFailed):
            self._failed = message
        elif not self.aside(sender, message):
            self._later.append((sender, message))
        if isinstance(message, Command | Answer) and not message.number:
            self._does[sender] = message.payload.decode("utf-8", "replace")
        return True

    def raise_failed(self) -> None:
        """Raises:
        RecoveryError: a rank has failed.
        """
        if self._failed is not None:
            raise remote_failure(self._failed, self._meeting.rank, self._run)

    def expect(self, ranks: Iterable[int]) -> None:
        """From now on these have to be heard, who may have had nothing to say so far."""
        self._heard_s |= dict.fromkeys(ranks, self._listened_s)

    def tell(self, rank: int, message: Message) -> None:
        """Says something to another rank; does not wait."""
        envelope = Envelope(self._meeting.session, self._meeting.rank, message)
        self._meeting.mailbox.send(rank, encode_message(envelope))

    def begin(self, doing: str) -> None:
        """This rank is going to do something that may take long, or hang."""
        self.doing = doing
        self._say()

    def is_alive(self) -> None:
        """Tells those who wait for this rank that it is there, every second."""
        if self._clock.monotonic_s() - self._said_s >= _ALIVE_EVERY_S:
            self._say()

    def _say(self) -> None:
        """Numbered so that it is no step of an agreement, and no answer."""
        self._said_s = self._clock.monotonic_s()
        words = self.doing.encode("utf-8", "replace")
        if self._meeting.rank != COORDINATOR:
            self.tell(COORDINATOR, Answer(0, words))
            return
        for rank in range(1, self._meeting.world):
            self.tell(rank, Command(0, "", words))

    def check(self, waits_for: Iterable[int]) -> None:
        """Looks whether those who have to say something next are there.

        Raises:
            DeadlineError: some are not; which, and what they were last heard to do.
        """
        waits = [rank for rank in waits_for if rank != self._meeting.rank]
        gone = [rank for rank in waits if self._silent_s(rank) > _GONE_S and self._is_gone(rank)]
        silent = [rank for rank in waits if self._silent_s(rank) > self._timeout_s]
        if not gone and not silent:
            return
        which = gone
        what = "have hung up, and are not back"
        if silent:
            which = silent
            what = f"have said nothing for {self._timeout_s:g} s"
        raise DeadlineError(
            f"rank(s) {', '.join(map(str, which))} {what} while the ranks agreed on what to "
            f"restore; {'; '.join(map(self._last, which))}",
            rank=self._meeting.rank,
            path=self._run,
            hint="they have died, hang, or have raised an error: look at what they print",
        )

    def leave(self, error: BaseException) -> None:
        """This rank has failed: tells those who wait for it, or would hear of it from nobody else.
        What is lost on the way is noticed by its silence."""
        failed = self._failed or StartFailed(self._meeting.rank, failure_reason(error))
        if self._meeting.rank == COORDINATOR:
            for rank in range(1, self._meeting.world):
                if rank != failed.rank:
                    self.tell(rank, failed)
        elif self._failed is None:
            self.tell(COORDINATOR, failed)

    def _silent_s(self, rank: int) -> float:
        return self._listened_s - self._heard_s[rank]

    def _is_gone(self, rank: int) -> bool:
        return self._meeting.mailbox.is_disconnected(rank)

    def _last(self, rank: int) -> str:
        if rank not in self._does:
            return f"rank {rank} was not heard at all"
        return f"the last that was heard of rank {rank}: it {self._does[rank]}"


def remote_failure(failed: StartFailed, rank: int, run: PurePath | None = None) -> RecoveryError:
    """What this ``rank`` raises when another one has failed."""
    return RecoveryError(
        f"rank {failed.rank} could not resume: {failed.reason}",
        rank=rank,
        path=run,
        hint=f"look at what rank {failed.rank} prints",
    )


def failure_reason(error: BaseException) -> str:
    """Why a rank has failed, as it tells the others."""
    words = error.message if isinstance(error, EverstepError) else f"{error!r}"
    return words[:_REASON_CHARACTERS_MAX]
