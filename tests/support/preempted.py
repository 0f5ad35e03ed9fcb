"""Trainer processes that are sent signals which announce the end of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.world import opened

PRELUDE = """
import os, signal, sys, threading
import torch
import everstep
from everstep.options import Preemption
run = sys.argv[1]
state = {"n": [0], "t": torch.zeros(50_000)}
def advance(ckpt):
    state["n"][0] += 1
    state["t"] += 1
    ckpt.step()
"""


def saved_at(run: Path) -> int:
    """The step that a next process would go on from; its values are those of that step."""
    live: dict[str, Any] = {"n": None, "t": None}
    with opened(run, live) as ckpt:
        step = ckpt.resume().step
    if step:
        assert live["n"] == [step]
        assert (live["t"] == step).all()
    return step
