"""Which copies a peer holds and lets go, and which base all ranks send: machines without I/O."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.commit.job.messages import (
    ChunkReply,
    ChunkRequest,
    Envelope,
    FetchProgress,
    Message,
    PeerCopyAck,
    PeerCopyBegin,
    PeerCopyChunk,
    PeerRound,
    PeerRoundReply,
    Send,
    decode_message,
    encode_message,
)
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import CopyRounds, HeldCopies, nodes_of, peer_of
from everstep.errors import FormatError
from everstep.format.message_codec import Stored
from everstep.format.records import FileRecord, Marker

A, B, C = BaseId(1, 10), BaseId(1, 20), BaseId(2, 5)
S = 100


# --- The ring ---------------------------------------------------------------------------


def test_a_peer_is_the_same_place_on_the_next_node() -> None:
    names = ["a", "a", "b", "b", "c", "c"]
    assert nodes_of(names) == ((0, 1), (2, 3), (4, 5))
    assert [peer_of(names, rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    names = ["a", "b", "a", "b"]
    assert [peer_of(names, rank) for rank in range(4)] == [1, 0, 3, 2]


def test_where_the_next_node_has_fewer_ranks_they_take_turns() -> None:
    names = ["a", "a", "a", "b"]
    assert [peer_of(names, rank) for rank in range(4)] == [3, 3, 3, 0]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_nobody_is_its_own_nodes_peer(names: list[str]) -> None:
    for rank, node in enumerate(names):
        peer = peer_of(names, rank)
        assert (peer is None) == (len(set(names)) == 1)
        assert peer is None or names[peer] != node


# --- What is held -----------------------------------------------------------------------


def held(shelf: HeldCopies) -> list[tuple[int, BaseId, bool]]:
    return [(copy.source, copy.base, copy.whole) for copy in shelf.copies]


def take(shelf: HeldCopies, source: int, base: BaseId, size: int = S) -> str:
    _, why = shelf.begin(source, base, size)
    if not why:
        shelf.finished(source, base)
    return why


def test_the_old_copy_stays_until_the_new_one_is_whole_everywhere() -> None:
    shelf = HeldCopies(2 * S)
    assert not take(shelf, 1, A)
    shelf.passed(A)
    assert not shelf.begin(1, B, S)[1]
    assert held(shelf) == [(1, A, True), (1, B, False)]
    shelf.finished(1, B)
    assert held(shelf) == [(1, A, True), (1, B, True)], "whole here says nothing of the others"
    assert [copy.base for copy in shelf.passed(B)] == [A]
    assert held(shelf) == [(1, B, True)]


def test_what_was_not_whole_everywhere_makes_room_and_what_was_does_not() -> None:
    shelf = HeldCopies(2 * S)
    take(shelf, 1, A)
    shelf.passed(A)
    take(shelf, 1, B)  # the round of it failed elsewhere
    gone, why = shelf.begin(1, C, S)
    assert ([copy.base for copy in gone], why) == ([B], "")
    assert held(shelf) == [(1, A, True), (1, C, False)]


def test_more_than_the_bound_is_refused_with_the_numbers() -> None:
    shelf = HeldCopies(2 * S - 1)
    take(shelf, 1, A)
    shelf.passed(A)
    gone, why = shelf.begin(1, B, S)
    assert not gone
    assert str(2 * S - 1) in why
    assert held(shelf) == [(1, A, True)]


def test_a_peer_without_a_copy_of_what_is_everywhere_else_keeps_what_it_has() -> None:
    shelf = HeldCopies(2 * S)
    take(shelf, 1, A)
    shelf.passed(B)
    assert held(shelf) == [(1, A, True)]


def test_a_new_start_drops_halves_and_strangers() -> None:
    shelf = HeldCopies(10 * S)
    take(shelf, 1, A)
    take(shelf, 2, A)
    shelf.begin(1, B, S)
    shelf.new_start([1], None)
    assert held(shelf) == [(1, A, True), (2, A, True)], "what training goes on from is on no disk"
    shelf.new_start([1], A)
    assert held(shelf) == [(1, A, True)]


def test_an_older_base_takes_nobodys_place() -> None:
    shelf = HeldCopies(2 * S)
    take(shelf, 1, B)
    assert "newer" in take(shelf, 1, A)
    assert shelf.passed(B) == []
    assert shelf.passed(A) == [], "never back"
    assert shelf.everywhere == B


def test_an_older_base_that_training_has_gone_back_to_takes_the_newer_ones_place() -> None:
    """Which leads nowhere any more, and stays until the other is whole everywhere."""
    shelf = HeldCopies(3 * S)
    for base in (A, B, C):
        take(shelf, 1, base)
        shelf.passed(base)
    shelf.new_start([1], B)
    assert held(shelf) == [(1, C, True)]
    assert shelf.everywhere is None
    assert not shelf.begin(1, B, S)[1]
    assert held(shelf) == [(1, B, False), (1, C, True)]
    shelf.finished(1, B)
    assert "newer" in take(shelf, 1, A), "nothing goes back further than training does"
    assert [copy.base for copy in shelf.passed(B)] == [C]
    assert held(shelf) == [(1, B, True)]
    assert shelf.everywhere == B


class Oracle:
    """Holders of a ring, and what must be true of them whatever comes."""

    def __init__(self, world: int, bounds: list[int]) -> None:
        self.world = world
        self.shelves = [HeldCopies(bound) for bound in bounds]
        self.whole: dict[BaseId, set[int]] = {}
        self.safe: BaseId | None = None

    def holder(self, source: int) -> HeldCopies:
        return self.shelves[(source + 1) % self.world]

    def check(self) -> None:
        for shelf in self.shelves:
            assert shelf.used_bytes <= shelf.bound_bytes
        if self.safe is not None:
            for source in range(self.world):
                copy = self.holder(source).find(source, self.safe)
                assert copy is not None, "the newest that was whole everywhere"
                assert copy.whole


@given(st.data())
def test_the_newest_base_that_was_whole_everywhere_is_never_lost(data: st.DataObject) -> None:
    """Any order of beginnings, ends, failures and news (late ones, too), any sizes and bounds."""
    world = data.draw(st.integers(2, 3))
    oracle = Oracle(world, data.draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)))
    news: list[BaseId] = []
    step = 0
    for _ in range(data.draw(st.integers(1, 30))):
        source = data.draw(st.integers(0, world - 1))
        shelf = oracle.holder(source)
        what = data.draw(st.sampled_from(["next", "begin", "finish", "drop", "hear"]))
        if what == "next":
            step += 1
            oracle.whole[BaseId(1, step)] = set()
        elif what == "begin" and step:
            base = BaseId(1, data.draw(st.integers(1, step)))
            if shelf.find(source, base) is None:
                shelf.begin(source, base, data.draw(st.integers(1, 3)))
        elif what in ("finish", "drop"):
            halves = [copy for copy in shelf.copies if copy.source == source and not copy.whole]
            for copy in halves:
                if what == "drop":
                    shelf.drop(source, copy.base)
                    continue
                shelf.finished(source, copy.base)
                there = [one for r in range(world) if (one := oracle.holder(r).find(r, copy.base))]
                newer = oracle.safe is None or copy.base > oracle.safe
                if len(there) == world and all(one.whole for one in there) and newer:
                    news.append(copy.base)
                    # Rank 0 tells all: each hears of it before the next base is sent to it.
                    for other in oracle.shelves:
                        other.passed(copy.base)
                    oracle.safe = copy.base
        elif what == "hear" and news:
            shelf.passed(data.draw(st.sampled_from(news)))
        oracle.check()


# --- Rounds ---------------------------------------------------------------------------------


def told(sends: Iterable[Send]) -> dict[int, Message]:
    return {send.rank: send.message for send in sends}


def test_all_ranks_send_the_same_base_and_the_next_when_it_is_whole_everywhere() -> None:
    rounds = CopyRounds(2)
    assert told(rounds.durable(A, 0.0)) == {0: PeerRound(A, None), 1: PeerRound(A, None)}
    assert not rounds.durable(B, 1.0)
    assert not rounds.on_reply(0, A, "whole", 2.0)
    assert rounds.everywhere is None, "one rank's copy is not all ranks'"
    assert told(rounds.on_reply(1, A, "whole", 3.0)) == {0: PeerRound(B, A), 1: PeerRound(B, A)}
    assert told(rounds.on_reply(1, B, "failed", 4.0)) == {
        0: PeerRound(None, A),
        1: PeerRound(None, A),
    }
    assert rounds.everywhere == A


def test_news_of_another_base_count_for_nothing() -> None:
    rounds = CopyRounds(2)
    rounds.durable(B, 0.0)
    for rank in (0, 1):
        assert not rounds.on_reply(rank, A, "whole", 1.0)
    assert rounds.everywhere is None


def test_the_newest_base_overtakes_those_that_wait() -> None:
    rounds = CopyRounds(1)
    rounds.durable(A, 0.0)
    rounds.durable(B, 1.0)
    rounds.durable(C, 2.0)
    assert rounds.passed_over == 1
    assert told(rounds.on_reply(0, A, "whole", 3.0)) == {0: PeerRound(C, A)}


def test_what_is_not_answered_is_said_again() -> None:
    rounds = CopyRounds(2, repeat_s=2.0)
    rounds.durable(A, 0.0)
    rounds.on_reply(0, A, "sending", 1.0)
    assert not rounds.tick(1.5)
    assert told(rounds.tick(2.5)) == {1: PeerRound(A, None)}
    rounds.on_reply(1, A, "sending", 3.0)
    assert not rounds.tick(10.0)
    rounds.on_reply(0, A, "whole", 11.0)
    rounds.on_reply(1, A, "whole", 11.0)
    rounds.on_reply(0, A, "noted", 11.5)
    assert told(rounds.tick(14.0)) == {1: PeerRound(None, A)}
    rounds.on_reply(1, A, "noted", 15.0)
    assert not rounds.tick(60.0)


def test_a_rank_that_says_nothing_ends_the_round() -> None:
    rounds = CopyRounds(2, late_s=30.0)
    rounds.durable(A, 0.0)
    rounds.on_reply(0, A, "whole", 1.0)
    rounds.durable(B, 5.0)
    rounds.tick(30.0)
    assert rounds.base == A
    rounds.tick(31.5)
    assert (rounds.base, rounds.everywhere) == (B, None)


# --- Messages ---------------------------------------------------------------------------

MARKER = Marker(
    "run", 1, 10, 10, 1, 2, True, (FileRecord("rank-00001.safetensors", 9, 8, "0" * 32, "1" * 32),)
)


@pytest.mark.parametrize(
    "message",
    [
        PeerRound(None, None),
        PeerRound(A, B),
        PeerRoundReply(A, "whole"),
        PeerCopyBegin(Stored(MARKER), b"record"),
        PeerCopyChunk(A, 3, b"bytes"),
        PeerCopyAck(A, 3, True, ""),
        ChunkRequest(A, 1, 0, 5),
        ChunkReply(A, 1, 0, b"bytes"),
        FetchProgress(1, True),
    ],
)
def test_messages_come_back_as_they_were(message: Message) -> None:
    envelope = Envelope("s", 1, message)
    data = encode_message(envelope)
    assert decode_message(data) == envelope
    with pytest.raises(FormatError):
        decode_message(data[:-1])
