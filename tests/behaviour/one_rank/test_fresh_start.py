"""A second ``resume()`` where nothing is to be restored: the state must be as it was at first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep import Checkpointer
from everstep.errors import MismatchError, RecoveryError, UnsupportedStateError
from tests.support.log.last_mark import Training

METHODS = ["lazy", "sync", "logged"]


def half_an_update(it: Training) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    it.model(torch.randn(4, 8)).pow(2).sum().backward()
    fake = it.optimizer.register_step_pre_hook(fails)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            it.optimizer.step()
    finally:
        fake.remove()


def in_place(it: Training) -> None:
    with torch.no_grad():
        it.model[1].weight.mul_(0.5)


MOVES: dict[str, Callable[[Training], Any]] = {
    "a forward": lambda it: it.model(torch.randn(4, 8)),
    "random numbers": lambda it: torch.rand(1),
    "an update that failed": half_an_update,
    "a write": in_place,
    "data": lambda it: it.data.update(at=3),
    "a rate": lambda it: it.optimizer.param_groups[0].update(lr=0.5),
}


def opened(it: Training, run: Path, method: str) -> Checkpointer:
    state = {"model": it.model, "optimizer": it.optimizer, "data": it.data}
    return Checkpointer(run, state, method=method, every=5)


@pytest.mark.thinned(18)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", MOVES)
def test_what_has_moved_is_not_called_step_0(what: str, method: str, run_folder: Path) -> None:
    it = Training()
    with opened(it, run_folder, method) as ckpt:
        assert ckpt.resume().exact
        MOVES[what](it)
        with pytest.raises(RecoveryError, match="no base of step 0, and this process has trained"):
            ckpt.resume()
        it.train()  # the loop may go on all the same
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        assert ckpt.resume().step == 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS)
def test_what_has_not_may_be_resumed_as_often_as_one_likes(method: str, run_folder: Path) -> None:
    it = Training()
    with opened(it, run_folder, method) as ckpt:
        for _ in range(3):
            recovery = ckpt.resume()
            assert (recovery.step, recovery.exact) == (0, True)
        for step in range(1, 4):
            it.train()
            ckpt.step()
            ckpt.save()
            ckpt.wait()
            assert ckpt.resume().step == step
            ckpt.resume()


class Rounding(torch.nn.Linear):
    """Gives what it stores in half of the bytes."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = super().state_dict(*args, **options)
        return {key: value.bfloat16() for key, value in found.items()}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rounds", [True, False])
def test_a_module_that_rounds_what_it_gives_is_not_exact(
    rounds: bool, method: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made() -> dict[str, Any]:
        torch.manual_seed(3)
        module = Rounding(4, 2) if rounds else torch.nn.Linear(4, 2)
        return {"m": module, "o": torch.optim.SGD(module.parameters(), lr=0.1)}

    state = made()
    with Checkpointer(run_folder, state, method=method, every=2) as ckpt:
        ckpt.resume()
        for _ in range(3):
            state["m"](torch.randn(2, 4)).sum().backward()
            state["o"].step()
            ckpt.step()
        ckpt.save()
    again = made()
    with Checkpointer(run_folder, again, method=method, every=2) as ckpt:
        assert ckpt.resume().exact == (not rounds)
    same = torch.equal(state["m"].weight, again["m"].weight)
    assert same == (not rounds)
    told = "parameter(s) bit for bit: m/weight (torch.float32, stored as torch.bfloat16)"
    assert (told in caplog.text) == rounds
    assert "that are not in the state" not in caplog.text


class Copying(torch.nn.Linear):
    """Gives copies of its parameters, rounded perhaps, in the dtype that they have."""

    def __init__(self, rounds: bool) -> None:
        super().__init__(4, 2)

        def copied(value: torch.Tensor) -> torch.Tensor:
            return value.bfloat16().float() if rounds else value.clone()

        def give(module: Any, found: dict[str, Any], *_: Any) -> None:
            found.update({key: copied(value) for key, value in found.items()})

        self.register_state_dict_post_hook(give)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_module_that_gives_copies(
    rounds: bool, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the same dtype, too, bits tell; and its parameters are saved."""

    def made() -> dict[str, Any]:
        torch.manual_seed(3)
        module = Copying(rounds)
        return {"m": module, "o": torch.optim.SGD(module.parameters(), lr=0.1)}

    state = made()
    with Checkpointer(run_folder, state, method="sync", every=None) as ckpt:
        ckpt.step()
        ckpt.save()
    again = made()
    with Checkpointer(run_folder, again, method="sync", every=None) as ckpt:
        assert ckpt.resume().exact == (not rounds)
    told = "does not keep 2 parameter(s) bit for bit: m/weight, m/bias;"
    assert (told in caplog.text) == rounds
    assert "that are not in the state" not in caplog.text


def test_a_parameter_of_an_optimizer_that_is_not_initialised_yet(run_folder: Path) -> None:
    """All of it is listed, and no error of torch's."""
    module = torch.nn.Sequential(torch.nn.LazyLinear(3))
    state = {"m": module, "o": torch.optim.SGD(module.parameters(), lr=0.1)}
    with pytest.raises(UnsupportedStateError, match="not initialised yet") as caught:
        Checkpointer(run_folder, state)
    assert {leaf.split("/")[0] for leaf, _ in caught.value.leaves} == {"m", "o"}


def test_another_generator_of_numpy(run_folder: Path) -> None:
    """Both are named; nothing is damaged."""
    module = torch.nn.Linear(2, 2)
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        with Checkpointer(run_folder, {"m": module}, method="sync", every=None) as ckpt:
            ckpt.step()
            ckpt.save()
        wanted = np.random.random(3).tolist()
        with Checkpointer(run_folder, {"m": module}, method="sync") as ckpt:
            assert ckpt.resume().exact
            assert np.random.random(3).tolist() == wanted
    finally:
        np.random.set_bit_generator(before)
    with Checkpointer(run_folder, {"m": module}, method="sync") as ckpt:
        with pytest.raises(
            MismatchError, match="saved from a PCG64, but the live generator is a MT19937"
        ):
            ckpt.resume()
        found = ckpt.resume(strict=False)
        assert (found.step, found.exact) == (1, False)
        assert [name for name, _ in found.mismatched] == ["everstep/rng/numpy"]
