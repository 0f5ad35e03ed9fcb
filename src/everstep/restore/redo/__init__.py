"""Replay log records onto a state that was restored from a base.

Runs in the training process during ``resume()``; ``driver`` and what it needs also run offline and
in the keeper's replica. Read in this order:

``driver``      ``ReplayDriver``: queue the updates of verified steps, apply several steps at once,
                compare with the samples in marks, finish from the last mark; comparison of the
                machine and versions with those of training
``live``        ``LiveMemory``: the live objects that it applies them to
``updates``     convert a record to an ``Update``: gradients of all ranks, dense or compressed, and
                the optimizer class; updates that a user's function computes (``declared=``)
``owned``       entries that belong to optimizers, found from a base's object trees; optimizer state
                that ZeRO distributes over ranks, merged
"""

from everstep.restore.redo.driver import (
    MarkEntries,
    ReplayDriver,
    Step,
    doubt_about,
    fingerprint_difference,
    replay_conditions,
    sampled_difference,
)
from everstep.restore.redo.live import LiveMemory, live_tensors
from everstep.restore.redo.owned import owned_entries, parameter_names
from everstep.restore.redo.updates import UnknownClassError

__all__ = [
    "LiveMemory",
    "MarkEntries",
    "ReplayDriver",
    "Step",
    "UnknownClassError",
    "doubt_about",
    "fingerprint_difference",
    "live_tensors",
    "owned_entries",
    "parameter_names",
    "replay_conditions",
    "sampled_difference",
]
