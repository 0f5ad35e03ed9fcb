"""Several ranks in one process with a log each: stepped, killed, resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep import LogOptions
from everstep.testing import inspect
from tests.support.ranks.together import resume, train, trained, trainings

ON_DISK: dict[str, Any] = {
    "method": "logged",
    "every": 4,
    "log": LogOptions(to="disk", batch_steps=1),
}


def die(ranks: Sequence[Any]) -> None:
    """Nothing more is written than what is under way: no base at the end."""
    for one in ranks:
        one.ckpt.wait(20)
        recorder, keeper = inspect(one.ckpt).recorder, inspect(one.ckpt).keepers.current
        assert recorder is not None
        recorder.base_step = 1 << 40
        assert keeper is not None
        keeper.records.settle(20.0)  # type: ignore[attr-defined]


def until(paths: tuple[Path, Path], steps: int, **options: Any) -> None:
    """A job that dies behind this step."""
    with trainings(*paths, **{**ON_DISK, **options}) as ranks:
        resume(ranks)
        train(ranks, steps)
        die(ranks)


def segment(path: Path, step: int, timeline: int = 1) -> Path:
    return path / f"timeline-{timeline:05d}" / "log" / f"{step - 1:012d}-{step:012d}"


def resumed(
    paths: tuple[Path, Path], step: int, *, replayed: int, asked: int | None = None
) -> list[everstep.Recovery]:
    """What a job of two ranks comes back to, and that it is what training had."""
    with trainings(*paths, **ON_DISK) as ranks:
        found = resume(ranks, asked)
        for rank, one in enumerate(found):
            assert (one.step, one.replayed, one.exact) == (step, replayed, True), one
            assert torch.equal(ranks[rank].weight, trained(rank, step))
        train(ranks, 2)
        for rank, training in enumerate(ranks):
            assert torch.equal(training.weight, trained(rank, step + 2))
        die(ranks)
        return found
