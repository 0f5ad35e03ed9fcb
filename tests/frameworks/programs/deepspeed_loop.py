"""A loop over a DeepSpeed engine, with the lines of everstep; several ranks under torchrun."""

from __future__ import annotations

import os

import deepspeed
import torch
from torch.utils.data import DataLoader

from everstep.integrations.deepspeed import resumable
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier

stage = int(os.environ["STAGE"])
dtype = getattr(torch, os.environ.get("DTYPE", "float32"))
torch.manual_seed(0)
if "RANK" not in os.environ:  # without torchrun
    os.environ["LOCAL_RANK"] = "0"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
net = classifier().append(torch.nn.BatchNorm1d(4, affine=False))
net[0].bias.requires_grad_(False)
decayed = [p for p in net.parameters() if p.ndim > 1]
others = [p for p in net.parameters() if p.ndim == 1 and p.requires_grad]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], 1e-2)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": dtype is torch.bfloat16},
    "fp16": {"enabled": dtype is torch.float16, "initial_scale_power": 24},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}},
    "steps_per_print": 10**6,
}
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
state = {"samples": 0}
loader = DataLoader(Noisy(80), batch_size=4, shuffle=True)
run, loader = resumable(
    engine, os.environ["RUN"], loader, state=state, every=4, method=os.environ["METHOD"]
)
record.recovered(run.recovery)
step = run.recovery.step
saw: list[float] = []
for _ in run.epochs(3):
    for ids, x, y in loader:
        if not saw:  # the step before is marked
            record.kill_if_due(step)
        loss = torch.nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        record.kill_if_due(step + 0.5)
        saw += [*ids.tolist(), loss.item()]
        state["samples"] += len(ids)
        skipped = engine.skipped_steps
        ends = engine.is_gradient_accumulation_boundary()
        engine.step()
        if not ends or engine.skipped_steps > skipped:  # float16: the scale was too large
            continue
        step += 1
        record.step(step, saw.copy())
        saw.clear()
with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
    record.final(
        model=net.state_dict(),
        optimizer=list(optimizer.state.values()),
        rates=[group["lr"] for group in engine.optimizer.param_groups],
        counters=[engine.global_steps, engine.global_samples, engine.skipped_steps],
        scale=getattr(engine.optimizer, "cur_scale", 1),
        samples=state["samples"],
    )
