"""What the tests of the replica share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import everstep
from everstep.commit.lineage import BaseId
from everstep.format.writer import ChunkRing
from everstep.restore.offline.offline import OfflineState
from everstep.restore.offline.offline_base import load_offline
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from tests.support.serving import Bench
from tests.support.world import TIMEOUT_S, forget

__all__ = ["base_of", "opened", "run_steps", "steps_on_disk", "taken_here", "until", "until_at"]


def opened(run: Path, world: Any, **options: Any) -> everstep.Checkpointer:
    """A Checkpointer whose keeper has a replica; it takes its first base in the first step."""
    forget(run)
    options = {"every": None, "keep": 50, "method": "lowdiff_plus"} | options
    return everstep.Checkpointer(run, world.state, **options)


def run_steps(ckpt: everstep.Checkpointer, world: Any, count: int) -> dict[int, Any]:
    """Trains; the state after each step."""
    found = {}
    for _ in range(count):
        world.train()
        ckpt.step()
        found[ckpt.stats().step] = world.snapshot()
    return found


def until(there: Callable[[], bool], what: str = "it", *, timeout_s: float = TIMEOUT_S) -> None:
    """Waits for something that another thread does."""
    deadline_s = time.monotonic() + timeout_s
    tick = iter(_ticks())
    while not there():
        assert time.monotonic() < deadline_s, f"{what} never came"
        next(tick)


def _ticks() -> Iterator[None]:
    import threading

    never = threading.Event()
    while True:
        never.wait(0.005)
        yield


def until_at(bench: Bench, step: int) -> None:
    """Waits until the replica has a step."""
    until(lambda: bench.server._duties.replicas.step == step, f"step {step}")


def taken_here(ckpt: everstep.Checkpointer) -> int:
    """How many bases the training process has captured itself."""
    return ckpt._saver._captures


def steps_on_disk(run: Path, timeline: int = 1) -> list[int]:
    """Of the bases that are committed."""
    bases = scan_run(PosixFileSystem(), PurePath(run)).bases
    there = [base.id for base in bases if base.status == "committed"]
    return sorted(key.step for key in there if key.timeline == timeline)


@contextmanager
def base_of(run: Path, step: int, timeline: int = 1) -> Iterator[OfflineState]:
    """A base on disk, read as a whole."""
    filesystem = PosixFileSystem()
    inventory = scan_run(filesystem, PurePath(run))
    (base,) = [one for one in inventory.bases if one.id == BaseId(timeline, step)]
    ring = ChunkRing(4, 2)
    try:
        yield load_offline(filesystem, base, inventory.run, ring, timeout_s=TIMEOUT_S)
    finally:
        ring.close()
