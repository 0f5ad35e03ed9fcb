"""Train a small classifier with Lightning Fabric; kill it at any moment and start it again.

pip install 'everstep[lightning]'
python examples/fabric_loop.py runs/fabric
torchrun --nproc-per-node=2 examples/fabric_loop.py runs/fabric-2
"""

import os
import sys

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.lightning import resumable

seed_everything(0)
fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")))
fabric.launch()
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))
state = {"model": model, "optimizer": optimizer}
run = resumable(fabric, sys.argv[1], state, loader, method="logged")  # added, as run.epochs below
for epoch in run.epochs(3):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.print(f"epoch {epoch}: loss {loss.item():.3f}")
