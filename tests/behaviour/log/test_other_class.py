"""A log that an optimizer of another class has written: the class that it names replays it. What
another makes of it is no state that training had, and is not called one (I9)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import MismatchError, RecoveryError
from everstep.format.log import LogRecord, RecordHead, record_digest
from everstep.format.writer import ChunkRing
from everstep.link.recordable import Layouts
from everstep.replay import exactness
from everstep.replay.updates import Update
from everstep.restore.redo import live
from everstep.restore.redo.driver import Step
from everstep.restore.redo.live import LiveMemory
from everstep.restore.redo.updates import update_from_record
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.training_state import State
from everstep.state.values.objects import decode, encode
from everstep.testing import inspect
from tests.support import following
from tests.support.logged import opened, rewrite_segment, segments_of
from tests.support.ranks.logs import die
from tests.support.ranks.relaid import same, trained_on
from tests.support.ranks.relogged import logged, only, record_of, redone
from tests.support.ranks.replicas import alike, replicas, resume, until
from tests.support.ranks.replicas import trained as weights_at
from tests.support.ranks.sharding import as_rank
from tests.support.ranks.together import on_all
from tests.support.serving import serving
from tests.support.world import forget, inventory_of

__all__ = ["alike"]

Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 6


class Pinned(torch.optim.Adam):
    """Keeps one element of each matrix, which no sample looks at."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    parameter[3, 3] = 0.0


class Renamed(Pinned):
    """The same, elsewhere."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def pinned(parameters: Any) -> torch.optim.Optimizer:
    return Pinned(parameters, 0.01)


def renamed(parameters: Any) -> torch.optim.Optimizer:
    return Renamed(parameters, 0.01)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "_DECLARED", dict(exactness._DECLARED))
    for kind in (Pinned, Renamed):
        exactness.declare(kind, elementwise=True)


class World:
    def __init__(self, make: Make, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(100, 200)
        self.optimizer = make(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.model(torch.randn(4, 100)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def moments(self) -> list[bytes]:
        held = (values for at in self.optimizer.state.values() for values in at.values())
        return [bytes(value.numpy().tobytes()) for value in held]

    def snapshot(self) -> bytes:
        return bytes(self.model.weight.detach().numpy().tobytes())


def trained(run: Path, make: Make) -> dict[int, bytes]:
    """A base of step 1, and a log behind it; the state after each step."""
    world, found = World(make), dict[int, bytes]()
    with opened(run, world, every=None) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            world.train()
            ckpt.step()
            found[step] = world.snapshot()
        ckpt.wait()
        inspect(ckpt).skip_last_base()
    forget(run)
    return found


def resumed(run: Path, make: Make, step: int | None = None, **options: Any) -> tuple[Any, bytes]:
    world = World(make, seed=9)
    with opened(run, world) as ckpt:
        found = ckpt.resume(step=step, **options)
        inspect(ckpt).skip_last_base()
        return found, world.snapshot()


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this a program that knows no class but torch's."""
    return lambda: monkeypatch.setattr(exactness, "_DECLARED", {})


@pytest.mark.thinned(2)
@pytest.mark.parametrize("step", [None, STEPS])
@pytest.mark.parametrize(("wrote", "goes_on"), [(pinned, adam), (adam, pinned), (adam, renamed)])
def test_the_class_of_the_log_replays_it(
    run_folder: Path, wrote: Make, goes_on: Make, step: int | None
) -> None:
    """Whatever the optimizer is now. torch's own is exact as ever; no other is called that."""
    states = trained(run_folder, wrote)
    found, values = resumed(run_folder, goes_on, step)
    assert (found.step, found.replayed, found.skipped) == (STEPS, STEPS - 1, ())
    assert found.exact == (wrote is adam)
    assert values == states[STEPS]


def test_what_comes_behind_is_of_the_class_that_is_here(run_folder: Path) -> None:
    """Its moments are those of the log; two programs' logs behind one base are replayed by two."""
    whole = trained(run_folder, adam)
    world, states = World(pinned, seed=9), dict[int, Any]()
    with opened(run_folder, world, every=None) as ckpt:
        assert ckpt.resume().step == STEPS
        for step in range(STEPS + 1, STEPS + 4):
            world.train()
            ckpt.step()
            states[step] = world.moments(), world.snapshot()
        ckpt.wait()
        inspect(ckpt).skip_last_base()
    forget(run_folder)
    only(run_folder, 1)
    for make in (adam, pinned):
        other = World(make, seed=9)
        with opened(run_folder, other) as ckpt:
            found = ckpt.resume(STEPS + 3)
            inspect(ckpt).skip_last_base()
            assert (found.step, found.base_step, found.exact) == (STEPS + 3, 1, False)
            assert (other.moments(), other.snapshot()) == states[STEPS + 3]
            found = ckpt.rewind(STEPS)
            assert found.exact
            assert other.snapshot() == whole[STEPS]
        forget(run_folder)


@pytest.mark.parametrize("step", [None, STEPS])
def test_nothing_is_left_out_without_a_word(
    run_folder: Path, forgotten: Callable[[], None], step: int | None
) -> None:
    """Of a class that nobody here knows; and no timeline is opened."""
    states = trained(run_folder, pinned)
    forgotten()
    with pytest.raises(MismatchError) as refused:
        resumed(run_folder, adam, step)
    said = str(refused.value)
    assert "the log cannot be replayed from step 2 on: 'optimizer' was a " in said
    assert "Pinned in training, and is a torch.optim.adam.Adam here" in said
    assert "resume() once with an optimizer of that class" in said
    assert "resume(strict=False) to continue from step 1" in said
    assert sorted(inventory_of(run_folder).timelines) == [1]
    forget(run_folder)
    if step is not None:
        with pytest.raises(RecoveryError, match="in training, and is a"):
            resumed(run_folder, adam, step, strict=False)
        return
    found, values = resumed(run_folder, adam, strict=False)
    assert (found.step, found.replayed, found.exact) == (1, 0, True)
    assert values == states[1]
    assert "can only be replayed by an optimizer of the recorded class" in found.skipped[0].reason
    (note,) = found.notes
    assert f"the log reaches step {STEPS} of timeline 1, but could not be replayed" in note
    assert "can only be replayed by an optimizer of the recorded class)" in note
    assert "steps 2 to 6 must be trained again" in note


def test_a_log_that_is_there_is_not_called_gone(
    run_folder: Path, forgotten: Callable[[], None]
) -> None:
    """Where another start has been at the end of it, too."""
    trained(run_folder, pinned)
    assert resumed(run_folder, pinned)[0].step == STEPS
    forgotten()
    forget(run_folder)
    found, _ = resumed(run_folder, adam, strict=False)
    assert (found.step, found.timeline) == (1, 3)
    (note,) = found.notes
    assert "but could not be replayed here" in note
    assert "neither a base nor a log" not in note


@pytest.mark.parametrize("make", [adam, pinned])
def test_the_same(run_folder: Path, make: Make) -> None:
    states = trained(run_folder, make)
    found, values = resumed(run_folder, make)
    assert (found.step, found.exact) == (STEPS, make is adam)
    assert values == states[STEPS]


def test_users_may_rename_their_own(run_folder: Path) -> None:
    """What comes of it is as it was, and nobody claims that."""
    states = trained(run_folder, pinned)
    found, values = resumed(run_folder, renamed)
    assert (found.step, found.exact) == (STEPS, False)
    assert values == states[STEPS]
    assert "test_other_class.Pinned in training, and is a" in found.evidence


def test_a_base_over_several_steps(run_folder: Path) -> None:
    """Its parts are made whole by the class that its updates name: always one of torch's."""
    world = World(adam)
    method = everstep.Method(base="multistep", parts=3, rebuild="recovery")
    with serving(run_folder), following.opened(run_folder, world, method=method, every=5) as ckpt:
        ckpt.resume()
        states = following.run_steps(ckpt, world, 12)
    forget(run_folder)
    found, values = resumed(run_folder, pinned)
    assert found.exact
    assert "its parts completed by replaying" in found.evidence
    assert values == states[found.step]


def without_kind(record: LogRecord) -> LogRecord:
    if record.head.kind == "mark":
        return record
    about: Any = decode(record.objects[UPDATE_OBJECT])
    del about["kind"]
    objects = {UPDATE_OBJECT: encode(about)}
    found = replace(record, objects=objects, digest=record_digest(record.data, objects))
    assert update_from_record(record).kind
    assert not update_from_record(found).kind
    return found


def test_a_log_that_does_not_say_stays_readable(run_folder: Path) -> None:
    states = trained(run_folder, adam)
    for segment in segments_of(run_folder):
        rewrite_segment(run_folder, segment, lambda records: list(map(without_kind, records)))
    found, values = resumed(run_folder, adam)
    assert (found.step, found.exact) == (STEPS, True)
    assert values == states[STEPS]


def test_without_looking_it_is_called_exact(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "replay_class", lambda update, kind: (kind, ""))
    states = trained(run_folder, pinned)
    found, values = resumed(run_folder, adam)
    assert (found.step, found.exact) == (STEPS, True)
    assert values != states[STEPS]


# --- Several ranks ----------------------------------------------------------------------


class Shrunk(torch.optim.AdamW):
    """Shrinks what it has updated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """All ranks get one of these instead of torch's, while this is open."""
    exactness.declare(Shrunk, elementwise=False)

    @contextlib.contextmanager
    def opened() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(torch.optim, "AdamW", Shrunk)
            yield

    return opened


@pytest.mark.thinned(2)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_replay_it_by_the_class_of_the_log(
    tmp_path: Path, shrunk: Callable[[], Any], world: int
) -> None:
    """As many as before, or more; in other parts it must be that class which acts by elements."""
    path = tmp_path / "run"
    until((path, path), 6)
    wanted = weights_at(6)
    with shrunk(), replicas(*((path,) * world)) as ranks:
        found = resume(ranks)
        assert [(one.step, one.replayed, one.exact) for one in found] == [(6, 2, True)] * world
        for one in ranks:
            assert all(map(torch.equal, one.weights, wanted))
        die(ranks)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_leave_nothing_out_without_a_word(
    tmp_path: Path, shrunk: Callable[[], Any], forgotten: Callable[[], None], world: int
) -> None:
    path = tmp_path / "run"
    with shrunk():
        until((path, path), 6)
    forgotten()
    errors = MismatchError, RecoveryError  # one that another rank was first with
    with (
        replicas(*((path,) * world)) as ranks,
        pytest.raises(errors, match="the log cannot be replayed from step 5 on"),
    ):
        resume(ranks)
    assert sorted(inventory_of(path).timelines) == [1]
    with replicas(*((path,) * world)) as ranks:
        found = on_all(*(partial(one.ckpt.resume, strict=False) for one in ranks))
        assert [(one.step, one.replayed) for one in found] == [(4, 0)] * world
        assert "can only be replayed by an optimizer of the recorded class" in str(found[0].skipped)
        assert {one.notes for one in found} == {found[0].notes}
        said = "the log reaches step 6 of timeline 1, but could not be replayed here (rank(s) 0"
        assert said in found[0].notes[0]
        assert "could not replay step 5" in found[0].notes[0]
        die(ranks)


def test_in_other_parts_by_what_acts_by_elements(tmp_path: Path) -> None:
    """The class of the log, and not the one that is here."""
    exactness.declare(Shrunk, elementwise=False)
    adamw = partial(torch.optim.AdamW, lr=0.1)
    like = partial(Shrunk, lr=0.1)
    ring = ChunkRing(4, 2)
    with contextlib.closing(ring):
        base, logs = logged(tmp_path, "fsdp", 4, ring, 3, optimizer=adamw)
        with as_rank(0, 2) as info:
            values, restored = redone(base, logs, "fsdp", info, ring, 3, optimizer=like)
            assert (restored.replayed, restored.inexact) == (3, "")
            assert same(values, trained_on("fsdp", info, adamw)) == []


def test_an_optimizer_keeps_its_class_where_another_ones_changes() -> None:
    """The other one's class is that of the log, too, after everything was restored from a mark."""
    model, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    one, two = torch.optim.SGD(model.parameters()), torch.optim.AdamW(other.parameters())
    memory = LiveMemory(State({"model": model, "other": other, "one": one, "two": two}))
    half = torch.optim.SGD([torch.zeros(1)], lr=0.5).param_groups[0]
    groups = ({key: value for key, value in half.items() if key != "params"},)
    sgd, adamw = map(exactness.kind_name, (torch.optim.SGD, torch.optim.AdamW))

    def step(number: int, kind: str) -> Step:
        mark = record_of(RecordHead("mark", 1, number, number, "shape"), Layouts().of({}), {}, {})
        ones = {"other.weight": torch.ones(1, 2)}
        updates = (
            Update(2 * number - 1, "one", groups, {}, kind=kind),
            Update(2 * number, "two", groups, ones, kind=sgd),
        )
        return Step([(mark, update) for update in updates], mark)

    first, second = step(1, sgd), step(2, adamw)
    memory.check(first)
    memory.begin(first)
    memory.check(second)
    assert memory.must_start_over(second, first.mark)
    memory.start_over()
    memory.begin(second)
    before = other.weight.detach().clone()
    memory.apply("two", [update for _, update in second.updates if update is not None][1:])
    assert torch.equal(other.weight.detach(), before - 0.5)
