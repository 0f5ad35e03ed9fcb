"""Updates that compute in torch's default dtype, as ASGD's do, are replayed in training's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import FormatError
from everstep.replay.optimizer_step import default_dtype
from everstep.restore.redo.updates import update_from_record
from everstep.state.layout.entries import UPDATE_OBJECT
from everstep.state.values.objects import decode, encode
from tests.support.following import until
from tests.support.log.lossy import log_of
from tests.support.logged import document, opened
from tests.support.serving import Bench, die, serving
from tests.support.world import TIMEOUT_S

STEPS = 7
WIDE = [torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=0.1)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(parameters, lr=0.1, t0=1, foreach=True)


class World:
    """One parameter, whose dtype does not follow from torch's default."""

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer] = plain, *, seed: int = 1
    ) -> None:
        self.model = torch.nn.Module()
        drawn = torch.Generator().manual_seed(seed)
        one = torch.randn(64, generator=drawn, dtype=torch.float64)
        self.model.one = torch.nn.Parameter(one)
        self.optimizer = make(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.seen = 0

    def train(self) -> None:
        self.seen += 1
        drawn = torch.Generator().manual_seed(self.seen)
        one: Any = self.model.one
        one.grad = torch.randn(64, generator=drawn, dtype=torch.float64)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[bytes]:
        held = [value for values in self.optimizer.state.values() for value in values.values()]
        return [t.detach().numpy().tobytes() for t in (*self.model.parameters(), *held)]


def trained(
    run: Path, dtypes: list[torch.dtype], make: Callable[[Any], torch.optim.Optimizer] = plain
) -> dict[int, list[bytes]]:
    """The state after each step; each under one of these in turn, whatever was the default as the
    timeline was opened."""
    torch.set_default_dtype(dtypes[0])
    world, found = World(make), {}
    with opened(run, world) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            torch.set_default_dtype(dtypes[step % len(dtypes)])
            world.train()
            ckpt.step()
            found[step] = world.snapshot()
    torch.set_default_dtype(torch.float32)
    return found


@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", [plain, foreach])
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_a_resume_under_another_default(
    dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer], run_folder: Path
) -> None:
    states = trained(run_folder, [dtype], make)
    other = World(make, seed=9)
    with opened(run_folder, other, every=None) as ckpt:
        recovery = ckpt.resume(step=6)
        assert (recovery.step, recovery.replayed, recovery.exact) == (6, 2, True)
    assert other.snapshot() == states[6]
    assert torch.get_default_dtype() == torch.float32


def test_a_default_that_changes_between_updates(run_folder: Path) -> None:
    states = trained(run_folder, [torch.float32, torch.float64])
    other = World(seed=9)
    with opened(run_folder, other, every=None) as ckpt:
        recovery = ckpt.resume(step=6)
        assert (recovery.replayed, recovery.exact) == (2, True)
    assert other.snapshot() == states[6]


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_tools_accuse_no_run_of_another_default(dtype: torch.dtype, run_folder: Path) -> None:
    trained(run_folder, [dtype])
    found = document("verify", run_folder, "--replay")["replay"]
    assert [one["verdict"] for one in found][-2:] == ["equal", "equal"]
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as bench:
        yield bench


def test_a_replica_follows_under_another_default(served: Bench) -> None:
    """In a process of its own, mostly, whose default is torch's; here it follows in this one."""
    torch.set_default_dtype(torch.float64)
    world = World()
    ckpt = everstep.Checkpointer(served.run, world.state, method="lowdiff_plus", every=3)
    ckpt.resume()
    for _ in range(2):
        world.train()
        ckpt.step()
    ckpt.wait(TIMEOUT_S)  # a base that the replica begins with
    for step in range(3, 8):
        torch.set_default_dtype(torch.float64)
        world.train()
        torch.set_default_dtype(torch.float32)  # as the replica's process has it
        ckpt.step()
        # A default is one for all threads of a process: training and the replica take turns.
        until(lambda at=step: ckpt.stats().replica_step == at)  # type: ignore[misc]
    ckpt.wait(TIMEOUT_S)
    die(ckpt)


class Slow:
    """A function of the program that computes in the default dtype, too."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.average = world.state["average"] = torch.zeros(64, dtype=torch.float64)

    def __call__(self) -> None:
        self.average.mul_(torch.tensor(0.9)).add_(self._world.model.one.detach())  # type: ignore[operator]


def test_a_declared_update_under_another_default(run_folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    world = World()
    slow, averages = Slow(world), []
    with opened(run_folder, world, declared={"average": slow}) as ckpt:
        ckpt.resume()
        for _ in range(STEPS):
            world.train()
            ckpt.before_update()
            slow()
            ckpt.after_update("average")
            ckpt.step()
            averages.append(slow.average.clone())
    torch.set_default_dtype(torch.float32)
    other = World(seed=9)
    again = Slow(other)
    with opened(run_folder, other, every=None, declared={"average": again}) as ckpt:
        recovery = ckpt.resume(step=6)
        assert (recovery.replayed, recovery.exact) == (2, True)
    assert again.average.equal(averages[5])


def test_it_is_put_back() -> None:
    with default_dtype(None):
        assert torch.get_default_dtype() == torch.float32
    with pytest.raises(KeyError), default_dtype(torch.float64):
        assert torch.get_default_dtype() == torch.float64
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


def test_one_replay_at_a_time_has_its_default() -> None:
    """It is the whole process's: another thread's replay waits, also where it needs no other."""
    found, began = [], threading.Event()

    def other() -> None:
        began.set()
        with default_dtype(torch.float32):
            found.append(torch.get_default_dtype())

    with default_dtype(torch.float64):
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        assert began.wait(TIMEOUT_S)
        assert not found
    thread.join(TIMEOUT_S)
    assert found == [torch.float32]


def test_what_a_record_says(run_folder: Path) -> None:
    """Older ones do not; what is none is no record."""
    record = next(one for one in log_of(run_folder, World(), "dense") if one.head.kind == "update")
    assert update_from_record(record).default_dtype == torch.float32
    about: Any = decode(record.objects[UPDATE_OBJECT])
    assert about["default_dtype"] == "F32"

    def told(**changed: Any) -> Any:
        return replace(record, objects={UPDATE_OBJECT: encode({**about, **changed})})

    del about["default_dtype"]
    assert update_from_record(told()).default_dtype is None
    assert update_from_record(told(default_dtype="BF16")).default_dtype == torch.bfloat16
    wrongs: list[Any] = ["I64", "F8_E5M2", "onnx", 3, []]
    for wrong in wrongs:
        with pytest.raises(FormatError, match="is not a valid update"):
            update_from_record(told(default_dtype=wrong))
