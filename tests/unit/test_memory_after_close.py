"""Whoever still has a Checkpointer that is closed has none of its memory: what it consists of
knows each other in circles, which Python's collector may not look at for a whole training."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import everstep
from everstep.keeper.remote import RemoteKeeper
from everstep.options import KeeperOptions
from everstep.seams import memory
from tests.unit.following import until


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mapped() -> set[int]:
    """Where memory is that was mapped to be shared."""
    return set(memory._mappings)


def trained(
    run: Path, model: torch.nn.Module, method: str, process: bool
) -> tuple[everstep.Checkpointer, list[everstep.Save]]:
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    ckpt = everstep.Checkpointer(
        run, state, method=method, every=2, keeper=KeeperOptions(process=process)
    )
    ckpt.resume()
    saves = []
    for _ in range(7):
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
    if method not in ("lowdiff_plus", "gemini"):
        saves.append(ckpt.save())
    return ckpt, saves


_HERE = ["async", "checkfreq", "lazy", "logged", "checkflow"]
_BESIDE = [*_HERE, "gockpt", "gockpt_o", "lowdiff_plus", "gemini"]


@pytest.mark.parametrize(
    ("method", "process"),
    [*((method, True) for method in _BESIDE), *((method, False) for method in _HERE)],
)
def test_close_gives_the_memory_back(method: str, process: bool, run_folder: Path) -> None:
    before = mapped()
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    ckpt, saves = trained(run_folder, model, method, process)
    assert mapped() - before, "or this says nothing"
    host_bytes = ckpt.stats().host_bytes
    assert host_bytes > 0
    ckpt.close()
    assert mapped() == before
    assert ckpt.stats().step == 7
    assert all(save.durable.done() for save in saves)


def test_a_cell_that_is_run_again_does_not_take_it_twice(run_folder: Path) -> None:
    """Nobody has closed the first one."""
    before = mapped()
    model = torch.nn.Linear(20, 20)
    kept = [trained(run_folder, model, "lazy", process=True) for _ in range(3)]
    assert len(mapped() - before) == 1
    kept[-1][0].close()
    assert mapped() == before


@pytest.mark.filterwarnings("ignore:everstep:RuntimeWarning")
@pytest.mark.parametrize(
    "method", ["async", "lazy", "logged", "checkflow", "gockpt_o", "lowdiff_plus", "gemini"]
)
def test_a_keeper_that_is_replaced_takes_its_memory_along(method: str, run_folder: Path) -> None:
    """Half of the machine's, perhaps; the next one takes as much."""
    before = mapped()
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with everstep.Checkpointer(run_folder, state, method=method, every=2) as ckpt:
        ckpt.resume()

        def train() -> None:
            for _ in range(3):
                model(torch.ones(2, 20)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()

        train()
        first = ckpt._keepers.current
        assert isinstance(first, RemoteKeeper)
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: first.lost is not None, "its loss")
        train()
        assert ckpt.stats().keeper_restarts == 1
        ckpt.wait()
        ckpt._lane.run(lambda: None).result(10)
        assert len(mapped() - before) == 1
        train()
    assert mapped() == before
