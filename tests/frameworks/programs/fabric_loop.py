"""A loop over objects that Fabric has set up, with the lines of everstep; DDP under torchrun."""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader

from everstep.integrations.lightning import resumable
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier

ranks = int(os.environ.get("WORLD_SIZE", "1"))
seed_everything(0, verbose=False)
fabric = Fabric(
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    precision="bf16-mixed",
)
fabric.launch()
net = classifier()
if ranks > 1:  # has state that differs from rank to rank
    net.append(torch.nn.BatchNorm1d(4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
workers = int(os.environ.get("WORKERS", "0"))
model, optimizer = fabric.setup(net, optimizer)
loader, held_out = fabric.setup_dataloaders(
    DataLoader(Noisy(80), batch_size=4, shuffle=True, num_workers=workers),
    DataLoader(Noisy(16), batch_size=8),
)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "samples": 0}
run = resumable(
    fabric, os.environ["RUN"], state, held_out, loader, every=4, method=os.environ["METHOD"]
)
record.recovered(run.recovery)
step = run.recovery.step
saw: list[float] = []
for _ in run.epochs(3):
    for number, (ids, x, y) in enumerate(loader):
        if not saw:  # the step before is marked
            record.kill_if_due(step)
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
        record.kill_if_due(step + 0.5)
        saw += [*ids.tolist(), loss.item()]
        state["samples"] += len(ids)
        if accumulates:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        record.step(step, saw.copy())
        saw.clear()
        if step % 8 == 0:
            with torch.no_grad():
                for _, x, y in held_out:
                    torch.nn.functional.cross_entropy(model(x), y)
    scheduler.step()  # after the inner loop
record.final(
    model=model.state_dict(),
    optimizer=optimizer.state_dict(),
    scheduler=scheduler.state_dict(),
    samples=state["samples"],
)
