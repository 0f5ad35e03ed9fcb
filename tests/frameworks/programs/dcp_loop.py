"""A plain loop that saves every second step with torch.distributed.checkpoint under one name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from everstep.integrations import dcp
from tests.frameworks import record
from tests.frameworks.samples import classifier

if os.environ.get("WORLD_SIZE", "1") != "1":
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = Path(os.environ["RUN"])
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": 0}
if run.exists():
    dcp.load(state, checkpoint_id=run)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
record.recovered(SimpleNamespace(step=state["step"], exact=True, notes=()))
for step in range(state["step"] + 1, 13):
    torch.manual_seed(step)
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    if torch.distributed.is_initialized():
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    record.step(step, loss.item())
    if step % 2 == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=run)
record.final(model=model.state_dict(), optimizer=optimizer.state_dict())
