"""When bases are taken, of which step, and when they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import OptionError, RecoveryError, StateError
from everstep.seams import ManualClock
from tests.support.world import base_folder, inventory_of, opened


def trainable() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "n": [0]}


def update(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()


def steps_of(run: Path) -> list[int]:
    return [base.id.step for base in inventory_of(run).bases if base.status == "committed"]


def test_bases_are_taken_every_so_many_steps(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}, every=3, keep=10) as ckpt:
        ckpt.resume()
        for _ in range(10):
            ckpt.step()
    assert steps_of(run_folder) == [3, 6, 9]


def test_bases_are_taken_every_so_many_seconds(run_folder: Path) -> None:
    clock = ManualClock()
    with opened(run_folder, {"a": 1}, every="2s", keep=10, clock=clock) as ckpt:
        for seconds in (1.9, 0.1, 1.0, 0.9, 0.1, 5.0):
            clock.advance(seconds)
            ckpt.step()
    assert steps_of(run_folder) == [2, 5, 6]


def test_save_starts_the_interval_again(run_folder: Path) -> None:
    clock = ManualClock()
    with opened(run_folder, {"a": 1}, every="2s", keep=10, clock=clock) as ckpt:
        clock.advance(1.5)
        ckpt.step()
        ckpt.save()
        clock.advance(1.5)
        ckpt.step()
        clock.advance(0.5)
        ckpt.step()
    assert steps_of(run_folder) == [1, 3]


def test_only_on_demand(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}, every=None) as ckpt:
        for _ in range(200):
            ckpt.step()
        assert steps_of(run_folder) == []
        ckpt.save()
    assert steps_of(run_folder) == [200]


def test_the_first_and_the_very_last_step(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}, keep=5) as ckpt:
        assert ckpt.save().step == 0
        ckpt.step()
        assert ckpt.save().step == 1
    with opened(run_folder, {"a": 0}, keep=5) as ckpt:
        assert ckpt.resume().step == 1
    with opened(run_folder, {"a": 0}, keep=5) as ckpt:
        assert ckpt.resume(step=0).base_step == 0


def test_what_was_trained_is_no_fresh_start(run_folder: Path) -> None:
    """Nothing would take the weights back, and the run would say that it is at step 0."""
    state = {"a": 0}
    with opened(run_folder, state, every=None) as ckpt:
        ckpt.resume()
        assert ckpt.resume(step=0).step == 0, "nothing was trained yet"
        for _ in range(3):
            state["a"] += 1
            ckpt.step()
        for ask in (ckpt.rewind, ckpt.resume):
            with pytest.raises(RecoveryError, match="no base of step 0, and this process has"):
                ask(0)
        with pytest.raises(RecoveryError, match="no base of step 0, and this process has"):
            ckpt.resume()  # to the newest base, and there is none
        assert state == {"a": 3}
        ckpt.step()
        ckpt.save()
    with opened(run_folder, {"a": 0}, every=None) as ckpt:
        assert ckpt.resume().step == 4, "no timeline was opened for it"
    with opened(run_folder, {"a": 0}, every=None) as ckpt:
        assert ckpt.resume(step=0).step == 0, "another Checkpointer, another state"


def test_steps_go_on_after_resuming(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}, every=2) as ckpt:
        for _ in range(3):
            ckpt.step()
        assert ckpt.stats().step == 3
    with opened(run_folder, {"a": 1}, every=2) as ckpt:
        assert ckpt.resume().step == 2
        ckpt.step()
        ckpt.step()
        assert (ckpt.stats().step, ckpt.stats().durable_step) == (4, 4)
    assert steps_of(run_folder) == [2, 4]


@pytest.mark.parametrize("method", ["sync", "async"])
def test_a_second_save_at_the_same_step_is_the_same_base(method: str, run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}, method=method, every=1) as ckpt:
        ckpt.step()
        first = ckpt.save()
        assert ckpt.save() is first
        first.durable.result(20)
        assert ckpt.save() is first
        assert ckpt.stats().saves == 1
        ckpt.step()
        assert ckpt.save() is not first
    assert steps_of(run_folder) == [1, 2]


def test_save_between_update_and_step_is_refused(run_folder: Path) -> None:
    """That state belongs to no step: resuming from it would make the update twice."""
    state = trainable()
    with opened(run_folder, state) as ckpt:
        update(state)
        with pytest.raises(StateError, match="an unfinished step"):
            ckpt.save()
        ckpt.step()
        assert ckpt.save().step == 1
    assert steps_of(run_folder) == [1]


def test_two_updates_in_one_step(run_folder: Path) -> None:
    state = trainable()
    with opened(run_folder, state) as ckpt:
        update(state)
        update(state)
        ckpt.step()
        ckpt.save()
    (base,) = inventory_of(run_folder).bases
    assert base.manifest is not None
    assert (base.manifest.markers[0].step, base.manifest.markers[0].lsn) == (1, 2)


def test_updates_are_counted_on_after_resuming(run_folder: Path) -> None:
    for expected in (2, 4):
        state = trainable()
        with opened(run_folder, state) as ckpt:
            ckpt.resume()
            for _ in range(2):
                update(state)
                ckpt.step()
            ckpt.save()
        newest = max(inventory_of(run_folder).bases, key=lambda base: base.id)
        assert newest.manifest is not None
        assert newest.manifest.markers[0].lsn == expected


class Nesting(torch.optim.SGD):
    """Its hooks fire twice a step, one pair within the other."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(torch.optim.SGD):
    fail = True

    def step(self, closure: Any = None) -> Any:
        if self.fail:
            raise RuntimeError("no")
        return super().step(closure)


def lsn_after(run: Path, ckpt: everstep.Checkpointer) -> int:
    ckpt.step()
    ckpt.save()
    newest = max(inventory_of(run).bases, key=lambda base: base.id)
    assert newest.manifest is not None
    return newest.manifest.markers[0].lsn


def test_nested_hooks_count_once(run_folder: Path) -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # wraps step() of all optimizers once more
    state = trainable()
    state["optimizer"] = Nesting(state["model"].parameters(), lr=0.1)
    with opened(run_folder, state) as ckpt:
        update(state)
        update(state)
        assert lsn_after(run_folder, ckpt) == 2


def test_an_update_that_raised_may_have_changed_something(run_folder: Path) -> None:
    """So it counts: two bases with none in between must have the same state (I8)."""
    state = trainable()
    optimizer = state["optimizer"] = Failing(state["model"].parameters(), lr=0.1)
    with opened(run_folder, state) as ckpt:
        with pytest.raises(RuntimeError, match="no"):
            update(state)
        optimizer.fail = False
        update(state)
        with pytest.raises(StateError, match="an unfinished step"):
            ckpt.save()
        assert lsn_after(run_folder, ckpt) == 2


def test_hooks_are_gone_after_closing(run_folder: Path) -> None:
    state = trainable()
    with opened(run_folder, state):
        assert len(state["optimizer"]._optimizer_step_pre_hooks) == 1
    assert not state["optimizer"]._optimizer_step_pre_hooks
    assert not state["optimizer"]._optimizer_step_post_hooks


def test_step_without_resume_on_a_run_with_bases_is_refused(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}) as ckpt:
        ckpt.step()
        ckpt.save()
    with opened(run_folder, {"a": 1}) as ckpt:
        for call in (ckpt.step, ckpt.save):
            with pytest.raises(StateError, match=r"resume\(\) was not called"):
                call()
        assert ckpt.resume().step == 1
        ckpt.step()
    assert inventory_of(run_folder).timelines.keys() == {1, 2}


def test_without_resume_on_a_fresh_run(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}) as ckpt:
        ckpt.step()
        ckpt.save()
    assert base_folder(run_folder, 1).is_dir()


def test_resume_on_a_fresh_run(run_folder: Path) -> None:
    state = {"a": torch.ones(2)}
    with opened(run_folder, state) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.source, recovery.base_step) == (0, "fresh", None)
    assert (recovery.exact, recovery.replayed, recovery.size_bytes) == (True, 0, 0)
    assert (recovery.timeline, recovery.skipped, recovery.notes) == (1, (), ())
    assert torch.equal(state["a"], torch.ones(2))


def test_what_a_recovery_says(run_folder: Path) -> None:
    with opened(run_folder, {"a": torch.ones(1000)}) as ckpt:
        ckpt.step()
        size = ckpt.save().durable.result(20)
    with opened(run_folder, {"a": torch.zeros(1000)}) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.source, recovery.base_step) == (1, "disk", 1)
    assert recovery.size_bytes == size == sum_of_files(base_folder(run_folder, 1))
    assert recovery.evidence.startswith("xxh3-128 of 4 entries")
    assert recovery.timeline == 2


def sum_of_files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_resuming_twice(run_folder: Path) -> None:
    state = {"a": 1}
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
        ckpt.step()
        ckpt.save()
        state["a"] = 2
        assert ckpt.resume().step == 1
        assert state == {"a": 1}
        ckpt.step()
        ckpt.save()
        state["a"] = 3
        recovery = ckpt.resume()
        assert (recovery.step, recovery.timeline) == (2, 3)
        assert state == {"a": 1}


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_a_step_that_is_no_step(step: Any, run_folder: Path) -> None:
    with (
        opened(run_folder, {"a": 1}) as ckpt,
        pytest.raises(OptionError, match="step must be an integer"),
    ):
        ckpt.resume(step=step)


def test_after_closing_nothing_works(run_folder: Path) -> None:
    with opened(run_folder, {"a": 1}) as ckpt:
        ckpt.step()
    for call in (ckpt.step, ckpt.save, ckpt.resume, ckpt.wait, ckpt.__enter__):
        with pytest.raises(StateError, match="closed"):
            call()
    ckpt.close()
    assert ckpt.stats().step == 1


def test_what_it_says_of_itself_is_short(run_folder: Path) -> None:
    run = f"<Checkpointer of {run_folder}: checkflow, every 2 steps, keep 3; at step"
    with opened(run_folder, {"a": torch.ones(9)}, every=2, method="checkflow") as ckpt:
        assert repr(ckpt) == f"{run} 0>"
        assert repr(ckpt.stats()).startswith("Stats(step=0, stall_s={}, interval_steps=2")
        for _ in range(40):
            ckpt.step()
        shown = repr(ckpt.stats())
        assert shown.startswith("Stats(step=40, ")
        assert len(shown) < 1000
        assert all(len(line) <= 100 for line in shown.splitlines())
        assert " object at 0x" not in shown
    assert repr(ckpt) == f"{run} 40, closed>"
    unmade = everstep.Checkpointer.__new__(everstep.Checkpointer)
    assert repr(unmade) == "<Checkpointer, not made>"


def test_stats(run_folder: Path) -> None:
    with opened(run_folder, {"a": torch.ones(1000)}, every=2, method="async") as ckpt:
        ckpt.step()
        stats = ckpt.stats()
        assert (stats.saves, stats.durable_step, stats.lag_steps) == (0, None, None)
        ckpt.step()
        ckpt.step()
        ckpt.wait()
        stats = ckpt.stats()
        assert (stats.step, stats.durable_step, stats.lag_steps) == (3, 2, 1)
        assert (stats.saves, stats.committed, stats.failed) == (1, 1, 0)
        assert stats.written_bytes == sum_of_files(base_folder(run_folder, 2))
        assert stats.host_bytes >= 4000
        assert set(stats.stall_s) == {"capture", "gate", "back_pressure", "persist", "keeper"}
        assert (stats.stall_s["keeper"], stats.recoverable_step) == (0.0, 2)


def test_the_start_says_what_it_will_use(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(run_folder, {"a": torch.ones(1 << 18)}, every=100, method="async", keep=2):
        said = capsys.readouterr().err
    assert f"everstep: {run_folder}: async, every 100 steps, keep 2" in said
    assert all(word in said for word in ("state ", "host memory ", "budget ", "disk up to "))
