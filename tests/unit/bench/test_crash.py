"""``everstep bench crash-interval``: intervals, lives, targets, tables; kills are real."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import EverstepError, OptionError
from everstep.testing.emulated_link import EmulatedLink
from everstep.workloads import make_deterministic
from everstep.workloads.comparison import fingerprint
from everstep_bench import crash
from everstep_bench.crash import (
    CrashReport,
    CrashTable,
    Life,
    Lives,
    Losses,
    SaveCosts,
    costs_of,
    interval_of,
    lived,
    logged_interval_of,
    share_of,
)
from everstep_bench.harness.children import Child
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.running import keepers_of
from everstep_bench.options import CRASH_ARMS, IDEAL, NONE, CrashOptions, Training
from everstep_bench.step.arms import DcpWarm, Ours, Recovered, Setting, StepArm, TorchSave
from everstep_bench.step.rounds import make_arm
from tests.support.stalls import (
    block_of,
    facts_of,
    ideal_of,
    invoke,
    row_of,
    session_of,
    shown_by,
)
from tests.support.stalls import interval_of as rounds_of

TINY = Training(params=100_000, batch=1)


@pytest.fixture(autouse=True)
def cores_back() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


# --- Words ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"crash_every_s": ()},
        {"crash_every_s": (10.0, 0.1)},
        {"crashes": 0},
        {"link_bytes_per_s": 0.0},
        {"arms": ("lasy",)},
        {"arms": (NONE,)},
        {"params": 1},
    ],
)
def test_what_makes_no_measurement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        CrashOptions(**wrong)


def test_failures_are_the_same_for_all_arms_and_drawn_around_their_mean() -> None:
    options = CrashOptions(crashes=200, seed=5)
    drawn = options.lifetimes(10.0)
    assert drawn == options.lifetimes(10.0)
    assert drawn != CrashOptions(crashes=200, seed=6).lifetimes(10.0)
    *failures, last = drawn
    assert last == 10.0
    assert len(failures) == 200
    assert all(5.0 <= seconds <= 15.0 for seconds in failures)
    assert sum(failures) / 200 == pytest.approx(10.0, rel=0.1)
    assert len(set(failures)) == 200


def test_wrong_words_end_with_a_usage_error() -> None:
    assert invoke("crash-interval", "--arms", "lasy").exit_code == 2
    assert invoke("crash-interval", "--crash-every", "soon").exit_code == 2
    assert invoke("crash-interval", "--crash-every", "10s,0.1s").exit_code == 2


# --- Intervals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_s", "best"),
    [(36.79, 472), (12.226, 272), (1.313, 89), (0.988, 77), (0.435, 51), (0.175, 32)],
)
def test_the_papers_best_intervals(save_s: float, best: int) -> None:
    """GoCkpt Table 1: all of them follow from one step time and a failure every 600 s."""
    found = interval_of(SaveCosts(step_s=0.4454, save_s=save_s, durable_s=0.0), 600.0)
    assert abs(found - best) <= 1


def test_a_save_is_durable_before_the_next_begins() -> None:
    assert interval_of(SaveCosts(step_s=0.1, save_s=0.0, durable_s=0.0), 10.0) == 1
    assert interval_of(SaveCosts(step_s=0.1, save_s=0.001, durable_s=0.55), 10.0) == 6
    assert interval_of(SaveCosts(step_s=0.1, save_s=0.2, durable_s=0.55), 10.0) == 20


def test_with_a_log_bases_are_further_apart() -> None:
    costs = SaveCosts(step_s=0.1, save_s=0.05, durable_s=0.1)
    plain = interval_of(costs, 10.0)
    logged = SaveCosts(step_s=0.1, save_s=0.05, durable_s=0.1, replay_s=0.005)
    assert logged_interval_of(logged, 10.0, state_bytes=10**8, batch=1) > 2 * plain
    slow = SaveCosts(step_s=0.1, save_s=0.05, durable_s=0.1, replay_s=0.2)
    assert logged_interval_of(slow, 10.0, state_bytes=10**8, batch=1) == plain


def test_the_share_is_that_of_the_papers_formula_and_greatest_at_the_best_interval() -> None:
    costs = SaveCosts(step_s=0.1, save_s=0.2, durable_s=0.0)
    assert share_of(costs, 20, 10.0, 0.5) == pytest.approx(1 / (1 + 0.1 + 0.1 + 0.05))
    best = interval_of(costs, 10.0)
    shares = {every: share_of(costs, every, 10.0, 0.5) for every in range(1, 60)}
    assert max(shares, key=lambda every: shares[every]) == best
    logged = SaveCosts(step_s=0.1, save_s=0.2, durable_s=0.0, replay_s=0.01)
    assert share_of(logged, 20, 10.0, 0.5) == pytest.approx(1 / (1 + 0.1 + 0.01 + 0.05))


def test_costs_are_stalls_unless_steps_are_slowed_down_by_more() -> None:
    quiet = block_of(0, 0.1, [1.0] * 4, window_s=0.5, causes={"gate": 0.0})
    row = row_of("lazy", "ours", quiet)
    ideals = [ideal_of(1.0, blocks=2)]
    found = costs_of(rounds_of(ideals, row), row)
    assert found == SaveCosts(pytest.approx(1.0), pytest.approx(0.1), 0.5)  # type: ignore[arg-type]
    for step_s, save_s in ((2.0, 4.1), (1.01, 0.14)):  # blocks without a save differ by more
        slowed = block_of(0, 0.1, [step_s] * 4, window_s=0.5, causes={"gate": 0.0})
        row = row_of("lazy", "ours", slowed)
        found = costs_of(rounds_of(ideals, row), row)
        assert found is not None
        assert found.save_s == pytest.approx(save_s)
    assert costs_of(rounds_of(ideals), row_of("lazy", "ours")) is None


# --- Lives ------------------------------------------------------------------------------


def life(begin: int, reached: int, seconds: float = 10.0, load_s: float = 0.5) -> Life:
    return Life(Recovered(begin, "disk"), load_s, seconds, reached)


def test_useful_steps_are_those_that_are_there_in_the_end() -> None:
    found = Lives("lazy", 4, [life(0, 50), life(48, 90), life(84, 130)])
    assert found.reached == 130
    assert found.lost() == [2, 6]
    assert found.steps_per_s == pytest.approx(130 / 30)
    assert found.loads_s() == [0.5, 0.5]
    assert [one.steps for one in found.lives] == [50, 42, 46]


def test_a_step_that_is_trained_again_must_have_the_same_loss() -> None:
    losses = Losses()
    for step in (1, 2, 3):
        losses.see("lazy", step, f"loss {step}")
    losses.see("lazy", 3, "loss 3")
    assert (losses.again, losses.different) == (1, [])
    losses.see("torch.save", 2, "another")
    assert (losses.again, losses.different) == (2, [("torch.save", 2)])


def saying(*lines: bytes) -> Child:
    code = "import os, sys\n" + "".join(f"os.write(1, {line!r})\n" for line in lines)
    return Child("a child", command=[sys.executable, "-c", code])


def test_words_of_a_process_whatever_they_are_cut_into() -> None:
    lines = (b'{"event": "ready", "at_', b's": 1}\n{"event": "a"}\n{"event": "b"}\n{"ev')
    with saying(*lines) as process:
        assert process.next("ready") == {"event": "ready", "at_s": 1}
        assert process.next("a")
        assert process.wait(10.0)
        assert [word["event"] for word in process.kill()] == ["b"]  # and half a word


def test_a_process_that_ends_or_says_something_else_is_an_error() -> None:
    with saying() as process, pytest.raises(EverstepError, match="exit status 0"):
        process.next("ready")
    with saying(b'{"event": "step"}\n') as process, pytest.raises(EverstepError, match="'step'"):
        process.next("ready")


# --- Arms -------------------------------------------------------------------------------


def made(name: str, folder: Path, loop: Loop, every: int = 2, **choices: Any) -> Any:
    setting = Setting(name, every, batch_steps=2, **choices)
    return make_arm(setting, loop, folder, Placement(free_core=True))


def loop_of(seed: int) -> Loop:
    make_deterministic(seed)
    return Loop(TINY)


def test_arms_by_name(tmp_path: Path) -> None:
    loop = loop_of(1)
    kinds = {NONE: StepArm, "torch.save": TorchSave, "dcp-warm": DcpWarm}
    for name in CRASH_ARMS:
        assert type(made(name, tmp_path, loop)) is kinds.get(name, Ours)


def test_a_log_is_on_disk_where_no_keeper_survives(tmp_path: Path) -> None:
    loop = loop_of(1)
    log = made("logged", tmp_path, loop, log_on_disk=True).log()
    assert (log.to, log.batch_steps) == ("disk", 2)
    assert made("logged", tmp_path, loop).log().to == "memory"
    assert made("lazy", tmp_path, loop).seams().lane is None
    lane = made("lazy", tmp_path, loop, link_bytes_per_s=1e9).seams().lane()
    assert isinstance(lane, EmulatedLink)
    lane.close()
    setting = crash.setting_of(CrashOptions(link_bytes_per_s=1e9), "logged", 3)
    assert (setting.log_on_disk, setting.link_bytes_per_s) == (True, 1e9)


def test_dcp_gives_back_every_bit_of_its_newest_whole_save(tmp_path: Path) -> None:
    expected = None
    loop = loop_of(1)
    arm = made("dcp-warm", tmp_path / "a", loop)
    arm.open()
    try:
        assert arm.resume() == Recovered(0, "fresh")
        for step in range(1, 8):
            loop.step()
            arm.after_step()
            if step == 6:
                expected = fingerprint(loop.training)
    finally:
        arm.close()
    torn = tmp_path / "a" / "8"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"cut short")
    other = loop_of(2)
    arm = made("dcp-warm", tmp_path / "a", other)
    arm.open()
    try:
        found = arm.resume()
    finally:
        arm.close()
    assert (found.step, found.source) == (6, "disk")
    assert fingerprint(other.training) == expected
    left = sorted(path.name for path in (tmp_path / "a").iterdir() if path.name.isdecimal())
    assert left == ["4", "6"]


@pytest.mark.slow
def test_a_killed_training_goes_on_from_the_disk_and_trains_the_same_steps(tmp_path: Path) -> None:
    """Real SIGKILLs of training and keeper; the child's losses are compared with our own."""
    options = CrashOptions(params=100_000, batch=1, seed=3)
    losses = Losses()
    found = lived(options, Setting("lazy", 2), tmp_path / "run", (0.0, 0.0), losses, steps_min=8)
    assert found.error is None
    first, second = found.lives
    assert first.recovered == Recovered(0, "fresh", None, 0, True)
    assert first.reached >= 8
    assert second.recovered.source == "disk"  # its keeper, which had more in memory, is gone
    assert 0 < second.recovered.step <= first.reached
    assert second.recovered.step % 2 == 0
    assert found.lost() == [first.reached - second.recovered.step]
    assert losses.different == []
    assert losses.again == max(0, min(first.reached, second.reached) - second.recovered.step)
    make_deterministic(3)
    loop = Loop(options)
    for step in range(1, found.reached + 1):
        loop.step()
        assert losses.known[step] == float(loop.loss).hex()
    assert not (tmp_path / "run").exists()
    assert keepers_of(tmp_path / "run") == []


# --- The report -------------------------------------------------------------------------

COSTS = SaveCosts(step_s=0.2, save_s=0.05, durable_s=0.1)


def report_of(*rows: Lives, losses: Losses | None = None, **options: Any) -> CrashReport:
    return CrashReport(
        options=CrashOptions(**options),
        facts=facts_of(),
        costs={row.arm: COSTS for row in rows if row.arm != NONE},
        crashes=[CrashTable(10.0, Lives(IDEAL, 1, [life(0, 50)]), list(rows))],
        losses=losses or Losses({1: "a"}, again=3),
    )


def verdicts_of(report: CrashReport) -> list[bool | None]:
    return [verdict.met for verdict in report.verdicts()]


def test_targets() -> None:
    good = Lives("lazy", 5, [life(0, 48), life(45, 90)])
    bad = Lives("torch.save", 9, [life(0, 40), life(36, 70)])
    report = report_of(Lives(NONE, 1, [life(0, 50), life(0, 50)]), bad, good)
    assert verdicts_of(report) == [True, True]
    assert report.all_met()
    slower = report_of(Lives("lazy", 5, bad.lives), Lives("dcp-warm", 5, good.lives))
    assert verdicts_of(slower) == [True, False]
    assert verdicts_of(report_of(good)) == [True, None]
    wrong = Losses({1: "a"}, again=3, different=[("lazy", 1)])
    assert verdicts_of(report_of(bad, good, losses=wrong)) == [False, True]
    assert verdicts_of(report_of(bad, good, losses=Losses())) == [None, True]
    broken = Lives("lazy", 5, error="failed: no disk")
    assert verdicts_of(report_of(bad, broken)) == [True, None]


def test_tables_show_shares_next_to_the_formula_and_why_there_are_none() -> None:
    report = report_of(
        Lives("lazy", 5, [life(0, 48), life(45, 90)]),
        Lives("torch.save", 9, error="failed: no disk"),
        link_bytes_per_s=2e9,
    )
    text = shown_by(report)
    (line,) = (line for line in text.splitlines() if line.startswith("lazy "))
    modelled = 100 / (1 + 0.05 / 1.0 + 0.5 / 10 + 0.5 / 10)
    words = ["lazy", "50.00", "100.0", "5", "4.50", "90.0", "%", f"{modelled:.1f}", "%", "3.0"]
    assert line.split() == [*words, "500", "disk", "lazy"]
    assert "failed: no disk" in text
    assert text.count("EMULATED") >= 2
    document = json.loads(json.dumps(report.as_json()))
    (table,) = document["tables"]
    assert table["arms"][0]["share_of_ideal"] == pytest.approx(0.9)
    assert table["arms"][0]["lost"] == [3]
    assert table["arms"][1]["error"] == "failed: no disk"
    assert document["emulated_link_bytes_per_s"] == 2e9


def test_missed_targets_end_with_3_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Losses({1: "a"}, again=3, different=[("lazy", 1)])
    report = report_of(Lives("lazy", 5, [life(0, 48), life(45, 90)]), losses=wrong)
    asked: list[CrashOptions] = []

    def measure(options: CrashOptions, display: Any) -> CrashReport:
        asked.append(options)
        return report

    monkeypatch.setattr(crash, "run_crash", measure)
    words = ("crash-interval", "--crash-every", "10s,1min", "--link", "2GB/s", "--arms", "lazy")
    assert invoke(*words).exit_code == 0
    assert invoke(*words, "--check").exit_code == 3
    assert asked[0].crash_every_s == (10.0, 60.0)
    assert asked[0].link_bytes_per_s == 2e9
    assert asked[0].names() == ("lazy",)


def test_an_arm_without_costs_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def live(options: Any, setting: Setting, *_: Any, name: str | None = None) -> Lives:
        started.append(f"{name or setting.arm} {setting.every}")
        return Lives(name or setting.arm, setting.every, [life(0, 10)])

    monkeypatch.setattr(crash, "lived", live)
    costs: dict[str, SaveCosts | str] = {"torch.save": "not installed", "lazy": COSTS}
    names = [NONE, "torch.save", "lazy"]
    bench = crash.Bench(session_of(CrashOptions(), folder=Path("x")), names, costs, 10**9)
    table = bench.table(10.0)
    assert sorted(started) == [f"{IDEAL} 1", "lazy 5", f"{NONE} 1"]
    found = {lives.arm: lives.error for lives in table.rows}
    assert found["torch.save"] == "not installed"
    assert found["lazy"] is None


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    result = invoke(
        "crash-interval", "--params", "100k", "--batch", "1", "--crash-every", "1s", "--crashes",
        "1", "--repeats", "1", "--dir", str(tmp_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["of_these_different"] == []
    (table,) = document["tables"]
    assert [arm["name"] for arm in table["arms"]] == list(CRASH_ARMS)
    assert [arm["error"] for arm in table["arms"]] == [None] * len(CRASH_ARMS)
    assert list(tmp_path.iterdir()) == []
