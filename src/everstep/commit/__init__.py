"""Commit protocol, timelines and retention, as state machines without I/O.

The keeper process drives them; the trainer and read-only commands use the pure functions. A driver
performs an action, reports the resulting event, and gets the next action. Read in this order:

``lineage``      timelines, and the bases in the history of the newest one
``base_commit``  one base on one rank, from the first byte to the manifest
``deletion``     deletion of one base from one disk, in two steps (``adr/004``)
``retention``    choice of the bases to delete; the watermark (newest base durable on all ranks)
``job``          commits and starts of several ranks (``adr/020``)
``log_reach``    the last step that the logs of all ranks reach from a base
``copy_round``   rank 0's state while all ranks copy one base to another tier
``peer_copies``  copies of bases and logs in the memory of another node
"""

from everstep.commit.base_commit import (
    CheckFence,
    FenceSeen,
    FilesDurable,
    GatherMarkers,
    WriteFiles,
    WriteMarker,
)
from everstep.commit.lineage import BaseId, describe_abandoned, split_by_history
from everstep.commit.retention import COPY_TIERS

__all__ = [
    "COPY_TIERS",
    "BaseId",
    "CheckFence",
    "FenceSeen",
    "FilesDurable",
    "GatherMarkers",
    "WriteFiles",
    "WriteMarker",
    "describe_abandoned",
    "split_by_history",
]
