"""Train a small classifier with Accelerate; kill it at any moment and start it again.

pip install 'everstep[accelerate]'
python examples/accelerate_loop.py runs/accelerate
torchrun --nproc-per-node=2 examples/accelerate_loop.py runs/accelerate-2
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.accelerate import resumable

set_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
run = resumable(accelerator, sys.argv[1], method="logged")  # added, as run.epoch below
for epoch in range(run.epoch, 3):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
accelerator.end_training()
