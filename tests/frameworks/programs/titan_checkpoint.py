"""torchtitan's checkpoint component on everstep's files: sharded state, kept steps, two modes."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.components.checkpointer.dcp as titan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from everstep.integrations import dcp
from tests.frameworks import record
from tests.frameworks.samples import classifier

titan.dcp = dcp  # what docs/integrations/dcp.md says

STEPS = 11
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """As torchtitan's container has it: a flat state dict."""

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(model, optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=FLAT)


class Data:
    """Position of each rank, opaque to DCP as torchtitan's loader has it."""

    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{rank}": pickle.dumps(self.position), "world_size": world}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = pickle.loads(state[f"dp_rank_{rank}"])


class TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


dist.init_process_group("cpu:gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = classifier()
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
data, train = Data(), TrainState()
manager = titan.CheckpointManager(
    titan.CheckpointManager.Config(
        enable=True,
        interval=2,
        keep_latest_k=2,
        last_save_model_only=False,
        async_mode=os.environ["MODE"],
    ),
    dataloader=data,
    model_parts=[model],
    optimizers=Optimizers(),
    lr_schedulers=scheduler,
    states={"train_state": train},
    sd_adapter=None,
    base_folder=os.environ["RUN"],
)
manager.load(step=-1)
if rank == 0:
    record._write({"recovery": {"step": train.step}})
for step in range(train.step + 1, STEPS + 1):
    torch.manual_seed(1000 * step + rank)  # data and dropout of this step
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    data.position += 8
    train.step = step
    manager.save(step, last_step=step == STEPS)
    if rank == 0:
        record.step(step, [loss.item(), data.position])
        record.kill_if_due(step)
manager.maybe_wait_for_saving()
manager.close()
whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
moments = {
    name: one.full_tensor() if hasattr(one, "full_tensor") else one
    for name, one in Optimizers().state_dict().items()
}
if rank == 0:
    record.final(model=whole, optimizer=moments, scheduler=scheduler.state_dict())
dist.destroy_process_group()
