"""What a base over several steps finds out once, before it begins: used as long as it holds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.batches import Batch, Chunks, plan_batches, run_batch
from everstep.capture.cuda import DeviceLane
from everstep.capture.lane import CpuLane
from everstep.link.recordable import Layouts
from everstep.plan import multistep
from everstep.plan.multistep import Pipeline
from everstep.state.layout.shards import ShardLayout, plan_shards
from everstep.state.training_state import State
from everstep.state.values.tensors import tensor_entry
from everstep.testing import inspect
from everstep.trainer.log.update_inputs import InputReader
from everstep.trainer.multistep.held_gradients import GradientCheck
from everstep.trainer.multistep.partition import Partitioner
from everstep.trainer.multistep.plan import redo_bytes
from tests.support.elsewhere import elsewhere
from tests.support.following import opened, run_steps, steps_on_disk
from tests.support.multistep.measured import Bench as Steps
from tests.support.multistep.rows import over, restored
from tests.support.multistep.world import World, begin
from tests.support.serving import Bench, serving
from tests.support.world import TIMEOUT_S

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["gockpt", "gockpt_o"])


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


# --- What happens between windows -------------------------------------------------------


def replace_storage(world: World) -> None:
    """A parameter and a moment get other memory, with other values."""
    weight = world.model[3].weight
    weight.data = weight.data * 1.5
    world.optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 0.25)


def regroup(world: World) -> None:
    """The same parameters in another order, so that a record's names are of others."""
    (group,) = world.optimizer.param_groups
    group["params"].reverse()


def swap(world: World) -> None:
    """Another parameter has the name of one before."""
    (group,), old = world.optimizer.param_groups, world.model[3].weight
    new = nn.Parameter(old.detach() * 1.5)
    world.model[3].weight = new
    group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    moments = world.optimizer.state.pop(old)
    world.optimizer.state[new] = {name: value.clone() for name, value in moments.items()}


def freeze(world: World) -> None:
    world.model[0].weight.requires_grad_(False)


@pytest.mark.thinned(18)
@BOTH
@pytest.mark.parametrize("planned", ["ahead", "for the base before"])
@pytest.mark.parametrize("change", [None, replace_storage, regroup, swap, freeze])
def test_what_changes_after_it_was_planned_is_planned_anew(
    change: Any, planned: str, overlap: bool, served: Bench
) -> None:
    world = World()
    with opened(served.run, world, method=over(3, overlap=overlap), every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        multistep: Any = inspect(ckpt).multistep
        assert multistep.planner.is_ahead
        if planned == "for the base before":
            begin(ckpt)
            run_steps(ckpt, world, 3)
            ckpt.wait(TIMEOUT_S)
            multistep.planner.is_ahead = True  # and nothing is planned after it
        if change is not None:
            ckpt.before_update()
            change(world)
            ckpt.after_update()
        first = ckpt.stats().step
        begin(ckpt)
        states = run_steps(ckpt, world, 3)
        ckpt.wait(TIMEOUT_S)
        report = ckpt.stats().multistep
        assert report is not None
    last = first + 2
    assert last in steps_on_disk(served.run)
    fresh = World(seed=9)
    if change is regroup:
        change(fresh)
    assert report.abandoned == 0
    assert restored(served.run, fresh, last) == states[last]


# --- Planned ahead ----------------------------------------------------------------------


def test_memory_of_gradients_is_made_ready_behind_a_step_and_no_base_waits_for_it(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a device copies: until memory is ready bases are planned for what is."""
    ready, warmed = [0], []
    monkeypatch.setattr(DeviceLane, "ready_bytes", lambda self, tensors, block: ready[0])
    monkeypatch.setattr(
        DeviceLane, "warm", lambda self, _, block, take: warmed.append(block.numel())
    )
    copies = Pipeline(4.0, 4.0 / 3, 1.0, 0.0, 0.0, behind_update=True)  # a copy takes four steps
    monkeypatch.setattr(Partitioner, "_pipeline", lambda *_: copies)
    asked: list[tuple[int, Any]] = []
    before = Partitioner.cut

    def cut(*args: Any, **about: Any) -> Any:
        asked.append((args[3], before(*args, **about)))
        return asked[-1][1]

    monkeypatch.setattr(Partitioner, "cut", cut)
    world, many = World(), everstep.Method(base="multistep", overlap_forward=True)
    with opened(served.run, world, method=many, every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        multistep: Any = inspect(ckpt).multistep
        prepared = multistep.planner.plan.prepared
        pool: Any = inspect(ckpt).keepers.pool
        whole = pool.arena.size_bytes - prepared.objects_bytes
        base_bytes = pool.rounded_bytes(prepared.size_bytes)
        assert [memory for memory, _ in asked] == [whole, 0]
        wanted = asked[0][1]
        assert len(wanted) > 3
        assert max(warmed) == 2 * base_bytes + redo_bytes(wanted)
        gradient_bytes = sum(unit.gradient_bytes for units in wanted for unit in units)

        def parts() -> Any:
            asked.clear()
            begin(ckpt)
            if multistep.planner.timed is not None:
                multistep.planner.timed.result(TIMEOUT_S)
            found = ckpt.stats().multistep.parts  # type: ignore[union-attr]
            run_steps(ckpt, world, len(wanted) + 1)
            ckpt.wait(TIMEOUT_S)
            return found

        assert parts() == 1
        assert [memory for memory, _ in asked] == [whole, 0] * 2, "for the next one, too"
        ready[0] = 2 * base_bytes + gradient_bytes  # beside the base before
        assert 1 < parts() <= 3
        assert [memory for memory, _ in asked][:2] == [whole, base_bytes + gradient_bytes]
        ready[0] = max(warmed)
        warmed.clear()
        assert parts() > 1
        assert [memory for memory, _ in asked] == [whole] * 2
        assert not warmed


def test_parts_that_were_asked_for_do_not_wait_for_memory(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made ready all the same."""
    warmed: list[int] = []
    monkeypatch.setattr(DeviceLane, "ready_bytes", lambda self, tensors, block: 0)
    monkeypatch.setattr(
        DeviceLane, "warm", lambda self, _, block, take: warmed.append(block.numel())
    )
    world = World()
    with opened(served.run, world, method=over(3), every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        multistep: Any = inspect(ckpt).multistep
        base_bytes = inspect(ckpt).keepers.pool.rounded_bytes(
            multistep.planner.plan.prepared.size_bytes
        )
        assert max(warmed) == 2 * base_bytes + redo_bytes(multistep.planner.plan.cut)
        begin(ckpt)
        run_steps(ckpt, world, 2)
        ckpt.wait(TIMEOUT_S)
        assert ckpt.stats().multistep.parts == 3  # type: ignore[union-attr]


def test_nothing_is_planned_while_the_first_base_says_how_fast_the_link_is(
    served: Bench,
) -> None:
    """Copies of a device may be under way at the next step mark: a plan for no link is a base of
    one step, and its memory is made ready for nothing more."""
    world, many = World(), everstep.Method(base="multistep", overlap_forward=True)
    with opened(served.run, world, method=many, every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        begin(ckpt)
        multistep: Any = inspect(ckpt).multistep
        multistep.planner.timed.result(TIMEOUT_S)
        multistep.stats.link_bytes_per_s = None
        multistep.planner.timed = under_way = Future[None]()
        run_steps(ckpt, world, 2)
        assert not multistep.planner.is_ahead
        under_way.set_result(None)
        run_steps(ckpt, world, 1)
        assert multistep.planner.is_ahead
        multistep.stats.link_bytes_per_s = 1e9
        multistep.planner.timed = Future[None]()
        multistep.planner.is_ahead = False
        run_steps(ckpt, world, 1)
        assert multistep.planner.is_ahead, "it knows the link already"


def test_a_base_whose_memory_is_not_ready_says_nothing_about_the_link(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = [0]
    monkeypatch.setattr(DeviceLane, "ready_bytes", lambda self, tensors, block: ready[0])
    world, many = World(), everstep.Method(base="multistep", overlap_forward=True)
    with opened(served.run, world, method=many, every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 2)
        multistep: Any = inspect(ckpt).multistep
        begin(ckpt)
        assert multistep.planner.timed is None
        run_steps(ckpt, world, 2)
        ready[0] = 1 << 30
        begin(ckpt)
        multistep.planner.timed.result(TIMEOUT_S)


def test_an_idle_step_plans_nothing_twice(served: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    before = Partitioner.cut
    monkeypatch.setattr(Partitioner, "cut", lambda *a, **o: (asked.append(1), before(*a, **o))[1])
    world = World()
    with opened(served.run, world, method=over(3), every=None) as ckpt:
        ckpt.resume()
        run_steps(ckpt, world, 6)
        assert len(asked) == 1
        begin(ckpt)
        run_steps(ckpt, world, 2)
        assert len(asked) == 2
        run_steps(ckpt, world, 1)  # the last copies belong to the base
        assert len(asked) == 2
        run_steps(ckpt, world, 4)
        assert len(asked) == 3


def test_the_best_cut_is_looked_for_once_while_measurements_stay_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int] = []

    def counted(pipeline: Any, parts: int, held_steps: int | None) -> Any:
        searched.append(parts)
        return multistep.best_cut(pipeline, parts, held_steps)

    monkeypatch.setattr("everstep.trainer.multistep.partition.best_cut", counted)
    monkeypatch.setattr("everstep.trainer.multistep.partition.best_cut", counted)
    bench = Steps(link=48e6 / 4)
    first = bench.parts(48_000_000, 4_800_000)
    assert sorted(set(searched)) == list(range(1, 25))
    searched.clear()
    assert bench.stats.link_bytes_per_s is not None
    bench.stats.link_bytes_per_s *= 1.01
    assert bench.parts(48_000_000, 4_800_000) == first
    assert searched == []
    bench.stats.link_bytes_per_s *= 1.02  # a little more, and a little more again
    bench.parts(48_000_000, 4_800_000)
    assert searched
    bench.stats.link_bytes_per_s /= 8
    assert bench.parts(48_000_000, 4_800_000) != first


# --- Elements that are looked at --------------------------------------------------------


def layout_of(live: dict[str, torch.Tensor]) -> ShardLayout:
    (layout,) = plan_shards([tensor_entry(name, tensor) for name, tensor in live.items()])
    return layout


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_copies_are_planned_once_while_forms_and_devices_stay(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def counted(layout: ShardLayout, named: Any, chosen: Any) -> Any:
        planned.append(len(named))
        return plan_batches(layout, named, chosen)

    monkeypatch.setattr("everstep.trainer.log.update_inputs.plan_batches", counted)
    there = nn.Linear(3, 4), nn.Linear(4, 2, device=device)
    parameters = [parameter for layer in there for parameter in layer.parameters()]
    state = State({"optimizer": torch.optim.SGD(parameters, lr=0.1)})
    reader = InputReader(state)
    for number in range(3):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, number)
        consumed = reader.look("optimizer")
        assert consumed.in_host_memory is (device == "cpu")
        assert len(planned) == 1
        again = plan_batches(consumed.layout, consumed.tensors, consumed.tensors.keys())
        shown = [(b.begin, b.end, [s.data_ptr() for s in b.sources]) for b in consumed.batches]
        assert shown == [(b.begin, b.end, [s.data_ptr() for s in b.sources]) for b in again]
    for parameter in there[1].parameters():
        other = "meta" if device == "cpu" else "cpu"
        parameter.grad = None
        moved = nn.Parameter(torch.zeros_like(parameter, device=other))
        torch.utils.swap_tensors(parameter, moved)
        parameter.grad = torch.ones_like(parameter)
    consumed = reader.look("optimizer")
    assert len(planned) == 2
    assert all(len({part.device for part in batch.sources}) == 1 for batch in consumed.batches)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int8])
def test_a_gradient_that_arrives_torn_is_named(kind: torch.dtype) -> None:
    """All of many gradients are compared in turn."""
    layouts = Layouts()
    for turn in range(3):
        named = {f"gradient/{n}": torch.full((n + 1, 3), n + 1).to(kind) for n in range(70)}
        layout = layouts.of(named)
        check = GradientCheck(named, layout, turn)
        block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        for batch in plan_batches(layout, named, named.keys()):
            run_batch(batch, block)
        assert check.torn(block) is None
        for place in layout.placed:
            torn = block.clone()
            torn[place.begin : place.end] ^= 255
            number = place.entry.name.removeprefix("gradient/")
            assert check.torn(torn) == (number if int(number) % 3 == turn else None)


@pytest.mark.parametrize("torn", ["a", "b", "c", None])
def test_gradients_on_several_devices_are_looked_at_on_each(torn: str | None) -> None:
    """An embedding that stays in host memory, under the optimizer of a model that does not."""
    named = {
        "gradient/a": torch.randn(7),
        "gradient/b": elsewhere(torch.randn(3, 5)),
        "gradient/c": torch.randn(9),
    }
    layout = Layouts().of(named)
    check = GradientCheck(named, layout, 0)
    if torn is not None:
        named[f"gradient/{torn}"].data.fill_(99)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for batch in plan_batches(layout, named, named.keys()):
        run_batch(batch, block)
    assert check.torn(block) == torn


# --- Chunks -----------------------------------------------------------------------------


def test_chunks_are_cut_by_the_thread_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    cutting: list[int] = []
    before = Chunks.__iter__

    def seen(chunks: Chunks) -> Iterator[Batch]:
        cutting.append(threading.get_ident())
        return before(chunks)

    monkeypatch.setattr(Chunks, "__iter__", seen)
    source = torch.arange(100, dtype=torch.uint8)
    chunks = Chunks([Batch(0, 100, (source,))], 16)
    assert chunks
    assert (chunks.end, chunks.cut_in(16)) == (100, chunks)
    assert not Chunks([], 16)
    assert cutting == []
    block, lane = torch.zeros(100, dtype=torch.uint8), DeviceLane(CpuLane())
    try:
        assert lane.submit(chunks, block, lambda end: None).wait(TIMEOUT_S)
    finally:
        lane.close()
    assert block.equal(source)
    assert len(cutting) == 1
    assert cutting[0] != threading.get_ident()
    assert (len(chunks), chunks[-1].end, chunks.cut_in(50)[0].end) == (7, 100, 50)
