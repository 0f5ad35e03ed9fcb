"""Jobs that go on with the log of another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from everstep.seams import Seams
from everstep.state.ranks.writers import RankInfo
from tests.support.ranks.relogged import train
from tests.support.ranks.replicas import Replica, replicas, trained
from tests.support.ranks.sharding import STEP, Values, build, locals_of

STEPS = 3


Job = tuple[str, int]


def trained_on(
    layout: str, info: RankInfo, optimizer: Callable[[Any], Any] | None = None
) -> Values:
    """A rank of a job that nobody disturbed."""
    values = build(layout, info, 3)
    if optimizer is not None:
        values["optimizer"] = optimizer(values["model"].parameters())
        train(values, 0)
        values["optimizer"].step()
    for step in range(STEP + 1, STEP + 1 + STEPS):
        train(values, step)
        values["optimizer"].step()
    return values


def same(values: Values, wanted: Values) -> list[str]:
    """Names of tensors that differ."""
    mine, theirs = locals_of(values), locals_of(wanted)
    assert mine.keys() == theirs.keys()
    return [name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)]


def check(training: Replica, step: int) -> None:
    assert all(map(torch.equal, training.weights, trained(step)))
    assert training.state["data"]["step"] == step


def alone(path: Path, **options: Any) -> Any:
    """A process that no others train with."""
    return replicas(path, seams=[Seams()], **options)
