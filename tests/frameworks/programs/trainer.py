"""Hugging Face's Trainer: accumulated gradients, evaluation, a schedule, dropout.

The step mark is set where the next step begins: what the Trainer logs and evaluates at the end of
a step belongs to that step. The Trainer skips to the batch itself; what that draws from torch's
generator is undone, as an uninterrupted training does not skip. The losses that the Trainer logs
are averages since its last log, and it begins that average anew at a resume: recorded is the loss
of each batch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import everstep
from tests.frameworks import record

OUT = Path(os.environ["OUT"])
set_seed(0)
tokens = torch.randint(0, 64, (96, 16), generator=torch.Generator().manual_seed(0)).tolist()
data = Dataset.from_dict({"input_ids": tokens, "labels": tokens, "number": list(range(96))})
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
seen: list[int | float] = []


class Marks(TrainerCallback):
    def __init__(self, ckpt, generator) -> None:
        self.ckpt = ckpt
        self.generator = generator
        self.first = True

    def on_step_begin(self, args, state, control, **others):
        if self.first:
            torch.set_rng_state(self.generator)
        else:
            self.ckpt.step()
            record.kill_if_due(state.global_step)
        self.first = False

    def on_step_end(self, args, state, control, **others):
        record.step(state.global_step, seen.copy())
        seen.clear()

    def on_train_end(self, args, state, control, **others):
        self.ckpt.step()
        self.ckpt.close()


class Progress:
    """The Trainer's counters and its log of losses, as a part of the state."""

    def __init__(self, trainer) -> None:
        self.trainer = trainer

    def state_dict(self):
        kept = {k: v for k, v in vars(self.trainer.state).items() if k != "stateful_callbacks"}
        return json.loads(json.dumps(kept))

    def load_state_dict(self, kept):
        for name, value in kept.items():
            setattr(self.trainer.state, name, value)


class EverstepTrainer(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        numbers = inputs.pop("number").tolist()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            seen.extend([*numbers, loss.item()])
        return loss

    def train_with(self, run, **options):
        loader = self.get_train_dataloader()
        self.create_optimizer_and_scheduler(self.set_initial_training_values(self.args, loader)[-1])
        # True: train() replaces the scheduler that is in the state.
        self._created_lr_scheduler = os.environ.get("SCHEDULER") == "replaced"
        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.lr_scheduler,
            "progress": Progress(self),
        }
        ckpt = everstep.Checkpointer(run, state, **options)
        recovery = ckpt.resume()
        record.recovered(recovery)
        self.add_callback(Marks(ckpt, torch.get_rng_state()))
        if recovery.step == 0:
            return self.train()
        folder = OUT / "progress"
        folder.mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(folder / "trainer_state.json")
        return self.train(resume_from_checkpoint=str(folder))

    def _load_from_checkpoint(self, *args, **kwargs):
        pass  # everstep has restored all of it

    def _load_optimizer_and_scheduler(self, *args, **kwargs):
        pass

    def _load_rng_state(self, *args, **kwargs):
        pass


arguments = TrainingArguments(
    str(OUT / "trainer"),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=4,
    logging_steps=5,
    save_strategy="no",
    eval_strategy="epoch",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    remove_unused_columns=False,
    seed=0,
)
trainer = EverstepTrainer(
    model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(16))
)
trainer.train_with(os.environ["RUN"], every=4, method=os.environ["METHOD"])
record.final(model=model.state_dict(), optimizer=trainer.optimizer.state_dict())
