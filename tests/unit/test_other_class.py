"""A log that an optimizer of another class has written: what torch's own class makes of it is no
state that training had, and is not called one (I9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.errors import RecoveryError
from everstep.format.log import LogRecord, record_digest
from everstep.recover import redo
from everstep.recover.updates import update_of
from everstep.replay import exactness
from everstep.state.log import UPDATE_OBJECT
from everstep.state.objects import decode, encode
from tests.unit.logged import opened, rewrite_segment, segments_of
from tests.unit.world import forget

Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 6


class Pinned(torch.optim.Adam):
    """Keeps one element of each matrix, which no sample looks at."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    parameter[3, 3] = 0.0


class Renamed(Pinned):
    """The same, elsewhere."""


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def pinned(parameters: Any) -> torch.optim.Optimizer:
    return Pinned(parameters, 0.01)


def renamed(parameters: Any) -> torch.optim.Optimizer:
    return Renamed(parameters, 0.01)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "_DECLARED", dict(exactness._DECLARED))
    for kind in (Pinned, Renamed):
        exactness.declare(kind, elementwise=True)


class World:
    def __init__(self, make: Make, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(100, 200)
        self.optimizer = make(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        self.model(torch.randn(4, 100)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> bytes:
        return bytes(self.model.weight.detach().numpy().tobytes())


def trained(run: Path, make: Make) -> dict[int, bytes]:
    """A base of step 1, and a log behind it; the state after each step."""
    world, found = World(make), dict[int, bytes]()
    with opened(run, world, every=None) as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            world.train()
            ckpt.step()
            found[step] = world.snapshot()
        ckpt.wait()
        ckpt._recorder = None
    forget(run)
    return found


def resumed(run: Path, make: Make, step: int | None = None) -> tuple[Any, bytes]:
    world = World(make, seed=9)
    with opened(run, world) as ckpt:
        found = ckpt.resume(step=step)
        ckpt._recorder = None
        return found, world.snapshot()


@pytest.mark.parametrize(("wrote", "goes_on"), [(pinned, adam), (adam, pinned)])
def test_torchs_own_and_another(run_folder: Path, wrote: Make, goes_on: Make) -> None:
    states = trained(run_folder, wrote)
    found, values = resumed(run_folder, goes_on)
    assert (found.step, found.replayed, found.exact) == (1, 0, True)
    assert values == states[1]
    assert "Pinned" in found.skipped[0].reason
    assert "adam.Adam" in found.skipped[0].reason
    assert "the log needs one of that class" in found.skipped[0].reason
    forget(run_folder)
    with pytest.raises(RecoveryError, match="in training, and is a"):
        resumed(run_folder, goes_on, STEPS)


@pytest.mark.parametrize("make", [adam, pinned])
def test_the_same(run_folder: Path, make: Make) -> None:
    states = trained(run_folder, make)
    found, values = resumed(run_folder, make)
    assert (found.step, found.exact) == (STEPS, make is adam)
    assert values == states[STEPS]


def test_users_may_rename_their_own(run_folder: Path) -> None:
    """What comes of it is as it was, and nobody claims that."""
    states = trained(run_folder, pinned)
    found, values = resumed(run_folder, renamed)
    assert (found.step, found.exact) == (STEPS, False)
    assert values == states[STEPS]
    assert "test_other_class.Pinned in training, and is a" in found.evidence


def without_kind(record: LogRecord) -> LogRecord:
    if record.head.kind == "mark":
        return record
    about: Any = decode(record.objects[UPDATE_OBJECT])
    del about["kind"]
    objects = {UPDATE_OBJECT: encode(about)}
    found = replace(record, objects=objects, digest=record_digest(record.data, objects))
    assert update_of(record).kind
    assert not update_of(found).kind
    return found


def test_a_log_that_does_not_say_stays_readable(run_folder: Path) -> None:
    states = trained(run_folder, adam)
    for segment in segments_of(run_folder):
        rewrite_segment(run_folder, segment, lambda records: list(map(without_kind, records)))
    found, values = resumed(run_folder, adam)
    assert (found.step, found.exact) == (STEPS, True)
    assert values == states[STEPS]


def test_without_looking_it_is_called_exact(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo, "other_class", lambda update, kind: "")
    states = trained(run_folder, pinned)
    found, values = resumed(run_folder, adam)
    assert (found.step, found.exact) == (STEPS, True)
    assert values != states[STEPS]
