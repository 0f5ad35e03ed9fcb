"""LoRA with peft: everything but the adapters is static."""

from __future__ import annotations

import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import everstep
from tests.frameworks import record

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=1000, n_positions=64, n_embd=128, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
model = get_peft_model(GPT2LMHeadModel(config), adapters)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
static = [f"model/{name}" for name, _ in model.named_parameters() if "lora_" not in name]
with everstep.Checkpointer(
    os.environ["RUN"],
    {"model": model, "optimizer": optimizer},
    every=5,
    static=static,
    method=os.environ["METHOD"],
) as ckpt:
    recovery = ckpt.resume()
    record.recovered(recovery)
    for step in range(recovery.step + 1, 21):
        tokens = torch.randint(0, 1000, (2, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step(step, loss.item())
        ckpt.step()
        record.kill_if_due(step)
record.final(model=model.state_dict(), optimizer=optimizer.state_dict())
