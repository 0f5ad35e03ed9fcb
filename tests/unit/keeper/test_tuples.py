"""TierCheck's availability of a base as three bits (its section 3.3): in the memory of a rank's own
keeper, in that of its peer, in the durable tier. What the ranks restore, and from where, in all
eight cases; and with a disk of the rank's own, which the paper does not have, between them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from everstep.commit.job.offers import BaseOffer, Choice, Offer, Piece, choose
from everstep.commit.lineage import BaseId
from everstep.commit.retention import TIERS
from everstep.restore.fetch.peers import CopyOffer, fetch_plan
from tests.support.ranks.peering import RUN, piece, record_of

OLD, NEW = BaseId(1, 10), BaseId(1, 20)
TUPLES = list(itertools.product((True, False), repeat=3))
FIRST = {
    (True, True, True): "memory",
    (True, True, False): "memory",
    (True, False, True): "memory",
    (True, False, False): "memory",
    (False, True, True): "peer",
    (False, True, False): "peer",
    (False, False, True): "object",
    (False, False, False): None,
}
"""From where rank 1 reads its part of the newest base; None: that one is lost."""


def offers_of(own: bool, durable: bool, *, disk: bool = False) -> list[Offer]:
    """Rank 0 has lost nothing. The base before is in the durable tier."""
    found = []
    for rank in range(2):
        bases: dict[BaseId, BaseOffer] = {}
        for base in (OLD, NEW):
            # Every rank sees all that is in the durable tier.
            there = ("object",) if durable or base == OLD else ()
            pieces = {other: Piece(piece(other, base).marker, there) for other in range(2)}
            mine = ("memory",) if (own or rank == 0) and base == NEW else ()
            mine += ("disk",) if disk and base == NEW else ()
            pieces[rank] = replace(pieces[rank], tiers=mine + there)
            pieces = {other: one for other, one in pieces.items() if one.tiers}
            if pieces:
                bases[base] = BaseOffer(pieces)
        found.append(Offer(rank, str(rank), RUN, 2, {1: record_of(1)}, bases))
    return found


def restored(own: bool, peer: bool, durable: bool, *, disk: bool = False) -> Choice:
    """As at a start: copies of peers come first, and then the ranks agree."""
    offers = offers_of(own, durable, disk=disk)
    told = CopyOffer(0, piece(1, NEW).marker, record_of(1).encode())
    plan, _ = fetch_plan(offers, [told] if peer else [], lambda rank, manifest: (rank,), None)
    assert plan in ({}, {1: [told]})
    if plan:
        bases = dict(offers[1].bases)
        before = bases[NEW].pieces if NEW in bases else {}
        tiers = before[1].tiers if 1 in before else ()
        bases[NEW] = BaseOffer({**before, 1: Piece(told.marker, ("peer", *tiers))})
        offers[1] = replace(offers[1], bases=bases)
    return choose(offers)


@pytest.mark.parametrize("tiers", TUPLES, ids=str)
def test_each_tuple_is_restored_from_the_cheapest_that_is_left(
    tiers: tuple[bool, bool, bool],
) -> None:
    choice = restored(*tiers)
    if FIRST[tiers] is None:  # a global miss: the newest that everybody can read is an older one
        assert choice.base == OLD
        assert dict(choice.skipped)[NEW] == "the files of rank 1 are missing"
        assert [source.tier for source in choice.sources[1]] == ["object", "object"]
        return
    assert choice.base == NEW
    assert choice.sources[1][0].tier == FIRST[tiers]
    assert choice.sources[0][0].tier == "memory", "who has lost nothing asks nobody"


@pytest.mark.parametrize("tiers", TUPLES, ids=str)
def test_what_is_left_of_it_is_what_is_fallen_back_on(tiers: tuple[bool, bool, bool]) -> None:
    """Damage in the first place leads to the next, in the order of what they cost."""
    own, peer, durable = tiers
    choice = restored(*tiers)
    if choice.base != NEW:
        return
    found = list(dict.fromkeys(source.tier for source in choice.sources[1]))
    # A peer is asked only by a rank that has not got it itself.
    wanted = {"memory": own, "peer": peer and not own, "object": durable}
    assert found == [tier for tier in TIERS if wanted.get(tier)]


@pytest.mark.parametrize("tiers", TUPLES, ids=str)
def test_a_disk_of_its_own_comes_behind_its_memory(tiers: tuple[bool, bool, bool]) -> None:
    """Nothing is lost that is on a rank's own disk, and no other node is asked for it."""
    choice = restored(*tiers, disk=True)
    assert choice.base == NEW
    assert choice.sources[1][0].tier == ("memory" if tiers[0] else "disk")


@pytest.mark.parametrize("lost", list(itertools.combinations(range(4), 2)), ids=str)
def test_of_two_nodes_lost_at_once_neighbours_take_all_to_the_durable_tier(
    lost: tuple[int, int],
) -> None:
    """A ring of four nodes, each with what is in its memory and in that of the next one: where two
    neighbours go, one part of the newest base goes with them, and that it is missing is said."""
    record = replace(record_of(1), world=4)
    offers, copies = [], []
    for rank in range(4):
        bases: dict[BaseId, BaseOffer] = {}
        for base in (OLD, NEW):
            there = ("object",) if base == OLD else ()
            mine = ("memory",) if base == NEW and rank not in lost else ()
            pieces = {
                other: Piece(
                    piece(other, base, world=4).marker, (mine if other == rank else ()) + there
                )
                for other in range(4)
            }
            pieces = {other: one for other, one in pieces.items() if one.tiers}
            if pieces:
                bases[base] = BaseOffer(pieces)
        offers.append(Offer(rank, str(rank), RUN, 4, {1: record}, bases))
        if (rank + 1) % 4 not in lost:
            copies.append(
                CopyOffer((rank + 1) % 4, piece(rank, NEW, world=4).marker, record.encode())
            )
    plan, _ = fetch_plan(offers, copies, lambda rank, manifest: (rank,), None)
    if abs(lost[0] - lost[1]) == 2:
        assert {rank: [one.holder for one in found] for rank, found in plan.items()} == {
            rank: [(rank + 1) % 4] for rank in lost
        }
        return
    assert plan == {}, "nothing is fetched for a base that is no more"
    choice = choose(offers)
    assert choice.base == OLD
    assert dict(choice.skipped)[NEW] == f"the files of rank {lost[0]}, {lost[1]} are missing"
    assert {sources[0].tier for sources in choice.sources.values()} == {"object"}
