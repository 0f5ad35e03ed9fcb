"""Tensors that a state has twice: in a module and in plain data, under two names of plain data, in
an optimizer's groups and in the loop's hands. They come back as one, with the values of now."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep import Checkpointer, KeeperOptions, LogOptions
from everstep.errors import MismatchError, RecoveryError
from everstep.format.names import base_dir
from tests.support.world import opened

State = dict[str, Any]


def logged(run: Path, state: State, every: int = 100) -> Checkpointer:
    """A base of the first step, and a log on disk."""
    log, keeper = LogOptions(to="disk", batch_steps=1), KeeperOptions(process=False)
    return Checkpointer(run, state, method="logged", every=every, log=log, keeper=keeper)


def train(
    state: State, at: int, loop: Callable[[State, int], None] = lambda state, at: None
) -> None:
    torch.manual_seed(at)
    for key in ("model", "lora"):
        if isinstance(module := state.get(key), nn.Module):
            module(torch.randn(5, 3)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    loop(state, at)


def redone(run: Path, build: Callable[[int], State], loop: Any, steps: int = 6) -> tuple[Any, Any]:
    """Trains, loses all bases but the first, and goes on by the log; both states at the end."""
    state = build(1)
    with logged(run, state) as ckpt:
        ckpt.resume()
        for at in range(1, steps + 1):
            train(state, at, loop)
            ckpt.step()
    shutil.rmtree(base_dir(run, 1, steps))  # which close() has taken
    live = build(2)
    with logged(run, live) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.base_step, recovery.exact) == (steps, 1, True)
    return state, live


class Binding:
    """Binds what it loads."""

    def __init__(self) -> None:
        self.held = {"cur": torch.zeros(2), "best": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = dict(state)


def built(seed: int, **more: Any) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.1), **more}


def test_two_names_of_plain_data_are_one_behind_replay(run_folder: Path) -> None:
    """The best loss is the last, as long as it becomes less."""

    def build(seed: int) -> State:
        return built(seed, loss={"best": torch.tensor(torch.inf), "last": torch.tensor(0.0)})

    def loop(state: State, at: int) -> None:
        state["loss"]["best"] = state["loss"]["last"] = torch.tensor(1.0 / at)

    state, live = redone(run_folder, build, loop)
    assert live["loss"] == state["loss"] == {"best": 1 / 6, "last": torch.tensor(1 / 6)}
    assert live["loss"]["best"] is live["loss"]["last"]


def test_two_names_of_an_object_are_one_behind_replay(run_folder: Path) -> None:
    def loop(state: State, at: int) -> None:
        held = state["object"].held
        held["best"] = held["cur"] = torch.full((2,), float(at))

    _, live = redone(run_folder, lambda seed: built(seed, object=Binding()), loop)
    assert {key: one.tolist() for key, one in live["object"].held.items()} == {
        "cur": [6.0, 6.0],
        "best": [6.0, 6.0],
    }


def test_a_parameter_in_plain_data_is_of_the_step_of_replay(run_folder: Path) -> None:
    def build(seed: int) -> State:
        state = built(seed)
        return {**state, "zz": [state["model"].weight.detach()]}

    state, live = redone(run_folder, build, lambda state, at: None)
    assert torch.equal(live["zz"][0], state["model"].weight)
    assert live["zz"][0].data_ptr() == live["model"].weight.data_ptr()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", ["optimizer's", "module's", "frozen"])
def test_plain_data_that_others_have_is_read_to_where_it_lies(how: str, run_folder: Path) -> None:
    def build(seed: int) -> State:
        torch.manual_seed(seed)
        lora, bn = nn.Linear(3, 3), nn.BatchNorm1d(3)
        optimizer = torch.optim.AdamW(lora.parameters(), 0.1)
        if how == "optimizer's":  # the module is in no part of the state
            plain = {key: value for key, value in lora.state_dict().items() if "weight" in key}
        elif how == "frozen":
            plain = {"weight": lora.weight.requires_grad_(False)}
        else:
            plain = {"mean": bn.running_mean}
        return {"plain": plain, "bn": bn, "optimizer": optimizer, "lora": Binding(), "all": [lora]}

    def step(state: State, lora: nn.Module) -> None:
        state["bn"](lora(torch.randn(5, 3))).square().sum().backward()
        state["optimizer"].step()

    def made(seed: int) -> tuple[State, nn.Module]:
        state = build(seed)
        (lora,) = state.pop("all")
        return state, lora

    state, lora = made(1)
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
        step(state, lora)
        with torch.no_grad():
            lora.weight.add_(1)
        ckpt.step()
        ckpt.save()
    live, mine = made(2)
    with opened(run_folder, live) as ckpt:
        recovery = ckpt.resume()
        assert "not in the state" in recovery.evidence, "of the rest of the module"
        (key,) = live["plain"]
        holder = live["bn"].running_mean if how == "module's" else mine.weight
        assert live["plain"][key].data_ptr() == holder.data_ptr()
        saved = state["bn"].running_mean if how == "module's" else lora.weight
        assert torch.equal(holder, saved)


def test_a_rate_that_is_a_tensor_stays_the_loops(run_folder: Path) -> None:
    """torch's load_state_dict() gives groups copies, and the loop goes on with the tensor."""
    torch.manual_seed(1)
    model, lr = nn.Linear(3, 3), torch.tensor(0.1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=lr), "lr": lr}

    def loop(state: State, at: int) -> None:
        state["lr"].fill_(0.1 / at)

    with logged(run_folder, state) as ckpt:
        ckpt.resume()
        seen = {}
        for at in range(1, 6):
            train(state, at, loop)
            ckpt.step()
            seen[at] = model.weight.detach().clone()
        ckpt.rewind(2)
        assert state["optimizer"].param_groups[0]["lr"] is state["lr"] is lr
        assert lr.item() == pytest.approx(0.05)
        for at in range(3, 6):
            train(state, at, loop)
            ckpt.step()
            assert torch.equal(model.weight, seen[at])


class Around:
    """Hands both calls through."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def test_an_optimizer_is_not_loaded_into_an_object_around_one(run_folder: Path) -> None:
    state = built(1)
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
        train(state, 1)
        ckpt.step()
        ckpt.save()
    live = built(2)
    live["optimizer"] = Around(live["optimizer"])
    with (
        opened(run_folder, live) as ckpt,
        pytest.raises(MismatchError, match="the checkpoint has an optimizer here"),
    ):
        ckpt.resume()


def test_there_is_no_way_back_to_before_the_first_update(run_folder: Path) -> None:
    """The first step has failed behind its update: this state is nobody's step 0."""
    state = built(1)
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
        train(state, 1)
        for again in (ckpt.resume, lambda: ckpt.rewind(0)):
            with pytest.raises(RecoveryError):
                again()
