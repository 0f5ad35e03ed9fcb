"""What all ranks restore: the newest element of the intersection, along the history (I7)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.commit.job.messages import decode_choice, decode_offer, encode_choice, encode_offer
from everstep.commit.job.offers import BaseOffer, Choice, Excluded, Offer, Piece, Source, choose
from everstep.commit.lineage import BaseId
from everstep.commit.retention import TIERS
from everstep.errors import FormatError, RecoveryError
from everstep.format.digests import digest
from everstep.format.records import Manifest, manifest_of
from tests.support.offers import marker, offer, own, pieces, record


def test_the_newest_that_all_have() -> None:
    choice = choose([own(0, 10, 20, 30), own(1, 10, 20)])
    assert choice.base == BaseId(1, 20)
    assert choice.sources == {0: (Source(2, 0),), 1: (Source(2, 1),)}
    assert choice.timeline == 2
    assert [manifest.step for manifest in choice.complete] == [10, 20]


def test_not_the_minimum_of_the_maxima() -> None:
    """20 is the older one of the newest, and rank 0 does not have it."""
    choice = choose([own(0, 10, 30), own(1, 10, 20)])
    assert choice.base == BaseId(1, 10)
    assert dict(choice.skipped)[BaseId(1, 20)] == "the files of rank 0 are missing"


def test_by_timeline_and_not_by_number() -> None:
    """After a rewind to 10, step 40 of the old timeline is not newer than step 20 of the new."""
    timelines = {1: record(1), 2: record(2, BaseId(1, 10))}
    bases = [BaseId(1, 10), BaseId(1, 40), BaseId(2, 20)]
    offers = [
        offer(
            rank,
            {base: BaseOffer(pieces(base, [rank], 2)) for base in bases},
            timelines=timelines,
            next_timeline=3,
        )
        for rank in range(2)
    ]
    assert choose(offers).base == BaseId(2, 20)
    without = [
        offer(o.rank, {b: v for b, v in o.bases.items() if b.timeline == 1}, timelines=timelines)
        for o in offers
    ]
    assert choose(without).base == BaseId(1, 10)
    assert choose(without, step=40).base == BaseId(1, 40)


def test_ranks_that_do_not_fetch_need_their_own() -> None:
    """Each rank has one half; with the world changed each needs both."""
    offers = [own(0, 10), own(1, 10)]
    assert choose(offers, fetch=False, needs=lambda rank, manifest: (rank,)).base == BaseId(1, 10)
    with pytest.raises(RecoveryError, match="rank 0 cannot read the files of rank 1"):
        choose(offers, fetch=False)


def test_the_cheapest_source_first_and_damage_falls_through() -> None:
    base = BaseId(1, 10)
    offers = [
        offer(0, {base: BaseOffer(pieces(base, [0, 1], 2, ("object",)))}),
        offer(1, {base: BaseOffer(pieces(base, [1], 2, ("memory", "disk")))}),
    ]
    assert choose(offers).sources[1] == (Source(0, 1), Source(2, 1), Source(4, 0))
    unusable = {(base, 1, Source(0, 1)), (base, 1, Source(2, 1))}
    assert choose(offers, excluded=Excluded(files=unusable)).sources[1] == (Source(4, 0),)
    with pytest.raises(RecoveryError, match="the files of rank 1 are damaged"):
        choose(offers, excluded=Excluded(files={*unusable, (base, 1, Source(4, 0))}))


@pytest.mark.parametrize("tiers", list(itertools.product((False, True), repeat=3)))
def test_availability(tiers: tuple[bool, bool, bool]) -> None:
    """The eight tuples (memory, peer, durable) of TierCheck's section 3.3, and where to read."""
    base = BaseId(1, 10)
    there = tuple(
        t for t, is_there in zip(("memory", "peer", "disk"), tiers, strict=True) if is_there
    )
    found = {0: Piece(marker(base, 0, 1), there)} if there else {}
    one = offer(0, {base: BaseOffer(found)} if found else {})
    choice = choose([one])
    if not there:
        assert choice.base is None
        return
    assert choice.base == base
    assert [source.tier for source in choice.sources[0]] == list(there)
    assert choice.durable == ("disk" in there)
    assert bool(choice.complete) == choice.durable, "no manifest of what is only in memory (I5)"


def test_a_fresh_start() -> None:
    empty = [Offer(rank, "disk", None, 1, {}, {}) for rank in range(2)]
    choice = choose(empty)
    assert (choice.base, choice.run, choice.timeline) == (None, None, 1)
    assert choose([own(0, 10), own(1, 10)], step=0).base is None


def test_what_was_never_finished_is_no_reason_to_refuse() -> None:
    assert choose([own(0, 10), own(1)]).base is None


def test_what_was_committed_is() -> None:
    """Rank 1's disk is gone: to start afresh would throw the base away unnoticed."""
    base = BaseId(1, 10)
    committed = offer(0, {base: BaseOffer(pieces(base, [0], 2), manifest="0" * 32)})
    with pytest.raises(RecoveryError, match="the files of rank 1 are missing"):
        choose([committed, own(1)])


def test_records_that_are_damaged_are_no_fresh_start() -> None:
    with pytest.raises(RecoveryError, match="its records are damaged"):
        choose([offer(0, {}, lost=(BaseId(1, 10),))])


def test_a_step_that_is_not_there() -> None:
    with pytest.raises(RecoveryError, match="no base of step 15"):
        choose([own(0, 10), own(1, 10)], step=15)


def test_two_runs_are_not_mixed() -> None:
    with pytest.raises(RecoveryError, match="different runs"):
        choose([own(0, 10), offer(1, {}, run="another")])


def test_files_of_two_attempts_are_not_mixed() -> None:
    base = BaseId(1, 10)
    other = {1: Piece(marker(base, 1, 2)), 0: Piece(marker(base, 0, 2, attempt="b"))}
    choice = choose([own(0, 5, 10), offer(1, {**own(1, 5).bases, base: BaseOffer(other)})])
    assert choice.base == BaseId(1, 5)
    assert dict(choice.skipped)[base] == "the disks contradict each other"


def test_files_that_the_manifest_does_not_list() -> None:
    base = BaseId(1, 10)
    one = BaseOffer(pieces(base, [0], 2), manifest="0" * 32)
    choice = choose([offer(0, {**own(0, 5).bases, base: one}), own(1, 5, 10)])
    assert choice.base == BaseId(1, 5)


def test_written_apart_and_both_used() -> None:
    """Two starts, each with half of the hosts, opened timeline 2 and trained on."""
    offers = []
    for rank in range(2):
        timelines = {1: record(1), 2: record(2, BaseId(1, 10), session=f"s{rank}")}
        base = BaseId(2, 20)
        bases = {base: BaseOffer(pieces(base, [0], 1))}
        offers.append(offer(rank, bases, timelines=timelines))
    with pytest.raises(RecoveryError, match="timeline 2 was opened by two starts"):
        choose(offers)


def test_written_apart_and_one_was_never_used() -> None:
    base = BaseId(2, 20)
    used = {1: record(1), 2: record(2, BaseId(1, 10), session="used")}
    unused = {1: record(1), 2: record(2, None, session="unused")}
    first = offer(0, {base: BaseOffer(pieces(base, [0], 1))}, timelines=used)
    choice = choose([first, offer(1, {}, timelines=unused)])
    assert choice.base == base
    assert used[2] in choice.timelines
    assert unused[2] not in choice.timelines


def test_a_timeline_whose_base_is_half_deleted_does_not_hide_what_is_newer() -> None:
    timelines = {1: record(1), 2: record(2, BaseId(1, 10))}
    offers = [
        offer(0, {BaseId(1, 10): BaseOffer(pieces(BaseId(1, 10), [0], 2)), **own(0, 30).bases}),
        own(1, 30),
    ]
    offers = [offer(o.rank, dict(o.bases), timelines=timelines) for o in offers]
    assert choose(offers).base == BaseId(1, 30)


_steps = st.sets(st.integers(1, 6))


@given(st.lists(_steps, min_size=2, max_size=4))
def test_against_sets(held: list[set[int]]) -> None:
    """One timeline, each rank its own files: the greatest of the intersection."""
    world = len(held)
    offers = [own(rank, *steps, world=world) for rank, steps in enumerate(held)]
    common = set.intersection(*held)
    choice = choose(offers)
    assert choice.base == (BaseId(1, max(common)) if common else None)


@given(st.permutations(range(3)))
def test_the_order_of_offers_says_nothing(order: list[int]) -> None:
    offers = [own(rank, 10, 20, world=3) for rank in range(3)]
    assert choose([offers[rank] for rank in order]) == choose(offers)


def test_offers_and_choices_travel() -> None:
    base = BaseId(1, 10)
    manifest = manifest_of({rank: marker(base, rank, 2) for rank in range(2)})
    assert manifest is not None
    known = digest(manifest.encode())
    one = offer(0, {base: BaseOffer(pieces(base, [0, 1], 2, TIERS), known)}, lost=(BaseId(1, 7),))
    one = offer(0, dict(one.bases), lost=one.lost, timelines={1: record(1), 2: None})
    assert decode_offer(encode_offer(one)) == one
    choice = choose([one, own(1, 10)])
    assert decode_choice(encode_choice(choice)) == choice
    fresh = Choice(None, None, {}, (), (), None, 1)
    assert decode_choice(encode_choice(fresh)) == fresh
    assert isinstance(choice.manifest, Manifest)


@pytest.mark.parametrize("data", [b"", b"\x93\x01\x02\x03", b"\xc1", encode_offer(own(0, 1))[:-3]])
def test_bytes_that_are_no_offer(data: bytes) -> None:
    for decode in (decode_offer, decode_choice):
        with pytest.raises(FormatError):
            decode(data)


# --- Files that are gone, of ranks that had something in common with those that are left ------


def left(rank: int, *steps: int, has: Iterable[int] = (), manifest: str | None = None) -> Offer:
    """A rank of a job of one that has some files of bases of two ranks, and their manifests."""
    bases = {}
    for base in (BaseId(1, step) for step in steps):
        markers = {number: marker(base, number, 2) for number in range(2)}
        whole = manifest_of(markers)
        assert whole is not None
        others = tuple(m for number, m in markers.items() if number not in has)
        named = manifest or digest(whole.encode())
        bases[base] = BaseOffer(pieces(base, has, 2), named, others)
    return offer(rank, bases)


def test_what_is_left_is_taken_where_nothing_else_is() -> None:
    with pytest.raises(RecoveryError, match="the files of rank 1 are missing"):
        choose([left(0, 10, 20, has=[0])])
    choice = choose([left(0, 10, 20, has=[0])], partly=True)
    assert (choice.base, choice.partly, choice.durable) == (BaseId(1, 20), True, False)
    assert choice.sources == {0: (Source(2, 0),), 1: ()}
    assert choice.complete == ()
    assert choice.unreadable == (BaseId(1, 10), BaseId(1, 20))


def test_an_older_base_that_is_whole_comes_first() -> None:
    """Also where ranks have told what is left of newer ones."""
    older, newer = left(0, 10, has=[0, 1]), left(0, 20, has=[0])
    choice = choose([offer(0, {**older.bases, **newer.bases})], partly=True)
    assert (choice.base, choice.partly) == (BaseId(1, 10), False)


def test_what_is_left_has_been_committed_as_it_is() -> None:
    for manifest in ("contradicted", "0" * 32):
        with pytest.raises(RecoveryError):
            choose([left(0, 10, has=[0], manifest=manifest)], partly=True)
    base = BaseId(1, 10)
    never = offer(0, {base: BaseOffer(pieces(base, [0], 2))})
    assert choose([never], partly=True).base is None, "nobody has a manifest: it was never there"


def test_each_rank_reads_some_of_what_is_left() -> None:
    mine, none = left(0, 10, has=[0]), left(1, 10)
    with pytest.raises(RecoveryError):
        choose([mine, none], partly=True, fetch=False)
    with pytest.raises(RecoveryError):
        choose([left(0, 10)], partly=True)


def test_what_is_left_goes_over_the_wire() -> None:
    one = left(0, 10, 20, has=[0])
    assert decode_offer(encode_offer(one)) == one
    choice = choose([one], partly=True)
    assert decode_choice(encode_choice(choice)) == choice
