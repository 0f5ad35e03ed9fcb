"""Hugging Face's Trainer with one line of everstep: accumulated gradients, evaluation, dropout;
DDP under torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from everstep.integrations.transformers import resumable
from tests.frameworks import record

OUT = Path(os.environ["OUT"])
set_seed(0)
tokens = torch.randint(0, 64, (90, 16), generator=torch.Generator().manual_seed(0)).tolist()
data = Dataset.from_dict({"input_ids": tokens, "labels": tokens, "number": list(range(90))})
if os.environ.get("DATA") == "stream":
    data = data.to_iterable_dataset(num_shards=2)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
seen: list[int | float] = []


class Recorded(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        numbers = inputs.pop("number").tolist()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            record.kill_if_due(self.state.global_step + 0.5)
            seen.extend([*numbers, loss.item()])
        return loss


class Record(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        record.step(state.global_step, seen.copy())
        seen.clear()

    def on_step_begin(self, args, state, control, **others):
        record.kill_if_due(state.global_step)


arguments = TrainingArguments(
    str(OUT / "trainer"),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    max_steps=int(os.environ.get("MAX_STEPS", "-1")),
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=4,
    logging_steps=5,
    save_strategy=os.environ.get("SAVE", "no"),
    eval_strategy="epoch",
    load_best_model_at_end=os.environ.get("SAVE", "no") != "no",
    metric_for_best_model="loss",
    dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
    report_to=[],
    use_cpu=True,
    # For a stream and several ranks: by default the first of them reads it for all.
    accelerator_config={"dispatch_batches": None if "RANK" not in os.environ else False},
    disable_tqdm=True,
    remove_unused_columns=False,
    seed=0,
)
held_out = Dataset.from_dict({"input_ids": tokens[:16], "labels": tokens[:16], "number": range(16)})
trainer = Recorded(
    model=model,
    args=arguments,
    train_dataset=data,
    eval_dataset=held_out,
    callbacks=[Record(), EarlyStoppingCallback(5)],
)
trainer = resumable(
    trainer, os.environ["RUN"], on_resume=record.recovered, every=4, method=os.environ["METHOD"]
)
trainer.train()
timed = ("runtime", "per_second")
logs = [
    {name: value for name, value in entry.items() if not name.endswith(timed)}
    for entry in trainer.state.log_history[:-1]
]
record.final(
    model=model.state_dict(),
    optimizer=trainer.optimizer.state_dict(),
    scheduler=trainer.lr_scheduler.state_dict(),
    logs=logs,
)
