"""Capture a base in one step; runs in the training process.

Read in this order:

- ``prepared_base``: the layout of a base and its copy plan, reused while the state keeps its shape;
  the state at a step mark, for a base that ``close()`` takes later.
- ``saver``: captures a base into host memory (or writes it at once) and holds updates back
  until their tensors are copied.
"""

from everstep.trainer.base.prepared_base import LastMark, MarkSnapshot, PlannedCopies, PreparedBase
from everstep.trainer.base.saver import STALL_CAUSES, BaseRetry, Saver

__all__ = [
    "STALL_CAUSES",
    "BaseRetry",
    "LastMark",
    "MarkSnapshot",
    "PlannedCopies",
    "PreparedBase",
    "Saver",
]
