"""Two ranks under DDP that consume compressed gradients, with a log of these: one rank, for a
process of its own. Every case is trained undisturbed, and then with a Checkpointer that dies behind
a step; made anew with other values, it comes back from base and log, and trains to the end.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import everstep
from everstep.compress import Compressor
from everstep.compress.ddp import DDPCompression, compressed_mean
from everstep.format.writer import ChunkRing
from everstep.run.segments import read_segment, scan_log
from everstep.seams import PosixFileSystem
from everstep.state.layout.entries import PART_OBJECT, UPDATE_OBJECT
from everstep.state.values.objects import decode
from everstep.testing import inspect
from tests.support.ranks import compressed as ranks
from tests.support.world import forget_open_runs

__all__ = ["CASES", "DIES", "QUICK", "RELAID", "STEPS", "WORLD", "main"]

WORLD, DIES, STEPS = 2, 5, 7
_HANGS_S = 60.0


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        log: of the method.
        options: of the communication hook; None: DDP's own mean.
        compressor: options of a Compressor behind the mean; None: there is none.
        scenario: of ``compressed.py``: which layers are used, and what is not a number.
        batches: that are accumulated for a step.
        clips: gradients are clipped behind the exchange.
        scaler: ``"unscaled"`` before the step, or ``"fused"``: by the kernel.
        spoils: adds this to a gradient behind the exchange.
        frozen: a parameter is not trained.
        several: a second optimizer has some of the parameters.
        zero: ranks share out the optimizer's state (ZeRO).
        shards: FSDP2 instead of DDP.
    """

    log: str = "topk"
    options: dict[str, Any] | None = field(default_factory=dict)
    compressor: dict[str, Any] | None = None
    scenario: str = "topk"
    batches: int = 1
    clips: bool = False
    scaler: str = ""
    spoils: float = 0.0
    frozen: bool = False
    several: bool = False
    zero: bool = False
    shards: bool = False


CASES = {
    "plain": Case(),
    "no error feedback": Case(options={"error_feedback": False}),
    "threshold": Case(options={"kind": "threshold"}, scenario="threshold"),
    "bfloat16": Case(scenario="bfloat16"),
    "clipped": Case(clips=True),
    "accumulated": Case(batches=3, clips=True),
    "unused": Case(scenario="unused"),
    "used by one rank first": Case(scenario="late"),
    "frozen": Case(frozen=True),
    "two optimizers": Case(several=True),
    "scaler": Case(scaler="unscaled", clips=True, scenario="strange"),
    "fused scaler": Case(scaler="fused", scenario="strange"),
    "changed behind the exchange": Case(spoils=1e-3),
    "a zero with a sign behind the exchange": Case(spoils=-0.0),
    "a dense log": Case(log="dense"),
    "behind the mean": Case(options=None, compressor={}),
    "behind the mean, no error feedback": Case(options=None, compressor={"error_feedback": False}),
    "behind the mean, int8": Case(options=None, compressor={"kind": "int8"}, batches=2),
    "behind the mean, scaler": Case(
        options=None, compressor={}, scaler="unscaled", scenario="strange", clips=True
    ),
    "behind both": Case(compressor={"kind": "int8"}),
    "ZeRO": Case(zero=True, clips=True),
    "ZeRO, behind the mean": Case(options=None, compressor={}, zero=True),
    "shards": Case(options=None, compressor={}, shards=True, clips=True),
    "shards, int8": Case(options=None, compressor={"kind": "int8"}, shards=True),
    "shards, lossy": Case(log="adaptive", options=None, shards=True),
    "ZeRO, lossy": Case(log="adaptive", options=None, zero=True),
    "lossy": Case(log="adaptive", options=None),
}


RELAID = ("plain", "scaler", "behind the mean", "shards", "shards, lossy", "lossy")
"""Cases that another number of ranks goes on from."""

QUICK = (
    *RELAID,
    "no error feedback",
    "changed behind the exchange",
)
"""Cases that are played often."""


class Training:
    """One rank of a job.

    Args:
        seed: of the values that it begins with.
    """

    def __init__(self, case: Case, rank: int, seed: int = 7) -> None:
        self.case, self.rank, self.at = case, rank, 0
        net = ranks.net_of(case.scenario)
        if seed != 7:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(seed)
        if case.frozen:
            net.conv.weight.requires_grad_(False)
        self.net = net
        if case.shards:
            net.conv.weight.data = net.conv.weight.data.contiguous()
            self.ddp: Any = net
            if dist.get_world_size() > 1:  # with one rank no log takes what would be DTensors
                fully_shard(net.wide)
                fully_shard(net)
        else:
            unused = case.scenario in ("unused", "late")
            self.ddp = nn.parallel.DistributedDataParallel(
                net, bucket_cap_mb=0.02, find_unused_parameters=unused
            )
        taught = [p for p in net.parameters() if p.requires_grad]
        make: Callable[..., Any] = torch.optim.AdamW
        fused = case.scaler == "fused"
        first, second = (taught[:2], taught[2:]) if case.several else (taught, [])
        self.optimizers = [make(first, lr=1e-2, fused=fused)]
        if case.zero:
            self.optimizers = [ZeroRedundancyOptimizer(first, make, lr=1e-2)]
        if second:
            self.optimizers.append(torch.optim.SGD(second, lr=1e-2, momentum=0.9))
        enabled = bool(case.scaler)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**10, growth_interval=2, enabled=enabled
        )
        self.state: dict[str, Any] = {"model": self.ddp, "data": {"at": 0}}
        for number, optimizer in enumerate(self.optimizers):
            self.state[f"optimizer {number}"] = optimizer
        self.hook: DDPCompression | None = None
        if case.options is not None:
            about = {"ratio": ranks.RATIO, "dense_below": ranks.DENSE_BELOW, **case.options}
            scale = {"loss_scale": self.scaler.get_scale} if enabled else {}
            self.hook = self.state["exchange"] = DDPCompression(self.ddp, **about, **scale)
            self.ddp.register_comm_hook(self.hook, compressed_mean)
        if case.compressor is not None:
            about = {"ratio": ranks.RATIO, "dense_below": ranks.DENSE_BELOW, **case.compressor}
            for number, optimizer in enumerate(self.optimizers):
                self.state[f"compressor {number}"] = Compressor(optimizer, **about)
        if enabled:
            self.state["scaler"] = self.scaler

    def step(self) -> None:
        case, at = self.case, self.state["data"]["at"]
        for batch in range(case.batches):
            last = batch == case.batches - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                which = at + 100 * batch
                loss = ranks.loss_of(self.ddp, self.net, case.scenario, self.rank, which)
                self.scaler.scale(loss).backward()
        if case.scaler == "unscaled":
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if case.clips:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.01)
        if case.spoils or str(case.spoils) == "-0.0":
            assert self.net.wide.weight.grad is not None
            flat = self.net.wide.weight.grad.view(-1)
            flat[:100] = torch.where(flat[:100] == 0, case.spoils, flat[:100])
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.state["data"]["at"] = at + 1

    def residuals(self) -> dict[str, Any]:
        """What error feedback has kept on this rank."""
        found: dict[str, Any] = {}
        for key, value in self.state.items():
            if isinstance(value, (DDPCompression, Compressor)):
                held = value.state_dict()
                found |= {f"{key} {name}": r for name, r in held["residuals"].items()}
                found[f"{key} scale"] = torch.tensor(held.get("loss_scale", 0.0))
        return found

    def digest(self, *, shared: bool = False) -> str:
        """Of all that training goes on from; of what all ranks have in common."""
        found: dict[str, Any] = {}
        for name, parameter in self.net.named_parameters():
            found[name] = parameter
            for number, optimizer in enumerate(self.optimizers):
                held = getattr(optimizer, "optim", optimizer).state.get(parameter, {})
                if shared and self.case.zero:
                    held = {}
                found |= {f"{number} {name} {key}": value for key, value in held.items()}
        if not shared:
            found |= self.residuals()
        found["scale"] = torch.tensor(self.scaler.get_scale())
        found["at"] = torch.tensor(self.state["data"]["at"])
        return _digest_of(found)


def _digest_of(tensors: dict[str, Any]) -> str:
    """Of whole tensors, where ranks have parts of them: all ranks call it."""
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return ranks.digest_of(whole)


@contextlib.contextmanager
def _opened(run: Path, training: Training) -> Iterator[everstep.Checkpointer]:
    ckpt = everstep.Checkpointer(
        run,
        training.state,
        method=everstep.Method(base="lazy", log=training.case.log),
        every=100,
        log=everstep.LogOptions(to="disk", batch_steps=1),
        keeper=everstep.KeeperOptions(process=False),
        progress_timeout_s=_HANGS_S,
    )
    forget_open_runs()
    yield ckpt
    ckpt.wait(_HANGS_S)  # and dies: no base at the end
    recorder, keeper = inspect(ckpt).recorder, inspect(ckpt).keepers.current
    assert recorder is not None
    recorder.base_step = 1 << 40
    keeper.records.settle(_HANGS_S)  # type: ignore[union-attr]
    ckpt.close()


def _play(case: Case, run: Path, rank: int) -> dict[str, Any]:
    undisturbed = Training(case, rank)
    wanted = {}
    for step in range(1, STEPS + 1):
        undisturbed.step()
        wanted[step] = undisturbed.digest()
    with warnings.catch_warnings(record=True), _opened(run, first := Training(case, rank)) as ckpt:
        ckpt.resume()
        for step in range(1, DIES + 1):
            first.step()
            ckpt.step()
            assert first.digest() == wanted[step], step
        assert inspect(ckpt).recorder is not None
        holes, before = inspect(ckpt).recorder.stats.holes, first.digest()
    del first
    with _opened(run, again := Training(case, rank, seed=9)) as ckpt:
        recovery = ckpt.resume()
        resumed = again.digest()
        shared = again.digest(shared=True)
        steps = []
        for step in range(recovery.step + 1, STEPS + 1):
            again.step()
            ckpt.step()
            steps.append(again.digest() == wanted[step])
    return {
        "step": recovery.step,
        "replayed": recovery.replayed,
        "exact": recovery.exact,
        "same": resumed == wanted[DIES] == before,
        "goes on": all(steps) and len(steps) == STEPS - DIES,
        "holes": holes,
        "shared": [shared, again.digest(shared=True)],
        "residuals": _digest_of(again.residuals()),
        "logged": _logged(run, rank),
    }


def _go_on(case: Case, run: Path, rank: int) -> dict[str, Any]:
    """Another number of ranks than have trained takes over."""
    with _opened(run, training := Training(case, rank, seed=9)) as ckpt:
        recovery = ckpt.resume()
        shared, names = training.digest(shared=True), list(training.residuals())
        residuals = _digest_of(training.residuals())
        training.step()
        ckpt.step()
    return {
        "step": recovery.step,
        "replayed": recovery.replayed,
        "exact": recovery.exact,
        "notes": recovery.notes,
        "shared": [shared, training.digest(shared=True)],
        "residuals": residuals,
        "names": names,
    }


def _logged(run: Path, rank: int) -> dict[str, list[str]]:
    """Which gradients a rank's part of the last step before it died has, and how."""
    ring = ChunkRing(2, 1)
    with contextlib.closing(ring):
        filesystem = PosixFileSystem()
        found = scan_log(filesystem, run, [1], rank=rank)
        (one,) = (segment for segment in found if segment.last == DIES)
        records = read_segment(filesystem, one, ring, timeout_s=_HANGS_S)
    compressed, dense = [], []
    for record in records:
        if name := next((n for n in (PART_OBJECT, UPDATE_OBJECT) if n in record.objects), ""):
            about: Any = decode(record.objects[name])
            compressed += sorted(about.get("compressed", ()))
            names = (place.entry.name for place in record.layout.placed)
            dense += sorted(n.removeprefix("gradient/") for n in names if "gradient/" in n)
    return {"compressed": compressed, "dense": dense}


def main(store: str, rank: int, world: int, folder: str, names: str) -> None:
    """Plays some cases as one of the ranks, or takes over those of another number of ranks, and
    says what it saw: one JSON document."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    found = {}
    for name in json.loads(names):
        play = _play if world == WORLD else _go_on
        found[name] = play(CASES[name], Path(folder) / name, rank)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
