"""State that a keeper holds in memory, for restarted trainers, readers and other nodes.

Runs in the keeper process. Read in this order:

``newest_capture``   the newest complete capture of this rank
``memory_bases``     bases of this rank that live in memory only (``method="gemini"``)
``peer_stores``      copies of other nodes' bases; copies of other nodes' logs
"""

from everstep.keeper.held.newest_capture import LookReply, NewestCapture
from everstep.keeper.held.peer_stores import PeerBaseStore, PeerLogStore

__all__ = ["LookReply", "NewestCapture", "PeerBaseStore", "PeerLogStore"]
