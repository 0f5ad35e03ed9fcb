"""Training that ends within a step: what is kept is the step before, and nothing of this one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep import Checkpointer, KeeperOptions, LogOptions
from everstep.errors import (
    DeadlineError,
    EverstepError,
    NonFiniteError,
    OutOfSpaceError,
    StorageError,
)
from everstep.format.names import base_dir, shard_name
from everstep.link.channel import BackgroundChannel
from everstep.seams import ManualClock, Seams, SystemClock
from everstep.testing import inspect
from everstep.trainer.session.session import Session
from tests.support.following import until
from tests.support.keepers import end_keepers
from tests.support.log.last_mark import Training, resumed, same
from tests.support.world import HookedFileSystem, no_space, raising

STEPS = 7
WITHIN: dict[str, Callable[[Any], None]] = {
    "random numbers": lambda it: it.model[0](torch.randn(4, 8)),
    "objects": lambda it: it.data.update(at=99),
    "buffers": lambda it: it.model(torch.randn(4, 8)),
    "an update": lambda it: it.train(),
}


def ended_within(run: Path, what: str, **options: Any) -> list[Any]:
    """Trains, begins a step, and closes; returns the state at the end of the last step."""
    it = Training()
    ckpt = it.opened(run, **options)
    ckpt.resume()
    for _ in range(STEPS):
        it.train()
        ckpt.step()
    wanted = it.seen()
    WITHIN[what](it)
    assert not same(it.seen(), wanted)
    ckpt.close()
    return wanted


@pytest.mark.thinned(2)
@pytest.mark.parametrize("what", WITHIN)
def test_what_has_begun_is_in_no_base(run_folder: Path, what: str) -> None:
    """From a base of the last step where its state is still here, else from the keeper's log."""
    wanted = ended_within(run_folder, what)
    recovery, found = resumed(run_folder)
    assert (recovery.step, recovery.exact) == (STEPS, True)
    assert recovery.source == ("disk" if what in ("random numbers", "objects") else "memory")
    assert same(found, wanted)


@pytest.mark.parametrize("what", ["buffers", "an update"])
def test_without_a_keeper_process_that_is_said(
    run_folder: Path, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    in_thread = KeeperOptions(process=False)
    ended_within(run_folder, what, keeper=in_thread)
    assert f"no last base of step {STEPS} is taken" in (said := capfd.readouterr().err)
    assert "is lost with it" in said
    recovery, _ = resumed(run_folder, keeper=in_thread)
    assert recovery.step == 5


def test_a_log_on_disk_needs_nobody_to_stay(
    run_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"keeper": KeeperOptions(process=False), "log": LogOptions(to="disk")}
    wanted = ended_within(run_folder, "buffers", **options)
    assert "no last base" not in capfd.readouterr().err
    recovery, found = resumed(run_folder, **options)
    assert recovery.step == STEPS
    assert same(found, wanted)


def test_an_exception_leaves_nothing_of_its_step(run_folder: Path) -> None:
    it = Training()
    wanted: list[Any] = []
    with pytest.raises(KeyboardInterrupt), it.opened(run_folder) as ckpt:
        ckpt.resume()
        for _ in range(3):
            it.train()
            ckpt.step()
        wanted = it.seen()
        it.model(torch.randn(4, 8))
        raise KeyboardInterrupt
    recovery, found = resumed(run_folder)
    assert recovery.step == 3
    assert same(found, wanted)


def test_a_resume_is_a_mark_too(run_folder: Path) -> None:
    """Nothing was trained since, but what the log led to is in no base yet."""
    wanted = ended_within(run_folder, "buffers")
    it = Training()
    ckpt = it.opened(run_folder)
    assert ckpt.resume().step == STEPS
    torch.rand(1)
    ckpt.close()
    recovery, found = resumed(run_folder)
    assert (recovery.step, recovery.source) == (STEPS, "disk")
    assert same(found, wanted)


@pytest.mark.parametrize("then", ["go on", "close", "leave"])
def test_a_step_that_has_a_failure_to_tell_of_is_over_all_the_same(
    then: str, run_folder: Path
) -> None:
    """The base of step 5 fails, and step 6 says so: that one is in the log, or in a last base."""
    fs = HookedFileSystem(raising(no_space(), "write", f"*/{5:012}/*.safetensors.tmp"))
    it, seams = Training(), Seams(filesystem=fs, clock=SystemClock())
    ckpt = it.opened(run_folder, keeper=KeeperOptions(process=False), seams=seams)
    ckpt.resume()
    posted, post = list[EverstepError](), inspect(ckpt).channel.post

    def noted(error: EverstepError, **about: Any) -> None:
        post(error, **about)
        posted.append(error)

    inspect(ckpt).channel.post = noted
    for _ in range(5):
        it.train()
        ckpt.step()
    inspect(ckpt).saver.finish_captures()
    until(lambda: bool(posted))
    it.train()
    with pytest.raises(OutOfSpaceError), contextlib.ExitStack() as stack:
        if then == "leave":
            stack.push(ckpt)
        ckpt.step()
    wanted = it.seen()
    if then == "go on":
        it.train()
        ckpt.step()
        assert ckpt.stats().log_holes == 0
        ckpt.rewind(6)
        assert same(it.seen(), wanted)
    ckpt.close()
    recovery, found = resumed(run_folder)
    assert recovery.step == 6
    assert same(found, wanted)


def test_failures_are_told_one_at_a_time_and_none_is_lost() -> None:
    channel, done = BackgroundChannel("raise", ManualClock(), progress_timeout_s=9.0), []
    first, second = OutOfSpaceError("first"), StorageError("second")

    def told(of: EverstepError, then: BaseException | None = None) -> None:
        with pytest.raises(type(then or of)) as caught, channel.raising_storage_errors_last():
            done.append(1)
            if then is not None:
                raise then
        assert caught.value is (then or of)

    channel.post(first)
    channel.post(second)
    told(first, then=KeyboardInterrupt())
    told(first)
    told(second)
    assert len(done) == 3, "each time to its end"
    for other in (DeadlineError("it hangs"), NonFiniteError("of no use")):
        channel.post(first)
        channel.post(other)
        with pytest.raises(type(other)), channel.raising_storage_errors_last():
            done.append(1)
        assert len(done) == 3, "that is said before"
        told(first)
        done.pop()
    with channel.raising_storage_errors_last():
        pass


# --- Weights that are put in behind the last step ------------------------------------------


class Plain:
    """No buffers, which would tell by themselves."""

    def __init__(self, run: Path, method: str, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data = {"at": 0}
        state = {"model": self.model, "optimizer": self.optimizer, "data": self.data}
        self.ckpt = Checkpointer(run, state, method=method, every=4, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 8)).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.data["at"] += 1
            self.ckpt.step()

    def seen(self) -> list[Any]:
        moments = [value for p in self.model.parameters() for value in self._of(p)]
        tensors = [*self.model.state_dict().values(), *moments, torch.get_rng_state()]
        return [t.clone() for t in tensors] + [self.data["at"]]

    def _of(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        kept = self.optimizer.state.get(parameter, {})
        return [kept[key] for key in sorted(kept)]


def halve(it: Plain) -> None:
    for p in it.model.parameters():
        p.data.mul_(0.5)


def swap(it: Plain) -> None:
    for p in it.model.parameters():
        p.data = torch.zeros_like(p)


def in_numpy(it: Plain) -> None:
    it.model.weight.detach().numpy()[:] = 0


PUT_IN: dict[str, Callable[[Plain], Any]] = {
    "loaded": lambda it: it.model.load_state_dict(torch.nn.Linear(8, 8).state_dict()),
    "data": halve,
    "swapped": swap,
    "numpy": in_numpy,
    "moments": lambda it: it.optimizer.state[it.model.weight]["exp_avg"].zero_(),
    "random numbers": lambda it: torch.rand(3),
    "objects": lambda it: it.data.update(at=99),
    "rate": lambda it: it.optimizer.param_groups[0].update(lr=1.0),
    "nothing": lambda it: None,
}
STAYS = ("random numbers", "objects", "rate", "swapped", "nothing")
"""Of these the state of the mark is still there."""


QUICK = [("loaded", "logged"), ("data", "logged"), ("loaded", "gemini"), ("data", "gemini")]


def cases() -> Iterator[Any]:
    methods, numbers, ways = ("logged", "gemini", "lowdiff_plus"), (6, 8), ("closes", "raises")
    for what, method, steps, leaves in product(PUT_IN, methods, numbers, ways):
        is_quick = (steps, leaves) == (6, "closes") and (what, method) in QUICK
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(what, method, steps, leaves, marks=marks)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("what", "method", "steps", "leaves"), list(cases()))
def test_what_is_put_in_behind_the_last_step_is_no_state_of_it(
    run_folder: Path, what: str, method: str, steps: int, leaves: str
) -> None:
    """To be evaluated, perhaps, and the program ends with it."""
    it = Plain(run_folder, method)
    wanted: dict[int, list[Any]] = {}
    with contextlib.suppress(KeyboardInterrupt), it.ckpt as ckpt:
        ckpt.resume()
        for step in range(1, steps + 1):
            it.train(1)
            wanted[step] = it.seen()
        ckpt.wait()  # bases that were due
        PUT_IN[what](it)
        if leaves == "raises":
            raise KeyboardInterrupt
    again = Plain(run_folder, method)
    try:
        with again.ckpt as ckpt:
            recovery = ckpt.resume()
            assert recovery.exact
            assert same(again.seen(), wanted[recovery.step])
            newest = 8 if steps == 8 else 4
            left_in_memory = method == "gemini" and (leaves == "raises" or what not in STAYS)
            assert recovery.step == (newest if left_in_memory else steps)
    finally:
        end_keepers(run_folder.parent)


def test_bases_in_memory_outlive_a_last_one_that_fails(run_folder: Path) -> None:
    """It was to be what they are no more needed for; the keeper has the only copies."""
    it = Plain(run_folder, "gemini")
    wanted: dict[int, list[Any]] = {}
    try:
        with pytest.raises(StorageError, match="base"), it.ckpt as ckpt:
            ckpt.resume()
            for step in range(1, 11):
                it.train(1)
                wanted[step] = it.seen()
            ckpt.wait()
            (base_dir(run_folder, 1, 10) / shard_name(0)).mkdir(parents=True)  # in its way
        again = Plain(run_folder, "gemini")
        with again.ckpt as ckpt:
            recovery = ckpt.resume()
            assert (recovery.step, recovery.source, recovery.exact) == (8, "memory", True)
            assert same(again.seen(), wanted[8])
    finally:
        end_keepers(run_folder.parent)


def _interrupted(*_: Any, **named: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.thinned(4)
@pytest.mark.parametrize("how", ["fails", "is interrupted"])
@pytest.mark.parametrize("method", ["logged", "lowdiff_plus"])
def test_the_log_in_memory_outlives_a_last_base(
    run_folder: Path,
    method: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Whoever comes back in time loses no step, as behind SIGKILL."""
    it = Plain(run_folder, method)
    error = StorageError if how == "fails" else KeyboardInterrupt
    try:
        with pytest.raises(error), it.ckpt as ckpt:
            ckpt.resume()
            it.train(7)
            ckpt.wait()
            wanted = it.seen()
            if how == "fails":
                (base_dir(run_folder, 1, 7) / shard_name(0)).mkdir(parents=True)  # in its way
            else:
                monkeypatch.setattr(Session, "_wait_until_over", _interrupted)
                monkeypatch.setattr(Session, "take", _interrupted)
        assert "a resume() within that time restores them" in capfd.readouterr().err
        monkeypatch.undo()
        again = Plain(run_folder, method)
        with again.ckpt as ckpt:
            recovery = ckpt.resume()
            assert (recovery.step, recovery.exact) == (7, True)
            assert same(again.seen(), wanted)
    finally:
        end_keepers(run_folder.parent)
