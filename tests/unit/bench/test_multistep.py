"""``everstep bench multistep``: words, the training, targets, tables, and a small run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.errors import EverstepError, OptionError
from everstep.plan.multistep import best_cut, lower_bound_s, overlap
from everstep_bench.harness.loop import seeded_single_thread
from everstep_bench.harness.options import from_words
from everstep_bench.harness.placement import Placement
from everstep_bench.multistep import run
from everstep_bench.multistep.report import (
    AUTO,
    MeasuredSave,
    Measurement,
    MultistepReport,
    Row,
    allowed_s,
)
from everstep_bench.multistep.run import measure_row
from everstep_bench.multistep.training import Lengths, TimedTraining
from everstep_bench.options import WAYS, MultistepOptions, Ratio
from tests.support.stalls import facts_of, invoke, shown_by

LENGTHS = Lengths(0.03, 0.06, 0.01)
STATE_BYTES, GRADIENT_BYTES = 12_000_000, 4_000_000


@pytest.fixture(autouse=True)
def cores_back() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


# --- Words ------------------------------------------------------------------------------


def test_words() -> None:
    def parsed(name: str, text: str) -> Any:
        return getattr(from_words(MultistepOptions, **{name: text}), name)

    assert parsed("copies", "4, 8,4") == (4.0, 8.0)
    assert parsed("copies", "0.5") == (0.5,)
    assert parsed("ratios", "2/14, 4/12,2/14") == (Ratio(2, 14), Ratio(4, 12))
    assert str(Ratio(2, 14)) == "2/14"
    assert parsed("parts", "1-24") == tuple(range(1, 25))
    assert parsed("parts", "8,1, 3-4") == (1, 3, 4, 8)
    for name, text in (
        ("copies", "four"),
        ("copies", ""),
        ("ratios", "1:3"),
        ("ratios", "1/0"),
        ("parts", "1-"),
        ("parts", "all"),
        ("parts", "4-1"),
    ):
        with pytest.raises(OptionError, match="like"):
            parsed(name, text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"copies": ()},
        {"copies": (0.0,)},
        {"ratios": ()},
        {"ratios": (Ratio(1, 2),)},
        {"ratios": (Ratio(0, 2),)},
        {"parts": ()},
        {"parts": (0,)},
        {"parts": (25,)},
        {"repeats": 0},
        {"step_s": 0.0},
        {"state_bytes": 10},
        {"layers": 2},
        {"seed": -1},
    ],
)
def test_what_makes_no_measurement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        MultistepOptions(**wrong)


def test_wrong_words_end_with_a_usage_error() -> None:
    assert invoke("multistep", "--parts", "0-3").exit_code == 2
    assert invoke("multistep", "--ratios", "1/2").exit_code == 2
    assert invoke("multistep", "--copies", "-4").exit_code == 2


# --- The training -----------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [Ratio(4, 12), Ratio(2, 14), Ratio(1, 20)])
def test_gradients_are_the_share_of_the_state_that_was_asked_for(ratio: Ratio) -> None:
    with seeded_single_thread(1):
        training = TimedTraining(2_000_000, ratio.value, 0.2, layers=24, seed=1)
        training.step()
    optimizer = training.state()["optimizer"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for moments in optimizer.state.values() for t in moments.values()]
    counted = sum(t.numel() * t.element_size() for t in [*parameters, *state])
    assert training.state_bytes == counted == pytest.approx(2_000_000, rel=0.01)
    trained = [p for p in parameters if p.requires_grad]
    assert len(trained) == 24
    assert training.gradient_bytes == sum(p.numel() * p.element_size() for p in trained)
    assert training.gradient_bytes / training.state_bytes == pytest.approx(ratio.value, rel=0.01)
    assert all(p.grad is None for p in parameters)


def test_parts_are_those_that_everstep_cuts() -> None:
    with seeded_single_thread(1):
        training = TimedTraining(2_000_000, 1 / 7, 0.2, layers=24, seed=1)
    assert len(training.units) == 48
    assert sum(training.units) == training.state_bytes
    row = Row("gockpt", 2, [save_of(0.1, 2)], LENGTHS)
    fluid = Measurement(4, Ratio(4, 12), STATE_BYTES, GRADIENT_BYTES, STATE_BYTES / 0.4)
    coarse = replace(fluid, units=(10, 90))
    pipeline = fluid.pipeline(row)
    assert fluid.modelled_s(row) == pytest.approx(best_cut(pipeline, 2, None).overlap.stall_s)
    modelled_s = overlap(pipeline, 2, None, [0.1, 0.9]).stall_s
    assert coarse.modelled_s(row) == pytest.approx(modelled_s)
    assert coarse.modelled_s(row) != pytest.approx(fluid.modelled_s(row))


def test_every_trained_parameter_moves_and_no_other() -> None:
    with seeded_single_thread(1):
        training = TimedTraining(1_000_000, 1 / 7, 0.2, layers=24, seed=1)
        module = training.state()["model"]
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        training.step()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad


def test_steps_are_as_long_as_was_asked_for_and_that_must_be_possible() -> None:
    with seeded_single_thread(1):
        training = TimedTraining(1_000_000, 1 / 3, 0.2, layers=24, seed=1)
        assert min(training.forward_s, training.backward_s) > 0
        step = training.step()
        assert step.forward_s >= training.forward_s  # by the clock, whatever else goes on
        assert step.backward_s >= training.backward_s
        assert training.forward_s + training.backward_s < 0.2
        with pytest.raises(OptionError, match="without any compute"):
            TimedTraining(1_000_000, 1 / 3, 1e-6, layers=24, seed=1)


# --- Targets ----------------------------------------------------------------------------


def save_of(
    stall_s: float, parts: int, step_s: float = 0.1, own_s: float | None = None
) -> MeasuredSave:
    """That takes the library ``own_s`` itself: a quarter, if nothing is said."""
    own_s = 0.25 * stall_s if own_s is None else own_s
    waits_s = stall_s - own_s
    causes = {"gate": waits_s * 2 / 3, "gradients": waits_s / 3, "capture": own_s}
    wall_s = parts * step_s + stall_s
    beside = LENGTHS.forward_s, LENGTHS.backward_s
    return MeasuredSave(causes, stall_s * 0.2, stall_s * 0.8, wall_s, parts, step_s, parts, *beside)


def own_rows(part_s: float = 0.0, counts: Any = (1, 12, 24)) -> list[Row]:
    """Own work of so long for each part, and a little that is waited for."""
    return [
        Row(way, parts, [save_of(part_s * parts + 0.001, parts, own_s=part_s * parts)])
        for way in WAYS
        for parts in counts
    ]


def measured(copy_steps: float, off: Any = lambda model_s: model_s, **rows: Any) -> Measurement:
    """Rows whose figures are what the model says, own work of ``part_s`` for each part included,
    changed by ``off``."""
    part_s = rows.get("part_s", 0.0)
    made = Measurement(
        copy_steps,
        Ratio(4, 12),
        STATE_BYTES,
        GRADIENT_BYTES,
        STATE_BYTES / (copy_steps * 0.1),
        own=own_rows(part_s),
    )
    state_s = copy_steps * 0.1
    pipeline = replace(LENGTHS.pipeline(state_s, state_s / 3), part_s=part_s, behind_update=True)
    found = []
    for way in WAYS:
        for parts in rows.get("parts", range(1, 25)):
            model_s = best_cut(pipeline, parts, made.held(way)).overlap.lost_s
            found.append(Row(way, parts, [save_of(off(model_s), parts)], LENGTHS))
        best = min((row.saves[0].stall_s, row.parts) for row in found if row.way == way)
        auto = rows.get("auto", best[1])
        stall_s = next(row.saves[0].stall_s for row in found if (row.way, row.parts) == (way, auto))
        found.append(Row(way, AUTO, [save_of(stall_s, auto)], LENGTHS))
    found.append(Row("async", 1, [save_of(state_s, 1)], LENGTHS))
    made.rows = found
    return made


def report_of(*found: Measurement) -> MultistepReport:
    return MultistepReport(MultistepOptions(), facts_of(STATE_BYTES), list(found))


def verdicts_of(found: Measurement) -> dict[str, bool | None]:
    return {v.target: v.met for v in report_of(found).verdicts_of(found)}


def one(verdicts: dict[str, bool | None], *words: str) -> bool | None:
    (met,) = [met for what, met in verdicts.items() if all(word in what for word in words)]
    return met


def test_what_may_be_off() -> None:
    assert allowed_s(0.0) == pytest.approx(0.002)
    assert allowed_s(0.010) == pytest.approx(0.002)
    assert allowed_s(1.0) == pytest.approx(0.15)


def test_figures_that_are_the_models_meet_all_but_what_the_model_itself_misses() -> None:
    found = verdicts_of(measured(4))
    for way in WAYS:
        assert one(found, f"{way}: stall within") is True
        assert one(found, f"{way}: parts=") is True
    # Gradients of a third, held for one step only, do not all fit under training in 24 parts.
    assert one(found, "gockpt_o: at its best", "lower bound") is False
    assert one(verdicts_of(measured(0.5)), "gockpt_o: at its best", "lower bound") is True
    late = verdicts_of(measured(0.5, off=lambda model_s: model_s + 0.003))
    assert one(late, "gockpt_o: at its best", "lower bound") is False


def test_one_number_of_parts_that_is_off_is_seen() -> None:
    def off(by: float) -> dict[str, bool | None]:
        made = measured(4)
        (row,) = [row for row in made.rows if (row.way, row.parts) == ("gockpt", 4)]
        model_s = made.expected_s(row)
        assert model_s is not None
        row.saves = [save_of(model_s + by * allowed_s(model_s), 4)]
        return verdicts_of(made)

    assert one(off(0.9), "gockpt: stall within") is True
    assert one(off(1.1), "gockpt: stall within") is False
    assert one(off(-1.1), "gockpt: stall within") is False
    assert one(off(1.1), "gockpt_o: stall within") is True


@pytest.mark.parametrize("part_s", [0.0, 0.004])
def test_own_work_is_part_of_the_model_and_hides_nothing(part_s: float) -> None:
    made = measured(4, part_s=part_s)
    for way in WAYS:
        assert one(verdicts_of(made), f"{way}: stall within") is True
        for parts in (1, 7, 12, 24):
            assert made.own_s(way, parts) == pytest.approx(part_s * parts, abs=1e-9)
            row = made.row(way, parts)
            assert row is not None
            expected, own_s = made.expected(row), made.own_s(way, parts)
            assert expected is not None
            assert expected.lost_s == pytest.approx(expected.stall_s + own_s)
            # What waits for copies, and the bound, are as without it.
            pipeline = LENGTHS.pipeline(0.4, 0.4 / 3)
            plain = best_cut(pipeline, parts, made.held(way)).overlap
            assert made.modelled_s(row) == pytest.approx(plain.stall_s)
            assert made.bound_s(row) == pytest.approx(lower_bound_s(pipeline, parts))
    if part_s:  # 96 ms of it in 24 parts
        made.own = own_rows(0.0)
        assert one(verdicts_of(made), "gockpt_o: stall within") is False
        made.own = own_rows(3 * part_s)
        assert one(verdicts_of(made), "gockpt_o: stall within") is False


def test_own_work_that_was_not_measured_is_no_target_met() -> None:
    made = measured(4)
    made.own = []
    found = verdicts_of(made)
    assert one(found, "gockpt: stall within") is None
    assert one(found, "gockpt: parts=") is None
    made.own = [row for row in own_rows() if row.way == "gockpt_o"]
    made.own += [Row("gockpt", 4, error="failed: no disk")]
    found = verdicts_of(made)
    assert one(found, "gockpt: stall within") is None
    assert one(found, "gockpt_o: stall within") is True
    made.own = [*own_rows(), Row("gockpt", 4, error="failed: no disk")]
    assert one(verdicts_of(made), "gockpt: stall within") is False


def test_a_bad_choice_is_seen() -> None:
    assert one(verdicts_of(measured(4, auto=1)), "gockpt: parts=") is False
    assert one(verdicts_of(measured(4, auto=2)), "gockpt_o: parts=") is False


def test_a_choice_that_was_lucky_is_seen() -> None:
    """It may cost no more than the best, measured; the model knows better."""
    made = measured(4, auto=2)
    auto = made.row("gockpt_o", AUTO)
    best = made.best_measured("gockpt_o")
    assert auto is not None
    assert best is not None
    auto.saves = [save_of(best[1], 2)]
    assert one(verdicts_of(made), "gockpt_o: parts=") is False
    auto.saves = [save_of(best[1], best[0])]
    assert one(verdicts_of(made), "gockpt_o: parts=") is True
    auto.saves = [save_of(1.06 * best[1] + 0.002, best[0])]
    assert one(verdicts_of(made), "gockpt_o: parts=") is False


def test_one_line_for_each_way() -> None:
    made = measured(0.5, parts=(1, 2, 3))
    report = report_of(made)
    for way in WAYS:
        found = report.summary(made, way)
        assert found.met is True
        assert found.target == f"{way}, a copy of 0.5 steps, gradients 4/12"
        assert found.figure.startswith("3 of 3 rows as modelled, best 0.0 ms in 1 (bound 0.0)")
        assert found.figure.endswith("0.000 of async")
    (row,) = [row for row in made.rows if (row.way, row.parts) == ("gockpt_o", 2)]
    row.saves = [save_of(0.01, 2)]
    assert report.summary(made, "gockpt_o").met is False
    assert report.summary(made, "gockpt").met is True
    empty = Measurement(4, Ratio(4, 12), STATE_BYTES, GRADIENT_BYTES, 1e9, [])
    assert report_of(empty).summary(empty, "gockpt").met is None


def test_what_failed_is_no_target_met() -> None:
    made = measured(4)
    row = next(row for row in made.rows if (row.way, row.parts) == ("gockpt", 3))
    row.saves, row.error = [], "failed: no disk"
    assert one(verdicts_of(made), "gockpt: stall within") is False
    empty = Measurement(4, Ratio(4, 12), STATE_BYTES, GRADIENT_BYTES, 1e9, [])
    assert set(verdicts_of(empty).values()) == {None}
    assert not report_of(empty).all_met()


def test_steps_that_are_longer_beside_copies_give_the_link_time() -> None:
    """As they were measured apart; the model of copies alone goes by steps without any."""
    made = measured(4)
    row = next(row for row in made.rows if (row.way, row.parts) == ("gockpt_o", 3))
    copies_s, before_s = made.modelled_s(row), made.expected_s(row)
    for own in made.own:
        own.saves = [replace(save, backward_s=LENGTHS.backward_s + 0.004) for save in own.saves]
    assert made.modelled_s(row) == copies_s
    after_s = made.expected_s(row)
    assert before_s is not None
    assert after_s is not None
    assert 2 * 0.004 <= before_s - after_s <= 3 * 0.004, "in each window, but for cuts"


def test_the_slowdown_is_by_the_clock_on_the_wall() -> None:
    save = MeasuredSave({"gate": 0.1}, 0.05, 0.1, 1.3, 10, 0.1, 10, 0.03, 0.06)
    assert save.slowdown_s == pytest.approx(0.3)
    assert save.stall_s == pytest.approx(0.15)
    assert save.other_s == pytest.approx(0.05)


def test_tables_and_plain_data() -> None:
    made = measured(4, off=lambda model_s: model_s + 0.05, parts=(1, 4), part_s=0.003)
    text = shown_by(report_of(made))
    assert text.count("EMULATED") >= 2
    lines = [line.split() for line in text.splitlines() if line.startswith("gockpt ")]
    assert [line[1] for line in lines] == ["1", "4", "auto"]
    copies_s, model_s = made.modelled_s(made.rows[1]), made.expected_s(made.rows[1])
    assert model_s is not None
    assert lines[1][2:6] == [
        f"{1e3 * copies_s:.1f}",
        "12.0",
        f"{1e3 * model_s:.1f}",
        f"{1e3 * model_s + 50:.1f}",
    ]
    assert "everstep's choice: 4" in text
    assert "OFF" in text
    document = json.loads(json.dumps(report_of(made).as_json()))
    (found,) = document["measurements"]
    assert found["ratio"] == "4/12"
    row = found["rows"][1]
    assert row["modelled_stall_s"] == pytest.approx(copies_s)
    assert row["own_s"] == pytest.approx(0.012)
    assert row["modelled_lost_s"] == pytest.approx(model_s)
    assert {(own["way"], own["parts"]) for own in found["own"]} == {
        (way, parts) for way in WAYS for parts in (1, 12, 24)
    }
    assert row["stall_s"]["median"] == pytest.approx(model_s + 0.05)
    assert row["slowdown_s"]["median"] == pytest.approx(model_s + 0.05)


def test_missed_targets_end_with_3_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[MultistepOptions] = []

    def measure(options: MultistepOptions, display: Any) -> MultistepReport:
        asked.append(options)
        return report_of(measured(4))

    monkeypatch.setattr(run, "run_multistep", measure)
    words = ("multistep", "--copies", "4", "--ratios", "4/12", "--parts", "1-3", "--step-ms", "50")
    assert invoke(*words).exit_code == 0
    assert invoke(*words, "--check").exit_code == 3
    assert invoke(*words[:-4], "--k", "7,12").exit_code == 0
    assert asked[-1].parts == (7, 12)
    assert asked[0].copies == (4.0,)
    assert asked[0].parts == (1, 2, 3)
    assert asked[0].step_s == pytest.approx(0.05)


def test_it_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = MultistepOptions(parts=(1, 2, 4, 7, 12, 24), repeats=2, step_s=0.06)
    assert 600 < run.about_s(few) < 900
    assert run.about_s(replace(few, copies=(4.0,))) < 0.7 * run.about_s(few)
    assert run.about_s(MultistepOptions()) > 6 * run.about_s(few)
    monkeypatch.setattr(run, "run_multistep", lambda *_: report_of(measured(4)))
    told = invoke("multistep", "--k", "1,2,4,7,12,24", "--repeats", "2", "--step-ms", "60")
    assert "this takes about 13.1 minutes" in told.output


# --- Real saves -------------------------------------------------------------------------


@pytest.mark.slow
def test_real_saves_through_an_emulated_link(tmp_path: Path) -> None:
    """What must hold on a busy machine, too: nothing arrives sooner than the link allows."""
    with seeded_single_thread(1):
        training = TimedTraining(1_200_000, 1 / 3, 0.03, layers=24, seed=1)
        placement = Placement(free_core=True)
        speed = training.state_bytes / 0.2
        once = MultistepOptions(repeats=1)
        with placement.pinned():
            row = measure_row("gockpt", 3, training, speed, tmp_path / "run", placement, once)
            blocked = measure_row("async", 1, training, speed, tmp_path / "async", placement, once)
    (save,), (at_once,) = row.saves, blocked.saves
    assert (save.parts, at_once.parts) == (3, 1)
    assert save.steps >= 3
    # All of the state goes through the link, and training waits for gradients behind each update.
    assert save.wall_s >= 0.19
    assert save.causes["gradients"] > 0
    assert save.stall_s >= save.causes["gradients"] + save.causes["gate"] - 1e-3
    assert at_once.stall_s >= 0.19
    assert row.lengths is not None
    assert row.lengths.step_s >= 0.02


def test_a_row_that_fails_is_reported_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def measure(
        way: str, parts: int, training: Any, speed: float, run: Path, *_: Any, **__: Any
    ) -> Row:
        run.mkdir()
        (run / "something").write_bytes(b"x")
        told.append(f"{way} {parts}")
        if parts == 2:
            raise EverstepError("no disk")
        return Row(way, parts, [save_of(0.1, max(1, parts))], LENGTHS)

    monkeypatch.setattr(run, "measure_row", measure)
    display = type("Display", (), {"begin": lambda *_: None, "advance": lambda *_: None})()
    options = MultistepOptions(
        copies=(4.0,), ratios=(Ratio(4, 12),), parts=(1, 2), state_bytes=1_000_000, layers=24,
        folder=tmp_path,
    )  # fmt: skip
    report = run.run_multistep(options, display)
    own = [f"{way} {parts}" for way in WAYS for parts in (1, 2)]
    assert sorted(told[: len(own)]) == sorted(own)
    assert sorted(told[len(own) :]) == sorted(
        ["async 1", "lazy 1", *(f"{way} {parts}" for way in WAYS for parts in (0, 1, 2))]
    )
    (found,) = report.found
    assert {(row.way, row.parts) for row in found.own if row.error} == {(way, 2) for way in WAYS}
    errors = {(row.way, row.parts): row.error for row in found.rows if row.error}
    assert errors == {(way, 2): "failed: no disk" for way in WAYS}
    assert list(tmp_path.iterdir()) == []


def test_gradients_that_are_kept_longer_are_modelled_so() -> None:
    made = Measurement(
        4, Ratio(4, 12), STATE_BYTES, GRADIENT_BYTES, STATE_BYTES / 0.4, own=own_rows(0.0)
    )
    row = Row("gockpt_o", 12, [save_of(0.1, 12)], LENGTHS)
    one_step_s = made.modelled_s(row)
    made.held_steps = 4
    pipeline = LENGTHS.pipeline(0.4, 0.4 / 3)
    assert made.modelled_s(row) == pytest.approx(best_cut(pipeline, 12, 4).overlap.stall_s)
    assert made.modelled_s(row) < one_step_s
    assert made.held("gockpt") is None
