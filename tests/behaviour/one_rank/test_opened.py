"""What a program does right behind its resume(): no log, and no base over several steps, takes it
for what was there when the timeline was opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.seams import fingerprint as module
from everstep.seams.fingerprint import FingerprintWatch, volatile_settings
from everstep.trainer.session import start as starts
from tests.support.serving import Bench, die, serving
from tests.support.world import forget


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as bench:
        yield bench


class Dead:
    """One unit whose gradients are so small that its moments are denormals, where no sample is."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int) -> None:
        drawn = torch.Generator().manual_seed(step)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
            parameter.grad[5, 3] = 3e-38
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> list[bytes]:
        held = [value for values in self.optimizer.state.values() for value in values.values()]
        return [t.detach().numpy().tobytes() for t in (*self.model.parameters(), *held)]


METHODS: dict[str, Any] = {
    "logged": "logged",
    "lowdiff_plus": "lowdiff_plus",
    "keeper": everstep.Method(base="multistep", parts=3, overlap_forward=True),
    "recovery": everstep.Method(
        base="multistep", parts=3, overlap_forward=True, rebuild="recovery"
    ),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", METHODS)
def test_denormals_that_are_flushed_behind_the_resume(method: str, served: Bench) -> None:
    """The record of the timeline says that they are kept."""
    world, states = Dead(), {}
    every = 1000 if method == "logged" else 4
    ckpt = everstep.Checkpointer(served.run, world.state, method=METHODS[method], every=every)
    ckpt.resume()
    assert torch.set_flush_denormal(True)
    for step in range(1, 8):
        world.train(step)
        ckpt.step()
        states[step] = world.snapshot()
    ckpt.wait()
    die(ckpt)
    torch.set_flush_denormal(False)
    forget(served.run)
    other = Dead()
    again = everstep.Checkpointer(served.run, other.state, method=METHODS[method])
    recovery = again.resume()
    assert recovery.step >= 4
    assert not recovery.exact or other.snapshot() == states[recovery.step]
    die(again)


def test_a_keeper_that_comes_into_service_is_no_new_record() -> None:
    torch.set_num_threads(1)
    opened = FingerprintWatch({})
    opened.began(3)
    torch.set_num_threads(2)
    opened.began(3)
    assert not opened.holds
    opened.began(4)
    assert opened.holds
    assert volatile_settings()[0] == 2


def test_parameters_that_move_where_a_gpu_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its use begins no more: the program has it in use already."""
    in_use, where = [True], [("cpu",)]
    monkeypatch.setattr(module, "volatile_settings", lambda: (1, in_use[0], False))
    monkeypatch.setattr(module, "device_types", lambda optimizers: where[0])
    opened = FingerprintWatch({})
    opened.began(1)
    assert opened.holds
    where[0] = ("cuda",)
    assert not opened.holds
    opened.began(2)
    assert opened.holds
    in_use[0] = False
    assert not opened.holds


@pytest.mark.thinned(4)
@pytest.mark.parametrize("resumes", [True, False], ids=["resumes", "just begins"])
@pytest.mark.parametrize("trained_on", ["cpu", "cuda"])
def test_a_program_that_has_a_gpu_and_goes_on_on_the_cpu(
    trained_on: str, resumes: bool, served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the other way round: each has the same GPU in use, and computes elsewhere."""
    (other_one,) = {"cpu", "cuda"} - {trained_on}
    for step, where in ((0, trained_on), (4, other_one)):
        monkeypatch.setattr(starts, "device_types", lambda optimizers, where=where: (where,))
        world = Dead()
        ckpt = everstep.Checkpointer(served.run, world.state, method="logged", every=1000)
        if step:
            recovery = ckpt.resume()
            assert recovery.step == step
            assert not recovery.exact
            key = "parameters cuda, replayed with none", "parameters none, replayed with cuda"
            assert f"trained with {key[trained_on == 'cpu']}" in recovery.evidence
            die(ckpt)
            break
        if resumes:
            ckpt.resume()
        for number in range(1, 5):
            world.train(number)
            ckpt.step()
            if number == 1:
                ckpt.save()
        ckpt.wait()
        die(ckpt)
        forget(served.run)


@pytest.mark.parametrize("method", ["logged", "lowdiff_plus"])
def test_a_base_of_the_very_beginning(method: str, served: Bench) -> None:
    """The first update makes state that it has not: no log goes on from it, and no replica."""
    world = Dead()
    every = 1000 if method == "logged" else 2
    ckpt = everstep.Checkpointer(served.run, world.state, method=method, every=every)
    ckpt.resume()
    ckpt.save()
    for step in range(1, 6):
        world.train(step)
        ckpt.step()
    ckpt.wait(60)
    then = world.snapshot()
    die(ckpt)
    forget(served.run)
    other = Dead()
    again = everstep.Checkpointer(served.run, other.state, method=method)
    recovery = again.resume()
    assert (recovery.step, recovery.exact) == (5, True)
    assert other.snapshot() == then
    die(again)
