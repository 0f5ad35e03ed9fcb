"""``everstep bench stall``: words, arithmetic, targets, tables, traces."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.cli.plan.schedule_output import check_target
from everstep.errors import OptionError
from everstep_bench.harness import loop as loops
from everstep_bench.harness.options import from_words, parse_list, parse_number, parse_params
from everstep_bench.options import STALL_ARMS, StallOptions
from everstep_bench.stall import run, timeline
from everstep_bench.stall.figures import Ideal
from everstep_bench.stall.report import StallReport
from tests.support.stalls import (
    block_of,
    ideal_of,
    interval_of,
    invoke,
    report_of,
    row_of,
    saved,
    shown_by,
)

# --- Words on the command line ----------------------------------------------------------


def test_numbers_of_parameters() -> None:
    assert parse_params("25M") == 25_000_000
    assert parse_params("1.5g") == 1_500_000_000
    assert parse_params(" 2B ") == 2_000_000_000
    assert parse_params("300000") == 300_000
    for text in ("", "M", "-1M", "1MiB", "ten", "1M parameters"):
        with pytest.raises(OptionError, match="no number of parameters"):
            parse_params(text)


def test_lengths_of_blocks() -> None:
    parse = parse_list(parse_number)
    assert parse("8") == (8,)
    assert parse("1, 10,50,10") == (1, 10, 50)
    for text in ("", "1,", "a", "1.5", "-1", "1;2"):
        with pytest.raises(OptionError, match="no whole number"):
            parse(text)
    with pytest.raises(OptionError, match="--every 0: at least 1"):
        from_words(StallOptions, every="3,0")


def test_arms_by_name() -> None:
    assert from_words(StallOptions).arms is None
    assert from_words(StallOptions, arms="lazy, torch.save,lazy").arms == ("lazy", "torch.save")
    with pytest.raises(OptionError, match="did you mean 'dcp-warm'"):
        from_words(StallOptions, arms="dcp-wram")


@pytest.mark.parametrize(
    "wrong",
    [
        {"params": 10},
        {"params": 10**12},
        {"every": ()},
        {"every": (3, 0)},
        {"repeats": 0},
        {"within_s": 0.0},
        {"within_s": float("nan")},
        {"seed": -1},
        {"device": "tpu"},
        {"dtype": "float8"},
        {"batch": 0},
        {"layers": 0},
        {"link_bytes_per_s": 0.0},
        {"link_bytes_per_s": 1e9, "device": "cuda"},
        {"arms": ("lasy",)},
        {"arms": ("ideal",)},
    ],
)
def test_what_makes_no_measurement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        StallOptions(**wrong)


def test_the_ideal_is_always_measured_first() -> None:
    assert StallOptions().names() == STALL_ARMS
    assert StallOptions(arms=("lazy", "torch.save")).names() == ("ideal", "torch.save", "lazy")


# --- Arithmetic -------------------------------------------------------------------------


def test_an_ideal_step_is_the_mean_over_all_blocks() -> None:
    ideal = Ideal((block_of(0, 0, [1.0, 3.0]), block_of(9, 0, [2.0, 2.0, 4.0])))
    assert ideal.step_s == pytest.approx(12.0 / 5)
    assert ideal.noise_s == pytest.approx(8.0 / 3 - 2.0)
    assert ideal_of(1.0).noise_s is None


def test_slowdown_counts_the_call_and_slower_steps_and_all_steps() -> None:
    ideal = ideal_of(1.0, 1.0)
    assert ideal.slowdown_s(block_of(5, 0.5, [1.0, 1.0])) == pytest.approx(0.5)
    assert ideal.slowdown_s(block_of(5, 0.5, [1.25, 1.0])) == pytest.approx(0.75)
    # A block that goes on until its save is done is compared with as many ideal steps.
    assert ideal.slowdown_s(block_of(5, 0.5, [1.0] * 9)) == pytest.approx(0.5)
    assert ideal.slowdown_s(block_of(5, 0, [1.0] * 2, after_step_s=0.1)) == pytest.approx(0.2)


@given(
    step_s=st.floats(0.01, 10.0),
    call_s=st.floats(0.0, 10.0),
    count=st.integers(1, 50),
    gate_s=st.floats(0.0, 5.0),
    share=st.floats(0.05, 1.0),
)
def test_where_nothing_interferes_stall_and_slowdown_agree(
    step_s: float, call_s: float, count: int, gate_s: float, share: float
) -> None:
    steps = [step_s + gate_s, *[step_s] * (count - 1)]
    window_s = max(1e-3, share * (call_s + sum(steps)))
    block = block_of(7.0, call_s, steps, window_s=window_s, causes={"gate": gate_s})
    ideal = ideal_of(step_s, step_s)
    assert ideal.slowdown_s(block) == pytest.approx(block.stall_s, abs=1e-9 * 1000)
    rate = ideal.loop_rate(block)
    assert rate is not None
    assert 0.0 <= rate <= 1.0 + 1e-9
    if block.done_s is not None and block.done_s > block.steps[0].begin_s:
        # All that was lost was lost in the window.
        expected = max(0.0, 1.0 - (call_s + gate_s) / window_s)
        assert rate == pytest.approx(expected, abs=1e-6)


def test_the_loop_rate_is_that_of_the_window_only() -> None:
    ideal = ideal_of(1.0)
    # Four steps at half speed, then a hundred at full speed: half, not almost one.
    block = block_of(0, 0.0, [2.0] * 4 + [1.0] * 100, window_s=8.0)
    assert ideal.loop_rate(block) == pytest.approx(0.5)
    # What comes later, and is slow for other reasons, has nothing to do with it.
    block = block_of(0, 0.0, [2.0] * 4 + [1.5] * 100, window_s=8.0)
    assert ideal.loop_rate(block) == pytest.approx(0.5)
    # The window ends within a step: what that step lost, it lost inside.
    block = block_of(0, 0.0, [1.1, 1.0], window_s=0.5)
    assert ideal.loop_rate(block) == pytest.approx(1 - 0.1 / 0.5)


def test_a_save_that_training_waits_for_has_no_loop_rate() -> None:
    ideal = ideal_of(1.0)
    assert ideal.loop_rate(block_of(0, 3.0, [1.0, 1.0], window_s=2.9)) == 0.0
    assert ideal.loop_rate(block_of(0, 0.0, [1.0])) is None


def test_stall_is_calls_and_gate_and_the_rest_of_the_calls_has_no_cause() -> None:
    causes = {"capture": 0.2, "gate": 0.5, "back_pressure": 0.1, "persist": 0.3}
    block = block_of(0, 0.7, [1.0], causes=causes)
    assert block.stall_s == pytest.approx(1.2)
    assert block.other_s == pytest.approx(0.1)


def test_durable_includes_what_was_synced_for_the_library() -> None:
    assert block_of(4, 0.1, [1.0], window_s=2.0, sync_s=0.25).durable_s == pytest.approx(2.25)
    assert block_of(4, 0.1, [1.0]).durable_s is None


def test_blocks_are_paired_within_rounds_and_the_median_counts() -> None:
    # The second round is four times as slow for everybody; the third has an outlier.
    row = row_of(
        "lazy",
        "ours",
        block_of(0, 0.1, [1.0, 1.0]),
        block_of(0, 0.2, [4.0, 4.0]),
        block_of(0, 0.1, [9.0, 1.0]),
    )
    interval = interval_of([ideal_of(1.0), ideal_of(4.0), ideal_of(1.0)], row)
    found = interval.slowdown_s(row)
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx((0.1, 0.2, 8.1))
    found_all = interval.figures_of(row, 10**9)
    difference = found_all["difference_s"]
    assert difference is not None
    assert difference.median == pytest.approx(0.0)
    share = found_all["share_of_training"]
    assert share is not None
    assert share.median == pytest.approx(0.05)


def test_a_round_without_a_partner_does_not_count() -> None:
    row = row_of("lazy", "ours", block_of(0, 0.1, [1.0]), block_of(0, 50.0, [1.0]))
    interval = interval_of([ideal_of(1.0)], row)
    found = interval.slowdown_s(row)
    assert found is not None
    assert found.high == pytest.approx(0.1)


def test_noise_is_told_for_a_block_of_the_interval() -> None:
    def pair(one_s: float, other_s: float) -> Ideal:
        return Ideal((block_of(0, 0, [one_s] * 4), block_of(9, 0, [other_s] * 4)))

    interval = interval_of([pair(1.0, 1.1), pair(1.0, 1.3), pair(1.0, 1.0)], every=10)
    assert interval.noise_s() == pytest.approx(1.0)
    assert interval_of([ideal_of(1.0)]).noise_s() is None


def test_processor_time_is_what_steps_alone_do_not_take() -> None:
    ideal = Ideal((block_of(0, 0, [1.0] * 4, trainer_cpu_s=2.0),))
    row = row_of("lazy", "ours", block_of(0, 0.1, [1.0] * 2, trainer_cpu_s=1.25))
    found = interval_of([ideal], row).figures_of(row, 1)["trainer_cpu_s"]
    assert found is not None
    assert found.median == pytest.approx(0.25)


# --- The report -------------------------------------------------------------------------


def verdicts_of(report: StallReport) -> list[tuple[str, bool | None]]:
    return [(v.figure, v.met) for v in report.verdicts()]


def test_targets_that_are_met() -> None:
    lazy = row_of("lazy", "ours", saved(0.0015, gate_s=0.0002))
    warm = row_of("dcp-warm", "peer", saved(0.5))
    found = verdicts_of(report_of(interval_of([ideal_of(1.0, blocks=2)], lazy, warm)))
    assert [met for _, met in found] == [True, True, True]
    assert found[0][0] == "1.70 ms, of which 0.20 ms at the gate"
    assert found[1][0].startswith("1.7 ms next to 500.0 ms (two blocks without a save differ by")
    assert found[2][0] == "1.000"


def test_targets_that_are_missed() -> None:
    lazy = row_of("lazy", "ours", saved(0.0019, gate_s=0.0002, extra_s=0.1))
    warm = row_of("dcp-warm", "peer", saved(0.5))
    found = verdicts_of(report_of(interval_of([ideal_of(1.0)], lazy, warm)))
    assert [met for _, met in found] == [False, False, False]
    assert not report_of(interval_of([ideal_of(1.0)], lazy, warm)).all_met()


def test_targets_that_could_not_be_looked_at() -> None:
    lazy = row_of("lazy", "ours", saved(0.001))
    assert [met for _, met in verdicts_of(report_of(interval_of([ideal_of(1.0)])))] == [None] * 3
    # Without the peer; with a peer that lost nothing; without a free core.
    found = verdicts_of(report_of(interval_of([ideal_of(1.0)], lazy), free_core=False))
    assert [met for _, met in found] == [True, None, None]
    assert "no core is free; without: 1.000" in found[2][0]
    quick = row_of("dcp-warm", "peer", block_of(0, 0.0, [0.5], window_s=0.1))
    assert verdicts_of(report_of(interval_of([ideal_of(1.0)], lazy, quick)))[1][1] is None


def test_what_a_device_waits_for_is_a_stall_and_not_the_hooks_of_the_thread() -> None:
    """The thread runs ahead of the device there; and how much of its link a save has."""
    block = replace(saved(0.001, gate_s=0.3), device_s=0.02)
    assert block.stall_s == pytest.approx(0.021)
    assert saved(0.001, gate_s=0.3).stall_s == pytest.approx(0.301)
    lazy = row_of("lazy", "ours", block, replace(block, staged_s=11.0))
    interval = interval_of([ideal_of(1.0), ideal_of(1.0)], lazy)
    interval.pinned_bytes_per_s.update({1: 2.1e9, 2: 1.05e9})
    report = report_of(interval, device="cuda", dtype="bfloat16")  # a GB in 0.5 s, and in 1 s
    figure, met = verdicts_of(report)[3]
    assert (figure, met) == ("0.952 of 1.6 GB/s", True)
    text = shown_by(report)
    assert "on the GPU  link" in text
    assert "20.0  0.95" in text
    found = report.as_json()["intervals"][0]
    assert found["pinned_bytes_per_s"] == [2.1e9, 1.05e9]
    assert found["arms"][0]["blocks"][0]["device_s"] == 0.02
    interval.pinned_bytes_per_s.update({1: 4e9, 2: 4e9})
    assert verdicts_of(report)[3][1] is False
    interval.pinned_bytes_per_s.clear()
    assert verdicts_of(report)[3] == ("-", None)


class _Moment:
    """An event on a stream that takes a millisecond for whatever it is given."""

    count = 0

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None:
        _Moment.count += 1
        self.at = _Moment.count

    def elapsed_time(self, other: _Moment) -> float:
        return float(other.at - self.at)


def test_the_clock_of_a_device_tells_what_lies_between_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "_cuda", SimpleNamespace(Event=_Moment))
    clock = loops.DeviceClock()
    clock.end()  # without a beginning
    for _ in range(2):
        clock.begin()
        loops.moment()
        clock.end()
    clock.begin()
    assert clock.taken_s() == pytest.approx(0.004)
    assert clock.taken_s() == 0.0


def test_every_output_of_an_emulated_link_says_so() -> None:
    lazy = row_of("lazy", "ours", saved(0.001))
    report = report_of(interval_of([ideal_of(1.0, blocks=2)], lazy), link_bytes_per_s=2e9)
    text = shown_by(report)
    titles = [line for line in text.splitlines() if line.startswith(("What ", "After "))]
    assert len(titles) == 2
    assert all("[EMULATED]" in line for line in titles)
    assert text.count("EMULATED") == 3
    document = report.as_json()
    assert document["emulated_link_bytes_per_s"] == 2e9
    assert document["labels"][0].startswith("EMULATED: ")


def test_a_missing_core_is_labelled() -> None:
    report = report_of(interval_of([ideal_of(1.0)]), free_core=False)
    assert [label.split(":")[0] for label in report.labels()] == ["ONE CORE"]
    assert report_of(interval_of([ideal_of(1.0)])).labels() == []


def test_targets_of_several_intervals_are_told_apart() -> None:
    lazy = row_of("lazy", "ours", saved(0.001))
    report = report_of(
        interval_of([ideal_of(1.0)], lazy, every=1), interval_of([ideal_of(1.0)], lazy, every=8)
    )
    begins = [verdict.target.split(":")[0] for verdict in report.verdicts()]
    assert begins == ["every step"] * 3 + ["every 8 steps"] * 3


def test_tables_show_figures_and_why_there_are_none() -> None:
    lazy = row_of("lazy", "ours", saved(0.0015))
    absent = row_of("torchsnapshot", "peer", error="not installed")
    text = shown_by(report_of(interval_of([ideal_of(1.0, blocks=2)], absent, lazy)))
    assert "torchsnapshot: not installed" in text
    cost = next(line for line in text.splitlines() if line.startswith("lazy ")).split()
    assert cost[:4] == ["lazy", "1.50", "1.50", "0.00"]
    assert "Two blocks without a save of every 2 steps differ by 0.0 ms" in text


# --- The picture ------------------------------------------------------------------------


def test_writing_follows_the_copy_where_the_library_counts_nothing() -> None:
    block = block_of(10, 0.5, [1.0], window_s=4.0, staged_s=10.5)
    written = [event for event in timeline.events(block) if event.lane == "write"]
    assert written == [timeline.Event("write", "write", 10.5, 14.0)]


def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_matplotlib(monkeypatch)
    monkeypatch.setattr(run, "run_stall", lambda *_: pytest.fail("it was measured"))
    result = invoke("stall", "--picture", str(tmp_path / "p.png"))
    assert result.exit_code == 4
    assert "matplotlib, which is not installed" in result.stderr
    assert "pip install matplotlib" in result.stderr


def test_a_picture_in_no_folder_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)  # matplotlib is there
    monkeypatch.setattr(run, "run_stall", lambda *_: pytest.fail("it was measured"))
    assert invoke("stall", "--picture", str(tmp_path / "no" / "p.png")).exit_code == 2
    assert invoke("stall", "--picture", str(tmp_path)).exit_code == 2
    with pytest.raises(OptionError, match="no folder"):
        check_target(tmp_path / "no" / "t.json")


def test_the_picture_shows_both(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lazy = row_of("lazy", "ours", saved(0.001))
    dcp = row_of("dcp", "peer", saved(0.5))
    path = tmp_path / "p.png"
    report_of(interval_of([ideal_of(1.0)], lazy, dcp), picture=path).write()
    assert path.read_bytes().startswith(b"\x89PNG")


# --- The command ------------------------------------------------------------------------


def test_wrong_words_end_with_a_usage_error() -> None:
    assert invoke("stall", "--arms", "lasy").exit_code == 2
    assert invoke("stall", "--link", "fast").exit_code == 2
    assert invoke("stall", "--every", "0").exit_code == 2
    assert invoke("stall", "--device", "tpu").exit_code == 2


def test_missed_targets_end_with_3_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = row_of("lazy", "ours", saved(0.5))
    report = report_of(interval_of([ideal_of(1.0)], lazy))
    monkeypatch.setattr(run, "run_stall", lambda options, display: report)
    assert invoke("stall").exit_code == 0
    assert invoke("stall", "--check").exit_code == 3


@pytest.mark.parametrize(("link", "bytes_per_s"), [("2GB/s", 2e9), ("1 GiB/s", 1 << 30)])
def test_a_link_has_the_units_of_all_verbs(
    monkeypatch: pytest.MonkeyPatch, link: str, bytes_per_s: float
) -> None:
    asked: list[StallOptions] = []

    def measure(options: StallOptions, display: Any) -> StallReport:
        asked.append(options)
        return report_of(interval_of([ideal_of(1.0)], row_of("lazy", "ours", saved(0.5))))

    monkeypatch.setattr(run, "run_stall", measure)
    assert invoke("stall", "--link", link).exit_code == 0
    assert [options.link_bytes_per_s for options in asked] == [bytes_per_s]


def test_an_interrupted_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> StallReport:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_stall", interrupted)
    result = invoke("stall")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
