"""The memory that holds copies for other nodes keeps its promises; and each of the checks that say
so fails where just that promise is broken."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from everstep.arena.memory import Arena
from everstep.commit.job.messages import PeerCopyAck, PeerCopyBegin, PeerCopyChunk
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import Copy
from everstep.keeper.held import peer_base_store as peer_store
from everstep.keeper.held.peer_base_store import PeerBaseStore
from everstep.restore.fetch.peer_copy import PeerCopy, size_of
from everstep.testing import peer_conformance
from everstep.testing.peer_conformance import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_store_of_keepers_passes(check: Check) -> None:
    check(PeerBaseStore)


class _Forgets(PeerBaseStore):
    def whole(self) -> list[tuple[PeerCopy, Arena]]:
        return []


class _OffersHalves(PeerBaseStore):
    def whole(self) -> list[tuple[PeerCopy, Arena]]:
        found = []
        for one in self._memories.values():
            memory = one.arena.view[: size_of(one.marker)]
            found.append((PeerCopy(one.marker, one.record, memory), one.arena))
        return found


class _TakesGaps(PeerBaseStore):
    """Counts what comes, wherever it belongs."""

    def part(self, source: int, message: PeerCopyChunk) -> PeerCopyAck:
        one = self._memories.get((source, message.base))
        if one is not None and message.data and message.offset > one.received_bytes:
            message = PeerCopyChunk(message.base, one.received_bytes, message.data)
        return super().part(source, message)


class _TakesAgain(PeerBaseStore):
    """Goes back to where a part belongs."""

    def part(self, source: int, message: PeerCopyChunk) -> PeerCopyAck:
        one = self._memories.get((source, message.base))
        if one is not None and message.offset < one.received_bytes < size_of(one.marker):
            one.received_bytes = message.offset
        return super().part(source, message)


class _CutsOff(PeerBaseStore):
    """Takes of a part that is too long what fits."""

    def part(self, source: int, message: PeerCopyChunk) -> PeerCopyAck:
        one = self._memories.get((source, message.base))
        if one is not None:
            left = size_of(one.marker) - message.offset
            message = PeerCopyChunk(message.base, message.offset, message.data[: max(0, left)])
        return super().part(source, message)


class _GoesOnWithAnother(PeerBaseStore):
    def begun(self, source: int, message: PeerCopyBegin) -> PeerCopyAck:
        base = BaseId(message.marker.record.timeline, message.marker.record.step)
        known = self._memories.get((source, base))
        if known is not None:
            known.marker = message.marker.record
        return super().begun(source, message)


class _TakesFromAnybody(PeerBaseStore):
    def part(self, source: int, message: PeerCopyChunk) -> PeerCopyAck:
        owner = next((s for s, base in self._memories if base == message.base), source)
        return super().part(owner, message)


class _LetsGoEarly(PeerBaseStore):
    def begun(self, source: int, message: PeerCopyBegin) -> PeerCopyAck:
        at = super().begun(source, message)
        base = BaseId(message.marker.record.timeline, message.marker.record.step)
        self._free([Copy(source, other, 0) for _, other in list(self._memories) if other < base])
        return at

    def whole(self) -> list[tuple[PeerCopy, Arena]]:
        known = self._shelf._copies
        for key in [key for key in known if key not in self._memories]:
            del known[key]
        return super().whole()


class _Unbound(PeerBaseStore):
    def new_start(
        self,
        bound_bytes: int,
        sources: Collection[int],
        recovered: BaseId | None,
        spare: BaseId | None = None,
    ) -> None:
        super().new_start(1 << 40, sources, recovered, spare)


class _KeepsHalves(PeerBaseStore):
    def new_start(
        self,
        bound_bytes: int,
        sources: Collection[int],
        recovered: BaseId | None,
        spare: BaseId | None = None,
    ) -> None:
        self._shelf.bound_bytes = bound_bytes


class _OneAtATime(PeerBaseStore):
    """A second sender ends the first one's copy."""

    def begun(self, source: int, message: PeerCopyBegin) -> PeerCopyAck:
        for other, base in list(self._memories):
            copy = self._shelf.find(other, base)
            if other != source and copy is not None:
                self._shelf.drop(other, base)
                del self._memories[other, base]
        return super().begun(source, message)


class _Reuses(PeerBaseStore):
    """Writes new copies over old ones, whoever reads these."""

    def begun(self, source: int, message: PeerCopyBegin) -> PeerCopyAck:
        old = [one for (who, _), one in self._memories.items() if who == source]
        at = super().begun(source, message)
        base = BaseId(message.marker.record.timeline, message.marker.record.step)
        if old and (new := self._memories.get((source, base))) is not None:
            new.arena = old[0].arena
        return at


@pytest.mark.parametrize(
    ("store", "check"),
    [
        (_Forgets, peer_conformance.what_was_sent_is_held),
        (_OffersHalves, peer_conformance.a_cut_off_copy_is_no_copy),
        (_TakesGaps, peer_conformance.lost_parts_are_asked_for_again),
        (_TakesAgain, peer_conformance.doubled_parts_do_no_harm),
        (_TakesGaps, peer_conformance.parts_out_of_order_are_not_taken),
        (_CutsOff, peer_conformance.what_is_no_part_of_it_is_not_taken),
        (_GoesOnWithAnother, peer_conformance.another_attempt_is_not_mixed_in),
        (_TakesFromAnybody, peer_conformance.nobody_sends_for_another),
        (_LetsGoEarly, peer_conformance.older_copies_stay_until_a_newer_one_is_whole_everywhere),
        (_Unbound, peer_conformance.the_bound_is_kept),
        (_KeepsHalves, peer_conformance.halves_end_with_the_start),
        (_OneAtATime, peer_conformance.many_send_at_once),
        (_Reuses, peer_conformance.readers_keep_what_they_have_opened),
    ],
    ids=lambda value: value.__name__.strip("_"),
)
def test_each_check_finds_the_promise_that_is_broken(
    store: type[PeerBaseStore], check: Check
) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(store)


def test_damage_is_found_by_the_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_store, "check_files", lambda marker, memory: None)
    with pytest.raises(AssertionError, match="not noticed"):
        peer_conformance.damaged_bytes_are_no_copy(PeerBaseStore)


def test_every_check_has_a_store_that_fails_it() -> None:
    assert len(CHECKS) == len({check.__name__ for check in CHECKS}) == 14
