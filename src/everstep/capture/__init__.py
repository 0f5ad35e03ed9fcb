"""Copies from device to host in the training process, made by *lanes*: ordered queues of copies.

Read in this order:

``lane``              contract of a lane; the lane for tensors in host memory
``batches``           grouping of tensors into copies
``cuda``              lane for CUDA devices: side streams, a thread that enqueues the copies; choice
                      of the lane by the tensors' devices
``pinned``            pinned host memory that CUDA devices copy into
``update_hooks``      hooks on optimizers: count updates, and hold them back until copies are made
``step_events``       events of a training step, as seen by hooks, with times
``dispatch``          copies issued at planned events of a step (``trainer/schedule``)
``spot_check``        comparison of samples of a capture with the live state
``mark_samples``      samples of the state in step marks of the log, compared during replay
``version_counters``  detection of writes by torch's version counters
"""

from everstep.capture.batches import Batch, Chunks, plan_batches
from everstep.capture.cuda import on_cuda
from everstep.capture.dispatch import Dispatch
from everstep.capture.lane import Lane, Transfer
from everstep.capture.mark_samples import MarkComparison
from everstep.capture.update_hooks import UpdateHooks
from everstep.capture.version_counters import Versions

__all__ = [
    "Batch",
    "Chunks",
    "Dispatch",
    "Lane",
    "MarkComparison",
    "Transfer",
    "UpdateHooks",
    "Versions",
    "on_cuda",
    "plan_batches",
]
