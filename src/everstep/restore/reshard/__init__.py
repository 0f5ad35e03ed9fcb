"""Replay a log that another number of ranks wrote, or the same number in another layout
(``docs/design/ranks.md``).

Runs in the training process. Read in this order:

``gradients``  this rank's slices of the gradients of the old ranks
``marks``      step marks of the old ranks, restored like a base of those ranks
``replay``     logs of the old ranks, divided among the ranks of this job for reading; replay of
               the steps
"""

from everstep.restore.reshard.replay import LogsInMemory, ReshardedLogs, replay_resharded

__all__ = ["LogsInMemory", "ReshardedLogs", "replay_resharded"]
