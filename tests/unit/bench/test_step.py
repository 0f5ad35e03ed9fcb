"""``everstep bench step`` and ``bench frequency``: what is chosen, the arithmetic, the words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import OptionError
from everstep_bench.harness.figures import Spread
from everstep_bench.harness.options import parse_list, parse_share
from everstep_bench.options import STEP_ARMS, FrequencyOptions, StepOptions
from everstep_bench.step.arms import Recovered, Setting, settings, usual
from everstep_bench.step.frequency import Found, FrequencyReport, Probe, smallest
from everstep_bench.step.kills import Kill, Killed
from everstep_bench.step.recovery import (
    BLOCKED,
    EVERSTEP,
    RecoveryFigures,
    ReplayFigures,
)
from everstep_bench.step.report import StepReport
from everstep_bench.step.rounds import Block, Row, Rows
from tests.support.stalls import facts_of, shown_by

BIG = 92_000_000


# --- Options ----------------------------------------------------------------------------


def test_training_alone_is_always_measured_and_so_is_what_lowdiff_is_compared_with() -> None:
    assert [s.arm for s in settings(StepOptions())] == list(STEP_ARMS)
    assert [s.arm for s in settings(StepOptions(arms=("lazy",)))] == ["none", "lazy"]
    names = [s.arm for s in settings(StepOptions(arms=("lowdiff",)))]
    assert names == ["none", "compressed", "lowdiff"]


def test_each_value_is_tried_with_the_usual_ones_of_the_others() -> None:
    options = StepOptions(
        arms=("lowdiff", "logged", "lazy", "adaptive"), every=(10, 50), ratio=(0.01, 0.1),
        batch_steps=(5, 1),
    )  # fmt: skip
    found = settings(options)
    assert [s.words(usual(options, s.arm)) for s in found] == [
        "none", "compressed", "compressed ratio 0.1", "lazy", "logged", "logged every 50",
        "adaptive", "adaptive ratio 0.1", "adaptive every 50",
        "lowdiff", "lowdiff ratio 0.1", "lowdiff batch 1", "lowdiff every 50",
    ]  # fmt: skip
    assert {s.every for s in found if s.arm == "lazy"} == {1}  # a base after every step
    assert all(s.block_steps == (50 if s.every == 50 else 10) for s in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": (1,)}, "--every 1: at least 2"),
        ({"every": ()}, "at least one is needed"),
        ({"ratio": (0.0,)}, "--ratio 0.0: at least"),
        ({"ratio": (1.5,)}, "--ratio 1.5: at most 1"),
        ({"batch_steps": (0,)}, "--batch-steps 0: at least 1"),
        ({"kills": -1}, "--kills -1: at least 0"),
        ({"batch": 0}, "--batch 0: at least 1"),
        ({"params": 5}, "--params 5: at least 100,000"),
        ({"repeats": 0}, "--repeats 0: at least 1"),
        ({"arms": ("none", "compressed")}, "no arm that saves"),
        ({"arms": ("lowdif",)}, "no 'lowdif'"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        StepOptions(**options)


@pytest.mark.parametrize("options", [{"within": 0.0}, {"ratio": 0.0}, {"every_max": 0}])
def test_what_cannot_be_looked_for_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        FrequencyOptions(**options)


def test_shares_are_written_both_ways() -> None:
    assert parse_share("3.5%") == pytest.approx(0.035)
    parse = parse_list(parse_share)
    assert parse_share(" 0.035 ") == pytest.approx(0.035)
    assert parse("0.001,1%,0.1") == (0.001, 0.01, 0.1)
    for text in ("", "3.5 percent", "-1%", "1e-2,"):
        with pytest.raises(OptionError):
            parse(text)


# --- Arithmetic -------------------------------------------------------------------------


def setting(arm: str, ratio: float = 0.01, every: int = 10) -> Setting:
    return Setting(arm, every, ratio, 5, 10)


def row(arm: str, *rounds: float | tuple[float, float], ratio: float = 0.01, **more: Any) -> Row:
    """Seconds for each step, by round; two numbers are two blocks."""
    made = Row(arm, detail="what it does", setting=usual(StepOptions(ratio=(ratio,)), arm))
    for number, steps_s in enumerate(rounds, 1):
        each = steps_s if isinstance(steps_s, tuple) else (steps_s,)
        made.blocks[number] = tuple(Block(10, 10 * step_s, **more) for step_s in each)
    return made


def test_blocks_are_compared_with_those_of_their_own_round() -> None:
    rows = Rows([row("none", (1.0, 1.0), (2.0, 4.0), (1.0, 1.0)), row("lazy", 1.1, 6.0, 1.2)])
    found = rows.slowdown(rows.rows[1], rows.dense())
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx((0.1, 0.2, 1.0))
    del rows.rows[1].blocks[3]
    found = rows.slowdown(rows.rows[1], rows.dense())
    assert found is not None
    assert found.median == pytest.approx(0.55)
    assert rows.slowdown(rows.rows[1], rows.first("sync")) is None


def test_noise_is_the_difference_of_two_blocks_in_one_round() -> None:
    assert row("none", (1.0, 1.1), (1.0, 1.3), (1.0, 1.0)).noise() == pytest.approx(0.1 / 1.05)
    assert row("lazy", 1.0, 2.0).noise() is None


def test_lowdiff_is_compared_with_compressed_training_of_its_own_ratio() -> None:
    rows = Rows(
        [row("none", (1.0, 1.0)), row("compressed", (2.0, 2.0)),
         row("compressed", (4.0, 4.0), ratio=0.1), row("lowdiff", 4.4, ratio=0.1),
         row("logged", 1.5)]
    )  # fmt: skip
    for at, expected in ((3, 0.1), (4, 0.5)):
        found = rows.against_its_own(rows.rows[at])
        assert found is not None
        assert found.median == pytest.approx(expected)


# --- Targets ----------------------------------------------------------------------------


def report_of(
    *rows: Row,
    kills: list[Killed] | None = None,
    free_core: bool = True,
    params: int = BIG,
    device: str = "cpu",
    **more: Any,
) -> StepReport:
    return StepReport(
        options=StepOptions(params=params, device=device),
        facts=facts_of(12 * params, free_core=free_core),
        params=params,
        rows=Rows(list(rows)),
        kills=kills or [],
        replay=more.pop("replay", None),
        recoveries=more.pop("recoveries", []),
    )


def targets(report: StepReport) -> dict[str, tuple[bool | None, str]]:
    return {verdict.target: (verdict.met, verdict.figure) for verdict in report.verdicts()}


def found(report: StepReport, *words: str) -> tuple[bool | None, str]:
    hits = [value for name, value in targets(report).items() if all(word in name for word in words)]
    assert len(hits) == 1, targets(report)
    return hits[0]


def rows_with(lowdiff: float, plus: float, checkfreq: float) -> list[Row]:
    return [
        row("none", (1.0, 1.0)), row("compressed", (2.0, 2.0)), row("checkfreq", 1 + checkfreq),
        row("lowdiff", 2 * (1 + lowdiff)), row("lowdiff_plus", 1 + plus),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lowdiff", "plus", "expected"),
    [(0.02, 0.08, (True, True)), (0.04, 0.08, (False, True)), (0.02, 0.1, (True, False))],
)
def test_slowdown_targets(lowdiff: float, plus: float, expected: tuple[bool, bool]) -> None:
    report = report_of(*rows_with(lowdiff, plus, 0.5))
    assert found(report, "by lowdiff of each step", "compressed")[0] is expected[0]
    assert found(report, "by lowdiff_plus of each step", "dense")[0] is expected[1]
    one = report_of(*rows_with(lowdiff, plus, 0.5), free_core=False)
    met, figure = found(one, "by lowdiff of each step")
    assert met is None
    assert "no core is free" in figure
    assert "%" in figure


def test_what_noise_hides_is_neither_met_nor_missed() -> None:
    """Two blocks that differ by 10 % in each round say nothing of 3 %, unless there are many."""
    for rounds, lowdiff, expected in (
        (1, 0.02, None), (1, 0.1, None), (1, 0.5, False), (100, 0.02, True), (100, 0.05, False),
    ):  # fmt: skip
        noisy = [(1.9, 2.1)] * rounds
        report = report_of(
            row("none", *[(1.0, 1.0)] * rounds),
            row("compressed", *noisy),
            row("lowdiff", *[2 * (1 + lowdiff)] * rounds),
        )
        met, figure = found(report, "by lowdiff of each step")
        assert met is expected, (rounds, lowdiff, figure)
        assert ("cannot be told" in figure) == (expected is None)


def test_less_than_half_of_checkfreq() -> None:
    assert found(report_of(*rows_with(0.02, 0.08, 0.17)), "by lowdiff: less")[0] is True
    assert found(report_of(*rows_with(0.02, 0.08, 0.17)), "by lowdiff_plus: less")[0] is True
    assert found(report_of(*rows_with(0.02, 0.08, 0.15)), "by lowdiff_plus: less")[0] is False
    met, figure = found(report_of(*rows_with(0.02, 0.08, 0.0)), "by lowdiff: less")
    assert met is None  # nothing to be a half of
    assert "cannot be told: 2.0% next to 0.0%" in figure


def kill(arm: str, *, completed: int = 7, step: int = 7, seconds: float = 1.0, different: int = 0,
         exact: bool = True) -> Killed:  # fmt: skip
    recovered = Recovered(step, "memory", 5, step - 5, exact)
    return Killed(setting(arm), [Kill(completed, 0.5, recovered, seconds, 0.1, different, 225)])


def test_what_a_kill_may_cost() -> None:
    words = ("SIGKILL with lowdiff", "step in flight")
    assert found(report_of(kills=[kill("lowdiff")]), *words)[0] is True
    assert found(report_of(kills=[kill("lowdiff", step=6)]), *words)[0] is False
    assert found(report_of(kills=[kill("lowdiff", different=1)]), *words)[0] is False
    more = kill("lowdiff", step=8)  # it was over, and the process could not say so any more
    assert more.kills[0].lost == 0
    failed = Killed(setting("lowdiff"), error="failed: it hangs")
    assert found(report_of(kills=[failed]), *words) == (False, "failed: it hangs")
    assert "failed: it hangs" in shown_by(report_of(kills=[failed]))
    assert not [name for name in targets(report_of(kills=[kill("lazy", step=3)])) if "lazy" in name]


def test_a_lossy_log_must_not_be_called_exact() -> None:
    words = ("SIGKILL with adaptive", "step in flight")
    lossy = {"exact": False, "different": 100}
    assert found(report_of(kills=[kill("adaptive", **lossy)]), *words)[0] is True
    assert found(report_of(kills=[kill("adaptive", step=6, **lossy)]), *words)[0] is False
    assert found(report_of(kills=[kill("adaptive", different=100)]), *words)[0] is False


def test_on_a_device_bits_may_differ_only_where_that_is_said() -> None:
    words = ("SIGKILL with logged", "step in flight")
    for exact, different, met in ((True, 0, True), (False, 9, True), (True, 9, False)):
        killed = kill("logged", exact=exact, different=different)
        assert found(report_of(kills=[killed], device="cuda"), *words)[0] is met
        assert found(report_of(kills=[killed]), *words)[0] is (different == 0)


def test_a_gigabyte_is_back_within_two_seconds() -> None:
    for seconds, met in ((1.9, True), (2.1, False)):
        report = report_of(kills=[kill("lowdiff", seconds=seconds)])
        assert found(report, "resume() after SIGKILL with lowdiff")[0] is met
    small = report_of(kills=[kill("lowdiff")], params=10_000_000)
    assert found(small, "resume() after SIGKILL with lowdiff")[0] is None
    assert "SMALL MODEL" in small.labels()[0]


def replay_of(mine_s: float, theirs_s: float) -> ReplayFigures:
    seconds = {(BLOCKED, 1): (theirs_s,), (EVERSTEP, 1): (mine_s,)}
    return ReplayFigures(1_000_000, 5, seconds, {1: 1e9})


def recovery_of(replay_s: float, fused: bool = False) -> RecoveryFigures:
    return RecoveryFigures(
        to="memory", params=10, state_bytes=1, log_bytes=1, steps=5, resume_s=2.0, load_s=1.0,
        replay_s=replay_s, training_s=5.0, source="memory", exact=True, identical=True,
        fused=fused,
    )  # fmt: skip


def test_replay_targets() -> None:
    for mine_s, met in ((1.1, True), (1.2, False)):
        report = report_of(replay=replay_of(mine_s, 1.0))
        assert found(report, "replay on the CPU, 1 thread")[0] is met
    for replay_s, met in ((0.4, True), (0.6, False)):
        report = report_of(recoveries=[recovery_of(replay_s)])
        assert found(report, "reading it from memory")[0] is met
    report = report_of(recoveries=[recovery_of(0.6), recovery_of(0.4, fused=True)])
    assert found(report, "included, for-loop AdamW")[0] is False
    assert found(report, "included, fused AdamW")[0] is True


def test_a_target_that_was_not_measured_is_not_met() -> None:
    assert not report_of(row("none", (1.0, 1.0))).all_met()
    whole = report_of(
        *rows_with(0.02, 0.08, 0.5),
        kills=[kill("lowdiff")],
        replay=replay_of(1.0, 1.0),
        recoveries=[recovery_of(0.1)],
    )
    assert whole.all_met(), targets(whole)


# --- What people see --------------------------------------------------------------------


def test_every_row_and_every_label_is_shown() -> None:
    missing = Row("lowdiff_plus", error="this version has none", setting=setting("lowdiff_plus"))
    rows = [
        row("none", (1.0, 1.1)),
        row("lazy", 1.5, memory_bytes=20 * 10**6, written_bytes=10**7),
        missing,
    ]
    report = report_of(
        *rows,
        kills=[kill("lazy", different=3)],
        free_core=False,
        replay=replay_of(1.0, 1.0),
        recoveries=[recovery_of(0.1), recovery_of(0.05, fused=True)],
    )
    text = shown_by(report)
    for words in (
        "42.9 %", "2.000", "1.000", "no, 3 of 225 differ", "ONE CORE",
        "this version has none", "differ by 9.5 %", "\nmet ",
        "memory  for-loop", "memory     fused",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert text.count("[ONE CORE]") == 5  # no table is read without it


def test_the_outcome_as_data() -> None:
    report = report_of(
        row("none", (1.0, 1.1)),
        row("lazy", 1.5, written_bytes=100),
        kills=[kill("lazy")],
        replay=replay_of(1.0, 1.0),
        recoveries=[recovery_of(0.1)],
    )
    data = report.as_json()
    lazy = data["arms"][1]
    assert lazy["slowdown_against_dense"]["median"] == pytest.approx(1.5 / 1.05 - 1)
    assert lazy["written_bytes_per_step"]["median"] == 10
    assert lazy["blocks"][0]["round"] == 1
    assert (data["kills"][0]["kills"][0]["lost"], data["kills"][0]["arm"]) == (0, "lazy")
    assert len(data["targets"]) == len(report.verdicts())


# --- Frequency --------------------------------------------------------------------------


@given(least=st.integers(1, 200), most=st.integers(1, 150))
def test_the_smallest_interval_is_found_in_few_probes(least: int, most: int) -> None:
    tried: list[int] = []

    def within(every: int) -> bool:
        tried.append(every)
        return every >= least

    assert smallest(within, most) == (least if least <= most else None)
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 * most.bit_length() + 1
    assert max(tried) <= most


def test_frequencies_are_shown_with_what_they_rest_on() -> None:
    spread = Spread(0.01, 0.02, 0.03)
    report = FrequencyReport(
        options=FrequencyOptions(every_max=8),
        facts=facts_of(),
        found=[
            Found("lazy", [Probe(1, Spread(0.1, 0.2, 0.3)), Probe(2, spread, 0.005)], 2),
            Found("lowdiff", [Probe(1, spread)], 1),
            Found("torch.save", [Probe(8, Spread(0.5, 0.5, 0.5))]),
            Found("lowdiff_plus", error="this version has none"),
        ],
    )
    lines = {line.split()[0]: line for line in shown_by(report).splitlines() if line}
    assert "every 2" in lines["lazy"]
    assert "2.0 %" in lines["lazy"]
    assert lines["lazy"].rstrip().endswith("1, 2")
    assert "every step" in lines["lowdiff"]
    assert "not even every 8" in lines["torch.save"]
    assert "this version has none" in lines["lowdiff_plus"]
    arms = report.as_json()["arms"]
    assert [(a["whole_state_every"], a["every_step"]) for a in arms] == [
        (2, False), (1, True), (None, False), (None, False),
    ]  # fmt: skip
