"""Accelerate with the lines of everstep: accumulated gradients, evaluation, dropout."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch.utils.data import DataLoader

from everstep.integrations.accelerate import resumable
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier

set_seed(0)
shards = os.environ.get("FSDP") == "2"
accelerator = Accelerator(
    cpu=True,
    mixed_precision="no" if shards else "bf16",
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
)
if shards:
    # Emulated: Accelerate ignores a plugin of FSDP on the CPU. All of the rest is its own.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
    )
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
workers = int(os.environ.get("WORKERS", "0"))
loader = DataLoader(Noisy(84), batch_size=4, shuffle=True, num_workers=workers)
held_out = DataLoader(Noisy(16), batch_size=8)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(
    model, optimizer, loader, held_out, scheduler
)
run = resumable(accelerator, os.environ["RUN"], every=4, method=os.environ["METHOD"])
record.recovered(run.recovery)
step = run.recovery.step
saw: list[float] = []
for _ in range(run.epoch, 3):
    for ids, x, y in loader:
        if not saw:  # the step before is marked
            record.kill_if_due(step)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            record.kill_if_due(step + 0.5)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        saw += [*ids.tolist(), loss.item()]
        if accelerator.sync_gradients:
            step += 1
            record.step(step, saw.copy())
            saw.clear()
            if step % 8 == 0:
                with torch.no_grad():
                    for _, x, y in held_out:
                        torch.nn.functional.cross_entropy(model(x), y)
    scheduler.step()  # after the inner loop
accelerator.end_training()
record.final(
    model=accelerator.unwrap_model(model).state_dict(),
    optimizer=optimizer.state_dict(),
    scheduler=scheduler.state_dict(),
)
