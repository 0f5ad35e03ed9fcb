"""Captures of every step (Checkflow) by several ranks: killed at any step, they come back at one
that the keepers of all hold, with the bits that it had, and replay nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from tests.support.keepers import end_keepers
from tests.support.ranks.multistep import STEPS, Job, wanted
from tests.support.ranks.together import bases, on_all, resume, train, trainings
from tests.support.ranks.trainings import compare

STATE_BYTES = 16_400  # of a rank, as a block of memory
TOLD = "capture.before_captured"
METHOD = {"method": "checkflow", "every": 50, "keep": 50}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    end_keepers(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before_update", "after_step"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp_low", "zero", "tp", "pp"])
def test_killed_ranks_come_back_at_a_step_that_all_have(
    job: Job, tmp_path_factory: pytest.TempPathFactory, layout: str, place: str
) -> None:
    before = wanted(layout, tmp_path_factory.getbasetemp())
    dies = {"DIES": f"1 7 {place}", "DOES": "{}"}
    said = job.killed(layout, METHOD, 1, STEPS, {"DOES": "{}"}, dies)
    assert compare(said, before) == 0
    assert job.committed() == set()
    said = job.train(layout, METHOD, last=STEPS + 2)
    print([lines[0] for lines in said])
    assert 4 <= compare(said, before) <= 7


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_ranks_whose_newest_captures_differ_have_an_older_one_in_common(
    job: Job, tmp_path_factory: pytest.TempPathFactory, layout: str
) -> None:
    """Rank 1 dies with its capture of step 5 in its own hands; rank 0 has it, or the next. Then
    once more, in the first step after the start."""
    before = wanted(layout, tmp_path_factory.getbasetemp())
    alive = {"DOES": "{}"}
    job.killed(layout, METHOD, 1, STEPS, alive, alive | {"EVERSTEP_FAILPOINTS": f"{TOLD}=kill:5"})
    said = job.killed(
        layout, METHOD, 1, STEPS, alive, alive | {"EVERSTEP_FAILPOINTS": f"{TOLD}=kill:1"}
    )
    assert compare(said, before) == 4
    said = job.train(layout, METHOD, last=STEPS + 2)
    assert compare(said, before) == 4


@pytest.mark.slow
def test_ranks_that_save_make_the_captures_of_that_step_durable(
    job: Job, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = wanted("ddp", tmp_path_factory.getbasetemp())
    job.train("ddp", METHOD, {5: "save"}, {5: "save"}, last=7)
    assert job.committed() == {5}
    end_keepers(job.path.parent)
    said = job.train("ddp", METHOD, last=STEPS)
    assert compare(said, before) == 5


@pytest.mark.slow
def test_memory_for_five_states_is_enough_after_a_rewind(tmp_path: Path) -> None:
    """Captures of the steps that are undone take none of it: training goes on, and bases are
    taken."""
    path = tmp_path / "run"
    budget = everstep.Budget(host_bytes=5 * STATE_BYTES)
    options = {"method": "checkflow", "every": 5, "keep": 50, "budget": budget}
    options |= {"keeper": everstep.KeeperOptions(), "progress_timeout_s": 10.0}
    try:
        with trainings(path, path, **options) as ranks:
            resume(ranks)
            train(ranks, 8)
            on_all(*(lambda one=one: one.ckpt.wait(60) for one in ranks))  # type: ignore[misc]
            assert all(one.ckpt.stats().recoverable_step == 6 for one in ranks)
            on_all(*(lambda one=one: one.ckpt.rewind(5) for one in ranks))  # type: ignore[misc]
            # Steps 6 to 8 are undone.
            assert all((one.ckpt.stats().recoverable_step or 0) <= 5 for one in ranks)
            train(ranks, 5)
            on_all(*(lambda one=one: one.ckpt.wait(60) for one in ranks))  # type: ignore[misc]
            assert set(bases(path)) == {5, 10}
            on_all(*(one.ckpt.close for one in ranks))
    finally:
        end_keepers(tmp_path)
