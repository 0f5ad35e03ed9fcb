"""Replay the updates of an optimizer over the gradients that a log kept.

Read in this order:

``updates``         ``Update``: inputs of one ``step()`` call; compressed gradients
``exactness``       optimizers that can be replayed, and configurations where replay is bit-exact
``engine``          ``Replayer``: checks updates of one optimizer, and applies them to named
                    tensors, in place
``optimizer_step``  the optimizer's own ``step()``, on complete tensors and without hooks
``self_test``       trials that must pass before the fast path is used
``blocked``         the fast path of SGD, Adam and AdamW: several updates in one pass over the
                    state, block by block, by torch's functional forms, or by TorchScript programs
                    where torch has no kernel
``cuts``            cut tensors into blocks on which torch's kernels compute the same bits

Runs in the training process, in commands, and in the keeper's replica. Nothing here depends on
checkpoints.

State at LSN v = base + the records up to v (LowDiff, Algorithm 1, lines 13-19; the paper's own loop
applies merged gradients, which is wrong for every optimizer with moments).
"""

from everstep.replay.cuts import has_gaps
from everstep.replay.engine import ONE_THREAD, Replayer, ReplayOptions
from everstep.replay.exactness import Exactness, is_elementwise, kind_name, replay_kind
from everstep.replay.updates import Gradient, Update

__all__ = [
    "ONE_THREAD",
    "Exactness",
    "Gradient",
    "ReplayOptions",
    "Replayer",
    "Update",
    "has_gaps",
    "is_elementwise",
    "kind_name",
    "replay_kind",
]
