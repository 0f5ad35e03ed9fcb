"""Fetch copies of bases and log segments at a start, in the training process.

Sources are the memory of keepers, the memory and disks of other nodes, and copies in tiers.

Read in this order:

``held``           in a keeper's memory: base and log records of its own rank, copies of another
                   node's base files and log steps
``copies``         one rank: the run folder and its copies as one file system
``rank_copies``    several ranks: inventory of a rank's disk and of the copies in tiers; opens
                   timelines on that disk
``start_channel``  messages between the ranks during a start, and detection of silent ranks
``peer_plan``      decides which copies and steps each rank fetches
``peers``          carries out the plan: exchange of chunks between ranks; files on a rank's own
                   disk are served to ranks with another one
``sources``        places of each rank's files, cheapest first, with fallback on damage; read-ahead
                   from a remote place into host memory
``node_reads``     files that several ranks of a node need, read once on that node; the shared
                   memory for that
"""

from everstep.restore.fetch.held import (
    HeldBase,
    KeeperContents,
    PackedSteps,
    PeerLog,
    ReplicaReach,
    common_step,
)
from everstep.restore.fetch.peers import FetchCopies
from everstep.restore.fetch.rank_copies import Copies
from everstep.restore.fetch.start_channel import Meeting, StartChannel

__all__ = [
    "Copies",
    "FetchCopies",
    "HeldBase",
    "KeeperContents",
    "Meeting",
    "PackedSteps",
    "PeerLog",
    "ReplicaReach",
    "StartChannel",
    "common_step",
]
