"""Protocols between the ranks of a job, as state machines and messages without I/O (``adr/020``).

They run in the keepers (commits) and in the trainers (agreement at a start). Read in this order:

``messages``     messages between ranks, and their encoding; ranks, and which of them share a disk
``member``       commits of one rank in a timeline; actions, events and reports of the protocol
``coordinator``  rank 0: watermark and retention for all ranks
``offers``       inventories of the ranks at a start, and the choice of what to restore
``agreement``    start of a job: all ranks restore the same state
"""

from everstep.commit.job.messages import (
    COORDINATOR,
    ChunkReply,
    ChunkRequest,
    CopyMessage,
    Message,
    Send,
)
from everstep.commit.job.offers import Choice, Needs, Offer, Source

__all__ = [
    "COORDINATOR",
    "Choice",
    "ChunkReply",
    "ChunkRequest",
    "CopyMessage",
    "Message",
    "Needs",
    "Offer",
    "Send",
    "Source",
]
