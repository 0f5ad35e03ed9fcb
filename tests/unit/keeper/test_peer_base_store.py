"""Memory for other nodes' copies: whole or not at all, within its bound, whatever a link does to
the parts."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from everstep.commit.job.messages import PeerCopyAck, PeerCopyBegin, PeerCopyChunk
from everstep.commit.lineage import BaseId
from everstep.format.header import ShardIdentity, plan_files
from everstep.format.message_codec import Stored
from everstep.format.records import Marker, TimelineRecord
from everstep.format.writer import digest_shard
from everstep.keeper.held.peer_stores import PeerBaseStore
from everstep.restore.fetch.held import size_of
from everstep.state.layout.entries import Entry
from everstep.testing.conformance import at_once
from tests.support.ranks.peering import BodyOfBytes

_RUN = "0" * 32
_PART_BYTES = 1000
_SIZE_BYTES = 20_000
_BOUND_BYTES = 1 << 26
_A = BaseId(1, 10)
_B = BaseId(1, 20)
_C = BaseId(1, 30)


@dataclass(frozen=True, slots=True)
class _Files:
    """A rank's files of a base, as a sender has them."""

    base: BaseId
    source: int
    begun: PeerCopyBegin
    data: bytes

    def parts(self, size_bytes: int = _PART_BYTES) -> list[PeerCopyChunk]:
        steps = range(0, len(self.data), size_bytes)
        return [PeerCopyChunk(self.base, at, self.data[at : at + size_bytes]) for at in steps]

    def send(self, store: PeerBaseStore) -> PeerCopyAck:
        """All of it, as over a link that loses nothing."""
        at = store.begun(self.source, self.begun)
        for part in self.parts():
            if at.problem:
                break
            at = store.part(self.source, part)
        return at


def _files(source: int, base: BaseId, *, size_bytes: int = _SIZE_BYTES, salt: int = 0) -> _Files:
    """Files that no other rank, base or attempt has."""
    identity = ShardIdentity(_RUN, base.timeline, base.step, base.step, source, 8, True)
    pattern = bytes((at * 7 + source * 31 + base.step + salt) % 251 for at in range(251))
    data = (pattern * (size_bytes // 251 + 1))[:size_bytes]
    (plan,) = plan_files(identity, [Entry.whole("t", "U8", (size_bytes,))], {}, {})
    written = digest_shard(plan, identity, BodyOfBytes(data))
    marker = Marker.of(identity, (written.record,))
    record = TimelineRecord(_RUN, base.timeline, None, 0, True, 8, {}, 0.0).encode()
    return _Files(base, source, PeerCopyBegin(Stored(marker), record), written.header + data)


def _opened(bound_bytes: int = _BOUND_BYTES) -> PeerBaseStore:
    store = PeerBaseStore()
    store.new_start(bound_bytes, range(8), None)
    return store


def _held(store: PeerBaseStore) -> dict[tuple[int, BaseId], bytes]:
    return {
        (copy.marker.rank, BaseId(copy.marker.timeline, copy.marker.step)): bytes(copy.memory)
        for copy, _ in store.whole()
    }


def _one(files: _Files) -> dict[tuple[int, BaseId], bytes]:
    return {(files.source, files.base): files.data}


# --- Whole, or not at all ---------------------------------------------------------------


def test_what_was_sent_is_held() -> None:
    """Byte by byte, with its marker and the record of its timeline; and begun again it is there."""
    store = _opened()
    files = _files(1, _A)
    at = files.send(store)
    assert (at.whole, at.problem) == (True, ""), at
    assert _held(store) == _one(files)
    ((copy, _),) = store.whole()
    assert (copy.marker, copy.record) == (files.begun.marker.record, files.begun.record)
    again = store.begun(1, files.begun)
    there = again.whole, again.received_bytes
    assert there == (True, len(files.data)), "it need not be sent again"


def test_a_cut_off_copy_is_no_copy() -> None:
    """Up to its last byte; and goes on from where it was cut off."""
    store = _opened()
    files = _files(1, _A)
    store.begun(1, files.begun)
    last = len(files.data) - 1
    for part in files.parts()[:-1]:
        assert not store.part(1, part).whole
    at = files.parts()[-1].offset
    store.part(1, PeerCopyChunk(_A, at, files.data[at:last]))
    assert not _held(store), "a copy without its last byte is offered"
    where = store.begun(1, files.begun)
    assert (where.received_bytes, where.whole) == (last, False)
    assert store.part(1, PeerCopyChunk(_A, last, files.data[last:])).whole
    assert _held(store) == _one(files)


def test_lost_parts_are_asked_for_again() -> None:
    """Whatever is missing, the answer says from where."""
    store = _opened()
    files = _files(1, _A)
    store.begun(1, files.begun)
    parts = files.parts()
    for lost in range(0, len(parts), 5):
        for part in parts[lost + 1 : lost + 3]:
            at = store.part(1, part)
            assert at.received_bytes == parts[lost].offset, "bytes after a gap were counted"
        for part in parts[lost : lost + 5]:
            store.part(1, part)
    assert _held(store) == _one(files)


def test_doubled_parts_do_no_harm() -> None:
    """Nor does a message that comes late, with what was sent before."""
    store = _opened()
    files = _files(1, _A)
    store.begun(1, files.begun)
    parts = files.parts()
    for number, part in enumerate(parts):
        there = store.part(1, part).received_bytes
        for old in (part, parts[0], parts[number // 2]):
            assert store.part(1, old).received_bytes == there, "it has gone back, or on"
        assert store.begun(1, files.begun).received_bytes == there
    assert _held(store) == _one(files)


def test_parts_out_of_order_are_not_taken() -> None:
    """The last first: nothing of it stays where it does not belong."""
    store = _opened()
    files = _files(1, _A)
    store.begun(1, files.begun)
    for part in reversed(files.parts()[1:]):
        assert store.part(1, part).received_bytes == 0
    assert not _held(store)
    files.send(store)
    assert _held(store) == _one(files)


def test_what_is_no_part_of_it_is_not_taken() -> None:
    """Behind its end, over its end, of nothing, or of a base that was never begun."""
    store = _opened()
    files = _files(1, _A)
    assert store.part(1, files.parts()[0]).problem, "of a base that was never begun"
    store.begun(1, files.begun)
    first = files.parts()[0]
    store.part(1, first)
    there = len(first.data)
    over = PeerCopyChunk(_A, there, files.data[there:] + b"x")
    for wrong in (over, PeerCopyChunk(_A, there, b""), PeerCopyChunk(_A, len(files.data), b"x")):
        assert store.part(1, wrong).received_bytes == there
    assert files.send(store).whole
    assert _held(store) == _one(files)


def test_damaged_bytes_are_no_copy() -> None:
    """One bit of header or data: said, let go, and what was there before stays."""
    store = _opened()
    old = _files(1, _A)
    files = _files(1, _B)
    old.send(store)
    used_bytes = store.used_bytes
    for at in (3, len(files.data) // 2, len(files.data) - 1):
        wrong = bytearray(files.data)
        wrong[at] ^= 4
        said = _Files(files.base, 1, files.begun, bytes(wrong)).send(store)
        assert said.problem, "not noticed"
        assert not said.whole
        assert _held(store) == _one(old)
        assert store.used_bytes == used_bytes, "what is damaged takes memory"
    assert files.send(store).whole
    assert _held(store)[1, _B] == files.data


def test_another_attempt_is_not_mixed_in() -> None:
    """The same base of the same rank, in other bytes: from its first byte on."""
    store = _opened()
    first = _files(1, _A)
    other = _files(1, _A, salt=1)
    store.begun(1, first.begun)
    for part in first.parts()[:7]:
        store.part(1, part)
    assert store.begun(1, other.begun).received_bytes == 0
    other.send(store)
    assert _held(store) == _one(other)


def test_nobody_sends_for_another() -> None:
    """Files are taken from the rank whose they are."""
    store = _opened()
    files = _files(1, _A)
    assert store.begun(2, files.begun).problem
    store.begun(1, files.begun)
    assert store.part(2, files.parts()[0]).problem
    assert store.begun(1, files.begun).received_bytes == 0
    assert not _held(store)


# --- What stays, and how much of it -----------------------------------------------------


def test_older_copies_stay_until_a_newer_one_is_whole_everywhere() -> None:
    """There is always one, once there was one; and of each rank two at most."""
    store = _opened()
    a, b, c = (_files(1, base) for base in (_A, _B, _C))
    a.send(store)
    store.passed(_A)
    store.begun(1, b.begun)
    for part in b.parts()[:-1]:
        store.part(1, part)
        assert _held(store) == _one(a)
    b.send(store)
    assert _held(store) == {**_one(a), **_one(b)}
    c.send(store)
    assert _held(store) == {**_one(a), **_one(c)}, "the one that is whole everywhere has to stay"
    store.passed(_C)
    assert _held(store) == _one(c)
    assert a.send(store).problem, "older ones are not taken any more"
    assert _held(store) == _one(c)


def test_the_bound_is_kept() -> None:
    """A copy that does not fit is refused, and no other copy is dropped for it."""
    a = _files(1, _A)
    large = _files(2, _A, size_bytes=1 << 20)
    measured = _opened()
    a.send(measured)
    bound_bytes = 2 * measured.used_bytes
    store = _opened(bound_bytes)
    a.send(store)
    refused = large.send(store)
    assert str(bound_bytes) in refused.problem, refused
    assert store.used_bytes <= bound_bytes
    assert _held(store) == _one(a)
    assert _files(2, _A).send(store).whole, "what fits is taken"
    assert store.used_bytes <= bound_bytes
    assert _files(3, _A).send(store).problem
    assert store.used_bytes <= bound_bytes


def test_halves_end_with_the_start() -> None:
    """At a new start of the job what is whole stays, and what is not is gone."""
    store = _opened()
    whole = _files(1, _A)
    half = _files(1, _B)
    whole.send(store)
    used_bytes = store.used_bytes
    store.begun(1, half.begun)
    store.part(1, half.parts()[0])
    store.new_start(_BOUND_BYTES, range(8), None)
    assert _held(store) == _one(whole)
    assert store.used_bytes == used_bytes
    assert store.part(1, half.parts()[1]).problem, "it goes on with a half"


# --- Many at once -----------------------------------------------------------------------


def test_many_send_at_once() -> None:
    """Each its own files, each whole."""
    store = _opened()

    def send(source: int) -> _Files:
        files = _files(source, _A)
        assert files.send(store).whole
        return files

    wanted: dict[tuple[int, BaseId], bytes] = {}
    for files in at_once(send):
        wanted |= _one(files)
    assert _held(store) == wanted


def test_readers_keep_what_they_have_opened() -> None:
    """While newer bases come and older ones go, whoever has a copy reads its bytes."""
    store = _opened()
    files = _files(1, _A)
    files.send(store)
    store.passed(_A)
    opened = threading.Barrier(8, timeout=60.0)
    over = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            opened.wait()
            try:
                for step in range(20, 120, 10):
                    newer = _files(1, BaseId(1, step))
                    assert newer.send(store).whole
                    store.passed(newer.base)
            finally:
                over.set()
            return
        ((copy, arena),) = store.whole()
        opened.wait()
        while not over.is_set():
            assert bytes(copy.memory) == files.data, "it was written over"
        assert bytes(copy.memory) == files.data
        assert bytes(arena.view[: size_of(copy.marker)]) == files.data

    at_once(work)
    assert list(_held(store)) == [(1, BaseId(1, 110))]
