"""Keepers send their logs to each other: in order, whole, within a bound, and as long as needed."""

from __future__ import annotations

import dataclasses
import random

import pytest
from msgspec import structs

from everstep.commit.job.messages import (
    Message,
    PeerCopyChunk,
    PeerLogAck,
    PeerLogBegin,
    PeerLogChunk,
)
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import HeldLogCopies, LogCopy, merge_runs, run_of
from everstep.errors import DamageError, EverstepError, FormatError
from everstep.format.log import LogRecord, RecordHead
from everstep.keeper.held.peer_stores import PeerLogStore
from everstep.keeper.ship import senders
from everstep.restore.fetch.held import pack_steps, unpack_steps
from tests.support.ranks.peer_logs import (
    LOG_BYTES,
    LogRing,
    heads_of_step,
    log_of,
    records_of_steps,
)
from tests.support.ranks.peering import SlowRing, record_of


def heads(*steps: int) -> list[RecordHead]:
    return [head for step in steps for head in heads_of_step(step)]


# --- Machines ---------------------------------------------------------------------------


def test_steps_that_follow_each_other_are_a_run() -> None:
    assert run_of(heads(3, 4, 5)) == LogRun(1, 3, 4, (6, 8, 10), "s")
    mark = RecordHead("mark", 1, 7, 12, "s")
    assert run_of([mark]) == LogRun(1, 7, 12, (12,), "s"), "a step without an update"


def without(at: int) -> list[RecordHead]:
    found = heads(3, 4, 5)
    del found[at]
    return found


def swapped(at: int) -> list[RecordHead]:
    found = heads(3, 4, 5)
    found[at], found[at + 1] = found[at + 1], found[at]
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        *(without(at) for at in range(1, 9)),
        *(swapped(at) for at in range(8)),
        heads(3, 5),
        heads(4, 3),
        heads(3, 3),
        [*heads(3), *heads_of_step(4, timeline=2)],
        [*heads(3), *heads_of_step(4, shape="other")],
    ],
)
def test_anything_else_is_refused(wrong: list[RecordHead]) -> None:
    with pytest.raises(FormatError):
        run_of(wrong)


def test_what_a_peer_has_fills_what_a_log_lacks() -> None:
    own, lent = run_of(heads(6, 7)), run_of(heads(3, 4, 5))
    assert merge_runs([own], [lent]) == (run_of(heads(3, 4, 5, 6, 7)),)
    assert merge_runs([], [lent]) == (lent,)
    assert merge_runs([own], [run_of(heads(3, 4))]) == (run_of(heads(3, 4)), own), "5 is missing"
    other = dataclasses.replace(own, shape="other")
    assert merge_runs([own], [other]) == (own,), "what a rank has itself counts"


def copy(source: int, *steps: int, size: int = 10, record: str = "r") -> LogCopy:
    return LogCopy(source, record, run_of(heads(*steps)), size)


def test_steps_go_when_a_newer_base_is_whole_with_all_peers() -> None:
    shelf = HeldLogCopies(100)
    for one in (copy(1, 3, 4), copy(1, 5, 6), copy(2, 3, 4), copy(3, 3, 4)):
        shelf.take(one)
    gone = shelf.passed(BaseId(1, 5), there=[1], sources=[1, 2])
    assert [(one.source, one.run.last) for one in gone] == [(1, 4), (3, 4)]
    left = [(one.source, one.run.last) for one in shelf.copies]
    assert left == [(1, 6), (2, 4)], "of rank 2 the base is not here: its log is all there is"
    assert [one.source for one in shelf.passed(BaseId(2, 1), [1, 2], [1, 2])] == [1, 2]


def test_another_start_with_the_same_number_takes_its_place() -> None:
    shelf = HeldLogCopies(100)
    shelf.take(copy(1, 3, record="old"))
    shelf.take(copy(2, 3, record="old"))
    assert shelf.drop_other_timeline(1, 1, "old") == []
    assert [one.source for one in shelf.drop_other_timeline(1, 1, "new")] == [1]


# --- Steps as one piece of memory --------------------------------------------------------


def test_records_come_back_as_they_were() -> None:
    records = records_of_steps(3, 5)
    found = unpack_steps(pack_steps(records))
    for one, other in zip(records, found, strict=True):
        assert (one.head, one.layout, dict(one.objects)) == (
            other.head,
            other.layout,
            dict(other.objects),
        )
        assert bytes(one.data) == bytes(other.data)


def test_every_flipped_byte_of_steps_is_found() -> None:
    steps = pack_steps(records_of_steps(3, 3, size_bytes=64))
    for at in range(steps.memory.nbytes):
        steps.memory[at] ^= 16
        with pytest.raises(DamageError):
            unpack_steps(steps)
        steps.memory[at] ^= 16
    unpack_steps(steps)


def test_memory_that_is_used_again_is_not_packed() -> None:
    records = records_of_steps(3, 4)
    records[1].data[0] ^= 1
    with pytest.raises(DamageError):
        pack_steps(records)


# --- From keeper to keeper ----------------------------------------------------------------


class Loading:
    """Makes nothing approximate, and whoever asks it before it is ready would wait."""

    ready = False

    def __call__(self, record: LogRecord) -> LogRecord:
        assert self.ready
        return record


def test_bases_are_sent_while_torch_is_being_loaded() -> None:
    loading = Loading()
    ring = LogRing("ab", shrink=loading)
    ring.train(1, 2)
    ring.base(1)
    assert ring.held(1) == [(0, 1)]
    assert ring.logs(1) == []
    loading.ready = True
    ring.run()
    assert ring.logs(1) == [(0, [2])]


def test_each_step_ends_in_the_memory_of_the_next_node() -> None:
    ring = LogRing("abc")
    ring.train(1, 2)
    ring.run()
    ring.train(3)
    ring.run()
    assert [ring.logs(rank) for rank in range(3)] == [
        [((rank - 1) % 3, [1, 2, 3])] for rank in range(3)
    ]
    assert not any(ring.notices)
    assert all(one.log is not None and one.log.stats.step == 3 for one in ring.ranks)


def test_steps_stay_until_a_base_is_whole_with_all_peers() -> None:
    ring = LogRing("ab")
    ring.train(1)
    ring.base(1)
    for step in (2, 3, 4):
        ring.train(step)
        ring.run()
    assert ring.logs(1) == [(0, [2, 3, 4])]
    ring.lost = lambda sender, to, message: isinstance(message, PeerCopyChunk) and sender == 1
    ring.base(3)
    ring.run(10.0)
    assert ring.held(1) == [(0, 1), (0, 3)], "whole here, and not with the other one's peer"
    assert (ring.logs(0), ring.logs(1)) == ([(1, [2, 3, 4])], [(0, [2, 3, 4])])
    ring.lost = lambda sender, to, message: False
    ring.run(10.0)
    ring.train(5)
    ring.base(5)
    ring.run(60.0, tick_s=1.0)  # at its pace
    assert (ring.logs(0), ring.logs(1)) == ([], [])


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_are_lost_on_the_way_are_sent_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "CHUNK_BYTES", 500)
    rng = random.Random(seed)
    ring = LogRing("ab", timeout_s=300.0)
    ring.lost = lambda sender, to, message: rng.random() < 0.3
    for step in range(1, 6):
        ring.train(step)
        ring.run(60.0, tick_s=0.5)
    assert [ring.logs(rank) for rank in range(2)] == [
        [(1, [1, 2, 3, 4, 5])],
        [(0, [1, 2, 3, 4, 5])],
    ]
    assert not any(ring.notices)
    for rank in range(2):
        found = [r for log, _ in ring.ranks[rank].logs.whole()[0] for r in unpack_steps(log.steps)]
        wanted = records_of_steps(1, 5)
        assert [bytes(r.data) for r in found] == [bytes(r.data) for r in wanted]


def test_bytes_that_have_changed_on_the_way_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = LogRing("ab")
    send, unusable = ring.send, list[Message]()

    def spoil(sender: int, to: int, message: Message) -> None:
        if isinstance(message, PeerLogChunk) and sender == 0 and len(unusable) < 3:
            unusable.append(message)
            changed = bytes([message.data[0] ^ 1, *message.data[1:]])
            message = structs.replace(message, data=changed)
        send(sender, to, message)

    monkeypatch.setattr(ring, "send", spoil)
    ring.train(1, 2)
    ring.run(5.0)
    assert ring.logs(1) == []
    assert "damaged" in str(ring.notices[0])
    ring.train(3)
    ring.run(5.0)
    assert ring.logs(1) == [(0, [3])], "behind a hole, which is said"
    assert ring.ranks[0].log is not None
    assert ring.ranks[0].log.stats.missed >= 2


def test_what_has_no_room_is_said_and_goes_on_behind_the_next_base() -> None:
    ring = LogRing("ab", log_bytes=4096, size=2000)
    ring.train(1)
    ring.base(1)
    for step in (2, 3, 4):
        ring.train(step)
        ring.run()
    assert ring.logs(1) == [], "not one of 3 records of 2000 bytes and their index"
    assert "is full" in str(ring.notices[0])
    assert "is 4096" in str(ring.notices[0])
    ring = LogRing("ab", log_bytes=4096 * 4, size=2000)
    ring.train(1)
    ring.base(1)
    for step in (2, 3, 4, 5):
        ring.train(step)
        ring.run()
    assert ring.logs(1) == [(0, [2, 3])]
    assert ring.ranks[1].logs.used_bytes <= 4096 * 4 + (1 << 16)
    assert len(ring.notices[0]) == 1
    assert "from step 4 on" in str(ring.notices[0])
    ring.base(5)
    ring.train(6)
    ring.run(5.0)
    assert ring.logs(1) == [(0, [6])]


def test_what_was_let_go_before_it_was_sent_is_said() -> None:
    ring = LogRing("ab")
    ring.train(1)
    ring.base(1)
    ring.lost = lambda sender, to, message: isinstance(message, PeerLogBegin)
    ring.train(2)
    ring.run()
    ring.train(3, 4)
    for log in ring.mine:
        log.forget_all()
    ring.train(5)
    ring.lost = lambda sender, to, message: False
    ring.run(5.0)
    assert ring.logs(1) == [(0, [2, 5])]
    assert "steps 3 to 4" in str(ring.notices[0])
    assert ring.ranks[0].log is not None
    assert ring.ranks[0].log.stats.missed == 2


def test_memory_that_is_written_over_is_not_sent() -> None:
    ring = LogRing("ab")
    ring.train(1, 2)
    for log in ring.mine:
        log.overwrite()
    ring.train(3)
    ring.run()
    assert ring.logs(1) in ([], [(0, [3])])
    assert "were released" in str(ring.notices[0])
    ring.train(4)
    ring.run()
    (found,) = ring.logs(1)
    assert 4 in found[1]
    assert not {1, 2} & set(found[1])


def test_a_peer_whose_keeper_was_replaced_gets_what_comes_then() -> None:
    ring = LogRing("ab")
    ring.train(1)
    ring.run()
    ring.replace(1)
    ring.join(1)
    ring.train(2)
    ring.run(5.0)
    assert ring.logs(1) == [(0, [2])]


def test_a_peer_that_says_nothing_is_named() -> None:
    ring = LogRing("ab")
    ring.lost = lambda sender, to, message: isinstance(message, PeerLogBegin) and sender == 0
    ring.train(1)
    ring.run(60.0)
    (notice,) = ring.notices[0]
    assert "rank 1" in str(notice)
    assert "20 s" in str(notice)
    ring.lost = lambda sender, to, message: False
    ring.run(5.0)
    assert ring.logs(1) == [(0, [1])]


def test_the_pace_is_kept_for_the_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(senders, "CHUNK_BYTES", 1000)
    ring = LogRing("ab", log_rate=1000.0, size=3000)
    ring.train(1)

    def sent_bytes() -> int:
        return sum(len(m.data) for s, _, m in ring.said if isinstance(m, PeerLogChunk) and s == 0)

    for second in range(1, 6):
        ring.run(1.0)
        assert sent_bytes() <= (second + 1) * 1000, "a part ahead at most"
    assert sent_bytes() >= 4000
    ring.run(10.0)
    assert ring.logs(1) == [(0, [1])]


def test_a_slow_peer_is_not_buried_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes longer than an answer is waited for: nothing is sent twice because of it, and
    how far the peer is, is said."""
    monkeypatch.setattr(senders, "CHUNK_BYTES", 30_000)

    class Slow(LogRing, SlowRing):
        """Three seconds for a part."""

    ring = Slow("ab", size=50_000)
    for step in range(1, 5):
        ring.train(step)
        ring.run(5.0, tick_s=0.5)
    sender = ring.ranks[0].log
    assert sender is not None
    assert (sender.stats.step or 0) < 4, "behind training, which goes on"
    ring.run(60.0, tick_s=0.5)
    assert ring.logs(1) == [(0, [1, 2, 3, 4])]
    assert (sender.stats.step, sender.stats.missed) == (4, 0)
    assert ring.most_on_way_bytes <= 140_000, "four parts, and questions"
    assert ring.arrived_bytes <= 1.2 * sender.stats.copied_bytes, "hardly anything is sent twice"
    assert not ring.notices[0]


# --- What a store refuses ------------------------------------------------------------------


def begun(first: int, last: int, session: str = "s") -> tuple[PeerLogBegin, bytes]:
    log = log_of(1, first, last, session=session)
    steps = log.steps
    about = steps.memory.nbytes, steps.index_bytes, steps.index_digest
    return PeerLogBegin(1, first, last, log.record, *about), bytes(steps.memory)


def put(store: PeerLogStore, first: int, last: int, session: str = "s") -> PeerLogAck:
    message, data = begun(first, last, session)
    answer = store.begun(1, message)
    if answer.state != "more":
        return answer
    return store.part(1, PeerLogChunk(1, first, 0, data))


def store_of(bound_bytes: int = LOG_BYTES) -> PeerLogStore:
    store = PeerLogStore()
    store.new_start(bound_bytes, [1])
    return store


def test_parts_of_steps_count_only_in_their_order() -> None:
    store = store_of()
    message, data = begun(1, 2)
    assert store.part(1, PeerLogChunk(1, 1, 0, data)).state == "lost"
    assert store.begun(1, message).state == "more"
    assert store.part(1, PeerLogChunk(1, 1, 10, data[10:])).received_bytes == 0
    assert store.part(1, PeerLogChunk(1, 1, 0, data[:10])).received_bytes == 10
    assert store.part(1, PeerLogChunk(1, 1, 10, data[10:] + b"x")).received_bytes == 10
    assert store.part(1, PeerLogChunk(1, 1, 10, data[10:])).state == "whole"
    assert store.part(1, PeerLogChunk(1, 1, 10, data[10:])).state == "whole", "once more"
    assert store.begun(1, message).state == "whole"
    assert store.held == {1: 2}


def test_steps_that_are_there_are_not_taken_twice() -> None:
    store = store_of()
    assert put(store, 1, 3).state == "whole"
    assert put(store, 2, 4).state == "refused"
    assert put(store, 4, 4).state == "whole"
    assert store.held == {1: 4}


def test_steps_of_another_start_take_the_place_of_those_of_the_same_number() -> None:
    store = store_of()
    assert put(store, 1, 3).state == "whole"
    assert put(store, 2, 2, session="another start").state == "whole"
    ((log, _),) = store.whole()[0]
    assert log.record == record_of(1, "another start").encode()


def test_other_steps_than_were_announced_are_refused() -> None:
    store = store_of()
    message, data = begun(1, 3)
    store.begun(1, structs.replace(message, last=2))
    assert store.part(1, PeerLogChunk(1, 1, 0, data)).state == "refused"
    assert store.held == {}


def test_a_new_start_drops_what_was_on_its_way() -> None:
    store = store_of()
    put(store, 1, 2)
    message, data = begun(3, 3)
    store.begun(1, message)
    store.part(1, PeerLogChunk(1, 3, 0, data[:10]))
    store.new_start(LOG_BYTES, [1])
    assert store.part(1, PeerLogChunk(1, 3, 10, data[10:])).state == "lost"
    assert store.held == {1: 2}
    store.passed(BaseId(2, 1), {1})
    assert store.held == {}
    store.new_start(LOG_BYTES // 2, [1])
    assert store.used_bytes == 0


def test_without_room_nothing_is_taken() -> None:
    store = store_of(0)
    assert put(store, 1, 1).state == "full"
    assert store.used_bytes == 0


def test_the_announced_bound_is_never_passed() -> None:
    store = store_of(3 * 4096)
    states = [put(store, step, step).state for step in range(1, 6)]
    assert states == ["whole", "whole", "whole", "full", "full"]
    assert store.used_bytes <= 3 * 4096 + (1 << 16)


def test_internal_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with a batch is told, and the next one is tried."""
    ring = LogRing("ab")
    monkeypatch.setattr(senders, "pack_steps", _refuse)
    ring.train(1)
    ring.run()
    assert "refused" in str(ring.notices[0])


def _refuse(records: object) -> EverstepError:
    raise FormatError("refused")
