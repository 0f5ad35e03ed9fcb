"""What the tests of offline tools share: runs with a log on disk, and ways to spoil them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn
from typer.testing import CliRunner, Result

import everstep
from everstep.capture.lane import LiveBody
from everstep.cli import app
from everstep.commit.lineage import BaseId
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.log import LogRecord, RecordHead
from everstep.format.names import SLOTS_DIR, base_dir, timeline_dir
from everstep.format.writer import ChunkRing
from everstep.keeper.log.segment_queue import SegmentWriter
from everstep.keeper.persist.committer import OneRankCommit
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.options import LogOptions
from everstep.restore.load.load import Reads
from everstep.restore.offline.load import load_job
from everstep.restore.offline.memory import OfflineState
from everstep.restore.offline.rebuild import Rebuilder
from everstep.restore.offline.run_log import RunLog
from everstep.run.fence import Fence
from everstep.run.scan import scan_run
from everstep.run.segments import SegmentFound, read_segment, scan_log
from everstep.seams import PosixFileSystem, Seams
from everstep.seams.progress import silent
from everstep.tiers.durable_files import SlotStore
from tests.support.world import TIMEOUT_S, forget

__all__ = [
    "World",
    "document",
    "edit_base",
    "invoke",
    "opened",
    "rebuilder_of",
    "record",
    "rewrite_segment",
    "segments_of",
    "train",
    "write_segment",
]


class World:
    """A model with dropout, batch norm and tied weights, trained with clipping and a schedule.

    Attributes:
        gradients: what the optimizer consumed in each step, by position of the parameter.
    """

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer] | None = None, *, seed: int = 1
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6), nn.Linear(6, 2)
        )
        self.model.tied = self.model[3].weight  # type: ignore[assignment]
        make = make or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.gradients: list[list[torch.Tensor | None]] = []
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "plain": {"seen": 0},
        }

    def train(self) -> None:
        self.model(torch.randn(6, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.gradients.append(
            [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state["plain"]["seen"] += 1

    def snapshot(self) -> dict[str, bytes]:
        """Everything, as bytes."""
        found = {key: _bytes(value) for key, value in self.model.state_dict().items()}
        for number, values in enumerate(self.optimizer.state.values()):
            for key, value in values.items():
                found[f"{number}.{key}"] = _bytes(torch.as_tensor(value))
        groups = self.optimizer.param_groups
        found["groups"] = repr([{k: v for k, v in g.items() if k != "params"} for g in groups])
        found["scheduler"] = repr(self.scheduler.state_dict())
        found["plain"] = repr(self.state["plain"])
        found["rng"] = _bytes(torch.get_rng_state())
        return found


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def opened(run: Path, world: Any, **options: Any) -> Iterator[everstep.Checkpointer]:
    """A Checkpointer with a log on disk, two steps to a segment."""
    forget(run)
    log = LogOptions(to="disk", batch_steps=2, history="all")
    method = everstep.Method(base="lazy", log="dense")
    keeper = everstep.KeeperOptions(process=False)
    options = {"every": 4, "keep": 20, "method": method, "log": log, "keeper": keeper} | options
    with everstep.Checkpointer(run, world.state, **options) as ckpt:
        yield ckpt


def train(
    run: Path, world: Any, steps: int, *, at: int | None = None, **options: Any
) -> dict[int, Any]:
    """Trains from where the run is, or from step ``at``; the state after each step."""
    found = {}
    with opened(run, world, **options) as ckpt:
        step = ckpt.resume(step=at).step
        for number in range(step + 1, step + steps + 1):
            world.train()
            ckpt.step()
            found[number] = world.snapshot()
    forget(run)
    return found


@contextmanager
def rebuilder_of(run: Path) -> Iterator[Rebuilder]:
    """Over the folder as it is now."""
    filesystem = PosixFileSystem()
    ring = ChunkRing(4, 2)
    try:
        log = RunLog.of(filesystem, scan_run(filesystem, PurePath(run)))
        yield Rebuilder(filesystem, log, ring, timeout_s=TIMEOUT_S)
    finally:
        ring.close()


# --- Spoiling ---------------------------------------------------------------------------


def edit_base(
    run: Path,
    step: int,
    change: Callable[[OfflineState], None],
    timeline: int = 1,
    *,
    behind_mark: bool = False,
) -> None:
    """Writes a base anew with other contents, with digests that vouch for them."""
    filesystem = PosixFileSystem()
    inventory = scan_run(filesystem, PurePath(run))
    (base,) = [one for one in inventory.bases if one.id == BaseId(timeline, step)]
    ring = ChunkRing(4, 2)
    try:
        state, _ = load_job(filesystem, base, Reads(ring, TIMEOUT_S)).whole()
        change(state)
        shutil.rmtree(base_dir(PurePath(run), timeline, step))
        marker = state.marker
        identity = ShardIdentity(
            marker.run, timeline, step, marker.lsn, 0, 1, marker.exact, behind_mark
        )
        sizes = {name: len(data) for name, data in state.objects.items()}
        shards = plan_files(identity, list(state.entries.values()), state.aliases, sizes)
        bodies = [LiveBody(shards[0].layout, state.tensors, state.objects)]
        slots = SlotStore(filesystem, timeline_dir(PurePath(run), timeline) / SLOTS_DIR)
        writer = ShardWriter(filesystem, PurePath(run), ring, slots, timeout_s=TIMEOUT_S)
        fence = Fence(filesystem, PurePath(run), timeline)
        OneRankCommit(writer, BasePlan(identity, shards), fence).run(bodies, silent)
    finally:
        ring.close()


def segments_of(run: Path, timeline: int = 1) -> list[SegmentFound]:
    """What there is on disk, in order."""
    return scan_log(PosixFileSystem(), PurePath(run), [timeline])


def rewrite_segment(
    run: Path, segment: SegmentFound, change: Callable[[list[LogRecord]], Sequence[LogRecord]]
) -> None:
    """Writes a segment anew with other records, with digests that vouch for them; its name is
    that of the steps that it has then."""
    filesystem = PosixFileSystem()
    ring = ChunkRing(4, 2)
    try:
        records = read_segment(filesystem, segment, ring, timeout_s=TIMEOUT_S)
        changed = change(records)
        marker = segment.marker
        assert marker is not None
        shutil.rmtree(segment.path)
        write_segment(run, marker.run, changed, segment.after, ring, timeline=segment.timeline)
    finally:
        ring.close()


def write_segment(
    run: Path,
    run_id: str,
    records: Sequence[LogRecord],
    after: int,
    ring: ChunkRing,
    *,
    timeline: int = 1,
) -> None:
    """Writes a segment of steps ``(after, ...]``."""
    identity = ShardIdentity(run_id, timeline, 0, 0, 0, 1, True)
    SegmentWriter(Seams(), PurePath(run), identity, ring, timeout_s=TIMEOUT_S).write(records, after)


def record(old: LogRecord, **head: Any) -> LogRecord:
    """The record with another head."""
    new: RecordHead = dataclasses.replace(old.head, **head)
    return dataclasses.replace(old, head=new)


# --- The command ------------------------------------------------------------------------


def invoke(*args: object) -> Result:
    """Runs the command in this process; nothing but an exit may come out of it."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.output
    return result


def document(*args: object, status: int = 0) -> dict[str, Any]:
    """The one JSON document that the command prints."""
    result = invoke(*args, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


AT_ONCE = """
import os
os.nice = lambda increment: 0
os.sched_setscheduler = lambda pid, policy, param: None
"""
