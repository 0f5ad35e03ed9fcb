"""What something else than an optimizer writes to what optimizers own: no log can repeat it, so it
never comes back wrong and is called exact (I8, I9)."""

from __future__ import annotations

import copy
import dataclasses
import errno
import itertools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.mark_samples import MarkSampler
from everstep.capture.version_counters import Versions
from everstep.errors import AuditError, EverstepError, RecoveryError, StorageError
from everstep.options import LogOptions
from everstep.seams import Seams
from everstep.testing import inspect
from everstep.trainer.log import untracked_writes as untold_module
from everstep.trainer.log.untracked_writes import WatchedTensors
from tests.support.interrupts import started_at
from tests.support.log.untold import opened, said_once
from tests.support.logged import document, rewrite_segment, segments_of
from tests.support.matrix import CASES, LOOPS, Fleet, Loop
from tests.support.serving import die, serving
from tests.support.world import HookedFileSystem, forget

STEPS = 7
AT = 4
"""The step in which something is written."""

Write = Callable[["World"], None]


class World:
    """Two linear layers and batch norm, trained with AdamW."""

    def __init__(self, *, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Linear(20, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.shadow = [p.detach() * 0.5 for p in self.model.parameters()]

    @property
    def weight(self) -> nn.Parameter:
        found = self.model[2].weight
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def moment(self) -> torch.Tensor:
        found = self.optimizer.state[self.weight]["exp_avg"]
        assert isinstance(found, torch.Tensor)
        return found

    def backward(self) -> None:
        self.model(torch.randn(8, 6)).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, bytes]:
        found = {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()}
        for number, values in enumerate(self.optimizer.state.values()):
            found |= {f"{number}.{key}": value.numpy().tobytes() for key, value in values.items()}
        return found


# --- What is written --------------------------------------------------------------------


def clamped(world: World) -> None:
    with torch.no_grad():
        for parameter in world.model.parameters():
            parameter.clamp_(-0.1, 0.1)


def one_element(world: World) -> None:
    """Which no sample need hit."""
    with torch.no_grad():
        world.weight[3, 3] += 1.0


def copied(world: World) -> None:
    with torch.no_grad():
        world.weight.copy_(torch.ones_like(world.weight))


def loaded(world: World) -> None:
    world.model.load_state_dict(
        {key: value * 0.5 for key, value in world.model.state_dict().items()}
    )


def moment_reset(world: World) -> None:
    world.moment.zero_()


def optimizer_loaded(world: World) -> None:
    state = copy.deepcopy(world.optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].zero_()
    world.optimizer.load_state_dict(state)


def data_clamped(world: World) -> None:
    for parameter in world.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def data_swapped_in(world: World) -> None:
    """Averaged weights, as many implementations do it."""
    for parameter, average in zip(world.model.parameters(), world.shadow, strict=True):
        parameter.data.copy_(average)


def moment_data_reset(world: World) -> None:
    world.moment.data.zero_()


def through_numpy(world: World) -> None:
    world.weight.detach().numpy()[:] *= 0.5


SEEN = (clamped, one_element, copied, loaded, moment_reset)
"""Writes for which a version counter moves."""

UNSEEN = (data_clamped, data_swapped_in, moment_data_reset, through_numpy)
"""Writes for which none does."""

PLACES = ("before backward", "before update", "after update")


def train(
    run: Path,
    world: World,
    write: Write,
    place: str,
    *,
    at: Callable[[int], bool] = lambda step: step == AT,
    steps: int = STEPS,
    **options: Any,
) -> tuple[dict[int, Any], Any]:
    """Trains without a last base; the state after each step, and what it took."""

    def here(step: int, now: str) -> None:
        if at(step) and now == place:
            write(world)

    states = {}
    with opened(run, world, **options) as ckpt:
        ckpt.resume()
        for step in range(1, steps + 1):
            here(step, "before backward")
            world.backward()
            here(step, "before update")
            world.update()
            here(step, "after update")
            ckpt.step()
            states[step] = world.snapshot()
        ckpt.wait()
        stats = ckpt.stats()
        inspect(ckpt).skip_last_base()  # no base at the end
    return states, stats


def assert_never_wrong(run: Path, states: dict[int, Any], **options: Any) -> None:
    """Whatever is asked for, it is what training had, or it is refused, or not called exact."""
    found = []
    for step in (AT - 1, AT, AT + 1, None):
        world = World(seed=9, **options)
        with opened(run, world) as ckpt:
            try:
                recovery = ckpt.resume(step=step)
            except RecoveryError:
                continue
            inspect(ckpt).skip_last_base()
            assert not recovery.exact or world.snapshot() == states[recovery.step], step
            found.append(recovery.step)
    assert found


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most steps: elements are not looked at while training runs."""
    monkeypatch.setattr(untold_module, "SAMPLED_FIRST_STEPS", 0)
    monkeypatch.setattr(untold_module, "SAMPLE_EVERY_STEPS", 1 << 40)


@pytest.mark.thinned(27)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", [*SEEN, *UNSEEN])
def test_a_base_is_taken(run_folder: Path, write: Write, place: str) -> None:
    """In the step in which it shows; once."""
    fused = write in (data_clamped, one_element)
    with said_once():
        states, stats = train(run_folder, World(fused=fused), write, place)
    assert (stats.log_holes, stats.saves) == (1, 2)
    other = World(seed=9, fused=fused)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.base_step, recovery.exact) == (STEPS, AT, True)
        assert other.snapshot() == states[STEPS]
    assert_never_wrong(run_folder, states, fused=fused)


@pytest.mark.thinned(12)
@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", UNSEEN)
def test_replay_finds_what_training_has_not(run_folder: Path, write: Write, place: str) -> None:
    fused = write in (data_clamped, moment_data_reset)
    states, stats = train(run_folder, World(fused=fused), write, place)
    assert (stats.log_holes, stats.saves) == (0, 1)
    other = World(seed=9, fused=fused)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.exact) == (AT - 1, False)
        assert other.snapshot() == states[AT - 1]
    (skipped,) = recovery.skipped
    assert skipped.step == AT
    assert "outside the optimizer" in skipped.reason
    assert "not exact: step 4 differs from training" in recovery.evidence
    assert_never_wrong(run_folder, states, fused=fused)


@pytest.mark.usefixtures("unwatched")
def test_several_steps_at_once(run_folder: Path) -> None:
    """Replay goes back to the last step that is right, and not to the last one it looked at."""
    at = 9
    states, _ = train(
        run_folder, World(), data_clamped, "after update", at=lambda s: s == at, steps=14
    )
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert recovery.step == at - 1
        assert other.snapshot() == states[at - 1]
    with (
        opened(run_folder, other) as ckpt,
        pytest.raises(RecoveryError, match="outside the optimizer"),
    ):
        ckpt.resume(step=at + 2)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", [clamped, data_clamped])
def test_in_every_step(run_folder: Path, write: Write, place: str) -> None:
    """Slow, and right; said once."""
    with said_once():
        states, stats = train(run_folder, World(), write, place, at=lambda step: True)
    assert stats.saves == STEPS
    assert stats.log_holes >= STEPS - 1  # twice, where the first base was torn, too
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.exact) == (STEPS, True)
        assert other.snapshot() == states[STEPS]
    assert_never_wrong(run_folder, states)


def test_what_is_told_is_not_said(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world) as ckpt:

        def told(world: World) -> None:
            ckpt.before_update()
            clamped(world)
            data_clamped(world)
            ckpt.after_update()

        ckpt.resume()
        for step in range(1, STEPS + 1):
            world.backward()
            world.update()
            if step == AT:
                told(world)
            ckpt.step()
        assert ckpt.stats().saves == 2


def test_hooks_of_an_optimizer_count_as_others(run_folder: Path) -> None:
    """Replay runs the optimizer without them."""
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        run, world = run_folder / register, World()
        hook = getattr(world.optimizer, register)(lambda *_, world=world: clamped(world))
        with said_once():
            states, stats = train(run, world, lambda world: None, "")
        hook.remove()
        assert stats.log_holes == STEPS - 1
        assert_never_wrong(run, states)


def test_a_function_is_told_and_nothing_raised(run_folder: Path) -> None:
    """With whatever policy: training goes on."""
    told: list[EverstepError] = []
    train(run_folder, World(), clamped, "after update", on_failure=told.append)
    (only,) = told
    assert isinstance(only, AuditError)
    assert only.step == AT
    assert "model" in only.message


def test_a_state_that_is_restored(run_folder: Path) -> None:
    """Neither is resume() itself taken for a write, nor does one behind it go unnoticed."""
    train(run_folder, World(), lambda world: None, "")
    world = World(seed=9)
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        for _ in range(2):
            world.backward()
            world.update()
            ckpt.step()
        assert ckpt.stats().log_holes == 0
        ckpt.rewind(STEPS + 1)
        world.backward()
        world.update()
        ckpt.step()
        assert ckpt.stats().log_holes == 0
        inspect(ckpt).skip_last_base()
    world = World(seed=9)
    with said_once(), opened(run_folder, world) as ckpt:
        at = ckpt.resume().step
        clamped(world)
        world.backward()
        world.update()
        ckpt.step()
        assert ckpt.stats().log_holes == 1
        ckpt.wait()
        then = world.snapshot()
        inspect(ckpt).skip_last_base()
    world = World(seed=9)
    with opened(run_folder, world) as ckpt:
        assert ckpt.resume().step == at + 1
        inspect(ckpt).skip_last_base()
        assert world.snapshot() == then


@pytest.mark.thinned(2)
@pytest.mark.parametrize("write", [optimizer_loaded, clamped, moment_reset, data_clamped])
def test_in_a_step_without_an_update(run_folder: Path, write: Write) -> None:
    """The base that is taken is no other state of the update before: it is durable, and what comes
    back."""
    told: list[EverstepError] = []
    world = World()
    with opened(run_folder, world, every=1, on_failure=told.append) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            if step == AT:
                write(world)
            else:
                world.backward()
                world.update()
            ckpt.step()
            ckpt.wait()
            if step == AT:
                then = world.snapshot()
        assert ckpt.stats().log_holes == 1
        inspect(ckpt).skip_last_base()
    assert all("no log can repeat that" in one.message for one in told), told
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume(step=AT)
        inspect(ckpt).skip_last_base()
        assert (recovery.base_step, recovery.exact) == (AT, True)
        assert other.snapshot() == then


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("updates", [True, False])
def test_a_state_that_is_loaded_right_behind_a_resume(run_folder: Path, updates: bool) -> None:
    """New tensors take the place of those that were restored: no counter of these moves."""
    train(run_folder, World(), lambda world: None, "")
    world = World(seed=9)
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        optimizer_loaded(world)
        if updates:
            world.backward()
            world.update()
        ckpt.step()
        assert (ckpt.stats().log_holes, ckpt.stats().saves) == (1, 1)
        ckpt.wait()
        then = world.snapshot()
        inspect(ckpt).skip_last_base()
    world = World(seed=9)
    with opened(run_folder, world) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (STEPS + 1, True)
        inspect(ckpt).skip_last_base()
        assert world.snapshot() == then


def test_weights_loaded_before_anything_is_recorded(run_folder: Path) -> None:
    """There is nothing yet that they would be missing from."""
    world = World()
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        loaded(world)
        for _ in range(3):
            world.backward()
            world.update()
            ckpt.step()
        assert (ckpt.stats().log_holes, ckpt.stats().saves) == (0, 1)


def test_a_base_that_is_found_torn_while_a_step_is_marked(run_folder: Path) -> None:
    """By the lane, at any line of the mark: at this mark or the next one another base is due."""
    world, torn = World(), [AuditError("torn", step=1)]
    with opened(run_folder, world, on_failure=lambda error: None) as ckpt:
        ckpt.resume()
        train_one(world, ckpt)
        untracked = inspect(ckpt).recorder.untracked
        for line in itertools.count():
            lane = threading.Thread(target=untracked.handles_torn_base, args=torn)
            with started_at(line, untracked.at_mark, lane):
                train_one(world, ckpt)
            if lane.ident is None:
                break
            lane.join()
            train_one(world, ckpt)
            assert ckpt.stats().log_holes == line + 1
        inspect(ckpt).skip_last_base()
    assert line > 3


def train_one(world: World, ckpt: everstep.Checkpointer) -> None:
    world.backward()
    world.update()
    ckpt.step()


def test_a_base_that_was_being_copied(run_folder: Path) -> None:
    """From the first finding on nothing is copied behind the step mark."""
    world = World()
    with opened(run_folder, world, on_failure="warn") as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt.resume()
        for step in range(1, STEPS):
            if step > 1:
                clamped(world)
            world.backward()
            world.update()
            ckpt.step()
            whole = [
                flight.transfer is not None
                and flight.transfer.gate(flight.prepared.size_bytes, timeout_s=0.0)
                for flight in inspect(ckpt).pending
            ]
            assert step == 1 or all(whole)


class Broken:
    """A disk that refuses the bases of some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def __call__(self, op: str, path: PurePath) -> None:
        if op == "rename" and any(f"base/{step:012d}/" in str(path) for step in self.steps):
            raise OSError(errno.EIO, "no such luck", str(path))


def test_a_base_that_was_needed_and_fails_is_taken_again(run_folder: Path) -> None:
    """At the next step, then with growing distance, each time reported; until one is durable."""
    world, reported = World(), list[EverstepError]()
    seams = Seams(filesystem=HookedFileSystem(Broken({4, 5, 7})))
    with opened(run_folder, world, on_failure=reported.append, seams=seams) as ckpt:
        ckpt.resume()
        taken = []
        for step in range(1, 20):
            world.backward()
            world.update()
            if step == AT:
                clamped(world)
            before = ckpt.stats().saves
            ckpt.step()
            if ckpt.stats().saves > before:
                taken.append(step)
                ckpt.wait()  # it has ended, and whoever is to know that knows it
        assert taken == [1, 4, 5, 7, 11]
        inspect(ckpt).skip_last_base()
    assert [type(error) for error in reported] == [
        AuditError,
        StorageError,
        StorageError,
        StorageError,
    ]
    forget(run_folder)
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.base_step, recovery.exact) == (19, 11, True)
        assert other.snapshot() == world.snapshot()


@pytest.mark.parametrize("write", [clamped, data_clamped])
def test_a_killed_trainer(run_folder: Path, write: Write) -> None:
    """What the keeper has in memory of a loop that clamps in each step."""
    with serving(run_folder) as served, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = World()
        ckpt = everstep.Checkpointer(run_folder, world.state, method="logged", every=100)
        ckpt.resume()
        for _ in range(STEPS):
            world.backward()
            world.update()
            write(world)
            ckpt.step()
        inspect(ckpt).saver.finish_captures()
        then = world.snapshot()
        die(ckpt)
        forget(run_folder)
        other = World(seed=9)
        again = everstep.Checkpointer(served.run, other.state, method="logged", every=100)
        recovery = again.resume()
        assert (recovery.step, recovery.exact) == (STEPS, True)
        assert other.snapshot() == then
        inspect(again).skip_last_base()
        again.close()


# --- False alarms -----------------------------------------------------------------------


ALL = dataclasses.replace(LOOPS["all"], frozen=False)  # which makes new state, and so a new base


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loop", [pytest.param(ALL, marks=pytest.mark.slow), LOOPS["zeroed"]], ids=["all", "zeroed"]
)
def test_no_false_alarm(run_folder: Path, loop: Loop, steps: int) -> None:
    """With each optimizer and variant of the matrix; two of the steps overflow."""
    fleet = Fleet(loop)
    assert len(fleet.worlds) == len(CASES)
    with opened(run_folder, fleet, budget=everstep.Budget(host_bytes=1 << 28)) as ckpt:
        ckpt.resume()
        for _ in range(steps):
            fleet.train()
            ckpt.step()
        stats = ckpt.stats()
        assert (stats.log_holes, stats.saves) == (0, 1)
        inspect(ckpt).skip_last_base()
    other = Fleet(loop, seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.exact, recovery.skipped) == (steps, True, ())
        assert other.snapshot() == fleet.snapshot()


class Odd(World):
    """Loops that write to parameters in ways that are an optimizer's own, or not to them at all."""

    def __init__(self, kind: str, *, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.kind, parameters = kind, list(self.model.parameters())
        self.others: list[torch.optim.Optimizer] = []
        if kind == "of no optimizer":
            self.model.register_parameter("scale", nn.Parameter(torch.ones(3)))
        if kind == "views":
            self.model[0].bias = nn.Parameter(torch.randn(40)[::2])
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.state["optimizer"] = self.optimizer
        if kind == "several optimizers":
            self.others = [torch.optim.SGD([p], lr=0.1, momentum=0.5) for p in parameters]
            del self.state["optimizer"]
            self.state |= {f"o{n}": o for n, o in enumerate(self.others)}
        if kind == "in backward":
            self.others = [torch.optim.AdamW([p], foreach=True) for p in parameters]
            del self.state["optimizer"]
            self.state |= {f"o{n}": o for n, o in enumerate(self.others)}
            for parameter, optimizer in zip(parameters, self.others, strict=True):
                parameter.register_post_accumulate_grad_hook(_stepper(optimizer))
        if kind == "one storage":
            flat = torch.randn(sum(p.numel() for p in parameters)) * 0.1
            pieces = flat.split([p.numel() for p in parameters])
            for (name, module), piece in zip(self._places(), pieces, strict=True):
                shape = getattr(module, name).shape
                setattr(module, name, nn.Parameter(piece.view(shape)))  # one version counter
            halves = list(self.model.parameters())
            self.others = [torch.optim.SGD(halves[::2], lr=0.1), torch.optim.SGD(halves[1::2], 0.1)]
            del self.state["optimizer"]
            self.state |= {f"o{n}": o for n, o in enumerate(self.others)}
        if kind == "average":
            self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
            self.state["average"] = self.average
        self.norms = kind == "parametrized"
        if self.norms:
            nn.utils.parametrizations.weight_norm(self.model[0])
            nn.utils.parametrizations.spectral_norm(self.model[2])
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.state["optimizer"] = self.optimizer

    def _places(self) -> list[tuple[str, nn.Module]]:
        return [(n, m) for m in self.model for n, _ in m.named_parameters(recurse=False)]

    def one_step(self) -> None:
        inputs = torch.randn(8, 6)
        if self.kind == "closure":

            def closure() -> float:
                self.optimizer.zero_grad()
                loss = self.model(inputs).square().mean()
                loss.backward()
                return float(loss.item())

            self.optimizer.step(closure)
            return
        self.model(inputs).square().mean().backward()
        if self.kind in ("several optimizers", "one storage"):
            for other in self.others:
                other.step()
                other.zero_grad()
        elif self.kind == "inference mode":  # whose tensors have no counters
            with torch.inference_mode():
                self.update()
        elif self.kind != "in backward":
            self.update()
        if self.kind == "of no optimizer":
            with torch.no_grad():
                self.model.scale.mul_(0.9)
        if self.kind == "average":
            self.average.update_parameters(self.model)
        if self.kind == "evaluation":
            self.model.eval()
            with torch.inference_mode():
                self.model(inputs)
            self.model.train()
        if self.kind == "swapped for a look":
            with torch.no_grad():
                held = [p.data for p in self.model.parameters()]
                for parameter, shadow in zip(self.model.parameters(), self.shadow, strict=True):
                    parameter.data = shadow
                self.model(inputs)
                for parameter, data in zip(self.model.parameters(), held, strict=True):
                    parameter.data = data


def _stepper(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "kind",
    [
        "several optimizers",
        "in backward",
        "one storage",
        "average",
        "closure",
        "evaluation",
        "parametrized",
        "swapped for a look",
        "of no optimizer",
        "views",
        "inference mode",
    ],
)
def test_no_false_alarm_in_odd_loops(run_folder: Path, kind: str) -> None:
    world = Odd(kind)
    with opened(run_folder, world) as ckpt:
        ckpt.resume()
        for _ in range(20):
            world.one_step()
            ckpt.step()
        stats = ckpt.stats()
        assert (stats.log_holes, stats.saves) == (0, 1)
        inspect(ckpt).skip_last_base()
    other = Odd(kind, seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.exact, recovery.skipped) == (20, True, ())
        for key, value in other.model.state_dict().items():
            assert torch.equal(value, world.model.state_dict()[key]), key


# --- Logs on disk -----------------------------------------------------------------------


@pytest.mark.usefixtures("unwatched")
def test_tools_find_it_as_well(run_folder: Path) -> None:
    """`restore` refuses the step, and `verify --replay` names a step and an entry."""
    with opened(run_folder, World(), every=6):
        pass
    world = World()
    train(run_folder, world, data_clamped, "after update", every=6)
    out = run_folder.parent / "out"
    found = document("restore", run_folder, "--step", AT + 1, "--out", out, status=1)
    assert "outside the optimizer" in str(found)
    assert document("restore", run_folder, "--step", AT - 1, "--out", out)["exact"]
    found = document("verify", run_folder, "--replay", status=1)
    assert "outside the optimizer" in str(found)


@pytest.mark.usefixtures("unwatched")
def test_marks_without_samples_stay_readable(run_folder: Path) -> None:
    """Those of runs before there were any."""
    from everstep.format.log import LogRecord, record_digest
    from everstep.state.layout.entries import SPOT
    from everstep.state.layout.shards import plan_shards

    def bare(record: LogRecord) -> LogRecord:
        places = [p for p in record.layout.placed if not p.entry.name.startswith(SPOT)]
        (layout,) = plan_shards([p.entry for p in places], header_bytes_max=1 << 62)
        by_name = {p.entry.name: p for p in places}
        parts = [by_name[p.entry.name] for p in layout.placed]
        data = memoryview(b"".join(bytes(record.data[p.begin : p.end]) for p in parts))
        assert record.head.kind == "update" or len(places) < len(record.layout.placed)
        changed = record_digest(data, record.objects)
        return dataclasses.replace(record, layout=layout, data=data, digest=changed)

    states, _ = train(run_folder, World(), lambda world: None, "")
    for segment in segments_of(run_folder):
        rewrite_segment(run_folder, segment, lambda records: list(map(bare, records)))
    other = World(seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.exact) == (STEPS, True)
        assert other.snapshot() == states[STEPS]


# --- Without them -----------------------------------------------------------------------


@pytest.mark.usefixtures("unwatched")
def test_without_counters_one_element_comes_back_wrong(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Versions, "moved", lambda self, since, but=(): None)
    states, _ = train(run_folder, World(), one_element, "after update")
    with pytest.raises(AssertionError):
        assert_never_wrong(run_folder, states)


@pytest.mark.usefixtures("unwatched")
def test_without_samples_data_comes_back_wrong(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MarkSampler, "other", lambda self, step, values: None)
    states, _ = train(run_folder, World(), data_clamped, "after update")
    with pytest.raises(AssertionError):
        assert_never_wrong(run_folder, states)


# --- Parameters in one storage -----------------------------------------------------------------


@pytest.mark.parametrize("views", [False, True])
def test_a_flat_buffer_that_is_all_of_one_optimizers_is_watched_by_counters(views: bool) -> None:
    """Whoever else lies there is among them, so nobody's update moves a counter that is shared."""
    flat = torch.zeros(600)
    parts = {"a": flat[:100], "b": flat[100:500].view(20, 20), "c": flat[500:]}
    owned: dict[str, torch.Tensor] = parts
    if not views:
        owned = {name: torch.nn.Parameter(part.clone()) for name, part in parts.items()}
        for name, part in parts.items():
            owned[name].data = part
    watched = WatchedTensors(owned)
    assert watched.written() is None
    with torch.no_grad():
        owned["b"][7, 3] = 1.0  # samples look at 8 of the 400
    assert watched.written() in ("a", "b", "c") if views else watched.written() == "b"
    watched.settle(None)
    assert watched.written() is None


def test_what_shares_a_storage_with_others_is_not() -> None:
    flat = torch.zeros(600)
    few = {"a": flat[:100], "c": flat[500:]}
    watched = WatchedTensors(few)
    flat[300] = 1.0  # another optimizer's update moves their counter, too
    assert watched.written() is None


@pytest.mark.parametrize("norm", [None, 1.0])
def test_a_slice_of_a_larger_table_is_watched(norm: float | None, run_folder: Path) -> None:
    """Nobody else of the state has any of it. torch itself writes to the rows of a batch there."""
    torch.manual_seed(3)
    table = torch.randn(1200, 64)
    emb = torch.nn.Embedding.from_pretrained(table[:1000], freeze=False, max_norm=norm)
    optimizer = torch.optim.Adam(emb.parameters(), 0.01)
    keeper, log = everstep.KeeperOptions(process=False), LogOptions(to="disk")
    state = {"m": emb, "o": optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        options: dict[str, Any] = {"every": 1000, "keeper": keeper, "log": log}
        with everstep.Checkpointer(run_folder, state, method="logged", **options) as ckpt:
            ckpt.resume()
            for _ in range(5):
                (emb(torch.randint(0, 1000, (64,))) - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if norm is None:
                    with torch.no_grad():
                        emb.weight[0].zero_()
                ckpt.step()
            assert ckpt.stats().log_holes >= 4


@pytest.mark.parametrize("rest", [0, 8])
def test_what_two_optimizers_have_of_one_buffer_raises_no_alarm(
    rest: int, run_folder: Path
) -> None:
    """They have the counter in common, and so has a buffer that changes in each step."""
    flat = torch.randn(24 + rest)
    state: dict[str, Any] = {"seen": flat[16:24]}
    parameters = [torch.nn.Parameter(flat[at : at + 8]) for at in (0, 8)]
    for at, parameter in enumerate(parameters):
        state[f"p{at}"], state[f"o{at}"] = parameter, torch.optim.SGD([parameter], 0.1, 0.9)
    log, keeper = LogOptions(to="disk"), everstep.KeeperOptions(process=False)
    options: dict[str, Any] = {"every": 1000, "keeper": keeper, "log": log}
    with everstep.Checkpointer(run_folder, state, method="logged", **options) as ckpt:
        ckpt.resume()
        for _ in range(5):
            for at, parameter in enumerate(parameters):
                parameter.square().sum().backward()
                state[f"o{at}"].step()
                state[f"o{at}"].zero_grad()
            state["seen"].add_(1)
            ckpt.step()
        assert ckpt.stats().log_holes == 0


def test_what_was_found_once_is_compared_as_a_whole(run_folder: Path) -> None:
    """A row that only the samples of one step in eight see is written to in each, and no counter
    tells: from the first find on, none of these steps is in a log."""
    torch.manual_seed(3)
    emb = torch.nn.Embedding(1000, 64)
    optimizer = torch.optim.Adam(emb.parameters(), 0.01)
    log, keeper = LogOptions(to="disk"), everstep.KeeperOptions(process=False)
    options: dict[str, Any] = {"every": 1000, "keeper": keeper, "log": log}
    holes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        state = {"m": emb, "o": optimizer}
        with everstep.Checkpointer(run_folder, state, method="logged", **options) as ckpt:
            ckpt.resume()
            for _ in range(14):
                (emb(torch.tensor([0, 5, 7])) - 1).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                emb.weight.data[0].zero_()
                ckpt.step()
                holes.append(ckpt.stats().log_holes)
    first = holes.index(1)
    assert first < 8
    assert holes[first:] == list(range(1, len(holes) - first + 1))


# --- What two optimizers own, or views share -------------------------------------------------


class Shared:
    """A table that is logged in full at each step mark, and read by updates all the same: weight
    decay brings it into moments."""

    def __init__(self, kind: str, *, seed: int = 1, norm: float | None = None) -> None:
        torch.manual_seed(seed)
        self.table = torch.randn(1000, 64)
        self.model = nn.Embedding.from_pretrained(self.table, freeze=False, max_norm=norm)
        if kind == "a slice":
            self.table = torch.randn(1200, 64)
            self.model = nn.Embedding.from_pretrained(self.table[:1000], False, max_norm=norm)
        self.state: dict[str, Any] = {"m": self.model}
        for key in ("one", "two")[: 2 if kind == "two optimizers" else 1]:
            weights = self.model.parameters()
            self.state[key] = torch.optim.Adam(weights, 0.01, weight_decay=0.1)
        self.optimizers = [self.state[key] for key in ("one", "two") if key in self.state]
        if kind == "a view":
            self.state["half"] = self.table[:500]
        elif kind == "a slice":  # the rest of it is written to before each update
            self.state["all"], self.state["rest"] = self.table, self.table[1100:]
        self.batch = torch.tensor([3, 555, 777])  # which are no samples

    def one_step(self, behind: Callable[[], None] = lambda: None) -> None:
        if "rest" in self.state:
            self.state["rest"].add_(1)
        for optimizer in self.optimizers:
            (-self.model(self.batch).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        behind()

    def snapshot(self) -> dict[str, bytes]:
        found = {"table": self.table.numpy().tobytes()}
        for number, optimizer in enumerate(self.optimizers):
            (values,) = optimizer.state.values()
            found |= {f"{number}.{key}": value.numpy().tobytes() for key, value in values.items()}
        return found


def shared_run(
    run: Path, kind: str, steps: int, behind: Callable[[Shared], None], norm: float | None = None
) -> tuple[dict[str, bytes], Any]:
    world = Shared(kind, norm=norm)
    with opened(run, world) as ckpt:
        ckpt.resume()
        for _ in range(steps):
            world.one_step(lambda: behind(world))
            ckpt.step()
        stats = ckpt.stats()
        inspect(ckpt).skip_last_base()
    return world.snapshot(), stats


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("kind", ["two optimizers", "a view"])
def test_what_is_logged_and_read_is_watched(run_folder: Path, kind: str) -> None:
    """torch itself writes to rows of the table in each forward, before the update reads it."""
    with said_once():
        wanted, stats = shared_run(run_folder, kind, 5, lambda world: None, norm=1.0)
    assert stats.log_holes >= 4
    other = Shared(kind, seed=9, norm=1.0)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.base_step, recovery.exact) == (5, 5, True)
        assert other.snapshot() == wanted


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["two optimizers", "a view", "a slice"])
def test_what_is_logged_and_read_is_in_the_mark(run_folder: Path, kind: str) -> None:
    """So what is written to it between the last update and the mark is no hole, whatever it is."""

    def behind(world: Shared) -> None:
        with torch.no_grad():
            world.model.weight[555].mul_(0.5)
        world.model.weight.data[0].zero_()

    wanted, stats = shared_run(run_folder, kind, 20, behind)
    assert (stats.log_holes, stats.saves) == (0, 1)
    other = Shared(kind, seed=9)
    with opened(run_folder, other) as ckpt:
        recovery = ckpt.resume()
        inspect(ckpt).skip_last_base()
        assert (recovery.step, recovery.base_step, recovery.exact) == (20, 1, True)
        assert other.snapshot() == wanted


def test_between_two_updates_of_what_they_share(run_folder: Path) -> None:
    """No mark holds that."""
    world = Shared("two optimizers")
    one, two = world.optimizers
    with opened(run_folder, world) as ckpt, said_once():
        ckpt.resume()
        for step in range(1, 6):
            for optimizer in (one, two):
                (-world.model(world.batch).square().sum()).backward()
                if step == AT and optimizer is two:
                    with torch.no_grad():
                        world.model.weight[555].mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            ckpt.step()
        assert ckpt.stats().log_holes == 1
        inspect(ckpt).skip_last_base()
