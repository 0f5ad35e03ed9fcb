"""Training runs for demos, tests and benchmarks: models, text, loop, and comparison of results.

``gpt``       a byte-level GPT in plain torch, from thousands to billions of parameters
``text``      real text without a download, and a loader whose order can be resumed
``training``  model, optimizer, schedule and loader as one object with ``step()``

``comparison``   differences between two training runs: live states, described without everstep's
                 own code, and losses; progress reports of a training process
``processes``    folder, environment and signals of processes that train

``published``  networks from papers, for capture plans
"""

from __future__ import annotations

from everstep.workloads.gpt import GPT, GPTConfig, gpt_of
from everstep.workloads.text import WindowLoader, stdlib_text
from everstep.workloads.training import (
    Training,
    TrainingConfig,
    WarmupCosine,
    make_deterministic,
    training_of,
)

__all__ = [
    "GPT",
    "GPTConfig",
    "Training",
    "TrainingConfig",
    "WarmupCosine",
    "WindowLoader",
    "gpt_of",
    "make_deterministic",
    "stdlib_text",
    "training_of",
]
