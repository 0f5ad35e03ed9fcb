"""Two nodes lost at once, in a simulated ring with copies in peers' memory and a durable tier, by
seed: the job goes back to the newest base that is left of all ranks, in whichever tiers, and says
of each newer one that it is lost; never newer, never parts of two.

Neighbours take the one's copy with the other: what is not in the durable tier is gone. Of two that
are not neighbours, nothing is lost that was whole with all peers since the last start.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from everstep.commit.job import offers
from tests.crash.ring import Pair, Ring
from tests.crash.sim.cluster import SimViolationError
from tests.support.inside import planted

SCHEDULES = 10
MORE = 200


def counted(pair: Pair, seeds: range) -> Counter[str]:
    """What has happened in the schedules of all ``seeds``."""
    found = Counter(schedules=len(seeds))
    for seed in seeds:
        ring = Ring(seed, pair)
        ring.run_through()
        found["starts"] += len(ring.tiers) - 1
        found["recoveries"] += len(ring.back)
        found["older"] += sum(ring.back)
        found.update(tier for read in ring.tiers[1:] for tier in read)
    print(pair, dict(found))
    return found


def check(pair: Pair, seeds: range) -> None:
    found = counted(pair, seeds)
    assert found["schedules"] == len(seeds)
    assert found["recoveries"] > len(seeds) // 2
    if pair == "adjacent":
        assert found["older"] > len(seeds) // 5, "what two neighbours held is lost"
        assert found["object"] > len(seeds) // 5, "and the durable tier has what is left"
    else:
        assert found["peer"] > len(seeds) // 2, "their peers have what they held"


@pytest.mark.parametrize("pair", ["adjacent", "apart"])
def test_two_nodes_lost_at_once(pair: Pair) -> None:
    check(pair, range(SCHEDULES))


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["adjacent", "apart"])
def test_many_more_schedules(pair: Pair) -> None:
    check(pair, range(SCHEDULES, SCHEDULES + MORE))


def nobody_says_so(patch: pytest.MonkeyPatch) -> None:
    """What is lost is left out without a word."""
    patch.setattr(offers, "_missing", lambda known: "")


def copies_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """A base has to lie on the ranks' own disks."""

    def plant(real: Any) -> Any:
        def on_disks(self: Any, known: Any, *given: Any) -> bool:
            return bool(real(self, known, *given) and real(self, known.without_copies(), *given))

        return on_disks

    planted.replace(patch, offers, "_Candidates._all_can_read", plant)


@pytest.mark.parametrize(
    ("bug", "pair"),
    [
        (nobody_says_so, "adjacent"),
        (copies_do_not_count, "apart"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_planted_bugs_are_found(bug: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(SCHEDULES):
        try:
            Ring(seed, pair).run_through()
        except SimViolationError as found:
            print(seed, found.problem)
            return
    pytest.fail("not found")
