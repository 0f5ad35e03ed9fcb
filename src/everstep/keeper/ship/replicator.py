"""Sends a rank's bases to the memory of its peer, and holds those of others.

One thread of the keeper; training has no part in it. Parts are sent at a stated pace, a few of
them unanswered at a time; whatever is lost on the way is sent again. What is sent is compared with
its digests where it arrives. Which base, and when, rank 0 says (:class:`.peer_copies.CopyRounds`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
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
from everstep.errors import EverstepError, KeeperError
from everstep.keeper.held.peer_base_store import PeerBaseStore
from everstep.keeper.held.peer_log_store import PeerLogStore
from everstep.keeper.ship.log_sender import LogSender
from everstep.link.job_session import JobSession
from everstep.restore.fetch.held import HeldBase
from everstep.seams.clock import Clock

__all__ = ["Pace", "Replicator", "ReplicatorStats", "Source"]

_log = logging.getLogger("everstep.keeper")
_PART_BYTES = 1 << 20
_UNANSWERED_MAX = 4  # parts
_SAY_AGAIN_S = 2.0
_IDLE_S = 0.1
_BUSY_S = 0.01
_SHARE = 0.8  # of the time between two bases; the rest is for what was held up (section 3.2)

Source = tuple[HeldBase, bytes]
"""A rank's files of a base, wherever they can be read; and the record of its timeline."""


@dataclass(slots=True)
class ReplicatorStats:
    """What was done so far.

    Attributes:
        sent, sent_bytes: bases that the peer holds, or has held, whole.
        passed_over: bases that became durable while an older one was being sent, and that a newer
            one has overtaken: the interval is too short for the link.
        failed: bases that could not be sent.
        step: of the newest base that the peer holds whole.
    """

    sent: int = 0
    sent_bytes: int = 0
    passed_over: int = 0
    failed: int = 0
    step: int | None = None


@dataclass(slots=True)
class Pace:
    """How fast bases are sent.

    Attributes:
        bytes_per_s: at most; None: so that it takes four fifths of the time between the last two
            bases, and as fast as it goes as long as there were not two.
        at_once: None means as fast as it goes: training waits for it.
    """

    bytes_per_s: float | None = None
    at_once: bool = False
    _durable_s: float | None = None
    _interval_s: float | None = None

    def durable(self, now_s: float) -> None:
        """There is a new base."""
        if self._durable_s is not None:
            self._interval_s = now_s - self._durable_s
        self._durable_s = now_s

    def rate_of(self, size_bytes: int) -> float | None:
        """Bytes per second for a base of that size; None: as fast as it goes."""
        if self.bytes_per_s is not None:
            return self.bytes_per_s
        if self.at_once or not self._interval_s:
            return None
        return size_bytes / (_SHARE * self._interval_s)


@dataclass(slots=True)
class _Sending:
    """The base that this rank sends.

    Attributes:
        said_s: rank 0 was last told.
        progress_s: when it last got anywhere.
        asked_s: the peer was last asked how far it has come; ``answered`` since.
        sent_bytes: up to where parts are on their way; ``acked_bytes``: up to where they are there.
        told: what has become of it, which rank 0 may not have heard.
    """

    base: BaseId
    said_s: float
    progress_s: float
    source: Source | None = None
    size_bytes: int = 0
    rate: float | None = None
    paced_s: float = 0.0
    paced_bytes: int = 0
    asked_s: float = 0.0
    answered: bool = False
    heard_s: float = 0.0
    sent_bytes: int = 0
    acked_bytes: int = 0
    told: str = ""


class Replicator:
    """One rank's part, in one start of the job.

    Args:
        find: a base of this rank, where it can be read; None: nowhere (yet).
        send: to the keeper of a rank; does not wait.
        tell: told of what fails; training goes on.
        timeout_s: a peer that says nothing for so long is reported.

    Attributes:
        logs: steps of other ranks' logs that are held.
        log: sends this rank's own; None: there is none.
        on_everywhere: told of each base that is whole with all peers, in the thread.
    """

    def __init__(
        self,
        job_session: JobSession,
        store: PeerBaseStore,
        pace: Pace,
        clock: Clock,
        find: Callable[[BaseId], Source | None],
        send: Callable[[int, Message], None],
        tell: Callable[[EverstepError], None],
        *,
        timeout_s: float,
    ) -> None:
        peer = job_session.peer
        # Itself: there is none, and it is enough that all ranks have a base (in memory).
        self.peer = job_session.rank if peer is None else peer
        self.stats = ReplicatorStats()
        self._job_session = job_session
        self._store = store
        self._pace = pace
        self._clock = clock
        self._find = find
        self._send = send
        self._tell = tell
        self._timeout_s = timeout_s
        self._rounds = None
        if job_session.rank == COORDINATOR:
            self._rounds = CopyRounds(
                len(job_session.disks), repeat_s=_SAY_AGAIN_S, late_s=2 * timeout_s
            )
        self.logs = PeerLogStore()
        self.log: LogSender | None = None
        self.on_everywhere: Callable[[BaseId], None] = lambda base: None
        self._everywhere: BaseId | None = None
        self._events: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._sending: _Sending | None = None
        self._waiting: BaseId | None = None
        self._round: BaseId | None = None  # that all ranks send, as far as this one has heard
        self._over: BaseId | None = None  # what that was before
        self._early: dict[int, PeerCopyBegin] = {}
        self._complained: set[str] = set()
        self._thread: threading.Thread | None = None

    # From any thread.

    def start(self) -> None:
        """Begins to work, in a thread."""
        self._thread = threading.Thread(target=self._work, name="everstep-peers", daemon=True)
        self._thread.start()

    def hear(self, sender: int, message: PeerMessage) -> None:
        """A message has come."""
        self._events.put(lambda: self._heard(sender, message))

    def durable(self, base: BaseId) -> None:
        """This rank's base is durable, and all others' are."""
        self._events.put(lambda: self._durable(base))

    def logged(self) -> None:
        """A step of the log is whole."""
        self._events.put(lambda: None)

    def complain(self, error: EverstepError, kind: str = "") -> None:
        """Tells what has failed, once for each kind of trouble; in the thread."""
        _log.warning("%s", error)
        if (kind or error.message) not in self._complained:
            self._complained.add(kind or error.message)
            self._tell(error)

    def is_past(self, base: BaseId) -> bool:
        """Whether a base is whole with all peers, or will not be."""
        over = self._over
        now = self._round
        return (over is not None and base <= over) or (now is not None and base < now)

    def needed(self) -> list[BaseId]:
        """Bases that the disks of all ranks keep for the sake of a node that is lost: of these its
        peer has its part (on rank 0, which says what is deleted)."""
        if self._rounds is None:
            return []
        return self._rounds.needed(self._store.bases)

    def close(self) -> None:
        """Ends the thread; what is on its way stays behind."""
        self._events.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout_s)

    # The thread.

    def _work(self) -> None:
        while True:
            busy = self._sending is not None and not self._sending.told
            busy = busy or (self.log is not None and self.log.busy)
            try:
                if not self.turn(_BUSY_S if busy else _IDLE_S):
                    return
            except BaseException as error:  # would end this thread, and all copies to come
                _log.exception("internal error in sending bases to a peer")
                self.complain(EverstepError(f"internal error in sending to a peer: {error!r}"))

    def turn(self, timeout_s: float) -> bool:
        """Does what has come, or comes within ``timeout_s``; False: it is over."""
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
            self._say(self._rounds.tick(self._now_s))
        self._go_on()
        if self.log is not None:
            sent_bytes = self.log.turn()
            if self._sending is not None:  # of the same bytes a second
                self._sending.paced_bytes += sent_bytes
        return True

    @property
    def _now_s(self) -> float:
        return self._clock.monotonic_s()

    def _say(self, sends: list[Send]) -> None:
        for one in sends:
            self._to(one.rank, one.message)

    def _to(self, rank: int, message: Message) -> None:
        if rank == self._job_session.rank:
            assert isinstance(message, PeerMessage)
            self._heard(rank, message)
        else:
            self._send(rank, message)

    def _heard(self, sender: int, message: PeerMessage) -> None:
        if isinstance(message, PeerCopyBegin):
            self._on_begun(sender, message)
        elif isinstance(message, PeerCopyChunk):
            self._to(sender, self._store.part(sender, message))
        elif isinstance(message, PeerLogBegin):
            self._to(sender, self.logs.begun(sender, message))
        elif isinstance(message, PeerLogChunk):
            self._to(sender, self.logs.part(sender, message))
        elif isinstance(message, PeerLogAck):
            if self.log is not None:
                self.log.heard(message)
        elif isinstance(message, PeerCopyAck):
            self._on_at(message)
        elif isinstance(message, PeerRoundReply):
            if self._rounds is not None:
                self._say(self._rounds.on_reply(sender, message.base, message.state, self._now_s))
        else:
            self._on_round(message)

    def _durable(self, base: BaseId) -> None:
        self._pace.durable(self._now_s)
        if self._sending is not None and not self._sending.told and base != self._sending.base:
            if self._waiting is not None and self._waiting != self._sending.base:
                self._pass_over(self._waiting)
            self._waiting = base
        if self._rounds is not None:
            self._say(self._rounds.durable(base, self._now_s))

    def _pass_over(self, base: BaseId) -> None:
        self.stats.passed_over += 1
        self.complain(
            KeeperError(
                f"the peer, rank {self.peer}, gets no copy of the base of step {base.step}: the "
                "one before is still being sent when the next one is there",
                step=base.step,
                rank=self._job_session.rank,
                tier="peer",
                hint="a longer every=, or a larger PeerOptions(bytes_per_s=); counted in "
                "stats().peers_passed_over",
            ),
            "passed over",
        )

    def _on_begun(self, sender: int, message: PeerCopyBegin) -> None:
        """A rank wants to send a base. Which of two that are whole here has to stay for it, only
        the news of its round says: it is answered behind them."""
        base = BaseId(message.marker.timeline, message.marker.step)
        if base != self._round and self._store.holds_two(sender):
            self._early[sender] = message
            return
        self._early.pop(sender, None)
        self._to(sender, self._store.begun(sender, message))

    def _on_round(self, message: PeerRound) -> None:
        over = [one for one in (self._over, message.everywhere) if one is not None]
        if self._round is not None and self._round != message.base:
            over.append(self._round)
        self._over = max(over, default=None)
        self._round = message.base
        if message.everywhere is not None:
            self._pass(message.everywhere)
            if message.base is None:
                self._to(COORDINATOR, PeerRoundReply(message.everywhere, "noted"))
        sending = self._sending
        if message.base is None:
            self._sending = None
        elif sending is None or sending.base != message.base:
            if sending is not None and not sending.told:
                _close(sending)
            now_s = self._now_s
            self._sending = _Sending(message.base, now_s, now_s)
            if self._waiting is not None and self._waiting <= message.base:
                self._waiting = None
            self._to(COORDINATOR, PeerRoundReply(message.base, "sending"))
        early = self._early
        self._early = {}
        for sender, begun in early.items():  # what is of another round is asked again
            if BaseId(begun.marker.timeline, begun.marker.step) == message.base:
                self._on_begun(sender, begun)

    def _pass(self, everywhere: BaseId) -> None:
        """A base is whole with all peers."""
        self._store.passed(everywhere)
        self.logs.passed(everywhere, self._store.ranks_of(everywhere))
        if self._everywhere is None or everywhere > self._everywhere:
            self._everywhere = everywhere
            if self.log is not None:
                self.log.passed(everywhere)
            self.on_everywhere(everywhere)

    # Sending.

    def _go_on(self) -> None:
        one = self._sending
        now_s = self._now_s
        if one is None:
            return
        if now_s - one.said_s >= _SAY_AGAIN_S:
            one.said_s = now_s
            self._to(COORDINATOR, PeerRoundReply(one.base, one.told or "sending"))
        if one.told or self._sending is not one:
            return
        if one.source is None:
            self._begin(one, now_s)
        elif one.answered and one.sent_bytes > one.acked_bytes:
            if now_s - one.heard_s > _SAY_AGAIN_S:  # parts or answers were lost
                self._ask(one, now_s)
        elif one.answered:
            one.progress_s = now_s  # nobody is waited for
        elif now_s - one.asked_s > _SAY_AGAIN_S:
            self._ask(one, now_s)
        if now_s - one.progress_s > self._timeout_s:
            why = "its keeper has said nothing" if one.source else "it is nowhere to be read"
            self._fail(one, f"{why} for {self._timeout_s:g} s")
        elif one.answered:
            self._send_parts(one, now_s)

    def _begin(self, one: _Sending, now_s: float) -> None:
        one.source = self._find(one.base)
        if one.source is not None and self.peer == self._job_session.rank:
            self._ended(one, "whole")
        elif one.source is not None:
            one.size_bytes = sum(file.size_bytes for file, _ in one.source[0].files)
            one.rate = self._pace.rate_of(one.size_bytes)
            one.progress_s = one.paced_s = now_s
            self._ask(one, now_s)

    def _ask(self, one: _Sending, now_s: float) -> None:
        assert one.source is not None
        held, record = one.source
        one.answered = False
        one.asked_s = now_s
        self._send(self.peer, PeerCopyBegin(held.marker, record))

    def _send_parts(self, one: _Sending, now_s: float) -> None:
        assert one.source is not None
        while (
            one.sent_bytes < one.size_bytes
            and one.sent_bytes - one.acked_bytes < _UNANSWERED_MAX * _PART_BYTES
            and (one.rate is None or one.paced_bytes <= one.rate * (now_s - one.paced_s))
        ):
            data = bytearray(min(one.size_bytes - one.sent_bytes, _PART_BYTES))
            try:
                _read(one.source[0], one.sent_bytes, memoryview(data))
            except (OSError, EverstepError) as error:
                self._fail(one, f"it cannot be read any more ({error})")
                return
            if one.sent_bytes == one.acked_bytes:
                one.heard_s = now_s  # from now on an answer is waited for
            self._send(self.peer, PeerCopyChunk(one.base, one.sent_bytes, bytes(data)))
            one.sent_bytes += len(data)
            one.paced_bytes += len(data)

    def _on_at(self, message: PeerCopyAck) -> None:
        one = self._sending
        now_s = self._now_s
        if one is None or one.told or one.base != message.base or one.source is None:
            return
        if message.problem:
            self._fail(one, message.problem)
            return
        further = message.received_bytes > one.acked_bytes
        if further or not one.answered:
            one.progress_s = now_s
        # It answers in order: one that gets further is of a part, and those behind it may be on
        # their way. What is sent again meanwhile would only make a slow link slower, without end.
        if message.received_bytes > one.sent_bytes or not (one.answered or further):
            one.sent_bytes = message.received_bytes
        one.answered = True
        one.heard_s = now_s
        one.acked_bytes = message.received_bytes
        if message.whole:
            self.stats.sent += 1
            self.stats.sent_bytes += one.size_bytes
            self.stats.step = one.base.step
            self._ended(one, "whole")

    def _fail(self, one: _Sending, why: str) -> None:
        self.stats.failed += 1
        self.complain(
            KeeperError(
                f"the peer, rank {self.peer}, gets no copy of the base of step {one.base.step}: "
                f"{why}",
                step=one.base.step,
                rank=self._job_session.rank,
                tier="peer",
                hint="training goes on; the next base is sent anew",
            ),
            why,
        )
        self._ended(one, "failed")

    def _ended(self, one: _Sending, state: str) -> None:
        _close(one)
        one.told = state
        one.said_s = self._now_s
        self._to(COORDINATOR, PeerRoundReply(one.base, state))


def _read(held: HeldBase, offset: int, buffer: memoryview) -> None:
    """Bytes of all files of a base, counted through.

    Raises:
        OSError: a file is shorter than it was.
    """
    begin = done = 0
    for file, _ in held.files:
        at = offset + done
        end = begin + file.size_bytes
        if begin <= at < end and done < buffer.nbytes:
            want = min(buffer.nbytes - done, end - at)
            if file.read_into(buffer[done : done + want], at - begin) != want:
                raise OSError(f"{want} bytes were expected")
            done += want
        begin = end


def _close(one: _Sending) -> None:
    if one.source is not None:
        for file, _ in one.source[0].files:
            file.close()
