"""Compressed training learns: the losses of compressed and of dense training, same seed.

Losses are means over the last steps, in nats per byte. What is measured, with 400 steps of the
larger model (119 104 parameters; a byte drawn blindly from 256 costs 5.55):

===========  =========  ======  ======  ===========  ======  ===========
optimizer    dense      int8    top 5%  the same,    top 1%  the same,
                                        no feedback          no feedback
===========  =========  ======  ======  ===========  ======  ===========
SGD          2.48       2.48    2.47    2.60         2.47    2.67
AdamW        2.37       2.37    2.62    2.62         2.91    2.97
===========  =========  ======  ======  ===========  ======  ===========

With SGD error feedback makes up for what is left out. Adam divides a seldom and large sum of
gradients by the root of its own square, so it lags behind with and without feedback.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from everstep.compress.compressor import Compressor
from everstep.workloads import (
    GPTConfig,
    TrainingConfig,
    WarmupCosine,
    stdlib_text,
    training_of,
)

TINY = GPTConfig(layers=1, width=32, heads=1, context=32, dropout=0.0)
SMALL = GPTConfig(layers=2, width=64, heads=2, context=64, dropout=0.0)
WITHOUT = {"error_feedback": False}


def loss_after(
    model: GPTConfig, steps: int, optimizer: str, compression: dict[str, Any] | None
) -> float:
    """The mean loss of the last 20 steps of a training; ``compression`` None: dense."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    config = TrainingConfig(steps=steps, batch=8, noise=0.0, warmup_steps=20)
    training = training_of(model, config, stdlib_text(2 << 20))
    if optimizer == "SGD":
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.3)
        training.scheduler = LambdaLR(training.optimizer, WarmupCosine(20, steps))
    if compression is not None:
        Compressor(training.optimizer, **compression)
    losses = [training.step() for _ in range(steps)]
    assert losses[0] == pytest.approx(5.5, abs=0.3)
    return float(np.mean(losses[-20:]))


@pytest.mark.slow
def test_a_tiny_model_learns_as_from_dense_gradients() -> None:
    dense = loss_after(TINY, 120, "SGD", None)
    fed_back = loss_after(TINY, 120, "SGD", {"ratio": 0.002})
    lossy = loss_after(TINY, 120, "SGD", {"ratio": 0.002, **WITHOUT})
    quantized = loss_after(TINY, 120, "SGD", {"kind": "int8"})
    assert dense < 3.1
    assert fed_back == pytest.approx(dense, abs=0.1)
    assert quantized == pytest.approx(dense, abs=0.01)
    assert lossy > fed_back + 0.05


@pytest.mark.slow
def test_sgd_with_error_feedback_learns_as_from_dense_gradients() -> None:
    dense = loss_after(SMALL, 400, "SGD", None)
    for ratio in (0.05, 0.01):
        fed_back = loss_after(SMALL, 400, "SGD", {"ratio": ratio})
        assert fed_back == pytest.approx(dense, abs=0.05)
        assert loss_after(SMALL, 400, "SGD", {"ratio": ratio, **WITHOUT}) > fed_back + 0.1
    threshold = loss_after(SMALL, 400, "SGD", {"kind": "threshold", "ratio": 0.01})
    assert threshold == pytest.approx(dense, abs=0.05)


@pytest.mark.slow
def test_adam_learns_from_compressed_gradients_but_later() -> None:
    dense = loss_after(SMALL, 400, "AdamW", None)
    assert loss_after(SMALL, 400, "AdamW", {"kind": "int8"}) == pytest.approx(dense, abs=0.01)
    assert loss_after(SMALL, 400, "AdamW", {"ratio": 0.05}) < dense + 0.35
    assert loss_after(SMALL, 400, "AdamW", {"ratio": 0.01}) < dense + 0.65
