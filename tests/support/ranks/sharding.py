"""Jobs of several ranks in one process: every rank in turn, with a process group that talks to
nobody, saves its files of a base, or restores from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.capture.lane import LiveBody
from everstep.commit.lineage import BaseId
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.names import base_dir, marker_name, timeline_dir
from everstep.format.records import (
    Manifest,
    Marker,
    RunRecord,
    TimelineRecord,
    manifest_of,
)
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.restore.load.load import LoadedBase, Reads, load_ranks
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound
from everstep.seams import PosixFileSystem
from everstep.seams.progress import silent
from everstep.state.ranks.writers import RankInfo
from everstep.state.training_state import State
from everstep.state.values.tensors import local_tensor
from everstep.tiers.durable_files import SlotStore, ensure_dirs

__all__ = [
    "LAYOUTS",
    "Values",
    "as_rank",
    "build",
    "found",
    "load",
    "locals_of",
    "open_all",
    "save",
    "tensors_of",
    "write",
]

STEP, TIMEOUT_S = 7, 60.0
Values = dict[str, Any]


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[RankInfo]:
    """A process group of ``world`` ranks in which this process is ``rank``; its collectives do
    nothing."""
    distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield RankInfo(rank, world)
    finally:
        distributed.destroy_process_group()


class Net(nn.Module):
    """Parameters that few numbers of ranks divide, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(5)
        self.down = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())  # type: ignore[no-any-return]


def plain(seed: int) -> Net:
    """A net whose values depend on ``seed`` only."""
    net = Net()
    generator = torch.Generator().manual_seed(seed)
    for tensor in net.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return net


def _one(net: Net, world: int) -> Any:
    return net


def _ddp(net: Net, world: int) -> Any:
    return nn.parallel.DistributedDataParallel(net, init_sync=False)


def _fsdp(net: Net, world: int) -> Any:
    fully_shard(net.up)
    return fully_shard(net)


def _tp(net: Net, world: int) -> Any:
    return _parallel(net, init_device_mesh("cpu", (world,)))


def _parallel(net: Net, mesh: Any) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh, plan, src_data_rank=None)


def _hsdp(net: Net, world: int) -> Any:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    return fully_shard(net, mesh=mesh)


def _fsdp_tp(net: Net, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    _parallel(net, mesh["tensor"])
    return fully_shard(net, mesh=mesh["data"])


LAYOUTS: dict[str, Callable[[Net, int], Any]] = {
    "one": _one,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "tp": _tp,
    "hsdp": _hsdp,
    "fsdp_tp": _fsdp_tp,
    "zero": _ddp,
}
"""Ways to spread a net over a number of ranks."""


def build(layout: str, info: RankInfo, seed: int, *, stepped: bool = True) -> Values:
    """This rank's state dict, with an optimizer that has made a step, or none yet."""
    model = LAYOUTS[layout](plain(seed), info.world)
    if layout == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
        if layout == "zero":  # nobody has sent the others'
            stand_in = plain(seed)
            other = torch.optim.AdamW(stand_in.parameters(), lr=0.1)
            for parameter in stand_in.parameters():
                parameter.grad = parameter.detach() * 0.5
            other.step()
            for mine, theirs in zip(model.parameters(), stand_in.parameters(), strict=True):
                mine.data.copy_(theirs)
    other = torch.optim.SGD([torch.zeros(1)], lr=seed)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "own": {"n": seed}}


def write(run: Path, state: State, ring: ChunkRing, step: int = STEP) -> Marker:
    """Writes one rank's files of a base."""
    filesystem, info = PosixFileSystem(), state.ranks
    directory = base_dir(run, 1, step)
    ensure_dirs(filesystem, directory)
    survey = state.survey()
    shape = survey.shape
    identity = ShardIdentity("run", 1, step, step, info.rank, info.world, True)
    shards = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes)
    bodies = [
        LiveBody(s.layout, survey.tensors, survey.objects() if s is shards[-1] else {})
        for s in shards
    ]
    slots = SlotStore(filesystem, timeline_dir(run, 1) / "slots")
    writer = ShardWriter(filesystem, run, ring, slots, timeout_s=TIMEOUT_S)
    written = writer.write(BasePlan(identity, shards), bodies, silent)
    records = tuple(one.record for one in written)
    marker = Marker("run", 1, step, step, info.rank, info.world, True, records, shape.common)
    Path(directory / marker_name(info.rank)).write_bytes(marker.encode())
    return marker


def save(
    run: Path,
    layout: str,
    world: int,
    seed: int,
    ring: ChunkRing,
    *,
    change: Callable[[Values, RankInfo], None] = lambda values, info: None,
    near: Callable[[int], tuple[int, ...] | None] = lambda rank: None,
) -> BaseFound:
    """A run with one base that all ranks have written.

    Args:
        change: made to a rank's state before it is saved.
        near: the ranks that write to the same disk as one.
    """
    markers = []
    for rank in range(world):
        with as_rank(rank, world) as info:
            values = build(layout, info, seed)
            change(values, info)
            there = RankInfo(rank, world, near(rank))
            markers.append(write(run, State(values, ranks=there), ring))
    base = found(run, markers)
    assert base.manifest is not None
    assert manifest_of(dict(enumerate(markers))) == base.manifest, "parts that do not fit together"
    record = TimelineRecord("run", 1, None, 0, True, world, {}, 0.0)
    Path(run / "run.json").write_bytes(RunRecord("run").encode())
    Path(timeline_dir(run, 1) / "timeline.json").write_bytes(record.encode())
    Path(base.path / "manifest.json").write_bytes(base.manifest.encode())
    return base


def found(run: Path, markers: list[Marker], step: int = STEP) -> BaseFound:
    """The base that consists of what ranks have written."""
    directory = base_dir(run, 1, step)
    return BaseFound(BaseId(1, step), directory, "committed", Manifest(tuple(markers)), None, ())


@contextlib.contextmanager
def open_all(base: BaseFound, ranks: list[int] | None = None) -> Iterator[list[OpenBase]]:
    """The files of all ranks, or of some."""
    assert base.manifest is not None
    chosen = range(len(base.manifest.markers)) if ranks is None else ranks
    with contextlib.ExitStack() as stack:
        opened = []
        for rank in chosen:
            opened.append(OpenBase.open(PosixFileSystem(), base, rank))
            stack.callback(opened[-1].close)
        yield opened


def load(base: BaseFound, state: State, ring: ChunkRing, **given: Any) -> LoadedBase:
    """Restores a rank's state."""
    with open_all(base, given.pop("ranks", None)) as opened:
        return load_ranks(
            opened,
            state,
            Reads(ring, TIMEOUT_S),
            strict=given.pop("strict", True),
            **given,
        )


def locals_of(values: Values) -> dict[str, torch.Tensor]:
    """What a rank holds of the model and of the optimizer's state, by name, copied."""
    tensors = tensors_of(values)
    return {name: local_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


def tensors_of(values: Values) -> dict[str, torch.Tensor]:
    """The tensors of the model and of the optimizer's state, by name."""
    model, optimizer = values["model"], values["optimizer"]
    tensors = {f"model/{k.removeprefix('module.')}": v for k, v in model.state_dict().items()}
    inner = getattr(optimizer, "optim", optimizer)
    names = {id(p): k.removeprefix("module.") for k, p in model.named_parameters()}
    for parameter, state in inner.state.items():
        for key, value in state.items():
            tensors[f"optimizer/{names[id(parameter)]}/{key}"] = value
    return tensors
