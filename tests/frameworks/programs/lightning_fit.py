"""Lightning's Trainer with a callback, its fit loop and a stateful loader in the state."""

from __future__ import annotations

import logging
import os

import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()

    def training_step(self, batch, index):
        ids, x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.saw = [ids.tolist(), loss.item()]
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Save(lightning.Callback):
    """Resumes where all objects exist, and marks each step.

    The last step of an epoch is marked after the fit loop has counted the epoch.
    """

    def on_fit_start(self, trainer, module):
        state = {
            "model": module,
            "optimizer": trainer.optimizers[0],
            "scheduler": trainer.lr_scheduler_configs[0].scheduler,
            "loop": trainer.fit_loop,
        }
        self.ckpt = everstep.Checkpointer(
            os.environ["RUN"], state, every=5, method=os.environ["METHOD"]
        )
        record.recovered(self.ckpt.resume())

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        record.step(trainer.global_step, module.saw)
        if not trainer.is_last_batch:
            self.ckpt.step()
            record.kill_if_due(trainer.global_step)

    def on_train_epoch_end(self, trainer, module):
        self.ckpt.step()
        record.kill_if_due(trainer.global_step)

    def on_train_end(self, trainer, module):
        self.ckpt.close()


lightning.seed_everything(0, verbose=False)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
module = Module()
loader = StatefulDataLoader(Noisy(80), batch_size=4, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Save()],
)
trainer.fit(module, loader)
record.final(model=module.state_dict(), optimizer=trainer.optimizers[0].state_dict())
