"""Commit protocol, timelines and retention, as state machines without I/O.

The keeper process drives them; the trainer and read-only commands use the pure functions. A driver
performs an action, reports the resulting event, and gets the next action. Read in this order:

``lineage``      timelines, and the bases in the history of the newest one
``base_commit``  one base on one disk: its commit, from the first byte to the manifest, and its
                 deletion in two steps (``adr/004``)
``retention``    choice of the bases to delete; the watermark (newest base durable on all ranks)
``job``          commits and starts of several ranks (``adr/020``)
``log_reach``    the last step that the logs of all ranks reach from a base
``peer_copies``  copies of bases and logs in the memory of another node; rank 0's state while all
                 ranks copy one base to another tier
"""

from everstep.commit.lineage import BaseId, describe_abandoned, split_by_history
from everstep.commit.retention import COPY_TIERS, KeepRules

__all__ = [
    "COPY_TIERS",
    "BaseId",
    "KeepRules",
    "describe_abandoned",
    "split_by_history",
]
