"""When bases are taken with ``every="auto"``: what was measured goes in, the model's optimum comes
out, within its bounds."""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everstep
from everstep.commit.lineage import BaseId
from everstep.config.options import Prediction
from everstep.errors import StorageError
from everstep.link.save import Save
from everstep.options import Budget, Every, LogOptions, presets
from everstep.plan.interval import (
    WASTE_OF_NO_ACCOUNT,
    best_choice,
    checkfreq_interval,
    seldom,
    waste,
    without_log,
)
from everstep.restore.redo.driver import ReplayDriver
from everstep.restore.start.report import Resumed
from everstep.seams import ManualClock, Seams
from everstep.testing import inspect
from everstep.trainer.budget import DAY_S, DayMeter, Forecast, LogLimits, interval_steps_within
from everstep.trainer.participant import RestoredState
from everstep.trainer.session.cadence import (
    ASK_EVERY,
    FIRST_STEPS,
    Cadence,
)
from tests.support.cadence import MB, RUN, Run, options_of
from tests.support.logged import World, segments_of
from tests.support.logged import opened as logged
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, forget, opened


def lines(capsys: pytest.CaptureFixture[str], what: str) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if what in line]


def near(found: int | None, wanted: float) -> bool:
    """Within what is left alone."""
    return found is not None and abs(found - wanted) <= 0.25 * wanted


# --- The choice -------------------------------------------------------------------------


def test_nothing_is_chosen_while_all_steps_were_beside_the_first_base() -> None:
    """A log takes one at its first step, and steps may be short: what one takes by itself shows
    when it is over."""
    run = Run("logged")
    run.cadence.base_taken(save := Save(1, 1))
    for _ in range(3 * FIRST_STEPS):
        run.over()
    assert run.cadence.figures()["step_s"] is None
    save.durable.set_result(MB)
    run.over()
    assert run.cadence.figures()["step_s"] is None
    run.train(2 * FIRST_STEPS)
    assert run.cadence.figures()["step_s"] == 0.5
    assert run.cadence.interval_steps is not None


def test_without_a_log_the_interval_is_youngs(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(every=Every(auto=True, mtbf_s=30.0))
    run.train(FIRST_STEPS)
    assert run.cadence.interval_steps is None
    run.train(3)
    assert run.bases == [FIRST_STEPS + 1], "ten steps are measured, then a base is"
    chosen = run.cadence.interval_steps
    assert chosen == without_log(run.costs()).interval_steps
    assert chosen == round(math.sqrt(2 * run.cadence.figures()["mtbf_s"] * 2.0) / 0.5)
    (said,) = lines(capsys, "a base every")
    assert f"{RUN}: a base every {chosen} steps" in said
    assert "before" not in said


def test_an_interval_of_earlier_starts_lasts_until_this_one_has_measured() -> None:
    """The first base comes after ten steps at most; no forecast follows from the interval."""
    for predicted, first in ((3, 3), (12_000, FIRST_STEPS)):
        run = Run(auto=Prediction(None, predicted))
        for _ in range(FIRST_STEPS + 2):
            run.over()
            if run.cadence.due(run.step):
                run.bases.append(run.step)
                run.cadence.base_requested(run.step)
        assert run.bases[0] == first
        assert run.cadence.forecast is None
        run.train(FIRST_STEPS + 3)
        assert run.cadence.interval_steps == 30
        assert run.cadence.forecast is not None


def test_costs_that_earlier_starts_have_measured() -> None:
    """An interval follows from them before the first base, and one slow base does not change it."""
    every = Every(auto=True, mtbf_s=100.0)
    auto = Prediction(interval_steps=40, base_cost_s=2.0, base_write_s=3.0)
    run = Run(auto=auto, every=every)
    run.train(FIRST_STEPS + 1)
    assert run.bases == []
    chosen = run.cadence.interval_steps
    assert chosen == without_log(run.costs()).interval_steps == 40
    run.train(chosen, cost_s=20.0)
    assert run.bases == [chosen]
    run.train(2)
    assert run.cadence.interval_steps == chosen
    unknown = Run(every=every)
    unknown.train(chosen, cost_s=20.0)
    assert unknown.cadence.interval_steps > 2 * chosen


def test_bases_take_a_fifth_of_the_time_until_something_fails() -> None:
    """One is written in 3 s, steps take 0.5 s."""
    run = Run()
    run.train(FIRST_STEPS + 3)
    assert run.cadence.interval_steps == 30
    failed = Run()
    failed.cadence.restored(resumed(step=1, forks=[1]))
    failed.step = 1
    failed.train(FIRST_STEPS + 3)
    assert failed.cadence.interval_steps is not None
    assert failed.cadence.interval_steps < 30


def test_with_a_log_it_is_that_of_lowdiffs_model() -> None:
    run = Run("logged")
    run.train(FIRST_STEPS + 3)
    chosen = run.cadence.interval_steps
    assert chosen == best_choice(run.costs()).interval_steps
    # A step of the log is redone in a tenth of the time: bases may be sqrt(10) times as far apart.
    assert near(chosen, math.sqrt(10) * without_log(run.costs()).interval_steps)


def test_the_next_base_is_due_after_so_many_steps() -> None:
    run = Run(every=Every(auto=True, mtbf_s=100.0))
    run.train(200)
    chosen = run.cadence.interval_steps
    assert chosen == round(math.sqrt(2 * 100 * 2) / 0.5) == 40
    assert run.bases == list(range(FIRST_STEPS + 1, 200, chosen))


def test_a_given_mtbf_is_not_argued_with() -> None:
    run = Run(every=Every(auto=True, mtbf_s=7200.0))
    run.cadence.restored(resumed(step=400, forks=[100, 200, 300]))
    run.step = 400
    run.train(50)
    assert run.cadence.figures()["mtbf_s"] == pytest.approx(7200, rel=1e-3)


def test_figures_that_change_move_it_and_that_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(every=Every(auto=True, mtbf_s=1e5))
    run.train(FIRST_STEPS + 3)
    before = run.cadence.interval_steps
    run.train(300, step_s=5.0)
    after = run.cadence.interval_steps
    assert near(after, without_log(run.costs(step_s=5.0, mtbf_s=1e5)).interval_steps)
    assert before is not None
    assert after is not None
    assert near(after, before / 10)
    said = lines(capsys, "a base every")
    assert len(said) == 2
    assert said[1].endswith(f"; before: {before} steps")


def test_noise_moves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(every=Every(auto=True, mtbf_s=1e4))
    torch.manual_seed(4)
    for noise in torch.rand(3000).tolist():
        run.train(1, step_s=0.4 + 0.2 * noise, persist_s=2 + noise, cost_s=1.8 + 0.4 * noise)
    assert len(run.bases) > 5
    assert len(lines(capsys, "a base every")) == 1


def test_a_step_that_stalls_for_a_base_is_not_a_longer_step() -> None:
    run = Run(every=Every(auto=True, mtbf_s=20.0))
    run.train(200, cost_s=20.0, persist_s=0.1)
    assert len(run.bases) > 3
    assert run.cadence.figures()["step_s"] == pytest.approx(0.5)


def slowed(mtbf_s: float, *, beside: int, slow_s: float) -> Run:
    """Bases that hold training up for 10 ms each, and take ``beside`` steps until they are durable,
    each of them longer by ``slow_s``."""
    run = Run(every=Every(auto=True, mtbf_s=mtbf_s))
    under: Save | None = None
    left = 0
    for step in range(1, 400):
        run.clock.advance(0.5 + (slow_s if under is not None else 0.0))
        left -= 1
        if under is not None and left == 0:
            run.stats.committed += 1
            run.stats.persist_s += beside * 0.5
            under.durable.set_result(MB)
        run.mark()
        under = None if left == 0 else under
        if run.cadence.due(step):
            run.bases.append(step)
            run.saver.saves += 1
            run.saver.base_stall_s += 0.01
            run.clock.advance(0.01)
            under, left = Save(step, 1), beside
            run.cadence.base_requested(step)
            run.cadence.base_taken(under)
    return run


def test_what_steps_beside_a_base_lose_is_part_of_what_it_costs() -> None:
    """Waiting is not all: the processor, memory and the disk are shared with what is written."""
    run = slowed(1000.0, beside=2, slow_s=0.2)
    wanted = math.sqrt(2 * 1000 * (0.01 + 2 * 0.2)) / 0.5
    assert run.cadence.figures()["step_s"] == pytest.approx(0.5)
    assert near(run.cadence.interval_steps, wanted)
    assert not near(slowed(1000.0, beside=2, slow_s=0.0).cadence.interval_steps, wanted)


def test_steps_that_are_all_beside_a_base_are_steps_all_the_same() -> None:
    """What a step takes may change while there are no others."""
    run = Run(every=Every(auto=True, mtbf_s=1000.0))
    run.train(FIRST_STEPS + 1, step_s=0.5)
    save = Save(run.step, 1)
    run.cadence.base_taken(save)  # and never becomes durable
    run.train(200, step_s=2.0)
    assert run.cadence.figures()["step_s"] == pytest.approx(2.0)


def test_the_last_of_two_bases_may_fail() -> None:
    run = Run()
    run.train(FIRST_STEPS)
    first, second = Save(10, 1), Save(11, 1)
    for save in (first, second):
        run.cadence.base_requested(save.step)
        run.cadence.base_taken(save)
    run.stats.committed, run.stats.persist_s = 1, 3.0
    first.durable.set_result(MB)
    second.durable.set_exception(StorageError("no"))
    run.train(1)
    assert run.cadence.interval_steps is None


def test_where_nothing_helps_bases_are_as_often_as_without_a_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run("logged", every=Every(auto=True, mtbf_s=100.0))
    run.cadence.restored(resumed(replayed=10, replay_s=8.0))
    run.train(FIRST_STEPS + 3)
    assert run.cadence.interval_steps == without_log(run.costs(replay_s=0.8)).interval_steps
    (said,) = lines(capsys, "a base every")
    assert "replaying a step from the log takes 0.8 s" in said


def test_a_replica_is_persisted_as_checkfreq_would() -> None:
    options = options_of(everstep.Method(base="lazy", log="dense", apply="replica"))  # type: ignore[arg-type]
    assert presets["lowdiff_plus"].apply == options.method.apply
    run = Run("lowdiff_plus")
    run.train(FIRST_STEPS + 3, cost_s=0.07, persist_s=3.0)
    assert (
        run.cadence.interval_steps == 6 == checkfreq_interval(step_s=0.5, stall_s=0.07, persist_s=3)
    )
    dear = Run("lowdiff_plus", memory_bytes=10_000)
    dear.train(FIRST_STEPS + 3, cost_s=0.7, persist_s=3.0)
    assert dear.cadence.interval_steps == 40 == checkfreq_interval(step_s=0.5, stall_s=0.7)


# --- What a resume tells ----------------------------------------------------------------


def resumed(
    *,
    step: int = 0,
    forks: list[int] | None = None,
    replayed: int = 0,
    replay_s: float = 0.0,
    load_s: float = 0.0,
    again: bool = False,
) -> RestoredState:
    loaded: Any = SimpleNamespace(size_bytes=MB) if step else None
    found = Resumed(
        timeline=2,
        base=BaseId(1, step),
        loaded=loaded,
        source="disk",
        exact=True,
        skipped=(),
        problems=(),
        step=step,
        replayed=replayed,
        replay_s=replay_s,
        load_s=load_s,
        forks=tuple(forks or ()),
    )
    return RestoredState(found, step, None, only_in_memory=False, again=again)


def test_a_replay_that_was_measured_replaces_the_belief() -> None:
    run = Run("logged")
    run.cadence.restored(resumed(step=50, replayed=20, replay_s=4.0, load_s=1.0))
    run.step = 50
    run.train(FIRST_STEPS + 3)
    costs = run.costs(replay_s=0.2, load_bytes_per_s=MB)
    assert run.cadence.interval_steps == best_choice(costs).interval_steps


def test_a_resume_measures_its_parts(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world, found = ManualClock(), World(), []
    step = ReplayDriver.step
    began = Cadence.restored

    def redo(self: ReplayDriver, *args: Any) -> None:
        clock.advance(2.0)
        step(self, *args)

    def note(self: Cadence, restored: RestoredState) -> None:
        found.append(restored.resumed)
        began(self, restored)

    def hook(op: str, path: PurePath) -> None:
        if op == "open" and "base" in path.parts and path.suffix == ".safetensors":
            clock.advance(7.0)

    monkeypatch.setattr(ReplayDriver, "step", redo)
    monkeypatch.setattr(Cadence, "restored", note)
    options: dict[str, Any] = {"log": LogOptions(to="disk", batch_steps=1), "every": None}
    options |= {"seams": Seams(filesystem=HookedFileSystem(hook), clock=clock)}
    for timeline in range(3):
        with logged(run_folder, world, **options) as ckpt:
            ckpt.resume()
            for _ in range(4):
                world.train()
                ckpt.step()
            inspect(ckpt).skip_last_base()  # no base at the end
        first, *_ = segments_of(run_folder, timeline + 1)
        assert first.problem is None
    assert [one.step for one in found] == [0, 4, 8]
    for one in found[1:]:
        assert (one.load_s, one.replay_s) == (7.0, 2.0 * one.replayed)
    assert [one.forks for one in found] == [(), (), (4,)]


def test_each_time_that_a_process_takes_over_counts_as_a_failure() -> None:
    run = Run()
    run.cadence.restored(resumed(step=1000, forks=[400, 700]))
    run.step = 1000
    run.train(FIRST_STEPS + 3)
    trained_s = 0.5 * (1000 + FIRST_STEPS)
    expected_s = (10 + trained_s) / (0.5 + 3)
    assert run.cadence.figures()["mtbf_s"] == pytest.approx(expected_s, rel=0.001)


def test_a_rewind_is_no_failure() -> None:
    run = Run()
    run.train(100)
    before_bases = len(run.bases)
    run.cadence.restored(resumed(step=60, forks=[], again=True))
    run.step = 60
    before = run.cadence.figures()["mtbf_s"]
    run.train(100)
    assert run.cadence.figures()["mtbf_s"] >= before
    assert run.bases[before_bases] >= 60 + FIRST_STEPS, "counted from where it went back to"


# --- Bounds -----------------------------------------------------------------------------


def test_the_log_between_two_bases_fits_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("logged", memory_bytes=100_000)
    run.train(FIRST_STEPS + 3, log_bytes=1000)
    assert run.cadence.interval_steps == 50, "a log that has half filled it asks for a base"
    assert "the memory of the log" in lines(capsys, "a base every")[0]


@pytest.mark.parametrize("to", ["disk", "memory"])
def test_the_log_between_two_bases_fits_its_part_of_the_disk(
    to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a base every 205,132 steps, with all of the log between them on a disk that nobody had
    looked at."""
    limits = LogLimits(interval_bytes=50_000)
    run = Run("logged", limits=limits, log=LogOptions(to=to))
    run.train(FIRST_STEPS + 3, log_bytes=1000)
    said = lines(capsys, "a base every")[0]
    assert ("the log's share of the disk has space for no more" in said) == (to == "disk")
    assert (run.cadence.interval_steps == 50) == (to == "disk")


@pytest.mark.parametrize("every", [None, 1000])
def test_a_log_that_has_its_part_of_the_disk_asks_for_a_base(every: Any) -> None:
    limits = LogLimits(interval_bytes=50_000)
    run = Run("logged", limits=limits, every=every, log=LogOptions(to="disk"))
    run.recorder.memory.half_full = False
    full = []
    for _ in range(120):
        run.train(1, log_bytes=1000)
        if run.recorder.memory.half_full:
            full.append(run.step)
            run.recorder.memory.half_full = False
            run.base()
    assert full == [50, 100]
    assert run.bases[-1] == 100


def test_where_memory_and_write_budget_contradict_each_other_the_log_goes_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was said that every="auto" would keep the budget, which it was. What is advised does."""
    budget = Budget(write_bytes_per_day=MB * 172_800 // 400)  # a base in 400 steps
    host_bytes, state_bytes = 1_200_000, 500_000
    limits = LogLimits.of(host_bytes, host_bytes, state_bytes)
    run = Run("logged", budget=budget, memory_bytes=limits.memory_bytes, limits=limits)
    run.train(300, log_bytes=1000)
    assert run.cadence.interval_steps == 175
    said = lines(capsys, "budget")
    (conflict,) = (line for line in said if "allows" in line)
    assert (
        "allows a base every 400 steps, but the memory of the log has space for 175 steps"
        in conflict
    )
    assert not any("every=" in line for line in said)
    enough = int(re.findall(r"host_bytes=(\d+)", conflict)[0])
    limits = LogLimits.of(enough, enough, state_bytes)
    kept = Run("logged", budget=budget, memory_bytes=limits.memory_bytes, limits=limits)
    kept.train(300, log_bytes=1000)
    assert kept.cadence.interval_steps is not None
    assert 400 <= kept.cadence.interval_steps <= 440
    budget = Budget(write_bytes_per_day=int(re.findall(r"per_day=(\d+)", conflict)[0]))
    kept = Run("logged", budget=budget, memory_bytes=2 * 175_000)
    kept.train(300, log_bytes=1000)
    assert kept.cadence.interval_steps == 175
    assert not any("more than" in line for line in lines(capsys, "budget"))


@pytest.mark.parametrize("cost_s", [1e-9, 1e-6, 0.01, 0.5])
@pytest.mark.parametrize("log", [True, False])
def test_bases_that_cost_nothing_are_not_taken_all_the_time(log: bool, cost_s: float) -> None:
    """But as seldom as wastes a thousandth of the time; where more is wasted, as little as
    can be."""
    costs = Run("logged" if log else "lazy").costs(base_cost_s=cost_s, write_bytes_per_s=MB / 0.01)
    best = best_choice(costs) if log else without_log(costs)
    steps, wasted = seldom(costs, best, log=log)

    def wastes(n: int) -> float:
        interval_s = n * costs.step_s
        return waste(costs, interval_s, best.batch_s if log else interval_s).total

    allowed = max(best.waste.total, best.waste.load + WASTE_OF_NO_ACCOUNT)
    assert best.interval_steps <= steps
    assert wasted == wastes(steps) <= allowed < wastes(steps + 1)
    if best.waste.total - best.waste.load < WASTE_OF_NO_ACCOUNT / 2:
        assert steps > 2 * best.interval_steps


@pytest.mark.parametrize("method", ["lazy", "logged"])
def test_a_write_budget_stretches_the_interval(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # 172 800 steps in a day, and so many bytes that there may be a base in 4000 of them.
    budget = Budget(write_bytes_per_day=MB * 172_800 // 4000)
    free, bound = Run(method), Run(method, budget=budget)
    for run in (free, bound):
        run.train(FIRST_STEPS + 3, cost_s=0.01, persist_s=0.01)
    assert free.cadence.interval_steps is not None
    assert free.cadence.interval_steps < 4000
    assert bound.cadence.interval_steps is not None
    assert 4000 <= bound.cadence.interval_steps <= 4400
    assert bound.cadence.forecast is not None
    assert bound.cadence.forecast.total_bytes <= budget.write_bytes_per_day  # type: ignore[operator]
    assert "the budget allows no shorter interval" in lines(capsys, "a base every")[1]


# --- Several ranks ----------------------------------------------------------------------


def together(runs: list[Run], steps: int, *figures: dict[str, Any]) -> None:
    """Ranks that train together, each with figures of its own: all make the same of what they
    say, which is plain data."""
    next_step = 0
    for _ in range(steps):
        for run, mine in zip(runs, figures, strict=True):
            run.over(**mine)
        step = runs[0].step
        if step < next_step:
            continue
        said = [msgpack.unpackb(msgpack.packb(run.cadence.report())) for run in runs]
        ((due, again),) = {run.cadence.decide(said, step) for run in runs}
        assert 1 <= again <= ASK_EVERY
        next_step = step + again
        if due:
            for run, mine in zip(runs, figures, strict=True):
                run.base(**mine)


FIGURES = st.fixed_dictionaries(
    {
        "step_s": st.floats(0.01, 100.0),
        "persist_s": st.floats(0.01, 100.0),
        "cost_s": st.floats(0.001, 10.0),
        "log_bytes": st.integers(1, 100_000),
    }
)


@settings(max_examples=25)
@given(
    figures=st.lists(FIGURES, min_size=2, max_size=4),
    every=st.sampled_from([Every(auto=True, mtbf_s=300.0), Every(seconds=5.0)]),
    method=st.sampled_from(["lazy", "logged"]),
    budget=st.sampled_from([None, Budget(write_bytes_per_day=1000 * MB)]),
)
def test_ranks_take_the_same_bases_whatever_each_measures(
    figures: list[dict[str, Any]], every: Every, method: str, budget: Budget | None
) -> None:
    options = {"every": every, "budget": budget, "memory_bytes": 1_000_000, "alone": False}
    runs = [Run(method, **options) for _ in figures]  # type: ignore[arg-type]
    together(runs, 100, *figures)
    first = runs[0]
    for run in runs:
        assert run.bases == first.bases
        assert run.cadence.interval_steps == first.cadence.interval_steps
    if every.auto:
        assert first.bases
        assert first.bases[0] == FIRST_STEPS + 1


def test_the_longest_interval_that_a_rank_wants_is_that_of_all() -> None:
    runs = [Run(every=Every(auto=True, mtbf_s=200.0), alone=False) for _ in range(3)]
    together(runs, 100, {"cost_s": 0.5}, {"cost_s": 4.0}, {"cost_s": 1.0})
    wanted = round(math.sqrt(2 * 200 * 4) / 0.5)
    assert {run.cadence.interval_steps for run in runs} == {wanted}
    assert {tuple(run.bases) for run in runs} == {(FIRST_STEPS + 1, FIRST_STEPS + 1 + wanted)}


@pytest.mark.parametrize("alone", [True, False])
def test_captures_that_are_only_taken_when_they_are_due_cost_what_bases_do(alone: bool) -> None:
    run = Run("checkflow", alone=alone, every=Every(auto=True, mtbf_s=DAY_S))
    together([run], 3 * FIRST_STEPS, {"cost_s": 0.5})
    by_cost = without_log(run.costs(base_cost_s=0.5)).interval_steps
    wanted = checkfreq_interval(step_s=0.5, stall_s=0.0, persist_s=3.0) if alone else by_cost
    assert run.cadence.interval_steps == wanted


def test_the_bounds_of_each_rank_hold_for_all() -> None:
    budget = Budget(write_bytes_per_day=MB * 172_800 // 400)  # a base in 400 steps
    every = Every(auto=True, mtbf_s=200.0)
    bound, free = Run(every=every, budget=budget, alone=False), Run(every=every, alone=False)
    together([free, bound], 30, {}, {})
    for run in (free, bound):
        assert run.cadence.interval_steps is not None
        assert 400 <= run.cadence.interval_steps <= 440
    small, large = (Run("logged", memory_bytes=size, alone=False) for size in (100_000, 1_000_000))
    together([large, small], 30, {}, {})
    assert [run.cadence.interval_steps for run in (large, small)] == [50, 50]


def test_no_rank_takes_a_base_before_the_last_is_durable_for_all() -> None:
    runs = [Run(every=Every(auto=True, mtbf_s=10.0), alone=False) for _ in range(2)]
    together(runs, 2 * FIRST_STEPS + 2, {}, {})
    before, late = list(runs[0].bases), Save(runs[0].step, 1)
    runs[1].cadence.base_taken(late)
    together(runs, 50, {}, {})
    assert runs[0].bases == runs[1].bases == before
    late.durable.set_result(MB)
    together(runs, ASK_EVERY, {}, {})
    assert runs[0].bases == runs[1].bases != before


def test_a_time_is_over_when_it_is_for_the_last_rank() -> None:
    runs = [Run(every=Every(seconds=10.0), alone=False) for _ in range(2)]
    together(runs, 40, {"step_s": 1.0, "cost_s": 0.0}, {"step_s": 1.3, "cost_s": 0.0})
    assert runs[0].bases == runs[1].bases == [1, 11, 21, 31]


# --- A day's bytes ----------------------------------------------------------------------


def test_the_forecast_is_right_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogOptions(to="disk")
    run = Run("logged", every=50, log=log, budget=Budget(write_bytes_per_day=10**10))
    run.train(FIRST_STEPS)
    assert run.cadence.forecast is None
    run.train(300)
    forecast = run.cadence.forecast
    assert forecast == Forecast(
        bases_bytes=pytest.approx(MB * DAY_S / 25),  # type: ignore[arg-type]
        log_bytes=pytest.approx(1000 * DAY_S / 0.5),  # type: ignore[arg-type]
    )
    said = lines(capsys, "a day")
    assert said == [
        f"everstep: {RUN}: a step takes 0.5 s: bases of 3.5 GB and a log of 172.8 MB a day to "
        "disk; budget of 10.0 GB a day",
        *said[1:],
    ]


def test_nothing_is_foretold_of_what_is_not_known() -> None:
    run = Run(every=None)
    run.train(100)
    assert run.cadence.forecast == Forecast(0.0, 0.0)
    assert Run(every=100).cadence.forecast is None


def test_bases_in_seconds_are_foretold_too() -> None:
    run = Run(every="10min")
    run.train(FIRST_STEPS + 1)
    assert run.cadence.forecast == Forecast(MB * DAY_S / 600, 0.0)
    assert run.cadence.interval_steps is None


def test_bases_beyond_the_budget_are_taken_and_that_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run(every=20, budget=Budget(write_bytes_per_day=50 * MB))
    run.train(300)
    assert run.bases == list(range(20, 301, 20))
    assert len(lines(capsys, "bases alone exceed the daily budget")) == 1


def test_a_log_beyond_the_budget_stays_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    log, budget = LogOptions(to="disk"), Budget(write_bytes_per_day=400 * MB)
    run = Run("logged", every=1000, log=log, budget=budget)
    run.train(200, log_bytes=1000)  # bases 172.8 MB, log 172.8 MB
    assert run.told == []
    assert run.cadence.forecast == Forecast(172.8 * MB, 172.8 * MB)
    run.train(300, log_bytes=3000)
    assert run.told == [False]
    assert not run.recorder.disk.on
    assert run.cadence.forecast == Forecast(172.8 * MB, 0.0)
    (said,) = lines(capsys, "stays in memory")
    assert "budget of 400.0 MB a day" in said


def test_it_goes_to_disk_again_behind_a_base_once_there_is_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, budget = LogOptions(to="disk"), Budget(write_bytes_per_day=300 * MB)
    run = Run("logged", every=1000, log=log, budget=budget)
    run.train(50)
    assert run.told == [False]
    run.train(500, step_s=1.0)  # half of it a day
    assert run.told == [False], "only behind a base"
    assert len(lines(capsys, "has space again")) == 1
    run.train(1000, step_s=1.0)
    assert run.bases == [1000]
    assert run.told == [False, True]


def test_a_log_that_never_went_to_disk_is_held_for_what_it_would_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was held because "0 bytes were written within a day"."""
    run = Run("logged", budget=Budget(write_bytes_per_day=1), log=LogOptions(to="disk"))
    run.recorder.stats.record_bytes = 1000
    run.mark()
    (said,) = lines(capsys, "stays in memory")
    assert "0 bytes were written within a day, and the next segment of about" in said


def test_what_goes_back_and_forth_around_the_budget_stays_out() -> None:
    log, budget = LogOptions(to="disk"), Budget(write_bytes_per_day=345 * MB)
    run = Run("logged", every=1000, log=log, budget=budget)
    for _ in range(20):
        run.train(100, step_s=0.49)  # 352 MB a day
        run.train(100, step_s=0.51)  # 338 MB
    assert run.told == [False]


def test_bytes_that_were_written_count_and_not_only_those_foretold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = LogOptions(to="disk", batch_steps=1)
    budget = Budget(write_bytes_per_day=3 * MB)
    run = Run("logged", every=None, log=log, budget=budget)
    run.train(60, step_s=100.0)  # 864 kB a day
    assert run.told == []
    run.train(12, step_s=1.0, log_bytes=400_000)  # before anybody looks ahead again
    assert run.told == [False]
    assert run.stats.log_bytes <= 3 * MB
    assert "were written within a day" in lines(capsys, "stays in memory")[0]


def test_bases_stay_within_their_share_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A base costs 2 s, of steps of 0.5 s: a hundredth of the time is 400 steps."""
    every = Every(auto=True, mtbf_s=100.0)
    free = Run(every=every)
    free.train(FIRST_STEPS + 3)
    assert free.cadence.interval_steps == 40
    bound = Run(every=every, budget=Budget(overhead=0.01))
    bound.train(FIRST_STEPS + 3)
    assert bound.cadence.interval_steps == 440
    assert "the budget allows no shorter interval" in capsys.readouterr().err
    # A log in memory needs bases all the same.
    full = Run("logged", every=every, budget=Budget(overhead=0.01), memory_bytes=100_000)
    full.train(FIRST_STEPS + 3)
    assert full.cadence.interval_steps == 50
    said = capsys.readouterr().err
    assert "Budget(overhead=0.01) allows a base every 400 steps, but" in said
    assert "bases take more of the time" in said


def test_with_auto_a_log_that_leaves_no_room_for_bases_goes_first() -> None:
    log, budget = LogOptions(to="disk"), Budget(write_bytes_per_day=180 * MB)
    every = Every(auto=True, mtbf_s=20_000.0)
    run = Run("logged", log=log, budget=budget, memory_bytes=20_000_000, every=every)
    run.train(FIRST_STEPS + 3, log_bytes=1000)  # 172.8 MB of 180 a day
    assert run.told == [False]
    assert run.cadence.interval_steps == best_choice(run.costs()).interval_steps


@given(
    steps=st.lists(st.tuples(st.floats(0, 30_000), st.integers(0, 1000)), max_size=60),
)
def test_a_meter_of_a_day_never_says_too_little(steps: list[tuple[float, int]]) -> None:
    meter, now_s, total = DayMeter(), 0.0, 0
    written: list[tuple[float, int]] = []
    for passed_s, size in steps:
        now_s += passed_s
        total += size
        written.append((now_s, size))
        meter.reached(now_s, total)
        found = meter.last_day_bytes(now_s)
        least = sum(size for at_s, size in written if at_s > now_s - DAY_S)
        gap_s = max([600.0, *(s for s, _ in steps)])
        most = sum(size for at_s, size in written if at_s >= now_s - DAY_S - 600 - gap_s)
        assert least <= found <= most


@given(budget=st.floats(1, 1e15), base=st.integers(1, 10**12), step_s=st.floats(0.001, 1000))
def test_bases_within_a_budget(budget: float, base: int, step_s: float) -> None:
    steps, never = interval_steps_within(budget, base, step_s), interval_steps_within(0, 1, 1)
    assert never > 10**15
    assert steps == never or base * DAY_S / (steps * step_s) <= budget * (1 + 1e-9)
    if steps > 1:
        assert base * DAY_S / ((steps - 1) * step_s) > budget * (1 - 1e-9)


# --- A real Checkpointer ----------------------------------------------------------------


def test_a_checkpointer_measures_and_chooses(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``sync``: what a base costs is all of its write."""
    clock = ManualClock()

    def hook(op: str, path: PurePath) -> None:
        if op == "rename" and path.name == "rank-00000.safetensors":
            clock.advance(3.0)

    fs = HookedFileSystem(hook)
    every = Every(auto=True, mtbf_s=600.0)
    with opened(run_folder, {"a": torch.ones(5000)}, fs=fs, clock=clock, every=every) as ckpt:
        for _ in range(FIRST_STEPS + 2):
            clock.advance(0.5)
            ckpt.step()
        stats = ckpt.stats()
        assert (stats.saves, stats.durable_step) == (1, FIRST_STEPS + 1)
        assert stats.interval_steps == round(math.sqrt(2 * 600 * 3) / 0.5) == 120
        assert stats.step_s == pytest.approx(0.5)
        assert stats.mtbf_s == pytest.approx(600, rel=0.001)
        size = stats.written_bytes
        assert stats.forecast_bytes_per_day == pytest.approx(size * DAY_S / 60)
        for _ in range(120):
            clock.advance(0.5)
            ckpt.step()
        assert ckpt.stats().durable_step == FIRST_STEPS + 1 + 120
    assert len(lines(capsys, "a base every 120 steps (60 s)")) == 1


def test_a_base_is_durable_before_the_next_is_taken(run_folder: Path) -> None:
    clock, gate = ManualClock(), Gate()

    def hook(op: str, path: PurePath) -> None:
        if op == "rename" and path.name == "rank-00000.safetensors":
            gate.wait_at()

    fs = HookedFileSystem(hook)
    options: dict[str, Any] = {"fs": fs, "clock": clock, "method": "async"}
    every = Every(auto=True, mtbf_s=0.1)
    with opened(run_folder, {"a": torch.ones(5000)}, every=every, **options) as ckpt:
        try:
            for step in range(1, 101):
                clock.advance(0.5)
                ckpt.step()
                assert step <= FIRST_STEPS or gate.reached.wait(TIMEOUT_S)
            assert ckpt.stats().saves == 1
        finally:
            gate.open()
        ckpt.wait()
        for _ in range(5):
            clock.advance(0.5)
            ckpt.step()
            ckpt.wait()
        assert ckpt.stats().interval_steps == 100 - (FIRST_STEPS + 1), "so long it had taken"
        assert ckpt.stats().saves == 2


def test_a_base_that_failed_is_not_what_a_base_costs(run_folder: Path) -> None:
    clock, failing = ManualClock(), [True]

    def hook(op: str, path: PurePath) -> None:
        if op == "rename" and path.name == "rank-00000.safetensors" and failing:
            failing.pop()
            raise OSError(5, "Input/output error")

    fs = HookedFileSystem(hook)
    with opened(run_folder, {"a": torch.ones(5000)}, fs=fs, clock=clock, every="auto") as ckpt:
        with pytest.raises(StorageError):
            for _ in range(FIRST_STEPS + 1):
                clock.advance(0.5)
                ckpt.step()
        for _ in range(FIRST_STEPS - 1):
            clock.advance(0.5)
            ckpt.step()
        assert (ckpt.stats().saves, ckpt.stats().interval_steps) == (1, None)
        clock.advance(0.5)
        ckpt.step()
        assert ckpt.stats().durable_step == 2 * FIRST_STEPS + 1
        clock.advance(0.5)
        ckpt.step()
        assert ckpt.stats().interval_steps is not None


def test_failures_of_a_run_are_counted_by_its_timelines(run_folder: Path) -> None:
    state, clock = {"a": torch.ones(500)}, ManualClock()

    def hook(op: str, path: PurePath) -> None:
        if op == "rename" and path.name == "rank-00000.safetensors":
            clock.advance(9000.0)  # dear: there are few of them

    options: dict[str, Any] = {"clock": clock, "fs": HookedFileSystem(hook), "keep": 50}
    for crash in range(4):
        with opened(run_folder, state, every="auto", **options) as ckpt:
            assert ckpt.resume().step == crash * 40
            for step in range(40):
                clock.advance(100.0)
                ckpt.step()
                if step == 29:
                    ckpt.save()
            ckpt.save()
            mtbf_s = ckpt.stats().mtbf_s
            assert mtbf_s is not None
            trained_s = mtbf_s * (0.5 + crash) - 10
            assert crash * 4000 <= trained_s <= (crash + 1) * 4000
            if crash == 3:
                ckpt.rewind(150)
                for _ in range(FIRST_STEPS + 70):
                    clock.advance(100.0)
                    ckpt.step()
                assert ckpt.stats().mtbf_s > mtbf_s  # type: ignore[operator]
        forget(run_folder)


def test_the_start_says_what_each_base_and_step_writes(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    options: dict[str, Any] = {"method": "logged", "log": LogOptions(to="disk"), "every": "auto"}
    budget = Budget(write_bytes_per_day=10**12)
    with opened(run_folder, state, budget=budget, **options):
        said = lines(capsys, "logged, every=auto, keep 3")[0]
    for words in (
        "bytes per parameter)",
        "for two bases and 4.0 MB of gradients for each step since",
        " MB and the log, written ",
    ):
        assert words in said
    segments = "per base, 4.0 MB of gradients per step, in segments of batch_steps=auto"
    assert said.endswith(f"{segments} (budget of 1.0 TB a day)")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (LogOptions(to="disk", history="50GB"), "log with its bases (history='50GB'), written"),
        (LogOptions(to="memory"), " MB, written"),
    ],
)
def test_the_start_says_what_else_is_on_the_disk(
    log: LogOptions, said: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with opened(run_folder, state, method="logged", log=log):
        assert re.search(f"disk up to [^,;]*{re.escape(said)}", capsys.readouterr().err)
