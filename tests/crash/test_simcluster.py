"""Schedules of a simulated cluster by the thousand, and every planted mistake is found in some.

A failure prints its seed and what happened: ``simulate(SEED)`` gives the same again. More of
them: ``EVERSTEP_SCHEDULES=100000 pytest tests/crash/test_simcluster.py -k schedules``.
"""

from __future__ import annotations

import os

import pytest

from everstep.commit.lineage import BaseId
from tests.crash.cluster_bugs import BUGS
from tests.crash.sim.cluster import SimCluster, SimViolationError, simulate, simulate_many
from tests.crash.sim.job import Plan
from tests.crash.sim.rank import SimRank
from tests.crash.sim.truth import ViolatedError

SCHEDULES = int(os.environ.get("EVERSTEP_SCHEDULES", "1020"))
MORE = 4020
SEARCHED = 120
PARTS = 12  # a test each, so that they can be shared out

FOUND: dict[str, int] = {
    "number instead of timeline": 40,
    "greatest pair instead of history": 9,
    "minimum of maxima": 1,
    "manifest before a marker": 1,
    "stale process deletes": 23,
    "stale process is heard": 5,
    "stale process commits": 67,
    "one look at the fence": 23,
    "no second inventory": 10,
    "watermark goes back": 5,
    "watermark too early": 0,
    "reclaimed by local age": 0,
    "swept before rolled forward": 6,
    "nothing verified": 0,
    "any timeline of that number": 9,
    "memory counts as durable": 8,
    "name of the run not synced": 1785,
    "timeline in vain": 95,
}
"""By planted mistake: a seed at which it is found."""

LEFT_OUT = {2959: BaseId(1, 3), 3064: BaseId(1, 2)}
"""Seeds at which a promise to ranks that a start has left out is not kept: of this base."""


@pytest.mark.thinned(12)
@pytest.mark.parametrize("part", range(PARTS))
def test_schedules(part: int) -> None:
    count = SCHEDULES // PARTS
    simulated(range(part * count, (part + 1) * count))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_more_schedules(part: int) -> None:
    count = MORE // PARTS
    simulated(range(SCHEDULES + part * count, SCHEDULES + (part + 1) * count))


def simulated(seeds: range) -> None:
    chosen = [seed for seed in seeds if seed not in LEFT_OUT]
    total = simulate_many(chosen)
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {total}")
    assert total.schedules == len(chosen)
    assert total.recoveries > len(chosen)
    assert total.watermarks > len(chosen)


@pytest.mark.parametrize("seed", LEFT_OUT)
@pytest.mark.xfail(strict=True, raises=SimViolationError, reason="docs/FAULTS.md: hosts left out")
def test_ranks_of_a_job_that_was_started_again_elsewhere_are_told_the_truth(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("seed", LEFT_OUT)
def test_no_later_start_takes_what_they_are_told_of(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The rest of that schedule, when nobody takes them at their word."""
    told = []
    believed = SimCluster.on_durable

    def on_durable(cluster: SimCluster, rank: SimRank, base: BaseId) -> None:
        try:
            believed(cluster, rank, base)
        except ViolatedError:
            told.append((rank.job.session, base))
            cluster.truth.timelines[rank.job.key].durable.discard(base.step)

    monkeypatch.setattr(SimCluster, "on_durable", on_durable)
    simulate(seed)
    assert set(told) == {("s1", LEFT_OUT[seed])}, "of the start that hosts were left out of"


@pytest.mark.parametrize("seed", [223, 423, 788, 1095, 4813])
def test_what_simulation_has_found(seed: int) -> None:
    """Late deleters, timelines in vain; at 4813 a base of an older timeline that is called durable
    while a newer one sweeps up."""
    simulate(seed)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name: str) -> None:
    """At the seed that is kept or, where the code has changed and with it every schedule, at one
    of the next; and at that seed all is well without the mistake."""
    bug, likely = BUGS[name]
    for seed in range(FOUND[name], FOUND[name] + SEARCHED):
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            try:
                simulate(seed, likely=likely)
                continue
            except SimViolationError as found:
                print(found.problem)
        simulate(seed, likely=likely)
        return
    pytest.fail(f"not found in {SEARCHED} schedules")


def test_every_planted_bug_has_a_seed() -> None:
    assert BUGS.keys() == FOUND.keys()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_seed_gives_the_same_schedule(seed: int) -> None:
    assert simulate(seed) == simulate(seed)
    assert Plan.of(seed) == Plan.of(seed)


def test_a_violation_tells_what_led_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS["watermark too early"][0](monkeypatch)
    with pytest.raises(SimViolationError) as found:
        simulate_many(range(20))
    text = str(found.value)
    assert f"again with seed {found.value.plan.seed}" in text
    assert "WriteManifest" in text
    assert any("fault" in line for line in found.value.trace) or len(found.value.trace) > 10
