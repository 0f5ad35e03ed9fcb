"""Keepers send copies to each other: at a pace, whatever is lost, compared where they arrive."""

from __future__ import annotations

import random
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.commit.job.messages import (
    Message,
    PeerCopyAck,
    PeerCopyBegin,
    PeerCopyChunk,
    PeerRound,
    PeerRoundReply,
)
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import NEEDED_MAX
from everstep.errors import DamageError
from everstep.format.message_codec import Stored
from everstep.keeper.held.peer_stores import PeerBaseStore, copy_memory_bytes
from everstep.keeper.ship import senders
from everstep.keeper.ship.peer_copies import PeerCopies
from everstep.keeper.ship.senders import Pace
from everstep.link.messages import KeeperStats
from everstep.restore.fetch.held import HeldBase, check_files, files_over
from everstep.seams import Seams
from tests.support.ranks.peering import BOUND_BYTES, Ring, SlowRing, bytes_of, piece, record_of

A, B, C = BaseId(1, 10), BaseId(1, 20), BaseId(1, 30)


def test_each_base_ends_in_the_memory_of_the_next_node() -> None:
    ring = Ring("abc")
    ring.take(A)
    ring.run()
    assert [ring.held(rank) for rank in range(3)] == [[(2, 10)], [(0, 10)], [(1, 10)]]
    for rank, store in enumerate(ring.stores):
        ((copy, _),) = store.whole()
        source = ring.bases[(rank - 1) % 3, A]
        assert copy.marker == source.marker
        assert bytes(copy.memory) == bytes_of(source)
        assert copy.record == record_of(1).encode()
    assert not any(ring.notices)
    ring.take(B)
    ring.run()
    assert [ring.held(rank) for rank in range(3)] == [[(2, 20)], [(0, 20)], [(1, 20)]]
    assert [one.bases.stats.copied for one in ring.ranks] == [2, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_lost_is_sent_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "CHUNK_BYTES", 1000)
    rng = random.Random(seed)
    ring = Ring("ab", bytes_per_s=1e6, timeout_s=300.0)
    ring.lost = lambda sender, to, message: rng.random() < 0.3
    for base in (A, B):
        ring.take(base, size_bytes=9000)
        ring.run(200.0, tick_s=0.5)
    assert [ring.held(rank) for rank in range(2)] == [[(1, 20)], [(0, 20)]]
    assert not any(ring.notices)
    for store, source in zip(ring.stores, (1, 0), strict=True):
        assert bytes(store.whole()[0][0].memory) == bytes_of(ring.bases[source, B])


def test_the_old_copy_stays_while_the_new_one_is_whole_at_one_rank_only() -> None:
    ring = Ring("ab")
    ring.take(A)
    ring.run()
    ring.lost = lambda sender, to, message: isinstance(message, PeerCopyChunk) and sender == 1
    ring.take(B)
    ring.run(10.0)
    assert ring.held(1) == [(0, 10), (0, 20)], "whole here, and not everywhere"
    assert ring.held(0) == [(1, 10)]
    ring.lost = lambda sender, to, message: False
    ring.run(10.0)
    assert (ring.held(0), ring.held(1)) == ([(1, 20)], [(0, 20)])


@pytest.mark.parametrize("failed", [False, True], ids=["whole everywhere", "failed elsewhere"])
def test_what_has_to_stay_stays_when_the_next_base_comes_before_the_news(failed: bool) -> None:
    """Rank 0 tells all that B is whole everywhere, and the next round; rank 2 hears it last, and
    its source begins before."""
    ring = Ring("abc")
    ring.take(A)
    ring.run()
    if failed:  # C is whole at rank 2, and not at rank 0
        ring.lost = lambda sender, to, message: isinstance(message, PeerCopyChunk) and sender == 2
    ring.take(B)
    late: list[Message] = []

    def lost(sender: int, to: int, message: Message) -> bool:
        if isinstance(message, PeerRound) and to == 2 and message.base == C:
            late.append(message)
            return len(late) == 1
        base = B if failed and sender == 2 else C
        return isinstance(message, PeerCopyChunk) and message.base == base

    for _ in range(100):
        if ring.held(2) == [(1, 10), (1, 20)]:
            break
        for one in ring.ranks:
            one.turn(0.0)
        ring.deliver()
    ring.lost = lost
    if failed:
        assert ring.ranks[2].bases.busy
        ring.ranks[2].bases.fail("a test")
    ring.take(C)
    ring.run(1.0)
    assert any(
        isinstance(m, PeerCopyBegin) and m.marker.record.step == 30 and s == 1
        for s, _, m in ring.said
    )
    stays = 10 if failed else 20
    assert (1, stays) in ring.held(2), "the newest that is whole with all peers"
    assert [ring.held(0), ring.held(1)] == [[(2, stays)], [(0, stays)]] or failed
    ring.run(5.0)
    assert (1, stays) in ring.held(2)
    ring.lost = lambda sender, to, message: False
    ring.run(60.0)
    assert [ring.held(rank) for rank in range(3)] == [[(2, 30)], [(0, 30)], [(1, 30)]]


def test_the_disks_keep_what_a_slow_peer_has_and_what_it_is_getting() -> None:
    """A node that is lost has its part of a base with its peer; all others need theirs on disk."""
    ring = SlowRing("abc", bytes_per_s=10_000.0)
    bases = [BaseId(1, step) for step in range(10, 200, 10)]
    leader, wholes = ring.ranks[0], set()
    for base in bases:
        ring.take(base, size_bytes=30_000)
        for _ in range(10):
            ring.run(0.1)
            held = [{base for base in bases if one.ranks_of(base)} for one in ring.stores]
            whole = set.intersection(*held)
            assert whole <= set(leader.needed()), "the newest that is whole with all"
            assert len(leader.needed()) <= NEEDED_MAX
            wholes |= whole
    assert len(wholes) > 3
    assert max(wholes) < bases[-2]
    assert not ring.ranks[1].needed(), "rank 0 says what is deleted"


def test_a_new_start_keeps_what_peers_have_of_the_one_before() -> None:
    ring = SlowRing("abc", bytes_per_s=10_000.0)
    ring.take(A, size_bytes=30_000)
    ring.run(10.0)
    for rank in range(3):  # all go on from B, which no peer has
        ring.bases[rank, B] = piece(rank, B, size_bytes=30_000, world=3)
        ring.ranks[rank] = ring.make(rank, B)
    assert ring.ranks[0].needed() == [A]
    for one in ring.ranks:
        one.durable(B)
    ring.run(1.0)
    assert ring.ranks[0].needed() == [B, A]
    ring.run(30.0)
    assert ring.ranks[0].needed() == [B]


def test_bytes_that_have_changed_on_the_way_are_no_copy() -> None:
    ring = Ring("ab")
    ring.take(A)
    ring.run()
    ring.take(B)
    good = ring.bases[0, B]
    changed = bytearray(bytes_of(good))
    changed[-1] ^= 1
    files = files_over(good.marker, memoryview(changed))
    ring.bases[0, B] = HeldBase(good.marker, files, durable=True)
    ring.run(5.0)
    assert ring.held(1) == [(0, 10)], "what was there before, and nothing else"
    assert "digest" in str(ring.notices[0])
    ring.take(C)
    ring.run(5.0)
    assert ring.held(1) == [(0, 30)], "the next base is sent anew"


def test_every_flipped_byte_is_found() -> None:
    held = piece(0, A, size_bytes=64)
    data = bytearray(bytes_of(held))
    check_files(held.marker, memoryview(data))
    for at in range(0, len(data), 37):
        data[at] ^= 16
        with pytest.raises(DamageError):
            check_files(held.marker, memoryview(data))
        data[at] ^= 16


def test_a_keeper_that_was_replaced_gets_the_next_base() -> None:
    ring = Ring("ab", bytes_per_s=1000.0)
    ring.take(A, size_bytes=5 << 20)
    ring.run(2.0)
    ring.replace(1)
    ring.run(60.0, tick_s=1.0)
    ring.take(B, size_bytes=100)
    ring.run(5000.0, tick_s=50.0)
    assert ring.held(1) == [(0, 20)]
    assert "keeper was replaced" in str(ring.notices[0])
    assert ring.ranks[0].bases.stats.failed == 1


def test_a_peer_that_says_nothing_is_named_and_the_next_base_is_tried() -> None:
    ring = Ring("ab", timeout_s=20.0)
    ring.lost = lambda sender, to, message: isinstance(message, PeerCopyBegin)
    ring.take(A)
    ring.run(30.0)
    assert "rank 1" in str(ring.notices[0])
    assert "20 s" in str(ring.notices[0])
    ring.lost = lambda sender, to, message: False
    ring.take(B)
    ring.run(60.0)
    assert (ring.held(0), ring.held(1)) == ([(1, 20)], [(0, 20)])


def test_the_pace_is_kept() -> None:
    ring = Ring("ab", bytes_per_s=1 << 20)
    ring.take(A, size_bytes=10 << 20)

    def sent_bytes() -> int:
        return sum(len(m.data) for s, _, m in ring.said if isinstance(m, PeerCopyChunk) and s == 0)

    for second in range(1, 9):
        ring.run(1.0)
        assert sent_bytes() <= (second + 1) << 20, "a part ahead at most"
    assert sent_bytes() >= 8 << 20
    assert ring.held(1) == []
    ring.run(5.0)
    assert ring.held(1) == [(0, 10)]


@pytest.mark.parametrize("part_s", [0.5, 5.0], ids=str)
def test_a_slow_peer_is_not_buried(part_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes bytes, but longer for a part than an answer is waited for. What is on its way to it
    keeps to what may be unanswered, every byte gets there, and a base that has no time is counted
    and said; the other direction is as fast as ever."""
    monkeypatch.setattr(senders, "CHUNK_BYTES", 50_000)
    ring = SlowRing("ab", to=1, bytes_per_s=50_000 / part_s)
    bases = [BaseId(1, step) for step in (10, 20, 30)]
    for base in bases:
        ring.take(base, size_bytes=1_000_000)
        ring.run(8 * part_s, tick_s=0.25)
    ring.run(30 * part_s, tick_s=0.25)
    assert ring.most_on_way_bytes <= 220_000, "four parts, and questions"
    stats = ring.ranks[0].bases.stats
    assert ring.held(1) == [(0, 30)]
    assert (stats.copied, stats.missed, stats.failed) == (2, 1, 0)
    (notice,) = ring.notices[0]
    assert "still being sent while the next one is already durable" in str(notice)
    assert ring.arrived_bytes <= 1.2 * stats.copied_bytes, "hardly anything is sent twice"


def test_a_peer_that_stands_still_for_a_while_is_not_buried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(senders, "CHUNK_BYTES", 50_000)
    ring = SlowRing("ab", to=1, bytes_per_s=25_000.0, timeout_s=120.0)
    ring.take(A, size_bytes=1_000_000)
    ring.run(10.0)
    ring.stand_still(100.0)
    ring.run(200.0, tick_s=0.25)
    assert ring.held(1) == [(0, 10)]
    assert ring.most_on_way_bytes <= 260_000, "four parts, and the questions of 100 seconds"
    assert not ring.notices[0]


def test_without_a_number_it_takes_four_fifths_of_the_interval() -> None:
    pace = Pace()
    assert pace.rate_of(1000) is None, "nobody knows how long it may take"
    pace.durable(100.0)
    assert pace.rate_of(1000) is None
    pace.durable(110.0)
    assert pace.rate_of(1000) == pytest.approx(1000 / 8)
    assert Pace(50.0).rate_of(1000) == 50.0


def test_bases_that_come_too_fast_are_counted_and_said() -> None:
    ring = Ring("ab", bytes_per_s=100_000.0)
    bases = [BaseId(1, step) for step in (10, 20, 30, 40)]
    for base in bases:  # one takes some 20 s, and there is one every 10 s
        ring.take(base, size_bytes=2 << 20)
        ring.run(10.0)
    ring.run(60.0)
    for rank in (0, 1):
        stats = ring.ranks[rank].bases.stats
        assert stats.missed >= 1
        assert stats.copied + stats.missed == len(bases)
        assert ring.held(rank) == [(1 - rank, 40)]
        (notice,) = ring.notices[rank]
        assert "every=" in str(notice)


def test_a_base_that_is_nowhere_to_be_read_ends_the_round() -> None:
    ring = Ring("ab", timeout_s=20.0)
    ring.take(A)
    del ring.bases[1, A]
    ring.run(30.0)
    assert "could not be read" in str(ring.notices[1])
    ring.take(B)
    ring.run()
    assert (ring.held(0), ring.held(1)) == ([(1, 20)], [(0, 20)])


# --- What a store refuses ---------------------------------------------------------------


def begun(held: HeldBase, session: str = "s") -> PeerCopyBegin:
    return PeerCopyBegin(Stored(held.marker), record_of(held.marker.timeline, session).encode())


def test_a_store_keeps_to_its_bound() -> None:
    held = piece(1, A, size_bytes=5000)
    store = PeerBaseStore(copy_memory_bytes(sum(file.size_bytes for file, _ in held.files)) - 1)
    answer = store.begun(1, begun(held))
    assert "limit" in answer.problem
    assert store.used_bytes == 0
    store.new_start(BOUND_BYTES, [1], None)
    assert not store.begun(1, begun(held)).problem
    assert 0 < store.used_bytes <= BOUND_BYTES


def test_nobody_sends_in_the_name_of_another_rank() -> None:
    assert "another rank" in PeerBaseStore(BOUND_BYTES).begun(0, begun(piece(1, A))).problem


def test_parts_count_only_in_their_order() -> None:
    store, held = PeerBaseStore(BOUND_BYTES), piece(1, A)
    data = bytes_of(held)
    store.begun(1, begun(held))
    assert store.part(1, PeerCopyChunk(A, 10, data[10:])).received_bytes == 0
    assert store.part(1, PeerCopyChunk(A, 0, data[:10])).received_bytes == 10
    assert store.part(1, PeerCopyChunk(A, 0, data[:10])).received_bytes == 10
    assert store.part(1, PeerCopyChunk(A, 10, data[10:] + b"x")).received_bytes == 10
    assert store.part(1, PeerCopyChunk(A, 10, data[10:])) == PeerCopyAck(A, len(data), True, "")
    assert store.begun(1, begun(held)).whole, "it is there"


def test_the_same_number_of_another_timeline_is_another_base() -> None:
    store, held = PeerBaseStore(BOUND_BYTES), piece(1, A)
    store.begun(1, begun(held))
    store.part(1, PeerCopyChunk(A, 0, bytes_of(held)[:100]))
    assert store.begun(1, begun(held, session="other")).received_bytes == 0


def test_what_is_told_needs_no_memory_of_messages() -> None:
    """Rank 0 hears again what has become of a base, until it says what comes next."""
    ring = Ring("ab")
    dropped: list[Message] = []

    def lost(sender: int, to: int, message: Message) -> bool:
        if isinstance(message, PeerRoundReply) and message.state == "whole" and len(dropped) < 3:
            dropped.append(message)
            return True
        return False

    ring.lost = lost
    ring.take(A)
    ring.run(20.0)
    rounds = [m for _, _, m in ring.said if isinstance(m, PeerRound)]
    assert PeerRound(None, A) in rounds


class ClosedMeanwhile:
    """An exchange of which another thread closes the duty while its figures are read."""

    log = None

    def __init__(self, copies: PeerCopies) -> None:
        self._copies = copies
        self.stats = SimpleNamespace(copied=3, copied_bytes=9, missed=1)

    @property
    def bases(self) -> ClosedMeanwhile:
        self._copies.close()
        return self

    def close(self) -> None: ...


def test_figures_are_added_while_the_exchange_is_closed() -> None:
    copies = PeerCopies(Seams(), PurePath("/run"), lambda *_: None)
    copies.exchange = cast(Any, ClosedMeanwhile(copies))
    stats = KeeperStats()
    copies.add_to(stats)
    assert copies.exchange is None
    assert (stats.peered, stats.peered_bytes, stats.peers_passed_over) == (3, 9, 1)
