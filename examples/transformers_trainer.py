"""Train a small GPT-2 with Hugging Face's Trainer; kill it at any moment and start it again.

pip install 'everstep[transformers]' datasets
python examples/transformers_trainer.py runs/trainer
"""

import sys

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from everstep.integrations.transformers import resumable

set_seed(0)
tokens = torch.randint(0, 256, (512, 64)).tolist()
trainer = Trainer(
    model=GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    ),
    args=TrainingArguments(f"{sys.argv[1]}-trainer", num_train_epochs=3, save_strategy="no"),
    train_dataset=Dataset.from_dict({"input_ids": tokens, "labels": tokens}),
)
trainer = resumable(trainer, sys.argv[1], method="logged")  # the line to add
trainer.train()
