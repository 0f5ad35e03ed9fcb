"""The run folder: its bases, timelines and gradient logs.

Used by trainer, keeper and command-line processes alike; only ``tensors`` and ``shape`` import
torch. Read in this order:

``scan``       inventory of the folder: names and records, no data; order in which a resume tries
               the bases
``chain``      reach of the gradient log from each base
``segments``   segments of the log, and their records
``log_reads``  records of the log, read ahead of replay; items of a generator, produced ahead
``open_base``  a base opened for reading; redo file of a base captured over several steps
``tensors``    entries of log records as tensors; shape digest of a base
``verify``     full read-back of a base; audits of the bases that a state descends from
``folder``     creation and checks of the folder at the start of a process
``fence``      detection of a newer process that has taken the run over
``uncondemn``  withdrawal of a pending deletion
"""

from everstep.run.chain import Chain
from everstep.run.fence import Fence
from everstep.run.open_base import OpenBase
from everstep.run.scan import (
    BaseFound,
    Inventory,
    Skipped,
    TimelineCache,
    newest_timeline,
    scan_base,
    scan_run,
)

__all__ = [
    "BaseFound",
    "Chain",
    "Fence",
    "Inventory",
    "OpenBase",
    "Skipped",
    "TimelineCache",
    "newest_timeline",
    "scan_base",
    "scan_run",
]
