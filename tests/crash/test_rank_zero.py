"""Rank 0 of several dies at every act of a commit, and at every act of the start that rolls it
forward: whatever the others do then, all ranks go back to the old base or to the new one, together.

After each death the others live on, are killed, lose power, or are still there when the job starts
again; what must come back is computed from what lies on the disks (:mod:`tests.crash.rank_zero`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.commit.base_commit import Action, WriteMarker
from everstep.commit.job.member import Member
from everstep.commit.job.messages import MarkerNotice, Send
from everstep.format.message_codec import Stored
from tests.crash.cluster_bugs import BUGS
from tests.crash.rank_zero import ENDINGS, LAYOUTS, NEW, OLD, Commit, Death, Ending
from tests.crash.sim.cluster import SimViolationError
from tests.support.inside import planted

PARTS = 2  # a test each, so that they can be shared out
ALONE = ["one folder", "a disk each"]
UNCOMMITTED = 0.4
"""Of the acts from the capture on: all markers are durable there, and no manifest is."""


@functools.cache
def undisturbed(seed: int, layout: str) -> Commit:
    cluster = Commit(seed, layout)
    cluster.run_through()
    assert cluster.recovered == [NEW]
    return cluster


def deaths_of(seed: int, layout: str) -> list[Death]:
    """One before and one after each act, from the capture until the old base is deleted."""
    cluster = undisturbed(seed, layout)
    acts = range(1, len(cluster.acts["s1"]) + 1)
    assert len(acts) > 40
    return [Death("s1", act, after) for act in acts for after in (False, True)]


def resumes_of(seed: int, layout: str, first: Death, ending: Ending) -> list[Death]:
    """One before each act of the start behind that death, until it trains and has swept up."""
    cluster = Commit(seed, layout, (first,), ending)
    cluster.run_through()
    acts = len(cluster.acts["resume"])
    assert acts > 10
    return [Death("s2", act, False) for act in range(1, acts + 1)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", ALONE)
def test_before_every_act_of_a_commit(layout: str, part: int) -> None:
    """One ending each, in turn; all of them in the slow test."""
    found = set()
    for at, death in enumerate(deaths_of(0, layout)[::2]):
        if at % PARTS == part:
            cluster = Commit(0, layout, (death,), ENDINGS[at // PARTS % len(ENDINGS)])
            cluster.run_through()
            found.add(cluster.recovered[-1])
    assert found == {OLD, NEW}, "both happen"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", ALONE)
def test_before_every_act_of_the_start_behind_it(layout: str) -> None:
    deaths = deaths_of(0, layout)
    first = deaths[int(UNCOMMITTED * len(deaths))]
    for second in resumes_of(0, layout, first, "at once"):
        cluster = Commit(0, layout, (first, second), "at once")
        cluster.run_through()
        assert cluster.recovered[-1] == NEW


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_at_every_act_with_every_ending(seed: int, layout: str, ending: Ending) -> None:
    for death in deaths_of(seed, layout):
        Commit(seed, layout, (death,), ending).run_through()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["at once", "at once, power", "restarted"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_pairs_of_deaths(layout: str, ending: Ending) -> None:
    for first in deaths_of(1, layout)[::7]:
        for second in resumes_of(1, layout, first, ending):
            Commit(1, layout, (first, second), ending).run_through()


# Mistakes that must be found: each is made in the real code.


def told_too_early(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells of its marker when it begins to write it, and dies before it has."""

    def plant(real: Any) -> Any:
        def hasty(self: Member, flight: Any, action: Action | None, **how: bool) -> Any:
            out = real(self, flight, action, **how)
            if isinstance(action, WriteMarker) and self.rank == 0:
                notice = MarkerNotice(Stored(action.marker))
                out += [Send(rank, notice) for rank in self.cluster.others(0)]
            return out

        return hasty

    planted.replace(patch, Member, "_go_on", plant)


def disturbed(layout: str, *, twice: bool) -> Iterator[tuple[tuple[Death, ...], Ending]]:
    """Deaths of the sound code, so that they are known before a mistake is made."""
    deaths = deaths_of(0, layout)
    if twice:
        first = deaths[int(UNCOMMITTED * len(deaths))]
        yield from (((first, d), "at once") for d in resumes_of(0, layout, first, "at once"))
        return
    yield from (((d,), ENDINGS[at % len(ENDINGS)]) for at, d in enumerate(deaths))


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("bug", "layout", "twice"),
    [
        (told_too_early, "a disk each", False),
        (BUGS["minimum of maxima"][0], "one folder", False),
        (BUGS["reclaimed by local age"][0], "one folder", False),
        (BUGS["swept before rolled forward"][0], "a disk each", True),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_planted_bugs_are_found(
    bug: Any, layout: str, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list(disturbed(layout, twice=twice))
    bug(monkeypatch)
    for deaths, ending in tried:
        try:
            Commit(0, layout, deaths, ending).run_through()
        except SimViolationError as found:
            print(deaths, ending, found.problem)
            return
    pytest.fail("not found")
