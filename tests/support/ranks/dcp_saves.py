"""State dicts that ``torch.distributed.checkpoint`` saves, and ranks of a save in one process."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict

from everstep.integrations import dcp
from everstep.seams import Seams

__all__ = ["SlicePlanner", "blank", "save_as_ranks", "trained_state"]


def trained_state(seed: int = 1, width: int = 6) -> dict[str, Any]:
    """A model, its optimizer after two steps, and plain data of many types."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optim": moments,
        "loader": {"dp_rank_0": b"\x80opaque", "epoch": seed, "order": np.arange(seed + 3)},
        "train": {"step": seed, "loss": 0.1 * seed, "tokens": 2**70 + seed, "name": "a/b~c"},
        "rng": torch.get_rng_state(),
    }


def blank(value: Any) -> Any:
    """The same nested state with nothing of its values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        return [blank(item) for item in value]
    return None


class SlicePlanner(DefaultSavePlanner):
    """Planner of one of several ranks, each of which holds some rows of every tensor."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [self._sliced(item) for item in plan.items]
        return dataclasses.replace(plan, items=[item for item in items if item is not None])

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(MetadataIndex(index.fqn))
        if isinstance(found, torch.Tensor) and found.dim():
            found = found[slice(*self._rows(found.shape[0]))]
        return found

    def _rows(self, count: int) -> tuple[int, int]:
        each = -(-count // self._world)
        return min(count, self._rank * each), min(count, (self._rank + 1) * each)

    def _sliced(self, item: WriteItem) -> WriteItem | None:
        data = item.tensor_data
        if data is None or not data.size:
            return item
        begin, end = self._rows(data.size[0])
        rest = [0] * (len(data.size) - 1)
        chunk = ChunkStorageMetadata(
            offsets=torch.Size([begin, *rest]), sizes=torch.Size([end - begin, *data.size[1:]])
        )
        return dataclasses.replace(
            item,
            index=MetadataIndex(item.index.fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=dataclasses.replace(data, chunk=chunk),
        )


def save_as_ranks(
    state: dict[str, Any], folder: PurePath, world: int, seams: Seams | None = None
) -> None:
    """Save as so many ranks would, by the calls that torch makes on each of them."""
    writers = [dcp.EverstepStorageWriter(seams=seams) for _ in range(world)]
    planners = [SlicePlanner(rank, world) for rank in range(world)]
    plans = []
    for rank, (writer, planner) in enumerate(zip(writers, planners, strict=True)):
        writer.reset(folder)
        planner.set_up_planner(state, None, rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    planned, metadata = planners[0].create_global_plan(plans)
    planned = writers[0].prepare_global_plan(planned)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, planner, plan in zip(writers, planners, planned, strict=True)
    ]
    writers[0].finish(metadata, results)
