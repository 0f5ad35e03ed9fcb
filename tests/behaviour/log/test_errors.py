"""The log when training itself goes wrong: exceptions anywhere, calls in a strange order, a keeper
that is exchanged meanwhile. No memory is lost to it, and what is replayed is what training had."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import everstep
from everstep.config import FailurePolicy
from everstep.errors import EverstepError, RecoveryError, StorageError
from everstep.options import LogOptions
from everstep.state.values.objects import encode
from everstep.testing import inspect
from everstep.trainer.log import recorder as recording
from everstep.trainer.log.recorder import Recorder
from tests.support.log.every_step import DENSE, World
from tests.support.world import TIMEOUT_S, Gate, forget

ALL = LogOptions(to="disk", batch_steps=1, history="all")
STEPS = 6


class FaultError(Exception):
    """Nothing that the library raises."""


@contextlib.contextmanager
def opened(
    run: Path, world: World, on_failure: FailurePolicy = lambda error: None
) -> Iterator[everstep.Checkpointer]:
    forget(run)
    with everstep.Checkpointer(
        run,
        world.state,
        method=DENSE,
        every=100,
        keep=100,
        log=ALL,
        keeper=everstep.KeeperOptions(process=False),
        on_failure=on_failure,
    ) as ckpt:
        yield ckpt


def recorder_of(ckpt: everstep.Checkpointer) -> Recorder:
    assert inspect(ckpt).recorder is not None
    return inspect(ckpt).recorder


def bytes_left(ckpt: everstep.Checkpointer) -> int:
    """Of blocks of memory that hold neither a record nor the newest base."""
    ckpt.wait()
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    rooms = recorder_of(ckpt).memory
    assert rooms.target is not None
    pool = rooms.target.pool
    return pool.lent_bytes - sum(pool.rounded_bytes(one.room.size_bytes) for one in rooms.kept)


def check(run: Path, states: dict[int, Any], without: set[int], world: World) -> None:
    """Every step but some can be gone to, and is what training had."""
    with opened(run, world) as ckpt:
        for step in (*states, *reversed(states)):
            if step in without:
                with pytest.raises(RecoveryError, match=f"has step {step}"):
                    ckpt.resume(step=step)
                continue
            recovery = ckpt.resume(step=step)
            assert (recovery.step, recovery.exact) == (step, True)
            assert world.snapshot() == states[step], step
        recorder_of(ckpt).base_step = 100  # nothing has been trained


# --- Exceptions -------------------------------------------------------------------------

PLACES = {
    "looking at gradients": "everstep.trainer.log.update_inputs:InputReader.look",
    "taking pages": "everstep.link.pool:CapturePool.populate",
    "copying an update": "everstep.capture.cuda:DeviceLane.submit",
    "in the lane": "everstep.capture.lane:run_batch",
    "waiting for copies": "everstep.capture.lane:CpuTransfer.gate",
    "encoding": "everstep.trainer.log.recorder:encode",
    "copying a mark": "everstep.capture.cuda:DeviceLane.copy_now",
    "telling the keeper": "everstep.trainer.attach.keeper:ThreadKeeper.log",
    "a mark": "everstep.trainer.log.update_inputs:DeclaredUpdates.samples",
}
IN_THE_LANE = ("taking pages", "in the lane", "encoding", "telling the keeper")


@pytest.mark.thinned(9)
@pytest.mark.parametrize("error", [FaultError, EverstepError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_fails_once(
    place: str, error: type[BaseException], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 3, which may be lost to it, and no other is."""
    if error is KeyboardInterrupt and place in IN_THE_LANE:
        pytest.skip("signals come to the training thread only")
    module, name = PLACES[place].split(":")
    original, armed = resolve_name(PLACES[place]), [False]

    def failing(*args: Any, **options: Any) -> Any:
        if armed.pop():
            armed.append(False)
            raise error("as the test wants it")
        armed.append(False)
        return original(*args, **options)

    monkeypatch.setattr(f"{module}.{name}", failing)
    world, states = World(), {}
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        world.train()
        ckpt.step()
        states[1] = world.snapshot()
        assert bytes_left(ckpt) == 0
        for step in range(2, STEPS + 1):
            armed[0] = step == 3
            for call in (world.train, ckpt.step):
                with contextlib.suppress(FaultError, EverstepError, KeyboardInterrupt):
                    call()
            assert armed == [False], "it has not come to that"
            states[step] = world.snapshot()
        assert bytes_left(ckpt) == 0
        # Pages that are not taken beforehand are taken by the copy.
        holes = ckpt.stats().log_holes
        assert place == "taking pages" or 1 <= holes <= 2
    monkeypatch.undo()
    bases = {int(base.name) for base in run_folder.glob("timeline-00001/base/*")}
    check(run_folder, states, {3} - bases if holes else set(), World(seed=9))


@pytest.mark.thinned(12)
@pytest.mark.parametrize("place", PLACES)
def test_what_fails_in_recording_goes_by_the_policy(
    place: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory on a device, say: neither an update nor a step of the loop ends in it."""
    module, name = PLACES[place].split(":")
    original, armed = resolve_name(PLACES[place]), [False]

    def failing(*args: Any, **options: Any) -> Any:
        if armed[0]:
            armed[0] = False
            raise FaultError("as the test wants it")
        return original(*args, **options)

    monkeypatch.setattr(f"{module}.{name}", failing)
    reported: list[EverstepError] = []
    world, states = World(), {}
    with opened(run_folder, world, on_failure=reported.append) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            armed[0] = step == 3
            world.train()
            ckpt.step()
            states[step] = world.snapshot()
        holes = ckpt.stats().log_holes
    monkeypatch.undo()
    assert place == "taking pages" or holes >= 1
    assert place == "taking pages" or any("as the test wants it" in str(e) for e in reported)
    bases = {int(base.name) for base in run_folder.glob("timeline-00001/base/*")}
    check(run_folder, states, {3} - bases if holes else set(), World(seed=9))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("kind", "without"), [(StorageError, set()), (EverstepError, {3})])
def test_a_step_that_ends_in_an_error_makes_a_base_due(
    kind: type[EverstepError], without: set[int], run_folder: Path
) -> None:
    """What storage failed at is raised when a step is over; all else before its mark."""
    world, states = World(), {}
    with opened(run_folder, world, "raise") as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            world.train()
            if step == 3:
                inspect(ckpt).channel.post(kind("as the test wants it"))
                with pytest.raises(kind, match="as the test wants it"):
                    ckpt.step()
            else:
                ckpt.step()
            states[step] = world.snapshot()
    check(run_folder, states, without, World(seed=9))


def test_a_record_that_is_late_goes_to_no_other_keeper(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are in the memory of the old one: at that place of the new one there is nothing,
    and the new one would make a record of that, with a digest that vouches for it."""
    gate, told = Gate(), []

    def slowly(*args: Any, **options: Any) -> bytes:
        gate.wait_at()
        return encode(*args, **options)

    world = World()
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        world.train()
        ckpt.step()
        recorder, keeper = recorder_of(ckpt), inspect(ckpt).keeper
        into = recorder.memory.target
        assert into is not None
        assert keeper is not None
        monkeypatch.setattr(recording, "encode", slowly)
        world.train()
        monkeypatch.setattr(type(keeper), "log", lambda *args: told.append(args))
        service = inspect(ckpt).keepers.service
        assert service is not None
        recorder.start(service)  # as another comes into service
        gate.open()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        assert told == []
        assert recorder.base_due is not None
        monkeypatch.undo()
        assert bytes_left(ckpt) == 0


# --- Strange loops ----------------------------------------------------------------------


class Two(World):
    """A second optimizer, for the last layer."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), seed=seed, clip=False)
        *most, weight, bias = self.model.parameters()
        self.optimizer = torch.optim.SGD(most, lr=0.1, momentum=0.9)
        self.second = torch.optim.AdamW([weight, bias], lr=0.01)
        self.state = {"model": self.model, "one": self.optimizer, "two": self.second, "plain": 0}

    def backward(self) -> None:
        self.model.zero_grad()
        self.model(torch.randn(6, 8)).square().mean().backward()

    def snapshot(self) -> dict[str, bytes]:
        found = super().snapshot()
        for number, values in enumerate(self.second.state.values()):
            for key, value in values.items():
                found[f"second.{number}.{key}"] = value.numpy().tobytes()
        return found


def in_turn(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    world.backward()
    (world.optimizer if step % 2 else world.second).step()


def seldom(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    world.backward()
    world.optimizer.step()
    if step % 5 == 0:
        world.second.step()


def never(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    world.backward()


def all_frozen(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    if step % 2:
        world.backward()
    else:
        world.model.zero_grad()
    world.optimizer.step()
    world.second.step()


def replaced_by_a_hook(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    """Registered anew each time, hence behind ours."""

    def replace(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.01 * step)

    world.backward()
    handle = world.optimizer.register_step_pre_hook(replace)
    world.optimizer.step()
    handle.remove()
    world.second.step()


def edited(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    world.backward()
    world.optimizer.param_groups[0].update(lr=0.1 / step, nesterov=step % 2 == 0)
    world.optimizer.step()
    world.second.param_groups[0]["betas"] = (0.8, 0.9 + step / 100)
    world.second.step()


def one_in_the_other(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    def closure() -> None:
        world.backward()
        if step == 4:
            world.second.step()

    world.optimizer.step(closure)
    if step != 4:
        world.second.step()


def closure_called_twice(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    def closure() -> None:
        world.backward()
        if step == 4:  # as by an optimizer that looks for a better place with it
            inspect(ckpt).consume("one")
            world.backward()

    world.optimizer.step(closure)


def half_way(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    world.backward()
    module = importlib.import_module("torch.optim.sgd")
    update = module.sgd

    def failing(*args: Any, **options: Any) -> None:
        update(*args, **options)
        if step == 4:
            raise FaultError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(FaultError):
        patch.setattr(module, "sgd", failing)
        world.optimizer.step()


def nested_updates(world: Two, ckpt: everstep.Checkpointer, step: int) -> None:
    """What is declared to be under way twice, and never ended, and ended without a beginning."""
    world.backward()
    world.optimizer.step()
    if step == 4:
        ckpt.before_update()
        ckpt.before_update()
        with torch.no_grad():
            next(iter(world.model.parameters())).mul_(0.5)
        ckpt.after_update()
    if step == 5:
        ckpt.after_update()
        ckpt.before_update()


LOOPS: list[Callable[[Two, everstep.Checkpointer, int], None]] = [
    in_turn,
    seldom,
    never,
    all_frozen,
    replaced_by_a_hook,
    edited,
    one_in_the_other,
    closure_called_twice,
    half_way,
    nested_updates,
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_step_of(
    loop: Callable[[Two, everstep.Checkpointer, int], None], run_folder: Path
) -> None:
    world, states = Two(), {}
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            loop(world, ckpt, step)
            ckpt.step()
            states[step] = world.snapshot()
        assert bytes_left(ckpt) == 0
    check(run_folder, states, set(), Two(seed=9))
    # The base behind a hole does not count: replay must not go over it.
    holes = {"one_in_the_other": 4, "half_way": 4, "nested_updates": 4, "closure_called_twice": 4}
    if loop.__name__ in holes:
        forget(run_folder)
        with opened(run_folder, Two(seed=9)) as ckpt, pytest.raises(RecoveryError):
            for base in run_folder.glob("timeline-00001/base/*"):
                if int(base.name) >= holes[loop.__name__]:
                    for file in base.iterdir():
                        file.unlink()
                    base.rmdir()
            ckpt.resume(step=STEPS)
