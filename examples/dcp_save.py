"""Train with fully_shard, and save with torch.distributed.checkpoint to everstep's files.

torchrun --nproc-per-node=2 examples/dcp_save.py runs/dcp
torchrun --nproc-per-node=1 examples/dcp_save.py runs/dcp

The second start loads what the first has saved, with another number of ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from everstep.integrations import dcp  # instead of: import torch.distributed.checkpoint as dcp

run = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

begin = 0
saved = sorted(int(path.name.removeprefix("step-")) for path in run.glob("step-*"))
if saved:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "step": 0}
    dcp.load(state, checkpoint_id=run / f"step-{saved[-1]}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    begin = state["step"]

for step in range(begin + 1, begin + 101):
    loss = model(torch.randn(32, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": step}
        dcp.save(state, checkpoint_id=run / f"step-{step}")
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
