"""``method="auto"``: which method is chosen from which measurements, and that it stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from everstep.events import Event
from everstep.plan.auto import Observed, choose

SEEN = Observed(
    method="lazy",
    trained_s=1040.0,
    failures=10,
    step_s=0.1,
    captured_s={"lazy": 0.05},
    durable_s={"lazy": 0.5},
    load_s=1.0,
    base_cost_s={"lazy": 0.02},
    state_bytes=12e6,
    gradient_bytes=1e6,
    why_not_logged="",
)


def test_nothing_measured() -> None:
    choice = choose(None)
    assert (choice.method, choice.candidate, choice.candidates) == ("lazy", None, ())
    assert choose(Observed()).method == "lazy"


def test_the_formula_by_hand() -> None:
    """A base stalls 0.02 s, a failure comes every (1040 + 10) s / (10 + 0.5) = 100 s: a base every
    2 s. Of a second 0.01 s goes to bases. Every 100 s are lost: half of these 2 s, 0.05 s until a
    base was copied, and 1 s of loading.
    """
    lazy = {one.method: one for one in choose(SEEN).candidates}["lazy"]
    assert lazy.overhead == pytest.approx(0.01)
    assert (lazy.lost_s, lazy.interval_steps) == (pytest.approx(1.05), 20)
    assert lazy.wasted == pytest.approx(0.01 + 0.0205)


def test_a_log_where_failures_are_frequent_and_gradients_small() -> None:
    choice = choose(SEEN)
    assert choice.method == "logged"
    logged = choice.candidates[0]
    assert logged.lost_s == pytest.approx(0.05)
    # Gradients take half a millisecond of a step of 0.1 s, and a replay at least a tenth of it:
    # bases may be sqrt(2 * 0.02 s * 100 s / 0.1) apart.
    assert logged.overhead == pytest.approx(0.005 + 0.02 / math.sqrt(4 / 0.1))
    assert choice.candidate is logged
    assert logged.log_to == "memory"
    assert "with a failure every 100 s (lazy 3.05%" in choice.why


def test_a_log_on_disk_where_the_keeper_dies_too() -> None:
    """12 MB are on disk after 0.5 s, so gradients of 1 MB after 42 ms of the 100 of a step."""
    seen = replace(SEEN, resumes=3, from_memory=1)
    logged = {one.method: one for one in choose(seen).candidates}["logged"]
    assert (logged.log_to, logged.lost_s) == ("disk", pytest.approx(1.0))
    slow = choose(replace(seen, durable_s={"lazy": 1.0}))
    assert slow.method == "lazy"
    assert "the disk takes 83% of a step for its gradients" in slow.why
    assert "was not measured" in choose(replace(seen, durable_s={})).why


def test_bases_alone_where_failures_are_rare() -> None:
    assert choose(replace(SEEN, failures=0)).method == "lazy"
    assert replace(SEEN, failures=0).mtbf_s == 86_400.0
    assert replace(SEEN, failures=1).mtbf_s == 700.0


def test_the_failure_before_this_start_shows_whether_memory_survives() -> None:
    failed = replace(SEEN, has_failed=True)
    assert failed.followed_by(keeper_lives=True).keeps_memory
    assert not failed.followed_by(keeper_lives=False).keeps_memory
    assert SEEN.followed_by(keeper_lives=False).keeps_memory, "it has ended in order"


def test_several_steps_for_a_copy_that_takes_longer_than_one() -> None:
    slow = replace(
        SEEN, captured_s={"lazy": 0.8}, base_cost_s={"lazy": 0.7}, trained_s=1e5, failures=1
    )
    (held,) = (one for one in choose(slow).candidates if one.method == "gockpt_o")
    assert held.interval_steps > 8, "a base is begun after the last one was written"
    assert choose(slow).method == "gockpt_o"
    measured = replace(
        slow,
        failures=1000,
        captured_s={"lazy": 0.8, "gockpt_o": 1.5},
        durable_s={"lazy": 0.9, "gockpt_o": 4.0},
        base_cost_s={"lazy": 0.7, "gockpt_o": 1e-3},
    )
    (held,) = (one for one in choose(measured).candidates if one.method == "gockpt_o")
    assert held.interval_steps == 40
    assert held.lost_s == pytest.approx(4.0 / 2), "its step is the last one of its window"
    in_disk = replace(measured, resumes=1)
    (held,) = (one for one in choose(in_disk).candidates if one.method == "gockpt_o")
    assert held.lost_s == pytest.approx(4.0 / 2 + 2.5)
    assert choose(slow, refused=dict.fromkeys(("logged", "gockpt_o"), "x")).method == "lazy"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"refused": {"logged": "LBFGS cannot be replayed"}}, "LBFGS cannot be replayed"),
        ({"host_bytes": 25.9e6}, "host memory does not hold two steps of a log"),
    ],
)
def test_a_log_that_cannot_be(given: dict[str, Any], why: str) -> None:
    choice = choose(SEEN, **given)
    assert choice.method == "lazy"
    assert f"logged: {why}" in choice.why


def test_methods_are_compared_at_the_interval_that_was_given() -> None:
    assert SEEN.step_s is not None
    seen = replace(SEEN, given_interval_s=37 * SEEN.step_s)
    possible = [one for one in choose(seen).candidates if not one.why_not]
    assert len(possible) >= 2
    assert {one.interval_steps for one in possible} == {37}


def test_a_log_that_was_not_checked() -> None:
    assert choose(replace(SEEN, why_not_logged="a sparse gradient")).method == "lazy"
    assert (
        "no start has checked"
        in choose(replace(SEEN, why_not_logged=Observed().why_not_logged)).why
    )
    seen = observed(
        [start(0.0, "lazy"), [Event("log_checked", 1.0, 0, 1, 5, {"why_not": "LBFGS"})]]
    )
    assert seen is not None
    assert seen.why_not_logged == "LBFGS"


def test_bases_stay_within_their_share_of_the_time() -> None:
    """A base stalls 0.02 s: 0.4 % of 5 s. Gradients take half a percent of a step."""
    bounded = {one.method: one for one in choose(SEEN, overhead=0.004).candidates}
    lazy = bounded["lazy"]
    logged = bounded["logged"]
    assert (lazy.interval_steps, lazy.overhead) == (50, pytest.approx(0.004))
    assert logged.why_not == "a log takes 0.5% of the time, Budget(overhead=0.004) allows less"
    logged = {one.method: one for one in choose(SEEN, overhead=0.006).candidates}["logged"]
    assert (logged.interval_steps, logged.overhead) == (200, pytest.approx(0.006))


def test_little_memory_shortens_the_interval() -> None:
    rich = {one.method: one for one in choose(SEEN).candidates}["logged"]
    poor = {one.method: one for one in choose(SEEN, host_bytes=27e6).candidates}["logged"]
    assert poor.overhead > rich.overhead


def test_a_method_is_judged_by_what_it_did() -> None:
    """The log cost 10 % of the time, far more than was predicted: lazily again."""
    seen = replace(SEEN, method="logged", log_cost_s=0.01)
    large = replace(SEEN, state_bytes=96e6, captured_s={"lazy": 0.096})
    tax = {one.method: one.overhead for one in choose(large).candidates}["logged"]
    assert tax > 0.01  # gradients at the 1 GB/s at which that base was copied
    assert choose(seen).method == "lazy"


def test_a_small_gain_is_no_reason_to_change() -> None:
    seen = replace(SEEN, log_cost_s=0.001)
    other = replace(seen, method="logged", log_cost_s=0.0017)
    for measured, method in ((seen, "lazy"), (other, "logged")):
        choice = choose(measured)
        assert choice.method == method
        assert choice.candidates[0].method != method
        assert choice.why.startswith("as before: ")


# --- Reading the event log --------------------------------------------------------------


def start(
    at_s: float, method: str, *, step: int = 0, steps: int = 100, closed: bool = False, **more: Any
) -> list[Event]:
    """Events of a start that trains so many steps of 0.1 s, with two bases."""
    about = {"method": method, "state_bytes": 1000, "gradient_bytes": 200}
    source = {"source": "memory" if step else "fresh", "load_s": 0.5, "replay_s": 0.3}
    figures = {"step_s": 0.1, "base_cost_s": 0.25, "stall_s": {"gate": 0.5}, **more}
    end_s = at_s + 1.0 + steps * 0.1
    events = [
        Event("started", at_s, 0, 0, 0, about),
        Event("recovery", at_s + 1.0, 0, 1, step, {**source, "replayed": 3 * bool(step)}),
        Event("base_captured", at_s + 2.0, 0, 1, step + 5, {"seconds": 0.04}),
        Event("base_durable", at_s + 2.0, 0, 1, step + 5, {"tier": "disk", "seconds": 0.4}),
        Event("base_durable", at_s + 2.5, 0, 1, step + 5, {"tier": "peer"}),
        Event("progress", end_s, 0, 1, step + steps, figures),
    ]
    return [*events, Event("closed", end_s, 0, 1, step + steps)] if closed else events


def observed(starts: Sequence[list[Event]]) -> Observed | None:
    return Observed.of([event for one in starts for event in one])


def test_measurements_of_earlier_starts() -> None:
    seen = observed([start(0.0, "lazy"), start(100.0, "lazy", step=90, closed=True)])
    assert seen is not None
    assert (seen.trained_s, seen.failures, seen.method) == (20.0, 1, "lazy")
    assert not seen.has_failed
    assert (seen.step_s, seen.captured_s, seen.durable_s) == (0.1, {"lazy": 0.04}, {"lazy": 0.4})
    assert (seen.load_s, seen.replay_s) == (0.5, pytest.approx(0.1))
    assert (seen.base_cost_s, seen.log_cost_s) == ({"lazy": pytest.approx(0.25)}, None)
    assert (seen.resumes, seen.from_memory) == (1, 1)
    assert (seen.state_bytes, seen.gradient_bytes) == (1000, 200)


def test_each_method_has_its_own_costs() -> None:
    stalls = {"capture": 2.0, "log": 1.5}
    logged = {"step": 90, "base_cost_s": 0.7, "stall_s": stalls}
    seen = observed([start(0.0, "lazy"), start(100.0, "logged", **logged)])
    assert seen is not None
    assert seen.base_cost_s == {"lazy": pytest.approx(0.25)}
    assert seen.log_cost_s == pytest.approx(1.5 / 100)
    slower = start(200.0, "logged", **logged, step_s=0.15)
    seen = observed([start(0.0, "lazy"), slower])
    assert seen is not None
    assert seen.log_cost_s == pytest.approx(0.15 - 1.05 * 0.1), "the keeper takes cores, too"
    assert (seen.method, seen.failures, seen.has_failed) == ("logged", 2, True)


def test_costs_of_starts_by_an_earlier_version() -> None:
    """They had the stalls of a log in the steps, and no cost of a base."""
    earlier = {"base_cost_s": None, "saves": 2, "stall_s": {"capture": 0.2, "gate": 0.3}}
    starts = [start(0.0, "lazy", **earlier), start(100.0, "logged", step=90, **earlier)]
    seen = observed(starts)
    assert seen is not None
    assert (seen.base_cost_s, seen.log_cost_s) == ({"lazy": 0.25}, None)
    newer = {"step": 190, "step_s": 0.15, "stall_s": {"log": 0.0}}
    slow_before = start(100.0, "logged", step=90, step_s=0.15, **earlier)
    seen = observed([starts[0], slow_before, start(200.0, "logged", **newer)])
    assert seen is not None
    assert seen.log_cost_s == pytest.approx(0.15 - 1.05 * 0.1)


def test_ends_in_order_do_not_count_as_failures_and_errors_do() -> None:
    ended = start(0.0, "lazy", closed=True)
    from_disk = [
        replace(one, details={**one.details, "source": "disk"}) if one.kind == "recovery" else one
        for one in start(100.0, "lazy", step=90)
    ]
    seen = observed([ended, from_disk])
    assert seen is not None
    assert (seen.failures, seen.resumes) == (1, 0), "nothing is in memory after an end in order"
    *rest, last = ended
    seen = observed([[*rest, replace(last, details={"by_error": True})]])
    assert seen is not None
    assert (seen.failures, seen.has_failed) == (1, False)


def test_a_refusal_stays() -> None:
    checks = [Event("log_checked", 1.0, 0, 1, 5, {"why_not": why}) for why in ("", "sparse", "")]
    seen = observed([[*start(0.0, "lazy"), *checks]])
    assert seen is not None
    assert seen.why_not_logged == "sparse"


def test_a_log_on_disk_only_where_the_budget_has_room() -> None:
    seen = replace(SEEN, resumes=3, from_memory=1)
    assert "logged: a budget" in choose(seen, why_not_on_disk="a budget").why
    assert "logged: a budget" not in choose(seen).why
    assert choose(SEEN, why_not_on_disk="a budget").method == "logged", "its log is in memory"


def test_a_failure_rate_that_is_given() -> None:
    assert replace(SEEN, given_mtbf_s=7200.0).mtbf_s == 7200.0


def test_too_little_was_trained() -> None:
    assert observed([start(0.0, "lazy", steps=5)]) is None
    assert Observed.of([]) is None


@pytest.mark.parametrize("value", ["x", None, math.nan, -1.0, [1]])
def test_fields_that_are_no_numbers_are_left_out(value: object) -> None:
    seen = observed([start(0.0, "lazy", stall_s={"log": value}, base_cost_s=value)])
    assert seen is not None
    assert (seen.base_cost_s, seen.log_cost_s) == ({}, None)
