"""Ranks that train alike, in one process, each of which records a part of the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.format.log import LogRecord
from everstep.format.writer import ChunkRing
from everstep.run.segments import read_segment, scan_log
from everstep.seams import PosixFileSystem, Seams
from everstep.state.ranks import ddp
from everstep.testing import inspect
from tests.support.ranks.logs import ON_DISK, die
from tests.support.ranks.together import close_all, on_all, rank_seams
from tests.support.world import forget_open_runs

FS = PosixFileSystem()


WIDTHS = (8, 8, 8, 4)


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is as if DistributedDataParallel were around it, without a group of processes."""
    ranks = lambda module: (getattr(module, "alike", None), frozenset[str]())  # noqa: E731
    monkeypatch.setattr(ddp, "ddp_replicas", ranks)


def layers(ranks: tuple[int, ...] | None) -> nn.Sequential:
    """The same on every rank, without a generator, which all threads would share."""
    model = nn.Sequential(*map(nn.Linear, WIDTHS, WIDTHS[1:]))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(float(parameter.numel())).add(number).sin()
            parameter.copy_(values.reshape(parameter.shape))
    model.alike = ranks  # type: ignore[assignment]
    return model


@dataclass
class Replica:
    """One of several ranks that train alike: all consume the same gradients."""

    ckpt: everstep.Checkpointer
    model: nn.Module
    state: dict[str, Any]
    optimizer: torch.optim.Optimizer

    def train(self, steps: int) -> None:
        for _ in range(steps):
            at = self.state["data"]["step"]
            take(self.model, self.optimizer, at)
            self.state["data"]["step"] = at + 1
            self.ckpt.step()

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def take(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        value = 0.1 * (at + 1) + number
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def trained(steps: int) -> list[torch.Tensor]:
    model = layers(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for at in range(steps):
        take(model, optimizer, at)
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextlib.contextmanager
def replicas(
    *paths: Path, seams: list[Seams] | None = None, **options: Any
) -> Iterator[list[Replica]]:
    world = len(paths)
    seams = seams or rank_seams(world)
    about = {**ON_DISK, "keeper": everstep.KeeperOptions(process=False), **options}
    about.setdefault("progress_timeout_s", 20.0)
    apart = about.pop("apart", False)  # modules of their own, which nobody has in common

    def start(rank: int) -> Replica:
        model = layers(None if apart else tuple(range(world)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "data": {"step": 0}}
        ckpt = everstep.Checkpointer(paths[rank], state, seams=seams[rank], **about)
        forget_open_runs()
        return Replica(ckpt, model, state, optimizer)

    ranks = on_all(*(lambda rank=rank: start(rank) for rank in range(world)))  # type: ignore[misc]
    try:
        yield ranks
    finally:
        close_all([one.ckpt for one in ranks])


def resume(ranks: list[Replica]) -> list[everstep.Recovery]:
    return on_all(*(one.ckpt.resume for one in ranks))


def train(ranks: list[Replica], steps: int) -> None:
    on_all(*(lambda one=one: one.train(steps) for one in ranks))  # type: ignore[misc]


def until(paths: tuple[Path, ...], steps: int, **options: Any) -> list[int]:
    """A job that dies behind this step; returns the bytes that each rank has recorded."""
    with replicas(*paths, **options) as ranks:
        resume(ranks)
        train(ranks, steps)
        die(ranks)
        found = [inspect(one.ckpt).recorder for one in ranks]
        assert all(one is not None and one.stats.holes == 0 for one in found)
        return [one.stats.record_bytes for one in found if one is not None]


def folders(tmp_path: Path, shared: bool, world: int = 2) -> tuple[Path, ...]:
    return tuple(tmp_path / ("run" if shared else f"run {rank}") for rank in range(world))


def records_of(path: Path, step: int, rank: int) -> list[LogRecord]:
    ring = ChunkRing(2, 1)
    with contextlib.closing(ring):
        found = scan_log(FS, path, [1], rank=rank)
        (one,) = (segment for segment in found if segment.last == step)
        return read_segment(FS, one, ring, timeout_s=20.0)


@pytest.fixture
def two(tmp_path: Path) -> list[list[LogRecord]]:
    """Both ranks' updates of steps 2 and 3."""
    path = tmp_path / "run"
    until((path, path), 3)
    return [[records_of(path, step, rank)[0] for step in (2, 3)] for rank in range(2)]
