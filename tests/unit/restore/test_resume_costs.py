"""What a resume does once, and need not do again: looks at the state and at what there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, AdamW

from everstep.format.log import LogRecord
from everstep.replay import engine
from everstep.replay.blocked import Blocked
from everstep.restore.fetch.peers import FetchResult
from everstep.restore.redo import driver
from everstep.restore.redo.driver import ReplayDriver
from everstep.restore.redo.live import LiveMemory
from everstep.restore.start import rank_sources
from everstep.run.log_reads import Prefetch
from everstep.state.providers.modules import ModuleProvider
from everstep.state.training_state import State
from everstep.state.values.tensors import is_dtensor, local_tensor
from everstep.state.values.tree import split
from everstep.testing import inspect
from everstep.trainer.job import job as job_module
from everstep.trainer.session.start import RunStarter
from tests.support.inside.hooks import hooks_on
from tests.support.log.redone import STEPS, resumed, trained
from tests.support.ranks.sharding import as_rank
from tests.support.ranks.together import on_all, trainings
from tests.support.replays import record, replayed


@pytest.mark.parametrize(
    ("brought", "looks"),
    [([], 2), ([SimpleNamespace(disk=False, is_of=lambda inventory: False)], 3)],
    ids=["nothing", "something"],
)
def test_a_rank_looks_again_where_something_has_come_from_peers(
    brought: list[Any], looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it fetches; before the choice, if anything came; and behind the fence."""
    seen: list[Path] = []
    scan = rank_sources.scan_run

    def noting(filesystem: Any, run: Any, *known: Any) -> Any:
        seen.append(run)
        return scan(filesystem, run, *known)

    monkeypatch.setattr(rank_sources, "scan_run", noting)
    fetch = job_module.fetch_from_peers

    def fetched(*args: Any, **named: Any) -> FetchResult:
        assert fetch(*args, **named) == FetchResult([], [])
        return FetchResult([*brought], [])

    monkeypatch.setattr(job_module, "fetch_from_peers", fetched)
    with trainings(tmp_path / "run0", tmp_path / "run1") as ranks:
        for one in ranks:
            inspect(one.ckpt).starter.job.shared.fetches = True
        on_all(*(one.ckpt.resume for one in ranks))
    assert [seen.count(tmp_path / f"run{rank}") for rank in range(2)] == [looks, looks]


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """A state for each look at it."""
    found: list[State] = []
    survey = State.survey

    def noting(self: State) -> Any:
        found.append(self)
        return survey(self)

    monkeypatch.setattr(State, "survey", noting)
    return found


@pytest.mark.thinned(2)
@pytest.mark.parametrize("together_", [True, False], ids=["in two passes", "step by step"])
def test_the_state_is_looked_at_once_however_often_it_is_compared(
    together_: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surveys: list[State]
) -> None:
    states = trained(tmp_path / "run", AdamW)
    compared: list[int] = []
    compare = LiveMemory.first_difference

    def noting(self: LiveMemory, mark: LogRecord) -> str | None:
        compared.append(mark.head.step)
        return compare(self, mark)

    monkeypatch.setattr(LiveMemory, "first_difference", noting)
    monkeypatch.setattr(Prefetch, "ready", together_)
    replay = together_looks(monkeypatch, surveys)
    with resumed(tmp_path / "run", AdamW) as (world, recovery):
        assert (recovery.replayed, recovery.exact) == (STEPS, True)
        assert world.snapshot() == states[STEPS]
    assert compared == ([driver.STEPS_AT_ONCE, STEPS] if together_ else [*range(1, STEPS + 1)])
    assert replay == [1]


def together_looks(monkeypatch: pytest.MonkeyPatch, surveys: list[State]) -> list[int]:
    """How often the state was looked at by each replay."""
    found: list[int] = []
    finish = ReplayDriver.finish
    begin = LiveMemory.__init__
    before: list[int] = []

    def beginning(self: LiveMemory, state: State, *more: Any) -> None:
        before.append(len(surveys))
        begin(self, state, *more)

    def finishing(self: ReplayDriver) -> list[str]:
        notes = finish(self)
        found.append(len(surveys) - before[-1])
        return notes

    monkeypatch.setattr(LiveMemory, "__init__", beginning)
    monkeypatch.setattr(ReplayDriver, "finish", finishing)
    return found


@pytest.mark.parametrize("how", ["another tensor", "another view", "other memory"])
def test_tensors_that_took_the_place_of_others_are_looked_for(how: str) -> None:
    """The look before would compare what is gone."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    replay = LiveMemory(State({"model": model, "optimizer": optimizer}))
    first = replay.tensors()
    assert replay.tensors() is first
    values, other = optimizer.state[model.weight], torch.full_like(model.weight, 7.0)
    if how == "another view":
        other = values["momentum_buffer"].t()
    if how != "other memory":
        values["momentum_buffer"] = other
    else:
        values["momentum_buffer"].data = other
    now = replay.tensors()["optimizer/state/model.weight/momentum_buffer"]
    assert (now.data_ptr(), now.shape) == (other.data_ptr(), other.shape)


def test_what_was_restored_is_looked_at_once_for_the_new_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surveys: list[State]
) -> None:
    trained(tmp_path / "run", AdamW)
    own, at = RunStarter.resume, [0]

    def noting(self: RunStarter, *args: Any, **named: Any) -> Any:
        found = own(self, *args, **named)
        at[0] = len(surveys)
        return found

    monkeypatch.setattr(RunStarter, "resume", noting)
    with resumed(tmp_path / "run", AdamW):
        assert len(surveys) - at[0] == 1


def sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(1, 6))  # FSDP2 puts up some of its hooks only then
    return model


@pytest.mark.parametrize("hook", ["none", "before loading", "behind loading"])
def test_parameters_of_fsdp2_are_loaded_only_for_hooks_of_the_users(hook: str) -> None:
    """They are the memory that was read into. FSDP2's own hooks have nothing to do there."""
    with as_rank(0, 2):
        model = sharded()
        ran: list[str] = []
        if hook == "before loading":
            model.register_load_state_dict_pre_hook(lambda *args: ran.append(hook))
        elif hook == "behind loading":
            model.register_load_state_dict_post_hook(lambda *args: ran.append(hook))
        provider = ModuleProvider("model", model)
        tree = provider.collect()
        outer, inner = hooks_on(model), hooks_on(model[0])
        assert "load_state_dict_pre" in outer.keys() | inner.keys()
        assert "load_state_dict_post" in inner  # there is something to tell apart
        assert provider.needs_load(tree) == (hook != "none")
        provider.restore(tree, strict=True)
        assert ran == ([] if hook == "none" else [hook])


def test_parameters_of_fsdp2_that_were_not_read_into_are_loaded() -> None:
    with as_rank(0, 2):
        model = sharded()
        provider = ModuleProvider("model", model)
        tree = {key: value.detach().clone() for key, value in provider.collect().items()}
        for value in tree.values():
            local_tensor(value).fill_(3.0)
        assert provider.needs_load(tree)
        provider.restore(tree, strict=True)
        assert all((local_tensor(p) == 3.0).all() for p in model.parameters())


def test_a_dtensor_that_is_in_no_graph_is_taken_as_it_is() -> None:
    with as_rank(0, 2):
        model = sharded()
        plain, free = torch.ones(2), model.state_dict()["0.weight"]  # which brings them back
        parameter = model[0].weight
        assert is_dtensor(parameter)
        found: dict[str, torch.Tensor] = {}
        split({"parameter": parameter, "free": free, "plain": plain}, "x", found)
        assert found["x/free"] is free
        assert not found["x/parameter"].requires_grad
        assert found["x/plain"] is not plain  # set_data would move what was found with it


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each update, or several of them, was replayed."""
    taken: list[str] = []

    def noting(word: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            taken.append(word)
            return own(*args, **options)

        return call

    monkeypatch.setattr(engine, "step_over", noting("step", engine.step_over))
    monkeypatch.setattr(engine, "blocks_are_exact", noting("test", engine.blocks_are_exact))
    monkeypatch.setattr(Blocked, "run", noting("blocks", Blocked.run))
    return taken


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_blocks_and_their_self_test_are_for_more_than_a_little_work(
    kind: Any, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few elements for long pay as well as many at once; the bits are the same all the way."""
    run = record(
        lambda groups: kind(groups, lr=0.1, weight_decay=0.1),
        shapes={"one": (40,), "other": (20, 3)},
        steps=7,
        late=False,
    )
    monkeypatch.setattr(engine, "BLOCKS_PAY_ELEMENTS", 500)
    replayed(run, 1, 2)
    assert ways[:4] == ["step"] * 4  # four updates of 100 elements
    assert set(ways[4:]) == {"test", "blocks"}
    ways.clear()
    replayed(run, 1, 0)  # all six at once
    assert set(ways) == {"test", "blocks"}
