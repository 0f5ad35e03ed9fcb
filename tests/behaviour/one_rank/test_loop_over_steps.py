"""``for step in ckpt.steps(...)``: resumes, marks each step, and closes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import OptionError, StateError
from tests.support.world import inventory_of, opened


def committed(run: Path) -> list[int]:
    bases = inventory_of(run).bases
    return sorted(base.id.step for base in bases if base.status == "committed")


def test_it_begins_at_the_restored_step_and_marks_each(run_folder: Path) -> None:
    state = {"n": 0}
    for until, expected in ((4, [0, 1, 2, 3]), (7, [4, 5, 6]), (6, []), (5, [])):
        seen = []
        with opened(run_folder, state, every=2, keep=9) as ckpt:
            for step in ckpt.steps(until):
                seen.append(step)
                state["n"] = step + 1
        assert seen == expected
        state["n"] = -1
    assert committed(run_folder) == [2, 4, 6]
    with opened(run_folder, state) as ckpt:
        assert (ckpt.resume().step, state["n"]) == (6, 6)


def test_a_resume_of_the_program_is_not_repeated(run_folder: Path) -> None:
    with opened(run_folder, {"n": 0}, every=2, keep=9) as ckpt:
        assert [*ckpt.steps(5)] == [0, 1, 2, 3, 4]
    with opened(run_folder, {"n": 0}, every=None) as ckpt:
        assert ckpt.resume(step=2).step == 2
        assert [*ckpt.steps(4)] == [2, 3]
        assert max(inventory_of(run_folder).timelines) == 2


def test_it_closes_when_all_steps_are_trained(run_folder: Path) -> None:
    with opened(run_folder, {"n": 0}) as ckpt:
        assert [*ckpt.steps(2)] == [0, 1]
        with pytest.raises(StateError, match="closed"):
            ckpt.save()


@pytest.mark.parametrize("ending", ["break", "raise"])
def test_a_loop_that_is_left_marks_no_step_and_leaves_it_open(
    run_folder: Path, ending: str
) -> None:
    with opened(run_folder, {"n": 0}) as ckpt:
        with pytest.raises(ZeroDivisionError):
            for step in ckpt.steps(9):
                if step == 3:
                    if ending == "break":
                        break
                    raise ZeroDivisionError
            raise ZeroDivisionError
        assert ckpt.stats().step == 3
        ckpt.save()
    assert committed(run_folder) == [3]


def test_a_body_that_marks_its_steps_itself_is_refused(run_folder: Path) -> None:
    """Each step would count twice."""
    with opened(run_folder, {"n": 0}) as ckpt, pytest.raises(StateError, match=r"step\(\) itself"):
        for _ in ckpt.steps(9):
            ckpt.step()


def test_it_goes_on_after_a_rewind(run_folder: Path) -> None:
    state: dict[str, Any] = {"n": 0}
    seen = []
    with opened(run_folder, state, every=2, keep=9) as ckpt:
        for step in ckpt.steps(6):
            seen.append((step, state["n"]))
            state["n"] += 1
            if len(seen) == 4:
                ckpt.rewind(2)
                continue
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3), (2, 2), (3, 3), (4, 4), (5, 5)]


def test_it_ends_at_the_step_of_an_announced_end(run_folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    with opened(run_folder, {"n": 0}, preempt=True) as ckpt:
        for step in ckpt.steps(100):
            seen.append(step)
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [0, 1, 2, 3, 4]
    assert committed(run_folder) == [5]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("until", [1.0, "9", None])
def test_a_number_of_steps_that_is_none(run_folder: Path, until: Any) -> None:
    with opened(run_folder, {"n": 0}) as ckpt, pytest.raises(OptionError, match="until"):
        ckpt.steps(until)
