"""``everstep plan``: quantities as people write them, output, exit status, docs/PLANNING.md."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from everstep.cli import app
from everstep.cli.common.errors import ExitCode
from everstep.cli.common.output import (
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
    seconds_in_words,
)
from everstep.errors import OptionError
from everstep.plan.interval import Costs, optimum

DOCUMENT = (Path(__file__).parents[3] / "docs" / "PLANNING.md").read_text()

GIVEN = {
    "state-bytes": "14GB",
    "write-bw": "3GB/s",
    "replay-s": "0.2",
    "mtbf": "4h",
    "step-s": "1.1",
}
COSTS = Costs(14e9, 3e9, 0.2, 4 * 3600.0, 1.1)


def invoke(*args: str, columns: int | None = None) -> Result:
    """Runs the command in this process; nothing but an exit may come out of it."""
    env = {"COLUMNS": None if columns is None else str(columns)}
    result = CliRunner(env=env).invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result


def plan(*more: str, columns: int | None = None, **changed: str) -> Result:
    """``everstep plan interval`` with the options above, but for what is changed."""
    options = {**GIVEN, **{name.replace("_", "-"): value for name, value in changed.items()}}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return invoke("plan", "interval", *words, *more, columns=columns)


def document(*more: str, status: int = 0, **changed: str) -> dict[str, Any]:
    """The one JSON document that it prints."""
    result = plan(*more, "--json", **changed)
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


# --- What it says -----------------------------------------------------------------------


def test_json_is_the_optimum_and_the_curve() -> None:
    found = document()
    expected = optimum(COSTS)
    assert found["interval_steps"] == expected.choice.interval_steps
    assert found["batch_steps"] == expected.choice.batch_steps
    assert found["interval_s"] == expected.choice.interval_s
    assert found["waste"]["total"] == expected.choice.waste.total
    parts = [value for name, value in found["waste"].items() if name != "total"]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(found["waste"]["total"])
    assert found["closed_form"]["interval_s"] == expected.closed_form.interval_s
    assert found["continuous"]["batch_s"] == expected.continuous.batch_s
    assert found["without_log"]["interval_steps"] == expected.without_log.interval_steps
    assert found["costs"]["mtbf_s"] == 14400
    assert found["wasted_accelerators"] == found["waste"]["total"]
    rows = found["curve"]
    assert len(rows) == 9
    assert [row["interval_steps"] for row in rows] == sorted(r["interval_steps"] for r in rows)
    best = min(rows, key=lambda row: row["waste"]["total"])
    assert best["interval_steps"] == found["interval_steps"]


def test_every_option_reaches_the_costs() -> None:
    costs = document(
        *("--load-bw", "2GiB/s", "--diff-write-s", "50ms", "--merge-s", "10ms"),
        *("--base-cost-s", "800ms", "--accelerators", "64"),
        state_bytes="12GiB",
        write_bw="500MB/s",
        replay_s="150ms",
        mtbf="2.5d",
        step_s="1e0",
    )["costs"]
    assert costs == {
        "state_bytes": 12 * 2**30,
        "write_bytes_per_s": 5e8,
        "load_bytes_per_s": 2 * 2**30,
        "replay_s": 0.15,
        "mtbf_s": 216000,
        "step_s": 1,
        "merge_s": 0.01,
        "batch_write_s": 0.05,
        "base_cost_s": 0.8,
        "accelerators": 64,
    }


def test_batch_max_is_kept() -> None:
    assert document("--diff-write-s", "1")["batch_steps"] > 5
    found = document("--diff-write-s", "1", "--batch-max", "5")
    assert found["batch_steps"] == 5
    assert {row["batch_steps"] for row in found["curve"]} == {5}


def test_the_form_of_the_paper() -> None:
    found = document("--summed")
    best, formula = found["continuous"], found["closed_form"]
    assert best["interval_s"] == pytest.approx(formula["interval_s"])
    assert best["batch_s"] == pytest.approx(formula["batch_s"])
    assert found["waste"]["total"] >= formula["waste"]["total"]
    assert found["interval_s"] == pytest.approx(formula["interval_s"], rel=0.2)
    assert found["costs"]["merge_s"] == 0.2


def test_text_marks_the_optimum_and_names_what_it_wastes() -> None:
    text = plan("--diff-write-s", "50ms", "--accelerators", "64").stdout
    first, header, *rows = text.splitlines()
    assert first == (
        "a base every 782 steps (14.3 min), the log written every 38 steps (41.8 s): 1.36% wasted"
    )
    assert header.split() == "interval batch wasted lost loads replay bases log".split()
    assert [row.split()[1] for row in rows if row.startswith(">")] == ["782"]
    assert "of 64 accelerators that is the work of 0.868" in text
    assert "LowDiff Eq. 10" in text
    assert "\x1b" not in text
    single = plan(diff_write_s="0").stdout
    assert "the log written every step (1.1 s)" in single
    assert "accelerators" not in single


def test_a_curve_of_very_short_intervals_names_each_once() -> None:
    rows = document(state_bytes="30MB", mtbf="60", replay_s="1")["curve"]
    steps = [row["interval_steps"] for row in rows]
    assert steps == sorted(set(steps))
    assert steps[0] == 1


# --- Usage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text", "hint"),
    [
        ("step-s", "5x", "like 30s, 5min or 4h"),
        ("state-bytes", "14GB/s", "like 14GB or 12GiB"),
        ("step-s", "abc", "like 30s, 5min or 4h"),
        ("step-s", "-3", "like 30s"),
        ("step-s", "nan", "like 30s"),
        ("step-s", "", "like 30s"),
        ("state-bytes", "14XB", "like 14GB or 12GiB"),
        ("write-bw", "25Gb/s", "like 3GB/s or 500MiB/s"),
    ],
)
def test_nonsense_gets_an_example(option: str, text: str, hint: str) -> None:
    result = plan(**{option: text})
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: --{option} ")
    assert hint in result.stderr
    found = document(status=2, **{option: text})
    assert (found["error"], found["exit_code"]) == ("OptionError", 2)
    assert hint in found["hint"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step_s": "0"}, "must be more than nothing"),
        ({"mtbf": "0h"}, "must be more than nothing"),
        ({"mtbf": "1e400"}, "must be more than nothing, and finite"),
        ({"replay_s": "0"}, "must be more than nothing"),
        ({"step_s": "1e-12"}, "Costs.step_s must be a number from"),
        ({"state_bytes": "1e30"}, "Costs.state_bytes must be a number from"),
    ],
)
def test_numbers_out_of_range(changed: dict[str, str], said: str) -> None:
    result = plan(**changed)
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "intervall"],
        ["plan", "interval"],
        ["plan", "interval", "--mtfb", "4h"],
        [
            "plan",
            "interval",
            *(w for k, v in GIVEN.items() for w in ("--" + k, v)),
            "--batch-max=0",
        ],
        ["plan", "interval", *(w for k, v in GIVEN.items() for w in ("--" + k, v)), "x"],
    ],
)
def test_usage_errors(words: list[str]) -> None:
    assert invoke(*words).exit_code == ExitCode.USAGE


def test_a_misspelled_option_or_verb_gets_the_right_one() -> None:
    assert "--mtbf" in invoke("plan", "interval", "--mtfb", "4h").stderr
    assert "interval" in invoke("plan", "intreval").stderr


def test_hostile_text_steers_no_terminal() -> None:
    result = plan(mtbf="4\x1b[2Jh\n\u202e[bold red]x[/]")
    assert result.exit_code == ExitCode.USAGE
    assert "\x1b" not in result.stderr
    assert "\u202e" not in result.stderr


def test_help_names_every_option() -> None:
    text = "".join(
        invoke("plan", verb, "--help", columns=200).stdout
        for verb in ("interval", "multistep", "schedule")
    )
    for option in (*GIVEN, "load-bw", "diff-write-s", "batch-max", "summed", "json"):
        assert f"--{option}" in text
    assert "interval" in invoke("plan", "--help").stdout
    assert "plan" in invoke("--help").stdout


# --- Infeasible -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "quantity", "needed"),
    [
        ({"mtbf": "4s"}, "write_bytes_per_s", 3.5e9),
        ({"load_bw": "100kB/s"}, "load_bytes_per_s", 14e9 / 14400),
        ({"replay_s": "1.1s"}, "replay_s", 1.1),
        ({"diff_write_s": "9", "batch_max": "4"}, "batch_write_s", 4.4),
    ],
)
def test_infeasible_is_3_with_the_number_needed(
    changed: dict[str, str], quantity: str, needed: float
) -> None:
    result = plan(**changed)
    assert result.exit_code == ExitCode.INFEASIBLE
    assert result.stdout == ""
    assert f"{needed:.4g}" in result.stderr
    found = document(status=3, **changed)
    assert (found["error"], found["exit_code"]) == ("InfeasibleError", 3)
    assert found["quantity"] == quantity
    assert found["needed"] == pytest.approx(needed)


def test_what_is_needed_is_enough() -> None:
    needed = document(status=3, mtbf="6s")["needed"]
    assert document(mtbf=f"{needed * 1.001}s")["waste"]["total"] == pytest.approx(1, rel=0.01)


# --- Quantities -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30s", 30), ("5min", 300), ("5m", 300), ("4h", 14400), ("2d", 172800), ("7sec", 7)),
        *(("250ms", 0.25), ("3us", 3e-6), ("0.2", 0.2), ("1.5 h", 5400), (" 1e3 ", 1000)),
    ],
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds("--x", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("3000", 3000), ("7B", 7), ("2kB", 2000), ("2KB", 2000), ("2KiB", 2048), ("1MB", 1e6)),
        *(("14GB", 14e9), ("12GiB", 12 * 2**30), ("1.5TB", 1.5e12), ("2PiB", 2**51)),
    ],
)
def test_sizes_and_bandwidths(text: str, size: float) -> None:
    assert parse_bytes("--x", text) == size
    assert parse_bytes_per_s("--x", text if text.isdigit() else f"{text}/s") == size


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_refused_in_words(text: str) -> None:
    for parse in (parse_bytes, parse_bytes_per_s, parse_seconds):
        with contextlib.suppress(OptionError):
            assert parse("--x", text) > 0
            continue
        with pytest.raises(OptionError) as caught:
            parse("--x", text)
        assert caught.value.message.startswith("--x ")


@given(st.floats(1e-6, 1e9))
def test_durations_in_words_can_be_read_back(seconds: float) -> None:
    assert parse_seconds("--x", seconds_in_words(seconds)) == pytest.approx(seconds, rel=0.01)


# --- docs/PLANNING.md -------------------------------------------------------------------

BLOCKS = re.findall(r"^```console\n(.*?)^```$", DOCUMENT, re.M | re.S)


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS)
def test_documented_output_is_what_comes_out(block: str) -> None:
    first, _, shown = block.partition("\n")
    command = shlex.split(first.removeprefix("$ "))
    assert command[0] == "everstep"
    result = invoke(*command[1:])
    failed = "error" in shown or "infeasible" in shown
    assert result.exit_code == (ExitCode.INFEASIBLE if failed else ExitCode.OK)
    found = result.stdout + result.stderr
    assert [line.rstrip() for line in found.splitlines()] == shown.splitlines()


def test_documented_options_exist() -> None:
    text = "".join(
        invoke("plan", verb, "--help", columns=200).stdout
        for verb in ("interval", "multistep", "schedule")
    )
    options = set(re.findall(r"`(--[a-z-]+)`", DOCUMENT))
    assert len(options) >= 12
    for option in options:
        assert option in text, option
