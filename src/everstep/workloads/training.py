"""Model, optimizer, schedule and loader as one object that takes steps.

Every step draws from all three process-wide generators: torch's for dropout, Python's for
how much noise this batch gets, NumPy's for where it falls. A resume that loses any one of
them shows in the very next loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from everstep.errors import OptionError
from everstep.workloads.gpt import GPT, GPTConfig
from everstep.workloads.text import WindowLoader


@dataclass
class WarmupCosine:
    """Learning-rate factor: linear from 0 to 1, then half a cosine down to ``floor``.

    A callable object and not a function, because LambdaLR stores the attributes of the one
    as plain data and nothing of the other.
    """

    warmup_steps: int
    total_steps: int
    floor: float = 0.1

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """Hyperparameters of a training.

    Attributes:
        steps: length of the schedule.
        batch: windows in a batch.
        seed: of the weights, the data order and all generators, in [0, 2**32).
        lr: the highest learning rate.
        warmup_steps: steps until it is reached.
        weight_decay: of matrices; vectors have none.
        clip_norm: bound of the gradient's global norm.
        noise: highest share of input bytes that are replaced by random ones.
    """

    steps: int
    batch: int = 16
    seed: int = 0
    lr: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    noise: float = 0.05

    def __post_init__(self) -> None:
        if min(self.steps, self.batch) < 1 or self.warmup_steps < 0:
            raise OptionError("steps and batch must be at least 1, warmup_steps at least 0")
        if not 0 <= self.seed < 2**32:
            raise OptionError(f"seed must be in [0, 2**32), not {self.seed}")


@dataclass(slots=True)
class Training:
    """One training run; its parts are what a checkpoint has to hold.

    Attributes:
        progress: plain data that changes with every step.
    """

    config: TrainingConfig
    model: GPT
    optimizer: AdamW
    scheduler: LambdaLR
    loader: WindowLoader
    progress: dict[str, Any]

    def state(self) -> dict[str, Any]:
        """The state dict for a Checkpointer."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "progress": self.progress,
        }

    def step(self) -> float:
        """One update; returns the loss (nats per byte) before it."""
        inputs, targets = self.loader.next_batch()
        device = next(self.model.parameters()).device  # the model may be in a wrapper
        inputs = _with_noise(inputs, self.config.noise).to(device)
        targets = targets.to(device)
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        value = loss.item()
        self.progress["steps"] += 1
        self.progress["bytes_seen"] += inputs.numel()
        self.progress["loss_best"] = min(self.progress["loss_best"], value)
        return value


def make_deterministic(seed: int) -> None:
    """One thread, deterministic kernels, all generators seeded: the same bits in every run."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def training_of(
    model: GPTConfig,
    training: TrainingConfig,
    text: bytes,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    wrap: Callable[[GPT], GPT] = lambda model: model,
) -> Training:
    """Builds a training run; the weights come from the device's generator as it stands.

    Args:
        dtype: of the parameters, and so of gradients and moments.
        wrap: makes of the model what is trained, before there is an optimizer.

    Raises:
        OptionError: when ``text`` does not fill one batch.
    """
    loader = WindowLoader(text, context=model.context, batch=training.batch, seed=training.seed)
    with torch.device(device):  # a billion weights take the host's generator half a minute
        made = GPT(model).to(dtype)
    gpt = wrap(made)
    parameters = list(gpt.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=training.lr, betas=(0.9, 0.95))
    schedule = WarmupCosine(training.warmup_steps, training.steps)
    progress = {"steps": 0, "bytes_seen": 0, "loss_best": math.inf}
    return Training(training, gpt, optimizer, LambdaLR(optimizer, schedule), loader, progress)


def _with_noise(inputs: Tensor, highest: float) -> Tensor:
    """``inputs`` with a random share, up to ``highest``, of its bytes replaced by random ones."""
    share = random.uniform(0.0, highest)
    hit = torch.from_numpy(np.random.random_sample(tuple(inputs.shape)) < share)
    other = torch.from_numpy(np.random.randint(0, 256, size=tuple(inputs.shape), dtype=np.int64))
    return torch.where(hit, other, inputs)
