"""State that a keeper holds in memory, for restarted trainers, readers and other nodes.

Runs in the keeper process. Read in this order:

``newest_capture``   the newest complete capture of this rank; messages that hand the contents of
                     memory to a restarted training process
``peer_stores``      copies of other nodes' bases and logs; bases of this rank that live in memory
                     only (``method="gemini"``)
"""

from everstep.keeper.held.newest_capture import (
    LookReply,
    NewestCapture,
    base_from_wire,
    base_to_wire,
    log_to_wire,
    recalled_from_wire,
)
from everstep.keeper.held.peer_stores import IsPast, MemoryBases, PeerBaseStore, PeerLogStore

__all__ = [
    "IsPast",
    "LookReply",
    "MemoryBases",
    "NewestCapture",
    "PeerBaseStore",
    "PeerLogStore",
    "base_from_wire",
    "base_to_wire",
    "log_to_wire",
    "recalled_from_wire",
]
