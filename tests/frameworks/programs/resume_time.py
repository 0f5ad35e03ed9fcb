"""Samples that a resumed training reads before its first new step, by framework."""

from __future__ import annotations

import logging
import os

import torch

from tests.frameworks import record

SAMPLES = 40_000
EVERY = int(os.environ["EVERY"])
WIDTH = 16
read: list[int] = []
resumed: list[int] = []


class Samples(torch.utils.data.Dataset):
    """Random samples; notes which of them were read."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, WIDTH)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        read.append(number)
        return {"x": self.x[number]}


def on_resume(recovery) -> None:
    record.recovered(recovery)
    resumed.append(recovery.step)


OPTIONS = {"every": EVERY, "method": "sync", "on_resume": on_resume}


def step_is_over(number: int) -> None:
    """Note what was read up to the first step after a resume, and end there."""
    if 0 < resumed[0] < number:
        record.step(number, len(read))
        os._exit(0)
    record.kill_if_due(number)


def train_with_trainer() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from everstep.integrations.transformers import resumable

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, 1)

        def forward(self, x):
            return {"loss": self.linear(x).square().mean()}

    class Marks(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            step_is_over(state.global_step)

    arguments = TrainingArguments(
        os.environ["OUT"],
        per_device_train_batch_size=2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_steps=100,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Samples(), callbacks=[Marks()])
    resumable(trainer, os.environ["RUN"], **OPTIONS).train()


def train_with_lightning() -> None:
    import lightning

    from everstep.integrations.lightning import EverstepCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, 1)

        def training_step(self, batch, index):
            return self.linear(batch["x"]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Marks(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            step_is_over(trainer.global_step)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EverstepCallback(os.environ["RUN"], **OPTIONS), Marks()],
    )
    loader: torch.utils.data.DataLoader = torch.utils.data.DataLoader(
        Samples(), batch_size=2, shuffle=True
    )
    trainer.fit(Module(), loader)


torch.manual_seed(0)
torch.set_num_threads(1)
{"trainer": train_with_trainer, "lightning": train_with_lightning}[os.environ["FRAMEWORK"]]()
