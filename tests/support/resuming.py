"""Shards and steps of a run that is resumed and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from everstep import Recovery
from tests.support.world import base_folder, opened

BIG = 3000


def train_on(run: Path, *, until: int, value: int = 0, **how: Any) -> Recovery:
    """Resumes as ``how`` says and takes a base of every step up to ``until``; a base's value is
    ``value`` plus its step."""
    state = {"n": -1, "t": torch.zeros(BIG)}
    with opened(run, state, keep=20) as ckpt:
        recovery = ckpt.resume(**how)
        for step in range(recovery.step + 1, until + 1):
            state["n"] = value + step
            state["t"].fill_(value + step)  # type: ignore[attr-defined]
            ckpt.step()
            ckpt.save()
    return recovery


def look(run: Path, **how: Any) -> tuple[Recovery, int]:
    """Resumes and returns what came back."""
    state: dict[str, Any] = {"n": -1, "t": torch.full((BIG,), -1.0)}
    with opened(run, state, keep=20) as ckpt:
        recovery = ckpt.resume(**how)
    assert (state["t"] == state["n"]).all(), "a mixture of two bases"
    return recovery, state["n"]


def shard(run: Path, step: int, timeline: int = 1) -> Path:
    return base_folder(run, step, timeline) / "rank-00000.safetensors"
