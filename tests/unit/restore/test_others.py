"""What a rank hears of the others at a start, and what it tells them; without threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import PurePath

import pytest

from everstep.commit.job.messages import (
    Answer,
    Command,
    Envelope,
    Message,
    StartFailed,
    decode_message,
    encode_message,
)
from everstep.errors import DeadlineError, RecoveryError, StorageError
from everstep.restore.fetch.start_channel import Meeting, StartChannel
from everstep.seams import ManualClock

RUN = PurePath("run")
TIMEOUT_S = 60.0


class Box:
    """A mailbox; where nothing is in it, a look takes as long as was said.

    Attributes:
        sent: what was sent, and to whom.
        gone: ranks that have hung up.
    """

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._arrived: deque[bytes] = deque()
        self.sent: list[tuple[int, Message]] = []
        self.gone: set[int] = set()

    def arrives(self, sender: int, message: Message) -> None:
        self._arrived.append(encode_message(Envelope("session", sender, message)))

    def open(self, session: str, rank: int, peers: Sequence[tuple[str, int]]) -> None: ...

    def send(self, rank: int, message: bytes) -> None:
        self.sent.append((rank, decode_message(message).message))

    def receive(self, timeout_s: float) -> bytes | None:
        if self._arrived:
            return self._arrived.popleft()
        self._clock.advance(timeout_s)
        return None

    def is_disconnected(self, rank: int) -> bool:
        return rank in self.gone

    def close(self) -> None: ...


class Start:
    """One of three ranks."""

    def __init__(self, rank: int = 0) -> None:
        self.clock = ManualClock()
        self.box = Box(self.clock)
        meeting = Meeting("session", rank, ("0", "0", "0"), self.box)
        self.others = StartChannel(meeting, self.clock, RUN, timeout_s=TIMEOUT_S)

    def listen(self, for_s: float) -> None:
        """Nothing is said for so long."""
        end_s = self.clock.monotonic_s() + for_s
        while self.clock.monotonic_s() < end_s:
            assert self.others.listen() is None


def test_what_was_said_while_this_rank_was_busy_is_heard_before_anybody_is_blamed() -> None:
    """The base that it reads may be large, and the others done long ago."""
    start = Start()
    start.clock.advance(20 * TIMEOUT_S)
    for rank in (1, 2):
        start.box.arrives(rank, Answer(0, b"waits for rank(s) 0"))
    for _ in (1, 2):
        assert start.others.listen() is not None
        start.others.check((0, 1, 2))
    start.listen(TIMEOUT_S - 1)
    start.others.check((0, 1, 2))
    start.listen(2)
    with pytest.raises(DeadlineError, match=r"rank\(s\) 1, 2 were silent for 60 s"):
        start.others.check((0, 1, 2))
    start.others.check((0,))


def test_a_machine_that_stood_still_blames_nobody() -> None:
    start = Start()
    for _ in range(50):
        start.clock.advance(TIMEOUT_S)
        assert start.others.listen() is None
        start.others.check((1, 2))


def test_a_silent_rank_is_named_with_what_it_was_last_heard_to_do() -> None:
    start = Start(rank=2)
    start.box.arrives(0, Command(0, "", b"restores step 4 of timeline 1"))
    assert start.others.listen() is not None
    start.listen(TIMEOUT_S + 1)
    last = r"last activity of rank 0: restores step 4 of timeline 1"
    with pytest.raises(DeadlineError, match=last):
        start.others.check((0,))
    with pytest.raises(DeadlineError, match="nothing was received from rank 1"):
        start.others.check((1,))


def test_what_this_rank_does_is_told_when_it_begins_and_every_second() -> None:
    start = Start(rank=1)
    start.others.begin("opens timeline 2")
    start.others.is_alive()
    assert start.box.sent == [(0, Answer(0, b"opens timeline 2"))]
    start.clock.advance(1.0)
    start.others.is_alive()
    assert start.box.sent == [(0, Answer(0, b"opens timeline 2"))] * 2
    leads = Start()
    leads.others.begin("restores nothing")
    assert leads.box.sent == [(rank, Command(0, "", b"restores nothing")) for rank in (1, 2)]


def test_a_rank_that_has_hung_up_is_not_waited_for_to_the_end() -> None:
    start = Start()
    start.box.gone.add(1)
    start.listen(20.0)
    start.others.check((1, 2))  # it may come back
    start.listen(11.0)
    start.others.check((2,))
    with pytest.raises(
        DeadlineError, match=r"rank\(s\) 1 closed the connection and did not reconnect"
    ):
        start.others.check((1, 2))
    start.box.arrives(1, Answer(0, b""))
    assert start.others.listen() is not None
    start.others.check((1, 2))


def test_a_rank_that_has_failed_says_why_and_all_hear_of_it() -> None:
    why = StartFailed(2, "no space is left")
    fails = Start(rank=2)
    fails.others.leave(StorageError("no space is left", rank=2, path=RUN))
    assert fails.box.sent == [(0, why)]

    leads = Start()
    leads.box.arrives(2, why)
    with pytest.raises(RecoveryError, match="rank 2 could not resume: no space is left") as caught:
        leads.others.listen()
    leads.others.leave(caught.value)
    assert leads.box.sent == [(1, why)]

    follows = Start(rank=1)
    follows.box.arrives(0, why)
    with pytest.raises(RecoveryError, match="rank 2 could not resume") as caught:
        follows.others.listen()
    follows.others.leave(caught.value)
    assert follows.box.sent == [], "rank 0 knows, and has told all others"

    leads = Start()
    leads.others.leave(KeyboardInterrupt())
    interrupted = StartFailed(0, "KeyboardInterrupt()")
    assert leads.box.sent == [(1, interrupted), (2, interrupted)]
