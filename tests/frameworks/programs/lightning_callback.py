"""Lightning's Trainer with one callback of everstep, and a plain loader; DDP under torchrun."""

from __future__ import annotations

import logging
import os

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from everstep.integrations.lightning import EverstepCallback
from tests.frameworks import record
from tests.frameworks.samples import Noisy, classifier

MANUAL = os.environ.get("MANUAL") == "1"
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = classifier()
        if RANKS > 1:  # has state that differs from rank to rank
            self.net.append(torch.nn.BatchNorm1d(4))
        self.automatic_optimization = not MANUAL
        self.saw: list[float] = []

    def training_step(self, batch, index):
        ids, x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        record.kill_if_due(self.trainer.global_step + 0.5)
        self.saw += [*ids.tolist(), loss.item()]
        if MANUAL:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            for scheduler in self.lr_schedulers():
                scheduler.step()
        return loss

    def validation_step(self, batch, index):
        _, x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        if MANUAL:
            some = [
                torch.optim.AdamW(self.net[0].parameters(), lr=1e-2),
                torch.optim.SGD(self.net[3].parameters(), lr=1e-2, momentum=0.9),
            ]
            return some, [torch.optim.lr_scheduler.StepLR(one, 7) for one in some]
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Record(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step % (2 if MANUAL else 1) == 0 and module.saw:
            record.step(trainer.global_step, module.saw.copy())
            if trainer.fit_loop.epoch_loop._should_accumulate():
                return
            module.saw.clear()

    def on_train_batch_start(self, trainer, module, batch, index):
        if not module.saw:  # the step before is marked
            record.kill_if_due(trainer.global_step)


lightning.seed_everything(0, verbose=False)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
module = Module()
workers = int(os.environ.get("WORKERS", "0"))
loader = DataLoader(Noisy(80), batch_size=4, shuffle=True, num_workers=workers)
best = ModelCheckpoint(os.path.join(os.environ["OUT"], "best"), monitor="loss", save_top_k=2)
trainer = lightning.Trainer(
    max_epochs=3,
    max_steps=int(os.environ.get("MAX_STEPS", "-1")),
    accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
    limit_train_batches=float(os.environ.get("LIMIT", "1.0")),
    val_check_interval=0.5,
    accelerator="cpu",
    strategy="ddp" if RANKS > 1 else "auto",
    devices=RANKS,
    use_distributed_sampler=os.environ.get("SAMPLER") != "own",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[
        EverstepCallback(
            os.environ["RUN"], on_resume=record.recovered, every=5, method=os.environ["METHOD"]
        ),
        Record(),
        EarlyStopping("loss", patience=20),
        best,
    ],
)
trainer.fit(module, loader, DataLoader(Noisy(16), batch_size=8))
record.final(
    model=module.state_dict(),
    optimizers=[one.state_dict() for one in trainer.optimizers],
    best=[best.best_model_score, sorted(best.best_k_models.values())],
    progress=[trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx],
)
