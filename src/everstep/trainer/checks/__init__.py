"""Checks of the state and of the training loop; most of them warn instead of raising.

Runs in the training process. The modules are independent of each other:

- ``keeper_replay``: refuses states whose updates a method cannot repeat.
- ``training_loop``: warns of optimizers, schedulers and compressors that are not part of the state,
  and when ``ckpt.step()`` is called before the step is complete.
- ``recompute``: computes gradients of sampled steps again, and compares them.
- ``first_batches``: warns of lost data and random numbers after a resume.
"""

from everstep.trainer.checks.first_batches import FirstBatches
from everstep.trainer.checks.keeper_replay import (
    refuse_lossy_replicas,
    refuse_method,
    why_inexact,
    why_replay_is_inexact,
)
from everstep.trainer.checks.training_loop import (
    LoopChecks,
    residual_bytes,
    warn_of_unsaved_residuals,
)

__all__ = [
    "FirstBatches",
    "LoopChecks",
    "refuse_lossy_replicas",
    "refuse_method",
    "residual_bytes",
    "warn_of_unsaved_residuals",
    "why_inexact",
    "why_replay_is_inexact",
]
