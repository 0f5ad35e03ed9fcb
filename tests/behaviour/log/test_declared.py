"""Declared updates (I8): averaged weights are left out of the step marks, and replay runs the
function that makes them, where it ran: every bit is that of training."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep
from everstep.capture.spot_check import Probe
from everstep.errors import (
    AuditError,
    MismatchError,
    OptionError,
    UnsupportedStateError,
)
from everstep.options import LogOptions
from everstep.state.training_state import State
from everstep.testing import inspect
from tests.support.log import every_step as plain
from tests.support.log.every_step import ON_DISK, opened, run_steps
from tests.support.serving import Bench, die, serving

Average = Callable[[], object]


class Counted:
    """Averages by hand, faster at first, as a class of a user would; kept in new tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.updates = model, 0
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        self.updates += 1
        decay = min(0.9, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                self.shadow[number] = self.shadow[number].lerp(parameter, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.shadow = state["updates"], list(state["shadow"])


def ema(world: World) -> tuple[Any, Average]:
    average = AveragedModel(world.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return average, lambda: average.update_parameters(world.model)


def with_buffers(world: World) -> tuple[Any, Average]:
    decay = get_ema_multi_avg_fn(0.7)
    average = AveragedModel(world.model, multi_avg_fn=decay, use_buffers=True)
    return average, lambda: average.update_parameters(world.model)


def swa(world: World) -> tuple[Any, Average]:
    average = AveragedModel(world.model)
    return average, lambda: average.update_parameters(world.model)


def lerp(world: World) -> tuple[Any, Average]:
    shadow = {name: p.detach().clone() for name, p in world.model.named_parameters()}

    def average() -> None:
        with torch.no_grad():
            for name, parameter in world.model.named_parameters():
                shadow[name].lerp_(parameter, 0.1)

    return shadow, average


def counted(world: World) -> tuple[Any, Average]:
    average = Counted(world.model)
    return average, average.update


KINDS = {one.__name__: one for one in (ema, with_buffers, swa, lerp, counted)}


class World(plain.World):
    """With an average of the weights.

    Attributes:
        places: where in a step it is updated.
        every: steps.
    """

    def __init__(
        self,
        kind: str = "ema",
        places: tuple[str, ...] = ("after",),
        *,
        every: int = 1,
        seed: int = 1,
        make: Callable[[Any], torch.optim.Optimizer] | None = None,
        scaled: bool = False,
    ) -> None:
        super().__init__(make, seed=seed)
        self.state["ema"], self.average = KINDS[kind](self)
        self.places, self.every = places, every
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.scaled = scaled
        if scaled:
            self.state["scaler"] = self.scaler
        self.ckpt: everstep.Checkpointer | None = None

    def at(self, place: str) -> None:
        """Updates the average if it is its turn."""
        if place not in self.places or self.state["plain"]["seen"] % self.every:
            return
        if self.ckpt is not None:
            self.ckpt.before_update()
        self.average()
        if self.ckpt is not None:
            self.ckpt.after_update("ema/*")

    def train(self) -> None:
        self.at("first")
        loss = self.model(torch.randn(6, 8)).square().mean()
        if self.scaled and self.state["plain"]["seen"] % 3 == 1:
            loss = loss * float("inf")
        (self.scaler.scale(loss) if self.scaled else loss).backward()
        self.at("before")
        if self.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.at("after")
        with torch.no_grad():
            self.model(torch.randn(6, 8))  # moves the statistics of the batch norm on
        self.at("last")
        self.scheduler.step()
        self.state["plain"]["seen"] += 1

    def snapshot(self) -> dict[str, bytes]:
        found = super().snapshot()
        average = self.state["ema"]
        tensors = average if isinstance(average, dict) else average.state_dict()
        if isinstance(average, Counted):
            found["updates"] = repr(average.updates).encode()
            tensors = dict(enumerate(average.shadow))
        found |= {f"ema {k}": v.numpy().tobytes() for k, v in tensors.items()}
        found["scaler"] = repr(self.scaler.state_dict()).encode()
        return found


def open_it(
    run: Path, world: World, *, registered: bool = True, **options: Any
) -> everstep.Checkpointer:
    """With the function, or without: then the average is logged in full."""
    if registered:
        options = {"declared": {"ema/*": world.average}} | options
    ckpt = opened(run, world, **({"every": 1000} | options))
    world.ckpt = ckpt if registered else None
    return ckpt


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def killed(ckpt: everstep.Checkpointer) -> None:
    inspect(ckpt).saver.finish_captures()
    die(ckpt)


CASES = {
    **{f"{kind} {place}": (kind, (place,), 1) for kind in KINDS for place in ("before", "after")},
    "ema first": ("ema", ("first",), 1),
    "ema last": ("ema", ("last",), 1),
    "ema twice": ("ema", ("before", "last"), 1),
    "ema everywhere": ("with_buffers", ("first", "before", "after", "last"), 1),
    "swa every 2nd": ("swa", ("after",), 2),
    "counted every 3rd": ("counted", ("first", "after"), 3),
}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_as_if_it_had_not_been(case: str, served: Bench) -> None:
    kind, places, every = CASES[case]
    random.seed(case)
    kills = sorted(random.sample(range(2, 12), 2))
    print("killed behind steps", kills)
    reference = World(kind, places, every=every)
    states = {}
    for step in range(1, 14):
        reference.train()
        states[step] = reference.snapshot()
    step = replayed = 0
    for number, stop in enumerate([*kills, 13]):
        world = World(kind, places, every=every, seed=1 if number == 0 else 50 + number)
        ckpt = open_it(served.run, world, every=(1000, 4)[number % 2])
        recovery = ckpt.resume()
        assert (recovery.step, recovery.exact) == (step, True), recovery.evidence
        replayed += recovery.replayed
        if step:
            assert world.snapshot() == states[step]
        assert run_steps(ckpt, world, stop - step)[stop] == states[stop]
        step = stop
        killed(ckpt)
    assert replayed


@pytest.mark.thinned(2)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips(fused: bool, served: Bench) -> None:
    def make(seed: int) -> World:
        def adamw(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=0.01, fused=fused)

        return World("ema", ("before", "after"), seed=seed, make=adamw, scaled=True)

    world = make(1)
    ckpt = open_it(served.run, world)
    ckpt.resume()
    states = run_steps(ckpt, world, 8)
    killed(ckpt)
    other = make(9)
    again = open_it(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.exact) == (8, True), recovery.evidence
    assert recovery.replayed > 3
    assert other.snapshot() == states[8]
    again.close()


def test_from_disk_and_by_rewinding(run_folder: Path) -> None:
    world = World("with_buffers", ("before", "last"))
    with open_it(run_folder, world, log=ON_DISK, every=4, keep=10) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 9)
        ckpt.rewind(6)
        assert world.snapshot() == states[6]
        assert run_steps(ckpt, world, 2)[8] == states[8]
    for step in (7, 2, 5):
        other = World("with_buffers", ("before", "last"), seed=9)
        with open_it(run_folder, other, log=ON_DISK, keep=10) as ckpt:
            assert ckpt.resume(step=step).exact
            assert other.snapshot() == states[step], step


def test_marks_no_longer_grow_with_the_average(run_folder: Path) -> None:
    def bytes_of_a_step(name: str, **options: Any) -> float:
        world = World("ema", ())
        with open_it(run_folder / name, world, **options) as ckpt:
            ckpt.resume()
            run_steps(ckpt, world, 2)
            recorder = inspect(ckpt).recorder
            assert recorder is not None
            before = recorder.stats.record_bytes
            run_steps(ckpt, world, 4)
            return (recorder.stats.record_bytes - before) / 4

    in_full = bytes_of_a_step("in full", registered=False)
    left_out = bytes_of_a_step("left out")
    module = World("ema", ()).state["ema"]
    average = [*module.parameters(), *module.buffers()]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in average)
    sampled = 16 * sum(tensor.element_size() for tensor in average)
    print(f"a step takes {in_full:.0f} bytes in full, {left_out:.0f} with a function")
    assert in_full - weights <= left_out <= in_full - weights + sampled


# --- Programs that do not fit the log ----------------------------------------------------


def trained(served: Bench, steps: int = 6, **options: Any) -> dict[int, dict[str, bytes]]:
    """A run that is killed; its base is that of step 1."""
    world = World(**options)
    ckpt = open_it(served.run, world)
    ckpt.resume()
    states = run_steps(ckpt, world, steps)
    killed(ckpt)
    return states


def test_without_the_function_nothing_is_touched(served: Bench) -> None:
    states = trained(served, every=3)  # it runs in steps 1, 4, ...
    other = World(seed=9)
    before = other.snapshot()
    again = open_it(served.run, other, registered=False)
    with pytest.raises(MismatchError, match=r"from step 4 on .* updates 'ema/\*'") as raised:
        again.resume()
    assert "strict=False) to continue from step 3" in str(raised.value.hint)
    assert other.snapshot() == before
    assert again.resume(step=3).exact  # up to there no function is needed
    assert other.snapshot() == states[3]
    again.close()


def test_without_the_function_and_not_strict_it_goes_on_from_before(served: Bench) -> None:
    states = trained(served, every=3)
    other = World(seed=9)
    again = open_it(served.run, other, registered=False)
    recovery = again.resume(strict=False)
    assert (recovery.step, recovery.replayed, recovery.exact) == (3, 2, True)
    assert "function that updates 'ema/*'" in recovery.skipped[-1].reason
    assert other.snapshot() == states[3]
    again.close()


def test_another_function_is_found_out(served: Bench) -> None:
    trained(served, kind="ema")
    other = World("ema", seed=9)
    average = AveragedModel(other.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    other.state["ema"] = average
    again = open_it(
        served.run, other, declared={"ema/*": lambda: average.update_parameters(other.model)}
    )
    recovery = again.resume()
    assert recovery.step == 6
    assert not recovery.exact
    assert "registered for 'ema/*' gives another 'ema/" in recovery.evidence
    again.close()


def test_a_function_that_depends_on_more_than_the_state_is_found_out(served: Bench) -> None:
    world = World("lerp")

    def noisy(world: World) -> Average:
        def average() -> None:
            for shadow in world.state["ema"].values():
                shadow.add_(torch.randn(()))

        return average

    world.average = noisy(world)
    ckpt = open_it(served.run, world)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    killed(ckpt)
    other = World("lerp", seed=9)
    other.average = noisy(other)
    again = open_it(served.run, other)
    recovery = again.resume()
    assert not recovery.exact
    assert "gives another 'ema/" in recovery.evidence
    again.close()


def test_what_was_logged_in_full_is_where_the_function_begins(run_folder: Path) -> None:
    reference = World("ema")
    for _ in range(7):
        reference.train()
    log = LogOptions(to="disk", batch_steps=1, history="all", lag_steps=0)
    for registered, steps in ((False, 4), (True, 3)):
        world = World("ema", seed=1 + registered)
        with open_it(run_folder, world, registered=registered, log=log, keep=20) as ckpt:
            ckpt.resume()
            run_steps(ckpt, world, steps)
    for base in sorted(run_folder.glob("timeline-*/base/*")):
        if int(base.name) > 1:  # so that it must be by replay, from one program to the other
            shutil.rmtree(base)
    last = World("ema", seed=10)
    with open_it(run_folder, last, log=log) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.base_step) == (7, 1)
        assert recovery.exact, recovery.evidence
        assert last.snapshot() == reference.snapshot()


def test_a_buffer_that_is_not_finite_is_no_gradient(run_folder: Path) -> None:
    world = World("ema", ())
    world.model[0].register_buffer("limit", torch.tensor(float("inf")))
    world.places = ("after",)
    with open_it(run_folder, world, log=LogOptions(watch=True)) as ckpt:
        ckpt.resume()
        world.average = lambda: None
        run_steps(ckpt, world, 3)
        ckpt.wait()


TENSORS = {
    "F32": torch.ones(7, 3),
    "BF16": torch.ones(100, dtype=torch.bfloat16),
    "I64": torch.ones((), dtype=torch.int64),
    "BOOL": torch.ones(3, dtype=torch.bool),
    "C128": torch.ones(5, dtype=torch.complex128),
    "channels_last": torch.ones(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "transposed": torch.ones(40, 30).t(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_change_of_any_kind_of_tensor_shows_in_its_sample(name: str) -> None:
    values = {"ema": {key: tensor.clone() for key, tensor in TENSORS.items()}}
    state = State(values, declared={"ema/*": list})
    probe = Probe()
    before = probe.take(state.survey())
    values["ema"][name].zero_()
    after = probe.take(state.survey())
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert len(changed) == 1
    at = int((before[changed[0]] != after[changed[0]]).nonzero()[0])
    assert probe.entry_at(changed[0], at) == f"ema/{name}"


# --- What is not declared, or not as it is ------------------------------------------------


def test_a_change_that_nobody_was_told_of_is_found_out(served: Bench) -> None:
    world = World("ema")
    ckpt = open_it(served.run, world)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    world.ckpt = None
    for step in (4, 5):
        world.train()
        with pytest.raises(AuditError, match=rf"declared by 'ema/\*' changed in step {step}"):
            ckpt.step()  # takes a base all the same
    state = world.snapshot()
    killed(ckpt)
    other = World("ema", seed=9)
    again = open_it(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.replayed) == (5, 0)
    assert other.snapshot() == state
    again.close()


def test_any_other_change_is_a_hole(served: Bench) -> None:
    world = World("ema")
    ckpt = open_it(served.run, world)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    ckpt.before_update()
    for parameter in world.state["ema"].parameters():
        parameter.data.zero_()
    ckpt.after_update()
    states = run_steps(ckpt, world, 2)
    killed(ckpt)
    other = World("ema", seed=9)
    again = open_it(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.base_step, recovery.exact) == (5, 4, True)
    assert other.snapshot() == states[5]
    again.close()


def test_a_mark_without_room_raises_no_false_alarm(served: Bench) -> None:
    world = World("ema", every=3)
    ckpt = open_it(served.run, world)
    ckpt.resume()
    run_steps(ckpt, world, 2)
    ckpt.wait()  # for the first base, which makes room in the log
    run_steps(ckpt, world, 1)
    recorder = inspect(ckpt).recorder
    assert recorder is not None
    limit, recorder.memory.bytes_max = recorder.memory.bytes_max, recorder.memory.kept_bytes
    run_steps(ckpt, world, 1)  # the function runs in it
    assert recorder.stats.holes
    recorder.memory.bytes_max = limit
    states = run_steps(ckpt, world, 5)
    killed(ckpt)
    other = World("ema", every=3, seed=9)
    again = open_it(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.replayed, recovery.exact) == (9, 5, True), recovery
    assert other.snapshot() == states[9]
    again.close()


def test_what_a_function_changes_besides_is_logged_in_full(served: Bench) -> None:
    def world(seed: int) -> World:
        made = World("lerp", seed=seed)
        made.state["besides"] = torch.zeros(3)
        inner = made.average

        def average() -> None:
            inner()
            made.state["besides"] += made.model[0].weight.detach().sum()

        made.average = average
        return made

    first = world(1)
    ckpt = open_it(served.run, first)
    ckpt.resume()
    states = run_steps(ckpt, first, 5)
    killed(ckpt)
    other = world(9)
    again = open_it(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.replayed, recovery.exact) == (5, 4, True)
    assert other.snapshot() == states[5]
    assert torch.equal(other.state["besides"], first.state["besides"])
    again.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_function_that_fails_in_replay(late: bool, served: Bench) -> None:
    """Half-way through a step, and at the third as well as at the first."""
    states = trained(served)
    other = World(seed=9)
    calls: list[int] = []

    def broken() -> None:
        calls.append(len(calls))
        if not late or len(calls) % 2 == 0:
            raise KeyError("no such thing")
        other.average()

    again = open_it(served.run, other, declared={"ema/*": broken})
    recovery = again.resume()
    reached = recovery.base_step + late  # type: ignore[operator]
    assert recovery.step == reached
    assert other.snapshot() == states[reached]
    (lost,) = recovery.skipped
    assert lost.step == reached + 1
    assert "'ema/*' failed in replay of step" in lost.reason
    inspect(again).release()


def test_a_function_that_declares_itself(served: Bench) -> None:
    states = trained(served)
    other = World(seed=9)
    again: everstep.Checkpointer = open_it(
        served.run, other, declared={"ema/*": lambda: again.before_update()}
    )
    recovery = again.resume()
    assert other.snapshot() == states[recovery.step]
    (lost,) = recovery.skipped
    assert "before_update() or after_update() itself" in lost.reason
    inspect(again).release()


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"ema/*": 3}, "is not a callable object"),
        ({"ema/*": lambda model: None}, "cannot be called without arguments: missing"),
        ({"ema/*": nn.Linear}, "cannot be called without arguments"),
        ({3: lambda: None}, "must be a list of patterns"),
        ({"ema*x": lambda: None}, "matches no entry"),
        ({"model/0.weight": lambda: None}, "updated by optimizer"),
    ],
)
def test_what_cannot_be_registered(declared: Any, why: str, run_folder: Path) -> None:
    with pytest.raises(OptionError, match=why):
        opened(run_folder, World(), declared=declared)


def test_no_replica_follows_a_function(run_folder: Path) -> None:
    world = World()
    with pytest.raises(UnsupportedStateError, match=r"ema/\*: a function of the program"):
        opened(run_folder, world, method="lowdiff_plus", declared={"ema/*": world.average})


def test_only_what_is_registered_can_be_told_of(run_folder: Path) -> None:
    world = World()
    world.state["other"] = torch.zeros(3)
    with open_it(run_folder, world, declared={"ema/*": world.average, "other": None}) as ckpt:
        for pattern in ("ema", "other"):
            with pytest.raises(OptionError, match=r"no function is registered for .*'ema/\*'"):
                ckpt.after_update(pattern)
