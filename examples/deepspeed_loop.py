"""Train a small classifier with DeepSpeed's ZeRO 2; kill it at any moment and start it again.

pip install 'everstep[deepspeed]'
torchrun --nproc-per-node=2 examples/deepspeed_loop.py runs/deepspeed
"""

import sys

import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.deepspeed import resumable

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
config = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
run, loader = resumable(engine, sys.argv[1], loader, method="logged")  # added, as run.epochs below
for epoch in run.epochs(3):
    for x, y in loader:
        scores = engine(x.to(engine.device, torch.bfloat16))
        loss = torch.nn.functional.cross_entropy(scores.float(), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
