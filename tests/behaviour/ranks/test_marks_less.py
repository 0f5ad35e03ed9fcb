"""Programs that go on from the log of another, and log less: what only its marks held stays as it
was in the last of them, whoever replays both logs (I8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from everstep.format.log import RecordHead
from everstep.format.records import Marker
from everstep.link.recordable import Layouts
from everstep.restore.offline.memory import HostMemory, OfflineState
from everstep.restore.redo import live
from everstep.restore.redo.driver import ReplayDriver, Step
from everstep.seams import Seams
from everstep.state.values.tensors import tensor_entry
from everstep.testing import inspect
from tests.support.logged import World, document, opened
from tests.support.ranks import replicas as parts
from tests.support.ranks.logs import die
from tests.support.ranks.relogged import only, record_of
from tests.support.ranks.replicas import alike, layers, replicas, resume
from tests.support.world import forget

__all__ = ["alike"]

FIRST, LAST = 6, 9
"""The last step of the program that logs it, and of the one that says it is static."""


class Counter:
    """Gives a copy of what it has, and takes another one back."""

    def __init__(self) -> None:
        self.count = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] * 1


class Counting(World):
    """Counts its steps, in a tensor and in an object, or leaves both as they are."""

    def __init__(self, *, seed: int = 1) -> None:
        super().__init__(seed=seed)
        self.table, self.counter, self.counts = torch.zeros(3), Counter(), True
        self.state |= {"table": self.table, "counter": self.counter}

    def train(self) -> None:
        super().train()
        if self.counts:
            self.table += 1
            self.counter.count = self.counter.count + 1

    def snapshot(self) -> dict[str, bytes]:
        counted = {"table": self.table, "counter": self.counter.count}
        return super().snapshot() | {k: v.numpy().tobytes() for k, v in counted.items()}


STATIC = ["table", "counter/*"]


@pytest.fixture
def two_programs(run_folder: Path) -> dict[str, bytes]:
    """One base, and the logs of two programs behind it; the state at the end."""
    world = Counting()
    for last, static in ((FIRST, []), (LAST, STATIC)):
        again = Counting(seed=last)
        again.counts = not static
        with opened(run_folder, again, every=None, static=static) as ckpt:
            step = ckpt.resume().step
            assert again.snapshot() == world.snapshot() or not step
            world = again
            for _ in range(step, last):
                world.train()
                ckpt.step()
            ckpt.wait()
            inspect(ckpt).skip_last_base()
        forget(run_folder)
    only(run_folder, 1)
    assert world.table.tolist() == world.counter.count.tolist() == [FIRST] * 3
    return world.snapshot()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("static", [[], STATIC], ids=["logged", "static"])
def test_what_is_static_from_then_on(
    run_folder: Path, two_programs: dict[str, bytes], static: list[str]
) -> None:
    world = Counting(seed=9)
    with opened(run_folder, world, static=static) as ckpt:
        found = ckpt.resume()
        assert (found.step, found.base_step, found.replayed) == (LAST, 1, LAST - 1)
        assert found.exact, found.evidence
        assert world.snapshot() == two_programs
        inspect(ckpt).skip_last_base()


@pytest.mark.slow
def test_a_step_of_the_first_program(run_folder: Path, two_programs: dict[str, bytes]) -> None:
    world = Counting(seed=9)
    with opened(run_folder, world, static=STATIC) as ckpt:
        assert ckpt.resume(step=FIRST - 1).exact
        assert world.table.tolist() == [FIRST - 1] * 3
        inspect(ckpt).skip_last_base()


@pytest.mark.slow
@pytest.mark.usefixtures("two_programs")
def test_without_the_programs(run_folder: Path) -> None:
    out = run_folder.parent / "out"
    assert document("restore", run_folder, "--step", str(LAST), "--out", out)["exact"]
    (table,) = (
        tensors["table"]
        for shard in out.rglob("*.safetensors")
        if "table" in (tensors := load_file(shard))
    )
    assert table.tolist() == [FIRST] * 3


def test_without_looking_it_comes_back_wrong(
    run_folder: Path, two_programs: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "mark_holds_less", lambda mark, *, than: False)
    world = Counting(seed=9)
    with opened(run_folder, world, static=STATIC) as ckpt:
        assert ckpt.resume().exact
        assert world.snapshot() != two_programs
        inspect(ckpt).skip_last_base()


# --- Several ranks ----------------------------------------------------------------------


@pytest.fixture
def several(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of two programs of two ranks, behind a base of step 4."""

    def counting(ranks: tuple[int, ...] | None) -> nn.Sequential:
        model = layers(ranks)
        model.register_buffer("seen", torch.zeros(3))
        return model

    monkeypatch.setattr(parts, "layers", counting)
    for last, static in ((FIRST, []), (LAST, ["model/seen"])):
        with replicas(run_folder, run_folder, static=static) as ranks:
            step = resume(ranks)[0].step
            for _ in range(step, last):
                if not static:
                    for one in ranks:
                        one.model.seen += 1  # type: ignore[operator]
                parts.train(ranks, 1)
            die(ranks)
    only(run_folder, 4)


@pytest.mark.thinned(6)
@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("static", [[], ["model/seen"]], ids=["logged", "static"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_of_several_ranks(run_folder: Path, world: int, static: list[str]) -> None:
    seams = [Seams()] if world == 1 else None
    with replicas(*(run_folder,) * world, seams=seams, static=static) as ranks:
        for found, one in zip(resume(ranks), ranks, strict=True):
            assert (found.step, found.base_step, found.replayed) == (LAST, 4, LAST - 4)
            assert one.model.seen.tolist() == [FIRST] * 3  # type: ignore[operator, union-attr]
            assert all(map(torch.equal, one.weights, parts.trained(LAST)))
        die(ranks)


@pytest.mark.slow
@pytest.mark.usefixtures("several")
def test_of_several_ranks_without_the_programs(run_folder: Path) -> None:
    out = run_folder.parent / "out"
    document("restore", run_folder, "--step", str(LAST), "--out", out)
    found = [load_file(shard) for shard in out.rglob("*.safetensors")]
    (seen,) = (tensors["model/seen"] for tensors in found if "model/seen" in tensors)
    assert seen.tolist() == [FIRST] * 3


def test_a_rank_of_which_nothing_is_computed() -> None:
    def step(number: int, **held: torch.Tensor) -> Step:
        head = RecordHead("mark", 1, number, number, "shape")
        return Step.of((), record_of(head, Layouts().of(held), {}, held))

    tensors = {"x": torch.zeros(3), "y": torch.zeros(1)}
    entries = {name: tensor_entry(name, tensor) for name, tensor in tensors.items()}
    marker = Marker("run", 1, 0, 0, 0, 1, True, ())
    state = OfflineState(marker, entries, tensors, {}, {}, "shape")
    driver = ReplayDriver(HostMemory(state, {}))
    driver.step(step(1, x=torch.ones(3), y=torch.ones(1)))
    driver.step(step(2, y=torch.ones(1) * 2))
    driver.finish()
    found = {name: one.tolist() for name, one in tensors.items()}
    assert found == {"x": [1.0] * 3, "y": [2.0]}
