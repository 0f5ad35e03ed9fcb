"""Lightning's own checkpoints through everstep, from which it resumes itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.integrations.lightning import EverstepCheckpointIO
from tests.frameworks import record


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, index):
        record.step(self.global_step, outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
module = Module()
data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
folder = Path(os.environ["RUN"])
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=1, save_last=True)],
    plugins=[EverstepCheckpointIO()],
)
trainer.fit(module, StatefulDataLoader(data, batch_size=2), ckpt_path="last")
record.final(model=module.state_dict(), optimizer=trainer.optimizers[0].state_dict())
