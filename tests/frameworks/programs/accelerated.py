"""Accelerate in bfloat16 with accumulated gradients, dropout, and everstep's loader."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import everstep
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier

set_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
loader = everstep.data.ResumableLoader(
    torch.utils.data.DataLoader(
        Noisy(80), batch_size=4, shuffle=True, num_workers=int(os.environ["WORKERS"])
    ),
    seed=1,
)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
with everstep.Checkpointer(os.environ["RUN"], state, every=5, method=os.environ["METHOD"]) as ckpt:
    recovery = ckpt.resume()
    record.recovered(recovery)
    step = recovery.step
    while loader.epoch < 3:
        for ids, x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                record.step(step, [ids.tolist(), x.sum().item(), loss.item()])
                ckpt.step()
                record.kill_if_due(step)
record.final(model=model.state_dict(), optimizer=optimizer.state_dict())
