"""Train a small classifier with Lightning's Trainer; kill it at any moment and start it again.

pip install 'everstep[lightning]'
python examples/lightning_trainer.py runs/lightning
"""

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from everstep.integrations.lightning import EverstepCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
trainer = lightning.Trainer(
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    callbacks=[EverstepCallback(sys.argv[1], method="logged")],  # the line to add
)
trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
