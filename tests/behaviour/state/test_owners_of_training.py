"""Optimizers, parameters, schedulers and options that train a state and are in no part of it: each
one is named, and nothing that is saved without it, or resumed from that, is called exact (I9)."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedules
from torch.optim import optimizer as torch_optimizer

import everstep
from everstep.errors import UnsupportedStateError
from everstep.format.header import ShardIdentity
from everstep.format.records import FileRecord, Manifest, Marker
from everstep.state.training_state import State
from everstep.testing import inspect
from everstep.trainer.base.saver import Saver
from everstep.trainer.checks import training_loop as strangers
from everstep.trainer.checks.training_loop import UntrackedOptimizers, is_held

THREAD = everstep.KeeperOptions(process=False)
STRANGER = "an optimizer that is not part of the state"
SCHEDULER = "a scheduler that is not part of the state"


def make(seed: int = 0, **options: Any) -> tuple[nn.Linear, AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    return model, AdamW(model.parameters(), lr=0.01, **options)


def update(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


@contextmanager
def said() -> Iterator[list[str]]:
    """Collect the warnings that a program gets."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in caught if "everstep" in str(one.message)]


@contextmanager
def opened(
    run: Path, state: dict[str, Any], *, method: str = "async", **options: Any
) -> Iterator[tuple[everstep.Checkpointer, everstep.Recovery]]:
    about = {"every": 1, "keep": 99, "keeper": THREAD, "method": method} | options
    with everstep.Checkpointer(run, state, **about) as ckpt:
        yield ckpt, ckpt.resume()


def peeked(run: Path, state: dict[str, Any], step: int | None = None) -> everstep.Recovery:
    """Return the recovery of another process."""
    with everstep.Checkpointer(run, state, every=None, keep=99, keeper=THREAD) as ckpt:
        return ckpt.resume(step)


# --- Optimizers -------------------------------------------------------------------------------


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["sync", "async", "lazy", "logged"])
def test_a_forgotten_optimizer_is_named_and_nothing_is_called_exact(
    run_folder: Path, method: str
) -> None:
    model, optimizer = make()
    with said() as messages, opened(run_folder, {"model": model}, method=method) as (ckpt, found):
        assert found.exact
        for _ in range(3):
            update(model, optimizer)
            ckpt.step()
    assert [STRANGER in one for one in messages] == [True], "once"
    assert "(torch.optim.adamw.AdamW) updates 2 tensor(s) of it (model/weight, " in messages[0]
    for life in range(3):
        model, _ = make()
        with opened(run_folder, {"model": model}, every=None) as (ckpt, found):
            assert (found.step, found.exact) == (3 + life, False)
            assert f"{STRANGER} (torch.optim.adamw.AdamW) updates" in found.evidence
            ckpt.step()
            ckpt.save()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["async", "lazy", "logged"])
def test_an_optimizer_that_is_bound_anew_in_mid_run(run_folder: Path, method: str) -> None:
    """Bases before it are exact; those after it have the state as it was, and are not."""
    model, optimizer = make()
    state = {"model": model, "optimizer": optimizer}
    weights: dict[int, torch.Tensor] = {}
    with said() as messages, opened(run_folder, state, method=method) as (ckpt, _):
        for step in range(1, 7):
            if step == 4:
                optimizer = AdamW(model.parameters(), lr=0.001)
            update(model, optimizer)
            weights[step] = model.weight.detach().clone()
            ckpt.step()
            ckpt.wait()
        ckpt.save().durable.result()
    assert [STRANGER in one for one in messages] == [True], messages
    for step, exact in ((6, False), (4, False), (3, True)):
        model, optimizer = make()
        found = peeked(run_folder, {"model": model, "optimizer": optimizer}, step)
        assert (found.step, found.exact, STRANGER in found.evidence) == (step, exact, not exact)
        assert torch.equal(model.weight, weights[step])


def test_rewinding_does_not_restore_an_optimizer_in_no_part_of_the_state(run_folder: Path) -> None:
    model, optimizer = make()
    other = AdamW(model.parameters())
    with said(), opened(run_folder, {"model": model, "optimizer": optimizer}) as (ckpt, _):
        for using in (optimizer, optimizer, other):
            update(model, using)
            ckpt.step()
        found = ckpt.rewind(2)
    assert not found.exact
    assert any(STRANGER in note for note in found.notes)


def test_its_updates_wait_until_what_they_change_is_copied(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate is asked before each update, as by the optimizers of the state (I1)."""
    model, optimizer = make()
    asked: list[tuple[str | None, torch.Tensor]] = []
    gate = Saver.gate

    def noted(self: Saver, key: str | None) -> None:
        asked.append((key, model.weight.detach().clone()))
        gate(self, key)

    monkeypatch.setattr(Saver, "gate", noted)
    other = SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with said(), opened(run_folder, state, method="lazy", every=None) as (ckpt, _):
        for using, key in ((optimizer, "optimizer"), (other, None), (other, None)):
            asked.clear()
            before = model.weight.detach().clone()
            update(model, using)
            assert [one for one, _ in asked] == [key]
            assert torch.equal(asked[0][1], before)
            ckpt.step()


def test_many_optimizers_are_told_of_a_few_times(run_folder: Path) -> None:
    """A new one in each epoch is told of once; of one for each parameter, some are named."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    with said() as messages, opened(run_folder, {"model": model}) as (ckpt, _):
        for _ in range(3):
            update(model, SGD(model.parameters(), lr=0.1))
            ckpt.step()
        update(model, *(AdamW([parameter]) for parameter in model.parameters()))
        ckpt.step()
    assert 2 < len(messages) < 10
    assert sum("SGD" in one for one in messages) == 1
    assert not peeked(run_folder, {"model": model}).exact


def test_a_closure_that_computes_the_gradients(run_folder: Path) -> None:
    """There are none before the step, nor after it."""
    model, _ = make()
    optimizer = SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        return float(loss)

    with said() as messages, opened(run_folder, {"model": model}) as (ckpt, _):
        optimizer.step(closure)
        model.zero_grad()
        ckpt.step()
    assert [STRANGER in one for one in messages] == [True]


def test_one_that_is_called_within_the_step_of_another(run_folder: Path) -> None:
    """No log can repeat that."""
    model, optimizer = make()
    other = SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        other.step()
        return float(loss)

    state = {"model": model, "optimizer": optimizer}
    with said() as messages, opened(run_folder, state, method="logged", every=None) as (ckpt, _):
        for _ in range(3):
            optimizer.step(closure)
            model.zero_grad()
            ckpt.step()
        assert ckpt.stats().log_holes >= 3
    assert STRANGER in "".join(messages)
    weight = model.weight.detach().clone()
    assert not peeked(run_folder, state).exact
    assert torch.equal(model.weight, weight)


class Calling(AdamW):
    """An optimizer whose step calls hooks twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Holding(SGD):
    """An optimizer that saves the one that it holds."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=0.1)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.inner.load_state_dict(kept.pop("inner"))
        super().load_state_dict(kept)


class Wrapper(torch.optim.Optimizer):
    """A wrapper as accelerate and Lightning make theirs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class App:
    """An object of the user's that saves what it holds in a list in a dict."""

    def __init__(self, **held: Any) -> None:
        self.held = [held]

    def state_dict(self) -> dict[str, Any]:
        return {key: one.state_dict() for key, one in self.held[0].items()}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for key, one in self.held[0].items():
            one.load_state_dict(kept[key])


def in_an_object(model: nn.Module, optimizer: AdamW) -> Any:
    return {"model": model, "app": App(optimizer=optimizer)}, optimizer


def wrapped(model: nn.Module, optimizer: AdamW) -> Any:
    outer = Wrapper(optimizer)
    return {"model": model, "optimizer": outer}, outer


def twice_hooked(model: nn.Module, _: AdamW) -> Any:
    own = Calling(model.parameters())
    return {"model": model, "optimizer": own}, own


def with_an_inner_one(model: nn.Module, optimizer: AdamW) -> Any:
    outer = Holding(optimizer)
    return {"model": model, "optimizer": outer}, outer


def of_another_model(model: nn.Module, optimizer: AdamW) -> Any:
    other, train = make(1)

    class Both:
        def step(self) -> None:
            optimizer.step()
            other(torch.randn(8, 4)).sum().backward()
            train.step()

    return {"model": model, "optimizer": optimizer}, Both()


def that_lists_what_is_frozen(model: nn.Module, _: AdamW) -> Any:
    """Share a backbone that nobody trains between two models."""
    model.bias.requires_grad_(False)  # type: ignore[union-attr,operator]
    own, other = AdamW([model.weight]), AdamW([model.bias])  # type: ignore[list-item]

    class Both:
        def step(self) -> None:
            own.step()
            other.step()

    return {"model": model, "optimizer": own}, Both()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "of",
    [
        in_an_object,
        wrapped,
        twice_hooked,
        with_an_inner_one,
        of_another_model,
        that_lists_what_is_frozen,
    ],
)
def test_no_false_alarm(run_folder: Path, of: Callable[..., Any]) -> None:
    for life in range(2):
        model, optimizer = make()
        state, train = of(model, optimizer)
        with said() as messages, opened(run_folder, state, method="lazy") as (ckpt, found):
            assert (found.step, found.exact) == (2 * life, True), found
            for _ in range(2):
                model(torch.randn(8, 4)).square().mean().backward()
                train.step()
                model.zero_grad()
                ckpt.step()
        assert not messages


def test_of_two_models_each_has_its_own(run_folder: Path) -> None:
    """Two nets of a GAN in two runs: the optimizer of one does not concern the other run."""
    paths = [run_folder / name for name in "ab"]
    run_folder.mkdir(exist_ok=True)
    pairs = [make(seed) for seed in range(2)]
    states = [{"model": model, "optimizer": optimizer} for model, optimizer in pairs]
    with (
        said() as messages,
        opened(paths[0], states[0]) as (one, _),
        opened(paths[1], states[1]) as (two, _),
    ):
        for _ in range(3):
            for model, optimizer in pairs:
                update(model, optimizer)
            one.step()
            two.step()
    assert not messages
    assert all(peeked(path, state).exact for path, state in zip(paths, states, strict=True))


def test_one_in_an_object_of_the_state_is_looked_for_once(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state may get entries at each step; the search through the object takes long."""
    searches = list[object]()

    def counted(optimizer: object, state: State) -> bool:
        searches.append(optimizer)
        return is_held(optimizer, state)

    monkeypatch.setattr(strangers, "is_held", counted)
    model, optimizer = make()
    losses = list[torch.Tensor]()
    state = {"model": model, "app": App(optimizer=optimizer), "losses": losses}
    with said() as messages, opened(run_folder, state) as (ckpt, _):
        for _ in range(3):
            update(model, optimizer)
            losses.append(torch.rand(1))
            ckpt.step()
    assert not messages
    assert searches == [optimizer]


def test_a_search_for_a_rate_before_resume_is_past(run_folder: Path) -> None:
    """It trains with an optimizer of its own, and puts the weights back."""
    model, optimizer = make()
    state = {"model": model, "optimizer": optimizer}
    with said() as messages, everstep.Checkpointer(run_folder, state, keeper=THREAD) as ckpt:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        update(model, SGD(model.parameters(), lr=1.0))
        model.load_state_dict(kept)
        assert ckpt.resume().exact
        update(model, optimizer)
        ckpt.step()
        ckpt.save()
    assert not messages
    assert peeked(run_folder, state).exact


def test_one_that_gets_a_group_of_ours_later(run_folder: Path) -> None:
    model, optimizer = make()
    other_model, other = make(1)
    extra = model.bias
    with said() as messages, opened(run_folder, {"model": model, "opt": optimizer}) as (ckpt, _):
        update(other_model, other)
        ckpt.save()
        other.add_param_group({"params": [extra]})
        update(model, other)
        ckpt.step()
    assert [STRANGER in one for one in messages] == [True]
    assert "updates 1 tensor(s) of it (model/bias)" in messages[0]


def test_a_model_that_was_moved_before_its_first_step(run_folder: Path) -> None:
    """Parameters that lie elsewhere than when the Checkpointer was made are found."""
    model, optimizer = make()
    with said() as messages, opened(run_folder, {"model": model}) as (ckpt, _):
        model.double().float()
        update(model, optimizer)
        ckpt.step()
    assert [STRANGER in one for one in messages] == [True]


def known(judged: UntrackedOptimizers) -> set[int]:
    """Ids of the optimizers that were looked at."""
    return {*judged._untracked, *judged._others}


def test_hooks_end_with_the_checkpointer_and_hold_no_optimizer(run_folder: Path) -> None:
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    before = [len(one) for one in hooks]
    model, optimizer = make()
    with said(), opened(run_folder, {"model": model, "optimizer": optimizer}) as (ckpt, _):
        judged = inspect(ckpt).state_watch.checks.optimizers
        for kind in (AdamW, SGD):
            gone, ours = make(1)[0], kind(model.parameters(), lr=0.1)
            theirs = kind(gone.parameters(), lr=0.1)
            update(model, ours)
            update(gone, theirs)
            refs = [weakref.ref(ours), weakref.ref(theirs)]
            keys = {id(ours), id(theirs)}
            assert keys <= known(judged)
            del ours, theirs
            gc.collect()
            assert [ref() for ref in refs] == [None, None]
            assert keys.isdisjoint(known(judged)), "ids are used again"
        ckpt.step()
    assert [len(one) for one in hooks] == before


# --- Parameters -------------------------------------------------------------------------------


def test_parameters_in_no_part_of_the_state_are_not_called_exact(run_folder: Path) -> None:
    def made() -> tuple[nn.Module, nn.Parameter, dict[str, Any]]:
        model, _ = make()
        scale = nn.Parameter(torch.ones(()))
        return model, scale, {"model": model, "opt": SGD([*model.parameters(), scale], lr=0.1)}

    model, scale, state = made()
    with opened(run_folder, state) as (ckpt, _):
        (model(torch.randn(8, 4)) * scale).square().mean().backward()
        state["opt"].step()
        ckpt.step()
    found = peeked(run_folder, made()[2])
    what = "'opt' trains 1 parameter(s) that are not in the state (group0[2])"
    assert not found.exact
    assert found.notes == (what,)
    assert what in found.evidence


def test_parameters_that_are_frozen_and_in_no_part_of_the_state(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen parameters are told of once they are unfrozen."""
    model, _ = make()
    head = nn.Linear(2, 2).requires_grad_(False)
    state = {"model": model, "opt": SGD([*model.parameters(), *head.parameters()], lr=0.1)}
    with opened(run_folder, state) as (ckpt, _):
        update(model, state["opt"])  # type: ignore[arg-type]
        ckpt.step()
        assert not caplog.text
        head.weight.requires_grad_(True)
        update(nn.Sequential(model, head), state["opt"])  # type: ignore[arg-type]
        ckpt.step()
    assert "'opt' trains 1 parameter(s) that are not in the state" in caplog.text
    head.requires_grad_(False)
    assert [peeked(run_folder, state, step).exact for step in (2, 1)] == [False, True]
    with pytest.raises(UnsupportedStateError, match="not in the state"):
        everstep.Checkpointer(run_folder, state, method="logged", keeper=THREAD)


def test_a_group_that_is_added_in_mid_run(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    head = nn.Linear(2, 2)
    with opened(run_folder, {"model": model, "opt": optimizer}) as (ckpt, _):
        update(model, optimizer)
        ckpt.step()
        optimizer.add_param_group({"params": list(head.parameters())})
        update(nn.Sequential(model, head), optimizer)
        ckpt.step()
    assert "'opt' trains 2 parameter(s) that are not in the state (group1[0], g" in caplog.text
    model, optimizer = make()
    optimizer.add_param_group({"params": list(nn.Linear(2, 2).parameters())})
    assert not peeked(run_folder, {"model": model, "opt": optimizer}).exact


def test_an_optimizer_within_another_that_does_not_save_it(run_folder: Path) -> None:
    class Sharp(SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.base = AdamW(self.param_groups)

        def step(self, closure: Any = None) -> Any:
            self.base.step()

    model, _ = make()
    state = {"model": model, "opt": Sharp(model.parameters())}
    with said() as messages, opened(run_folder, state, method="lazy") as (ckpt, _):
        update(model, state["opt"])  # type: ignore[arg-type]
        ckpt.step()
    assert not messages, "it was said at the start"
    found = peeked(run_folder, state)
    assert not found.exact
    assert "'opt' holds another optimizer (base)" in found.evidence


# --- Options of groups ------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["async", "logged"])
def test_an_option_that_the_base_does_not_know_stays(run_folder: Path, method: str) -> None:
    model, optimizer = make()
    state = {"model": model, "opt": optimizer}
    with opened(run_folder, state, method=method, every=2) as (ckpt, _):
        for _ in range(3):
            update(model, optimizer)
            ckpt.step()
    model, optimizer = make()
    optimizer.param_groups[0].update(clip=0.5, names=["a"] * 99)
    with opened(run_folder, {"model": model, "opt": optimizer}, method=method) as (ckpt, found):
        group = optimizer.param_groups[0]
        assert (group["clip"], len(group["names"]), group["lr"]) == (0.5, 99, 0.01)
        where = "opt/param_groups/0/clip is not in the base: the program's value is kept, 0.5"
        assert found.notes == (where, where.replace("clip", "names").replace("0.5", "list"))
        assert not found.exact
        ckpt.step()
        ckpt.save()
    again = peeked(run_folder, {"model": model, "opt": optimizer})
    assert not again.exact
    assert where in again.evidence


def test_an_option_that_only_the_base_knows_comes(run_folder: Path) -> None:
    model, optimizer = make()
    optimizer.param_groups[0]["clip"] = 0.5
    with opened(run_folder, {"model": model, "opt": optimizer}) as (ckpt, _):
        update(model, optimizer)
        ckpt.step()
    model, optimizer = make()
    found = peeked(run_folder, {"model": model, "opt": optimizer})
    assert (found.exact, found.notes) == (True, ())
    assert optimizer.param_groups[0]["clip"] == 0.5


def test_options_of_a_newer_torch_are_those_that_torch_gives_an_older_state(
    run_folder: Path,
) -> None:
    model, optimizer = make()
    del optimizer.param_groups[0]["maximize"], optimizer.defaults["maximize"]
    with opened(run_folder, {"model": model, "opt": optimizer}, every=None) as (ckpt, _):
        ckpt.step()
        ckpt.save()
    model, optimizer = make()
    found = peeked(run_folder, {"model": model, "opt": optimizer})
    assert (found.exact, found.notes) == (True, ())
    assert optimizer.param_groups[0]["maximize"] is False


# --- Schedulers -------------------------------------------------------------------------------


def scheduled(
    run: Path, of: Callable[[nn.Module, AdamW], Any], **options: Any
) -> tuple[list[str], list[everstep.Recovery]]:
    """Return the warnings and recoveries of two processes."""
    found = []
    with said() as messages:
        for _ in range(2):
            model, optimizer = make()
            more, steps = of(model, optimizer)
            with opened(run, {"model": model, "opt": optimizer, **more}, **options) as (ckpt, back):
                found.append(back)
                driving = [one() if isinstance(one, type(lambda: 0)) else one for one in steps]
                for _ in range(2):
                    update(model, optimizer)
                    for scheduler in driving:
                        scheduler.step()
                    ckpt.step()
    return messages, found


@pytest.mark.thinned(4)
@pytest.mark.parametrize("method", ["async", "logged"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_scheduler_in_no_part_of_the_state(run_folder: Path, method: str, replaced: bool) -> None:
    """It was forgotten, or a framework has made it in place of the one in the state."""

    def of(_: nn.Module, optimizer: AdamW) -> Any:
        if not replaced:
            return {}, [schedules.StepLR(optimizer, 2)]
        return {"sched": schedules.StepLR(optimizer, 2)}, [lambda: schedules.StepLR(optimizer, 2)]

    messages, found = scheduled(run_folder, of, method=method)
    assert [SCHEDULER in one for one in messages] == [True, True], "once in each process"
    assert "(torch.optim.lr_scheduler.StepLR) drives 'opt'" in messages[0]
    assert [one.exact for one in found] == [True, False]
    assert SCHEDULER in found[1].evidence


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "kind",
    [
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer),
        lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: schedules.ChainedScheduler([schedules.StepLR(optimizer, 2)]),
    ],
    ids=["that leaves no mark on the optimizer", "that counts otherwise", "that calls others"],
)
def test_every_kind_of_scheduler_is_found(run_folder: Path, kind: Callable[..., Any]) -> None:
    for life in range(2):
        model, optimizer = make()
        scheduler = kind(optimizer)
        with said() as messages, opened(run_folder, {"m": model, "opt": optimizer}) as (ckpt, back):
            assert back.exact is not bool(life)
            update(model, optimizer)
            scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
            ckpt.step()
        assert messages
        assert all(SCHEDULER in one for one in messages)


def test_a_scheduler_that_is_made_late(run_folder: Path) -> None:
    """It takes the place of the one in the state in mid-run."""
    model, optimizer = make()
    driving: Any = schedules.StepLR(optimizer, 2)
    state = {"model": model, "opt": optimizer, "sched": driving}
    with said() as messages, opened(run_folder, state) as (ckpt, _):
        for step in range(1, 9):
            if step == 5:
                driving = schedules.ExponentialLR(optimizer, 0.9)
            update(model, optimizer)
            driving.step()
            ckpt.step()
            assert inspect(ckpt).state.exact is (step < 8)
    assert [SCHEDULER in one for one in messages] == [True]


def test_a_scheduler_where_a_freed_one_lay(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the ``id()`` of one that was idle, and is found at the next mark that looks."""

    def same(one: object) -> int:
        return 1 if isinstance(one, schedules.StepLR) else id(one)

    monkeypatch.setattr(strangers, "id", same, raising=False)
    model, optimizer = make()
    driving: Any = schedules.StepLR(optimizer, 2)
    with said() as messages, opened(run_folder, {"model": model, "opt": optimizer}) as (ckpt, _):
        update(model, optimizer)
        ckpt.step()
        del driving
        gc.collect()
        driving = schedules.StepLR(optimizer, 2)
        update(model, optimizer)
        driving.step()
        ckpt.step()
        assert not inspect(ckpt).state.exact
    assert [SCHEDULER in one for one in messages] == [True]


class Progress:
    """An object of the user's that has a whole framework, and saves little of it."""

    def __init__(self, **framework: Any) -> None:
        self.framework = framework

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        pass


@pytest.mark.thinned(2)
@pytest.mark.parametrize("saves", [False, True])
def test_an_object_that_has_the_framework_which_replaces_a_scheduler(
    run_folder: Path, saves: bool
) -> None:
    def of(_: nn.Module, optimizer: AdamW) -> Any:
        second = schedules.StepLR(optimizer, 2)
        part = App(sched=second) if saves else Progress(sched=second)
        return {"part": part, "sched": schedules.StepLR(optimizer, 2)}, [second]

    messages, found = scheduled(run_folder, of)
    assert [SCHEDULER in one for one in messages] == ([] if saves else [True, True])
    assert [one.exact for one in found] == [True, saves]


def test_a_scheduler_of_the_state_that_drives_another_optimizer(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def of(model: nn.Module, _: AdamW) -> Any:
        other = AdamW(model.parameters())
        return {"sched": schedules.StepLR(other, 2)}, []

    _, found = scheduled(run_folder, of)
    assert caplog.text.count("'sched' drives an optimizer that is not part of the state") == 2
    assert [one.exact for one in found] == [True, False]
    assert "'sched' drives an optimizer" in found[1].evidence


class Prepared:
    """A scheduler as accelerate wraps it."""

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self.optimizers = scheduler, [optimizer]

    def step(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, kept: Any) -> None:
        self.scheduler.load_state_dict(kept)


def several_in_one(_: nn.Module, optimizer: AdamW) -> Any:
    inner = [schedules.ConstantLR(optimizer), schedules.StepLR(optimizer, 2)]
    one = schedules.SequentialLR(optimizer, inner, [1])
    return {"sched": one}, [one]


def within_an_object(_: nn.Module, optimizer: AdamW) -> Any:
    one = schedules.StepLR(optimizer, 2)
    return {"app": App(sched=one)}, [one]


def as_accelerate_has_it(_: nn.Module, optimizer: AdamW) -> Any:
    one = Prepared(schedules.StepLR(optimizer, 2), Wrapper(optimizer))
    return {"sched": one}, [one]


def several_that_one_calls(_: nn.Module, optimizer: AdamW) -> Any:
    one = schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer), schedules.StepLR(optimizer, 2)]
    )
    return {"sched": one}, [one]


def several_that_one_in_an_object_calls(_: nn.Module, optimizer: AdamW) -> Any:
    inner = [schedules.ConstantLR(optimizer), schedules.StepLR(optimizer, 2)]
    one = schedules.ChainedScheduler(inner)
    return {"app": App(sched=one), "idle": schedules.StepLR(optimizer, 3)}, [one]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "of",
    [
        several_in_one,
        several_that_one_calls,
        several_that_one_in_an_object_calls,
        within_an_object,
        as_accelerate_has_it,
    ],
)
def test_no_false_alarm_about_schedulers(run_folder: Path, of: Callable[..., Any]) -> None:
    messages, found = scheduled(run_folder, of)
    assert not messages
    assert [one.exact for one in found] == [True, True], found


def test_a_scheduler_that_nobody_steps_is_not_told_of(run_folder: Path) -> None:
    kept = []

    def of(_: nn.Module, optimizer: AdamW) -> Any:
        one = schedules.StepLR(optimizer, 2)
        kept.append(schedules.ExponentialLR(optimizer, 0.9))
        return {"sched": one}, [one]

    messages, found = scheduled(run_folder, of)
    assert not messages
    assert [one.exact for one in found] == [True, True], found


# --- The reason -------------------------------------------------------------------------------


def test_the_reason_is_written_only_where_there_is_one() -> None:
    identity = ShardIdentity("run", 1, 2, 3, 0, 1, False, inexact="x" * 9999)
    file = FileRecord("rank-00000.safetensors", 8, 8, "0" * 32, "0" * 32)
    marker = Marker.of(identity, (file,))
    assert Marker.decode(marker.encode(), PurePath("m")) == marker
    assert marker.inexact == "x" * 2000
    assert Manifest.decode(Manifest((marker,)).encode(), PurePath("m")).markers == (marker,)
    assert b"inexact" not in Marker.of(replace(identity, inexact=""), (file,)).encode()


def test_why_is_in_words_what_all_of_it_is() -> None:
    model, optimizer = make()
    state = State({"model": model, "optimizer": optimizer})
    assert (state.exact, state.why_inexact) == (True, "")
    state.coverage.unsaved_trainers.append("one")
    state.coverage.unsaved_inputs = ("two", "one")
    assert (state.exact, state.why_inexact) == (False, "two; one")
