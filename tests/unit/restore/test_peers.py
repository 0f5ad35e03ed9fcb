"""What is held in the memory of other nodes comes back to those who need it, and nothing else."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any

import pytest

from everstep.commit.job.messages import (
    ChunkReply,
    ChunkRequest,
    Envelope,
    Message,
    StartFailed,
    decode_message,
    encode_message,
)
from everstep.commit.job.offers import BaseOffer, Needs, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, RecoveryError
from everstep.format.records import Manifest
from everstep.restore.fetch import peers, start_channel
from everstep.restore.fetch.held import PeerCopy
from everstep.restore.fetch.peers import (
    CopyOffer,
    FetchedBase,
    OfferExtras,
    _Exchange,
    fetch_from_peers,
    fetch_plan,
)
from everstep.run.scan import Inventory
from everstep.seams import ManualClock, SystemClock
from tests.support.ranks.boxes import Box, channel, offer, own, told
from tests.support.ranks.peering import RUN, bytes_of, copy_of, piece, record_of
from tests.support.ranks.together import on_all

A, B = BaseId(1, 10), BaseId(1, 20)


def test_a_rank_that_has_lost_its_disk_fetches_what_its_peer_holds() -> None:
    copy = told(0, piece(1, B))
    assert fetch_plan([offer(0, A, B), offer(1)], [copy], own, None)[0] == {1: [copy]}


def test_nothing_is_fetched_that_is_there() -> None:
    copies = [told(0, piece(1, B)), told(1, piece(0, B))]
    assert fetch_plan([offer(0, B), offer(1, B)], copies, own, None)[0] == {}


def test_a_peer_is_asked_before_a_copy_in_a_store() -> None:
    copy = told(0, piece(1, B))
    offers = [offer(0, B), offer(1, B, tiers=("object",))]
    assert fetch_plan(offers, [copy], own, None)[0] == {1: [copy]}


def test_a_copy_that_not_all_others_can_match_is_passed_over() -> None:
    """The newest element of the intersection, not the newest copy (I7)."""
    copies = [told(0, piece(1, A)), told(0, piece(1, B))]
    assert fetch_plan([offer(0, A), offer(1)], copies, own, None)[0] == {1: [copies[0]]}


def test_a_copy_of_another_timeline_of_the_same_number_is_never_taken() -> None:
    copy = told(0, piece(1, B), session="another start")
    assert fetch_plan([offer(0, B), offer(1, A)], [copy], own, None)[0] == {}
    good = told(0, piece(1, B))
    assert fetch_plan([offer(0, A, B), offer(1, A)], [good], own, None)[0] == {1: [good]}


def all_of_them(rank: int, manifest: Manifest) -> Collection[int]:
    return range(len(manifest.markers))


def test_copies_of_two_starts_are_not_mixed_on_an_empty_disk() -> None:
    """Both starts have opened timeline 1, and each has left copies on one host."""
    one, other = told(0, piece(0, B)), told(1, piece(1, B), "another start")
    fits = told(1, piece(1, B))
    both = [one, fits]
    assert fetch_plan([offer(0), offer(1)], both, all_of_them, None)[0] == {0: both, 1: both}
    assert fetch_plan([offer(0), offer(1)], [one, other], all_of_them, None)[0] == {}
    # A third rank's disk says which start is meant; the empty disks need not know.
    known = Offer(2, "2", RUN, 2, {1: record_of(1)}, {})
    offers = [offer(0), offer(1), known]
    assert fetch_plan(offers, [one, other], all_of_them, None)[0] == {}
    plan, _ = fetch_plan(offers, [one, other, fits], all_of_them, None)
    assert plan == dict.fromkeys(range(3), both)


def test_what_has_come_is_offered_only_where_its_timeline_is_known_or_unknown() -> None:
    one = FetchedBase(piece(1, A), record_of(1))
    inventory = Inventory(PurePath("run"))
    assert one.is_of(inventory)
    inventory.timelines[1] = record_of(1)
    assert one.is_of(inventory)
    inventory.timelines[1] = record_of(1, "another start")
    assert not one.is_of(inventory)


def test_a_wanted_step_is_what_counts() -> None:
    copies = [told(0, piece(1, A)), told(0, piece(1, B))]
    offers = [offer(0, A, B), offer(1)]
    assert fetch_plan(offers, copies, own, A.step)[0] == {1: [copies[0]]}
    assert fetch_plan(offers, copies, own, 15)[0] == {}, "the agreement says that there is none"


# --- Fetching --------------------------------------------------------------------------------


def fetched(
    offers: list[Offer],
    copies: list[list[PeerCopy]],
    lost: Callable[[Message], bool] = lambda message: False,
    timeout_s: float = 20.0,
    needs: Needs = own,
) -> list[list[FetchedBase]]:
    """What each rank gets."""
    world = len(offers)
    barrier, said = threading.Barrier(world, timeout=60.0), dict[int, dict[str, Any]]()
    boxes: list[Box] = []
    boxes += [Box(rank, boxes, lost) for rank in range(world)]

    def say(rank: int, mine: dict[str, Any]) -> list[dict[str, Any]]:
        barrier.wait()
        said[rank] = mine
        barrier.wait()
        found = [said[other] for other in range(world)]
        barrier.wait()
        return found

    def one(rank: int) -> list[FetchedBase]:
        brought = fetch_from_peers(
            channel(rank, world, boxes[rank], SystemClock(), timeout_s),
            SystemClock(),
            lambda what, mine: say(rank, mine),
            offers[rank],
            copies[rank],
            needs,
            extras=OfferExtras(lambda choice: None),
            step=None,
        )
        return brought.bases

    return on_all(*(lambda rank=rank: one(rank) for rank in range(world)))  # type: ignore[misc]


def chunks_of(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    for module in (peers, start_channel):
        monkeypatch.setattr(module, "CHUNK_BYTES", size_bytes)


def test_bytes_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 700)
    lost = piece(2, B, size_bytes=30_000, world=3)
    offers = [with_world(offer(0, B)), with_world(offer(1, B)), offer(2)]
    found = fetched(offers, [[copy_of(lost)], [], []])
    assert found[:2] == [[], []]
    ((one,),) = found[2:]
    assert one.held.marker == lost.marker
    assert bytes_of(one.held) == bytes_of(lost)
    assert one.record == record_of(1)
    one.held.open().close()


def test_a_rank_takes_what_its_own_keeper_holds_of_another_one() -> None:
    """The folder that both share has lost the file of rank 1; rank 0's keeper holds a copy."""
    lost, there = piece(1, B), piece(0, B).marker
    bases = {B: BaseOffer({0: Piece(there)})}
    offers = [Offer(rank, "disk", RUN, 2, {1: record_of(1)}, bases) for rank in range(2)]
    found = fetched(offers, [[copy_of(lost)], []], needs=all_of_them)
    for (one,) in found:
        assert bytes_of(one.held) == bytes_of(lost)
    bad = copy_of(lost)
    bad.memory[-1] ^= 1
    assert fetched(offers, [[bad], []], needs=all_of_them) == [[], []]


def with_world(one: Offer) -> Offer:
    """The same, of a job of three ranks."""
    pieces = {base: piece(one.rank, base, world=3).marker for base in one.bases}
    bases = {base: BaseOffer({one.rank: Piece(marker)}) for base, marker in pieces.items()}
    return dataclasses.replace(one, bases=bases)


def test_parts_that_are_lost_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 700)
    monkeypatch.setattr(start_channel, "_RETRY_S", 0.02)
    seen: list[Message] = []

    def lost(message: Message) -> bool:
        seen.append(message)
        return isinstance(message, ChunkReply) and len(seen) % 3 == 0

    ((), (one,)) = fetched([offer(0, B), offer(1)], [[copy_of(piece(1, B))], []], lost)
    assert bytes_of(one.held) == bytes_of(piece(1, B))


class SlowHolder:
    """A mailbox to a rank that sends what it is asked for, in order, over a slow link."""

    def __init__(self, clock: ManualClock, data: bytes, part_s: float) -> None:
        self._clock, self._data, self._part_s = clock, data, part_s
        self._link: list[tuple[float, bytes]] = []
        self._free_s = 0.0
        self.sent = 0

    def send(self, rank: int, message: bytes) -> None:
        wanted = decode_message(message).message
        if isinstance(wanted, ChunkRequest):
            self.sent += 1
            self._free_s = max(self._free_s, self._clock.monotonic_s()) + self._part_s
            data = self._data[wanted.offset : wanted.offset + wanted.size_bytes]
            told = ChunkReply(wanted.base, wanted.rank, wanted.offset, data, wanted.log)
            self._link.append((self._free_s, encode_message(Envelope("s", 0, told))))

    def receive(self, timeout_s: float) -> bytes | None:
        self._clock.advance(5 * timeout_s)
        if self._link and self._link[0][0] <= self._clock.monotonic_s():
            return self._link.pop(0)[1]
        return None

    def is_disconnected(self, rank: int) -> bool:
        return False


@pytest.mark.parametrize("part_s", [0.5, 3.0, 11.0], ids=str)
def test_a_slow_rank_is_not_asked_for_the_same_again_and_again(
    part_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question brings an answer, and those take the time of all that are behind them."""
    chunks_of(monkeypatch, 1000)
    copy, clock = copy_of(piece(1, A, size_bytes=40_000)), ManualClock()
    link: Any = SlowHolder(clock, bytes(copy.memory), part_s)
    begun_s = clock.monotonic_s()
    wanted: Any = {1: [CopyOffer(0, copy.marker, copy.record)]}
    exchange = _Exchange(channel(1, 2, link, clock, 120.0), clock, 1, 1, wanted, {}, 2)
    brought, damaged = exchange.run()
    assert [bytes_of(one.held) for one in brought.bases] == [bytes(copy.memory)]
    assert not damaged
    parts = -(-len(copy.memory) // 1000)
    assert link.sent <= 1.5 * parts
    assert clock.monotonic_s() - begun_s <= 2 * parts * part_s


def test_a_damaged_copy_is_passed_over_for_the_one_before() -> None:
    bad = copy_of(piece(1, B))
    bad.memory[-1] ^= 1
    copies = [copy_of(piece(1, A)), bad]
    ((), (one,)) = fetched([offer(0, A, B), offer(1)], [copies, []])
    assert one.held.id == A
    assert fetched([offer(0, A, B), offer(1)], [[bad], []]) == [[], []]


def test_a_rank_that_fails_is_not_waited_for() -> None:
    boxes: list[Box] = []
    boxes += [Box(rank, boxes, lambda message: False) for rank in range(2)]
    failed = StartFailed(0, "no space is left")
    boxes[0].send(1, encode_message(Envelope("s", 0, failed)))
    copy, clock = copy_of(piece(1, B)), SystemClock()
    plan: Any = {1: [CopyOffer(0, copy.marker, copy.record)]}
    with pytest.raises(RecoveryError, match="rank 0 could not resume: no space is left"):
        _Exchange(channel(1, 2, boxes[1], clock), clock, 1, 1, plan, {}, 2).run()


def test_a_rank_that_says_nothing_is_named() -> None:
    with pytest.raises(DeadlineError, match=r"rank\(s\) [01] were silent"):
        silent = fetched(
            [offer(0, B), offer(1)],
            [[copy_of(piece(1, B))], []],
            lambda message: True,
            timeout_s=0.5,
        )
        assert not silent
