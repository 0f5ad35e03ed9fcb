"""``plan/multistep.py``: against the paper's formulas, a bound, and a pipeline in small ticks."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from everstep.cli import app
from everstep.cli.common.errors import ExitCode
from everstep.errors import OptionError
from everstep.plan.multistep import (
    Overlap,
    Pipeline,
    best_cut,
    fewest,
    fewest_of,
    filling_shares,
    lower_bound_s,
    overlap,
)

HELD: tuple[int | None, ...] = (None, 0, 1, 2)
ALL = 1000  # steps; as if device memory had no end


def pipeline(copy_steps: float, ratio: float, update_s: float = 0.0) -> Pipeline:
    """A step of one second; updates take some of it."""
    left_s = 1.0 - update_s
    return Pipeline(copy_steps, copy_steps * ratio, left_s / 3, left_s * 2 / 3, update_s)


def best_parts(given: Pipeline, held: int | None) -> Overlap:
    """The best number of parts, up to 24."""
    found = [best_cut(given, parts, held).overlap for parts in range(1, 25)]
    return found[fewest([one.lost_s for one in found]) - 1]


pipelines = st.builds(
    Pipeline,
    state_s=st.floats(0, 12),
    gradients_s=st.floats(0, 6),
    forward_s=st.floats(0, 1),
    backward_s=st.floats(0.05, 1),
    update_s=st.floats(0, 1),
)


def ticks(
    part: int,
    gradients: int,
    step_ticks: tuple[int, int, int],
    parts: int,
    held: int | None,
    half: int = 0,
    *,
    behind: bool = False,
) -> int:
    """Ticks that training waits: the same pipeline, moved on a tick at a time.

    Args:
        part: ticks to copy a part.
        gradients: to copy the gradients of one part.
        step_ticks: forward, backward, update.
        half: of the training thread's own work for a part, at the mark; as much at the update.
        behind: gradients are copied behind the update, too, before it is over.
    """
    forward, backward, update = step_ticks
    queue: dict[tuple[int, int, str], int] = {}
    waited = 0

    def tick() -> None:
        if queue:  # what is due first, first
            first = min(queue)
            queue[first] -= 1
            if not queue[first]:
                del queue[first]

    def wait(*limit: int) -> None:
        nonlocal waited
        while any(key[:2] <= limit for key in queue):
            tick()
            waited += 1

    at_end = 3 if behind else 2
    for step in range(1, parts + 1):
        for _ in range(half):
            tick()
        if part:
            queue[step, 2, "state"] = part
        for _ in range(forward):
            tick()
        wait(step, 1)
        for _ in range(backward):
            tick()
        wait(step, 2)
        for _ in range(half):
            tick()
        if step < parts:
            due = {None: (step, at_end), 0: (step + 1, 1)}.get(held, (step + (held or 0), 2))
            if gradients:
                queue[(*due, f"gradients {step}")] = gradients * step
            wait(step, 2)
            for _ in range(update):
                tick()
            wait(step, 3)
    return waited


def test_the_papers_saving_with_its_sign_put_right() -> None:
    savings = {}
    for parts in range(1, 16):
        found = overlap(pipeline(parts, 1 / 7), parts, None)
        assert found.stall_s == pytest.approx(parts * (parts - 1) / 14)
        savings[parts] = parts - 1 - found.stall_s
    assert max(savings.values()) == pytest.approx(3.0)
    assert [k for k in savings if savings[k] == pytest.approx(3.0)] == [7, 8]
    assert savings[14] == pytest.approx(0.0)
    assert min(savings[k] for k in range(2, 14)) > 0 > savings[15]


@pytest.mark.parametrize(("ratio", "saving", "best"), [(1 / 6, 2.5, [6, 7]), (1 / 3, 1.0, [3, 4])])
def test_other_ratios(ratio: float, saving: float, best: list[int]) -> None:
    found = {k: k - 1 - overlap(pipeline(k, ratio), k, None).stall_s for k in range(1, 13)}
    assert max(found.values()) == pytest.approx(saving)
    assert [k for k in found if found[k] == pytest.approx(saving)] == best


@given(pipelines)
def test_one_part_is_a_lazy_base(given: Pipeline) -> None:
    for held in HELD:
        found = overlap(given, 1, held)
        window_s = given.forward_s + given.backward_s
        assert found.stall_s == pytest.approx(max(0.0, given.state_s - window_s), abs=1e-9)
        assert found.gradients_s == 0


@given(pipelines, st.integers(1, 24), st.sampled_from([None, 0]))
def test_nothing_beats_the_bound(given: Pipeline, parts: int, held: int | None) -> None:
    assert overlap(given, parts, held).stall_s >= lower_bound_s(given, parts) - 1e-9


@given(pipelines, st.integers(1, 24))
def test_waiting_later_is_never_worse(given: Pipeline, parts: int) -> None:
    stalls = [overlap(given, parts, held).stall_s for held in (None, 0, 1, 2, ALL)]
    assert all(late <= early + 1e-9 for early, late in itertools.pairwise(stalls))
    window_s = given.forward_s + given.backward_s
    state_s = max(0.0, given.state_s / parts - window_s) * parts
    assert stalls[-1] == pytest.approx(state_s, abs=1e-6)


@given(
    st.integers(0, 40),
    st.integers(0, 20),
    st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(0, 10)),
    st.integers(1, 10),
    st.sampled_from(HELD),
    st.integers(0, 8),
    st.booleans(),
)
@example(96, 32, (8, 16, 0), 6, 0, 0, False)
@example(20, 8, (4, 8, 6), 6, None, 0, True)
@example(20, 8, (4, 8, 2), 6, 1, 3, False)
def test_the_same_as_in_small_ticks(
    part: int,
    gradients: int,
    step: tuple[int, int, int],
    parts: int,
    held: int | None,
    half: int,
    behind: bool,
) -> None:
    forward, backward, update = map(float, step)
    given = Pipeline(
        float(part * parts),
        float(gradients * parts),
        forward,
        backward,
        update,
        part_s=2.0 * half,
        behind_update=behind,
    )
    waited = ticks(part, gradients, step, parts, held, half, behind=behind)
    found = overlap(given, parts, held)
    assert found.stall_s == pytest.approx(waited, abs=1e-6)
    assert found.lost_s == pytest.approx(waited + 2 * half * parts, abs=1e-6)


@given(pipelines, st.integers(1, 24), st.sampled_from(HELD), st.floats(0, 0.5), st.booleans())
def test_own_work_is_paid_for_and_the_link_copies_meanwhile(
    given: Pipeline, parts: int, held: int | None, part_s: float, behind: bool
) -> None:
    given = replace(given, behind_update=behind)
    without = overlap(given, parts, held)
    found = overlap(replace(given, part_s=part_s), parts, held)
    assert without.work_s == 0
    assert without.lost_s == without.stall_s
    assert found.work_s == pytest.approx(part_s * parts)
    assert found.stall_s <= without.stall_s + 1e-9
    assert found.lost_s >= without.stall_s - 1e-9
    if held in (None, 0):
        assert found.lost_s >= lower_bound_s(given, parts) - 1e-9


@given(pipelines, st.integers(1, 24))
def test_to_copy_behind_the_update_is_never_worse(given: Pipeline, parts: int) -> None:
    behind = overlap(replace(given, behind_update=True), parts, None).stall_s
    before = overlap(given, parts, None).stall_s
    assert behind <= before + 1e-9
    assert before <= behind + given.update_s * (parts - 1) + 1e-9


def test_more_parts_are_more_work() -> None:
    """Where copies hold nothing up, the fewest parts with which they do not are best."""
    given = pipeline(4, 1 / 7)
    free = best_parts(given, 1)
    assert (free.parts, free.lost_s) == (6, pytest.approx(0.0, abs=1e-6))
    for part_s in (0.02, 0.2, 0.6, 1.5):
        paid = best_parts(replace(given, part_s=part_s), 1)
        lost = [best_cut(replace(given, part_s=part_s), k, 1).overlap.lost_s for k in range(1, 25)]
        assert paid.lost_s <= 1.02 * min(lost) + 1e-6
        assert lost[23] > 2 * paid.lost_s
    assert paid.parts == 1


@given(pipelines, st.integers(1, 24), st.sampled_from(HELD))
def test_equal_shares_are_equal_parts(given: Pipeline, parts: int, held: int | None) -> None:
    same = overlap(given, parts, held, [1 / parts] * parts)
    assert same.stall_s == pytest.approx(overlap(given, parts, held).stall_s, abs=1e-9)


def test_parts_need_not_be_equal() -> None:
    given = pipeline(2, 1 / 3)
    # Gradients of the first part are copied in both of the last two steps that have any.
    early = overlap(given, 3, None, [0.5, 0.25, 0.25])
    late = overlap(given, 3, None, [0.25, 0.25, 0.5])
    assert early.gradients_s == pytest.approx(2 / 3 * (0.5 + 0.75))
    assert late.gradients_s == pytest.approx(2 / 3 * (0.25 + 0.5))
    # A part that takes longer than its step is waited for.
    slow = overlap(pipeline(2, 0.0), 2, None, [0.75, 0.25])
    assert slow.state_wait_s == pytest.approx(0.5)
    assert overlap(pipeline(2, 0.0), 2, None).state_wait_s == pytest.approx(0.0)
    for shares in ([0.5], [0.5, 0.25], [1.0, 1.0]):
        with pytest.raises(OptionError, match="not the shares of 2 parts"):
            overlap(given, 2, None, shares)


def test_the_best_number_of_parts() -> None:
    for held in (None, 0, 1):
        # Gradients as large as the state take the link as long as what they bring forward.
        assert best_parts(pipeline(8, 1.0), held).parts == 1
        # Equal parts never beat a lazy base there; parts that fill their windows do.
        assert min(overlap(pipeline(8, 4 / 12), k, held).stall_s for k in range(1, 25)) == 7
        assert best_parts(pipeline(8, 4 / 12), held).stall_s <= 6
    found = best_parts(pipeline(4, 2 / 14), 1)
    assert (found.parts, found.stall_s) == (6, pytest.approx(0, abs=1e-6))
    assert fewest([3.0, 1.01, 1.0]) == 2
    assert fewest([3.0, 1.03, 1.0]) == 3
    assert fewest([0.0, 0.0]) == 1


@given(
    st.lists(st.sampled_from([0.0, 1e-7, 0.99e-6, 1e-6, 1.5e-6, 1e-3, 1.02, 1.0, 3.0]), min_size=1),
    st.sampled_from([0.0, 1e-7, 1e-4, 0.1, 1.0]),
)
def test_the_fewest_parts_are_found_without_asking_for_all(
    waits: list[float], part_s: float
) -> None:
    losses = [wait_s + part_s * (number + 1) for number, wait_s in enumerate(waits)]
    asked: list[int] = []

    def lost_s(parts: int) -> float:
        asked.append(parts)
        return losses[parts - 1]

    assert fewest_of(lost_s, len(losses), part_s) == fewest(losses)
    assert asked == list(range(1, len(asked) + 1))


def test_more_parts_than_can_pay_are_not_asked_for() -> None:
    asked: list[int] = []

    def lost_s(parts: int) -> float:
        asked.append(parts)
        return max(0.0, 1.0 - 0.5 * parts) + 0.1 * parts

    assert fewest_of(lost_s, 24, 0.1) == 2
    assert asked == [1, 2]
    asked.clear()
    assert fewest_of(lambda parts: asked.append(parts) or 0.0, 24, 0.0) == 1  # type: ignore[func-returns-value]
    assert asked == [1], "nothing is waited for: a lazy base"


# --- Parts that fill their windows ------------------------------------------------------

steps = st.builds(
    pipeline, st.floats(0.1, 12), st.floats(0.01, 0.9), st.one_of(st.just(0.0), st.floats(0, 0.6))
)
busy_steps = st.builds(
    lambda given, part_s: replace(given, part_s=part_s),
    steps,
    st.one_of(st.just(0.0), st.floats(0, 0.2)),
)


@pytest.mark.slow
@given(busy_steps, st.sampled_from(HELD))
def test_no_cut_is_worse_than_equal_parts(given: Pipeline, held: int | None) -> None:
    found = [best_cut(given, parts, held) for parts in range(1, 25)]
    for parts, cut in enumerate(found, start=1):
        assert len(cut.shares) == parts == cut.overlap.parts
        assert sum(cut.shares) == pytest.approx(1)
        assert min(cut.shares) >= 0
        assert cut.overlap.stall_s <= overlap(given, parts, held).stall_s + 1e-9
    if held == 1:  # and the more the better
        stalls = [cut.overlap.stall_s for cut in found]
        assert all(more <= less + 1e-6 for less, more in itertools.pairwise(stalls))


@given(
    busy_steps,
    st.lists(st.floats(0, 1), min_size=2, max_size=8).filter(lambda some: sum(some) > 0.01),
    st.sampled_from([None, 1]),
)
def test_no_other_cut_waits_less(given: Pipeline, some: list[float], held: int | None) -> None:
    shares = [share / sum(some) for share in some]
    best = best_cut(given, len(shares), held)
    assert best.overlap.stall_s <= overlap(given, len(shares), held, shares).stall_s + 1e-6
    near = [0.8 * b + 0.2 * s for b, s in zip(best.shares, shares, strict=True)]
    assert best.overlap.stall_s <= overlap(given, len(shares), held, near).stall_s + 1e-6


@given(st.floats(1.1, 12), st.floats(0.02, 0.9), st.integers(1, 24))
def test_stalls_by_the_closed_form(copy_steps: float, ratio: float, parts: int) -> None:
    """Held for a step: what is captured goes towards ``1 / (r T)``."""
    captured = 0.0
    for _ in range(parts - 1):
        captured = min(1.0, captured * (1 - ratio) + 1 / copy_steps)
    stall_s = max(0.0, copy_steps - 1 - captured * copy_steps * (1 - ratio))
    found = best_cut(pipeline(copy_steps, ratio), parts, 1).overlap.stall_s
    assert found == pytest.approx(stall_s, abs=1e-5)
    assert found >= max(0.0, copy_steps - 1 / ratio) - 1e-6


def test_windows_are_no_fuller_than_they_must_be() -> None:
    given = pipeline(4, 1 / 7)
    (shares,) = filling_shares(given, 12, 1)
    gradients = [4 / 7 * sum(shares[:number]) for number in range(12)]
    busy = [4 * share + before for share, before in zip(shares, gradients, strict=True)]
    assert max(busy) == pytest.approx(min(busy), abs=1e-4)
    assert max(busy) < 0.75


def test_memory() -> None:
    given = pipeline(4, 1 / 7)
    found = overlap(given, 8, None)
    assert found.gradients_s == pytest.approx(given.gradients_s * 7 / 2)  # G (k - 1) / 2
    assert found.whole_s == pytest.approx(8 + found.stall_s)
    held = overlap(given, 4, ALL)
    assert held.held_s == pytest.approx(1.5 * given.gradients_s)
    assert held.whole_s > 4


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_nonsense_is_refused(wrong: float) -> None:
    with pytest.raises(OptionError, match="seconds"):
        Pipeline(1.0, wrong, 1.0, 1.0)
    with pytest.raises(OptionError, match="some time"):
        Pipeline(1.0, 1.0, 0.0, 0.0)
    with pytest.raises(OptionError, match="parts"):
        overlap(pipeline(1, 1), 0, None)


def run(*words: str) -> Any:
    given = "--state-bytes 14GB --grad-bytes 2GB --link 25GB/s --step-ms 140".split()
    result = CliRunner().invoke(app, ["plan", "multistep", *given, *words])
    assert "Traceback" not in result.output
    return result


def test_command() -> None:
    found = json.loads(run("--json", "--write-bw", "2GB/s").stdout)
    assert found["async"]["stall_s"] == pytest.approx(0.56)
    assert found["lazy"]["stall_s"] == pytest.approx(0.42)
    assert found["sync"]["stall_s"] == pytest.approx(7)
    assert found["best"] == {"gockpt": 4, "gockpt_o": 6, "held": 6}
    assert len(found["gockpt"]) == 24
    assert found["gockpt"][3]["stall_s"] == pytest.approx(0.12)
    shown = run().stdout
    assert "> 120.0" in shown
    assert "the paper's" in next(line for line in shown.splitlines() if line.startswith("    7"))


@pytest.mark.parametrize(
    "words", ["--update-ms 140", "--forward-ms 200", "--link 0", "--step-ms 0", "--parts-max 0"]
)
def test_command_refuses(words: str) -> None:
    assert run(*words.split()).exit_code == ExitCode.USAGE


def test_command_with_own_work() -> None:
    """Beside what is waited for, and not hidden in it."""
    plain, found = (json.loads(run("--json", *words).stdout) for words in ((), ("--part-ms", "8")))
    assert found["held"][6]["work_s"] == pytest.approx(0.056)
    assert found["held"][6]["lost_s"] == pytest.approx(found["held"][6]["stall_s"] + 0.056)
    assert found["held"][6]["stall_s"] <= plain["held"][6]["stall_s"]
    assert found["lower_bound_s"] == plain["lower_bound_s"]
    assert found["best"]["gockpt"] <= plain["best"]["gockpt"]
    assert json.loads(run("--json", "--part-ms", "200").stdout)["best"]["held"] == 1
    shown = run("--part-ms", "8").stdout
    assert "own work" in shown
    assert "own work" not in run().stdout
    row = next(line for line in shown.splitlines() if line.startswith("    7"))
    assert "56.0" in row.split()
    assert run("--part-ms", "-1").exit_code == ExitCode.USAGE
