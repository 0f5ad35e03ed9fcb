"""Every step recoverable: base and log give back the state of any step, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import NonFiniteError, RecoveryError, UnsupportedStateError
from everstep.link.pool import CapturePool
from everstep.options import LogOptions
from everstep.seams import ManualClock, Seams
from everstep.seams.failpoints import arm
from everstep.testing import inspect
from tests.support.log.every_step import ON_DISK, World, opened, run_steps
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S, forget


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 9])
def test_a_killed_trainer_loses_no_step(served: Bench, steps: int) -> None:
    world = World()
    ckpt = opened(served.run, world)
    ckpt.resume()
    states = run_steps(ckpt, world, steps)
    inspect(ckpt).saver.finish_captures()
    world.train()  # the step in flight is lost
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert recovery.step == steps
    assert other.snapshot() == states[steps]
    assert recovery.exact, recovery.evidence
    assert recovery.replayed == recovery.step - (recovery.base_step or 0)
    again.close()


def test_killed_again_and_again(served: Bench) -> None:
    """Each time before the new timeline has a base of its own."""
    world = World()
    ckpt = opened(served.run, world, every=1000)
    ckpt.resume()
    reference = run_steps(ckpt, world, 3)
    step = 3
    for number in range(4):
        inspect(ckpt).saver.finish_captures()
        die(ckpt)
        world = World(seed=20 + number)
        ckpt = opened(served.run, world, every=1000)
        recovery = ckpt.resume()
        assert recovery.step == step
        assert world.snapshot() == reference[step]
        reference |= run_steps(ckpt, world, number)
        step += number
    ckpt.close()


class Averaged(World):
    """Weights are averaged in place, in tensors that are plain data of the state."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.state["average"] = [p.detach().clone() for p in self.model.parameters()]

    def train(self) -> None:
        super().train()
        with torch.no_grad():
            for average, parameter in zip(
                self.state["average"], self.model.parameters(), strict=True
            ):
                average.lerp_(parameter, 0.1)

    def snapshot(self) -> dict[str, bytes]:
        averages = enumerate(self.state["average"])
        return super().snapshot() | {f"average {n}": t.numpy().tobytes() for n, t in averages}


def test_training_does_not_write_into_the_log_that_it_came_back_from(served: Bench) -> None:
    """Where it is killed again in its first step, that log is needed once more."""
    world: World = Averaged()
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    states = run_steps(ckpt, world, 3)
    for life in (2, 3):
        inspect(ckpt).saver.finish_captures()
        die(ckpt)
        world = Averaged(seed=life)
        ckpt = opened(served.run, world, every=100)
        recovery = ckpt.resume()
        assert (recovery.step, recovery.base_step, recovery.exact) == (3, 1, True), recovery
        assert world.snapshot() == states[3]
        world.train()
    ckpt.close()


def test_any_logged_step_can_be_gone_back_to(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world, log=ON_DISK, every=4, keep=10) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 10)
    for step in (9, 2, 6, 5, 3):
        other = World(seed=9)
        with opened(run_folder, other, log=ON_DISK, every=1000, keep=10) as ckpt:
            recovery = ckpt.resume(step=step)
            assert recovery.step == step
            assert other.snapshot() == states[step], step


def test_training_goes_on_from_there_as_it_did(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world, log=ON_DISK) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 9)
    other = World(seed=9)
    with opened(run_folder, other, log=ON_DISK) as ckpt:
        ckpt.resume(step=7)
        then = run_steps(ckpt, other, 3)
    assert then[9] == states[9]
    last = World(seed=10)
    with opened(run_folder, last, log=ON_DISK) as ckpt:
        assert ckpt.resume().step == 10  # of the newest timeline, and not of the older one
        assert last.snapshot() == then[10]
    with (
        opened(run_folder, World(seed=10), log=ON_DISK) as ckpt,
        pytest.raises(RecoveryError, match="neither a base nor the log has step 50") as caught,
    ):
        ckpt.resume(step=50)
    assert caught.value.hint == "existing steps: 4 to 10", "each once, whatever leads to it"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loop", ["clip", "accumulate", "zero"])
def test_optimizers(name: str, loop: str, served: Bench) -> None:
    def world(seed: int) -> World:
        return World(
            OPTIMIZERS[name],
            seed=seed,
            clip=loop == "clip",
            accumulate=2 if loop == "accumulate" else 1,
            set_to_none=loop != "zero",
        )

    first = world(1)
    ckpt = opened(served.run, first, every=3)
    ckpt.resume()
    states = run_steps(ckpt, first, 5)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = world(9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.exact) == (5, True), recovery
    assert other.snapshot() == states[5]
    again.close()


def test_lbfgs_is_refused(run_folder: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="optimizer: "):
        opened(run_folder, World(lambda p: torch.optim.LBFGS(p)))


def test_what_no_base_has_is_trained_with_no_log(run_folder: Path) -> None:
    """Replay would read another weight where the update reads it, as weight decay does. It blamed
    the loop, and all steps since the base were lost."""
    model, head = nn.Linear(3, 2), nn.Linear(2, 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer}
    forget(run_folder)
    with pytest.raises(UnsupportedStateError, match=r"2 parameter\(s\) that it trains are not in"):
        everstep.Checkpointer(run_folder, state, method="logged")
    everstep.Checkpointer(run_folder, {**state, "head": head}, method="logged").close()


# --- In this very process ---------------------------------------------------------------


@pytest.mark.thinned(4)
@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize("to", ["memory", "disk"])
def test_rewind(run_folder: Path, process: bool, to: str) -> None:
    world = World()
    keeper = everstep.KeeperOptions(process=process, linger_s=5)
    log = LogOptions(to=to, batch_steps=3)
    with opened(run_folder, world, keeper=keeper, log=log, every=100) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 9)
        recovery = ckpt.rewind(6)
        assert recovery.step == 6
        assert world.snapshot() == states[6]
        assert run_steps(ckpt, world, 2)[8] == states[8]
        ckpt.rewind(7)  # of the new timeline
        assert world.snapshot() == states[7]
        if to == "disk":
            ckpt.rewind(3)  # and before its fork
            assert world.snapshot() == states[3]
        else:
            with pytest.raises(RecoveryError, match=r"of step 3|has step 3"):
                ckpt.rewind(3)  # that memory is used again
            assert world.snapshot() == states[7]
        then = run_steps(ckpt, world, 8 if to == "disk" else 4)
        assert then[9] == states[9]
    other = World(seed=9)
    with opened(run_folder, other, keeper=keeper, log=log) as ckpt:
        assert ckpt.resume().step == 11
        assert other.snapshot() == then[11]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("changed", [False, True])
def test_what_a_program_changes_behind_its_resume_is_noticed(
    run_folder: Path, threads: Callable[[int], None], changed: bool
) -> None:
    """A timeline's record says how torch was used when it was opened, and replay goes by that (I9):
    the same holds of CUDA, which a program that resumes before ``model.cuda()`` brings into use."""
    world = World()
    threads(1)
    with opened(run_folder, world, every=100) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        threads(2 if changed else 1)
        run_steps(ckpt, world, 2)
        threads(1)
        recovery = ckpt.rewind(4)
    assert recovery.exact != changed
    assert ("torch's number of threads" in recovery.evidence) == changed, recovery.evidence


def test_a_gradient_that_is_not_finite_is_reported(run_folder: Path) -> None:
    world = World()
    log = LogOptions(watch=True)
    with opened(run_folder, world, log=log) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 3)
        world.model(torch.full((6, 8), float("nan"))).square().mean().backward()
        world.optimizer.step()
        with pytest.raises(NonFiniteError, match=r"consumed by step 4 is not finite"):
            ckpt.step()
            inspect(ckpt).saver.finish_captures()
            ckpt.step()
        ckpt.rewind(3)
        assert world.snapshot() == states[3]


@pytest.mark.parametrize("watch", [True, False])
def test_the_end_of_a_training_that_is_not_finite(
    run_folder: Path, watch: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is known to be of no use is no last base; else it is said when it comes back."""
    world, log = World(), LogOptions(watch=watch)
    keeper = everstep.KeeperOptions(process=False)

    def train() -> None:
        with opened(run_folder, world, log=log, keeper=keeper, every=1000) as ckpt:
            ckpt.resume()
            run_steps(ckpt, world, 3)
            ckpt.save()
            world.model(torch.full((6, 8), float("nan"))).square().mean().backward()
            world.optimizer.step()
            ckpt.step()
            inspect(ckpt).saver.finish_captures()
            ckpt.step()

    if watch:
        with pytest.raises(NonFiniteError):
            train()
        assert "no last base of step" in capsys.readouterr().err
    else:
        train()
    other = World(seed=9)
    with opened(run_folder, other, keeper=keeper) as ckpt:
        recovery = ckpt.resume()
        assert recovery.step == (3 if watch else 5)
        assert recovery.exact
        found = [note for note in recovery.notes if "is not finite" in note]
        assert len(found) == (0 if watch else 1)
        inspect(ckpt).skip_last_base()


def test_a_rewind_undoes_gradients_that_were_not_finite(run_folder: Path) -> None:
    world = World()

    def spoil() -> None:
        world.model(torch.full((6, 8), float("nan"))).square().mean().backward()
        world.optimizer.step()
        inspect(ckpt).saver.finish_captures()

    with opened(run_folder, world, log=LogOptions(watch=True)) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 3)
        spoil()
        assert ckpt.rewind(3).step == 3  # nothing raised: the loop has seen the loss itself
        assert world.snapshot() == states[3]
        spoil()
        with pytest.raises(NonFiniteError, match="consumed by step 4"):
            ckpt.rewind(4)  # which is the one that consumed them
        ckpt.rewind(3)
        assert world.snapshot() == states[3]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rewind_leaves_nothing_of_a_backward_that_no_update_consumed(
    run_folder: Path, set_to_none: bool
) -> None:
    """The loop has seen the loss, and goes back at once: what it would have added its next
    gradients to is not of that step."""
    world = World(set_to_none=set_to_none)
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 7)
        world.model(torch.full((6, 8), float("nan"))).square().mean().backward()
        ckpt.rewind(5)
        assert world.snapshot() == states[5]
        assert run_steps(ckpt, world, 2) == {step: states[step] for step in (6, 7)}


def test_a_step_does_not_wait_for_memory_of_bases(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first base, which is waited for: nothing else leads to its step."""
    stepped, duration_in_words, threads = threading.Event(), [], []

    def warm(pool: CapturePool, size_bytes: int) -> None:
        threads.append(threading.current_thread())
        duration_in_words.append(stepped.wait(TIMEOUT_S))

    monkeypatch.setattr(CapturePool, "warm", warm)
    world = World()
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        stepped.set()
        run_steps(ckpt, world, 3)
        ckpt.wait()
        stepped.clear()
        duration_in_words.clear()
        run_steps(ckpt, world, 1)
        stepped.set()
        ckpt.wait()
    assert duration_in_words
    assert all(duration_in_words)
    assert threading.current_thread() not in threads


def unfreeze(world: World) -> None:
    world.optimizer.add_param_group({"params": world.state["head"].parameters()})


def forget_momenta(world: World) -> None:
    world.optimizer.state.clear()


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("first", "then", "waits"),
    [
        pytest.param(0, None, True, id="the first"),
        pytest.param(3, None, False, id="periodic"),
        pytest.param(3, unfreeze, True, id="another parameter"),
        pytest.param(3, forget_momenta, True, id="without state"),
    ],
)
def test_a_base_that_nothing_else_leads_to_is_waited_for(
    run_folder: Path, first: int, then: Callable[[World], None] | None, waits: bool
) -> None:
    """Or the step that is over is lost with the one in flight."""
    stepped, before = threading.Event(), []
    world = World()
    world.state["head"] = nn.Linear(3, 3)
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, first)
        ckpt.wait()
        wait_s = 0.5 if waits else TIMEOUT_S
        arm("capture.before_captured", lambda name: before.append(not stepped.wait(wait_s)))
        if then is not None:
            then(world)
        run_steps(ckpt, world, 1)
        stepped.set()
        ckpt.wait()
    assert before == [waits]


def test_after_a_base_that_has_failed_the_next_is_waited_for(run_folder: Path) -> None:
    stepped, before = threading.Event(), []
    world = World()

    def one_that_fails() -> None:
        run_steps(ckpt, world, 1)
        ckpt.wait()

    with opened(run_folder, world, on_failure="warn") as ckpt:
        ckpt.resume()
        arm("capture.before_captured", "raise")
        with pytest.warns(RuntimeWarning, match="while the state was copied"):
            one_that_fails()
        arm("capture.before_captured", lambda name: before.append(not stepped.wait(0.5)))
        run_steps(ckpt, world, 1)
        stepped.set()
        ckpt.wait()
    assert before == [True]


def test_waiting_for_a_record_counts_as_a_stall_of_the_log(run_folder: Path) -> None:
    clock = ManualClock()
    world = World()
    with opened(run_folder, world, every=1000, seams=Seams(clock=clock)) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        before = ckpt.stats().stall_s
        arm("log.before_record", lambda name: clock.advance(2.0), hit=2)  # of the step mark
        run_steps(ckpt, world, 1)
        after = ckpt.stats().stall_s
        stalled = {cause: after[cause] - before[cause] for cause in after}
        assert stalled.pop("log") == pytest.approx(2.0)
        assert not any(stalled.values())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch without grad_dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_gradient_of_another_dtype_is_refused_at_the_step_that_shows_it(
    run_folder: Path, dtype: torch.dtype
) -> None:
    """Torch computes with it as it is, a log would hold it in the parameter's."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad_dtype = None  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    state = {"p": torch.nn.ParameterList([parameter]), "optimizer": optimizer}
    with everstep.Checkpointer(run_folder, state, method="logged", every=2) as ckpt:
        ckpt.resume()
        for _ in range(3):
            parameter.grad = torch.ones(4)
            optimizer.step()
            ckpt.step()
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
        with pytest.raises(UnsupportedStateError, match=f"a gradient of {dtype}"):
            ckpt.step()
        ckpt.save()  # the way on, without a log
        wanted = parameter.detach().clone()
    forget(run_folder)
    with everstep.Checkpointer(run_folder, state, method="lazy") as ckpt:
        assert (ckpt.resume().step, torch.equal(parameter, wanted)) == (4, True)
