"""Ranks over gloo that save and load by ``torch.distributed.checkpoint`` on everstep's files.

A process is one rank of one start of a job (:func:`main`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from everstep.integrations import dcp
from tests.support.trainers import Trainer, finish_trainer, start_trainer

__all__ = ["Job", "main"]

_HANGS_S = 120.0


class Job:
    """Starts of jobs whose ranks save to a folder and load from it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0

    def start(
        self, action: str, layout: str, world: int, name: str, seed: int, *env: dict[str, str]
    ) -> list[Trainer]:
        """Starts ranks that ``save`` or ``load`` the checkpoint of a name."""
        self._starts += 1
        arguments = {
            "action": action,
            "layout": layout,
            "folder": str(self._folder / name),
            "meet": str(self._folder / f"meet-{self._starts}"),
            "world": world,
            "seed": seed,
        }
        return [
            start_trainer(
                "from tests.support.ranks.dcp import main; main()",
                json.dumps({**arguments, "rank": rank}),
                **(env[rank] if env else {}),
            )
            for rank in range(world)
        ]

    def run(self, action: str, layout: str, world: int, name: str, seed: int = 0) -> dict[str, str]:
        """Digests of the whole state, which is the same on all ranks."""
        ranks = self.start(action, layout, world, name, seed)
        ended = [finish_trainer(one, _HANGS_S) for one in ranks]
        assert [status for status, _, _ in ended] == [0] * world, ended
        found = [json.loads(out) for _, out, _ in ended]
        assert all(one == found[0] for one in found)
        return found[0]  # type: ignore[no-any-return]


def main() -> None:
    """One rank: trains from a seed and saves, or loads into what another seed has made."""
    warnings.simplefilter("ignore")
    about = json.loads(sys.argv[1])
    rank, world = about["rank"], about["world"]
    distributed.init_process_group(
        "gloo", init_method=f"file://{about['meet']}", rank=rank, world_size=world
    )
    model, optimizer = _trained(about["layout"], world, about["seed"])
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optim": moments, "step": about["seed"]}
    if about["action"] == "load":
        dcp.load(state, checkpoint_id=about["folder"])
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        state["model"], state["optim"] = get_state_dict(model, optimizer)
    else:
        saved = {**state, "loader": {f"dp_rank_{rank}": [rank]}}
        if about["action"] == "async":
            dcp.async_save(saved, checkpoint_id=about["folder"]).result(_HANGS_S)  # type: ignore[union-attr]
        else:
            dcp.save(saved, checkpoint_id=about["folder"])
        loader = {"loader": {f"dp_rank_{one}": None for one in range(world)}}
        dcp.load(loader, checkpoint_id=about["folder"])
        assert loader["loader"] == {f"dp_rank_{one}": [one] for one in range(world)}
    print(json.dumps(_digests(state)), flush=True)
    distributed.barrier()
    # torch may wait forever in the destructor of DDP, for a thread that waits for the GIL.
    os._exit(0)


def _trained(layout: str, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    # Shards of several sizes; of the last layer one rank has the only row.
    model: nn.Module = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":  # and FSDP over it
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _digests(value: Any, path: str = "") -> dict[str, str]:
    """Digests of the leaves of nested state, with tensors put together from all ranks."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        data = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        form = f"{whole.dtype} {list(whole.shape)} "
        return {path: hashlib.sha256(form.encode() + data).hexdigest()}
    else:
        return {path: repr(value)}
    found: dict[str, str] = {}
    for key, item in items:
        found |= _digests(item, f"{path}/{key}")
    return found
