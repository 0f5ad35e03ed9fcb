"""Copies of bases and log, sent to other tiers and to the memory of a peer node.

Runs in the keeper process, after the commit; training never waits for it. Read in this order:

``couriers``     all copies of one keeper to the places in ``tiers=``; detect calls that hang
``courier``      copy to one place: thread, turns, failures; the place itself: its fence, its
                 records, its inventory; deletion of old copies
``base_copies``  copy committed bases; with several ranks, rank 0 chooses the base and commits
``log_copies``   copy log segments; approximate records for ``log="adaptive"``
``peer_copies``  copies in the memory of another node: start and stop, find bases to send; exchange
                 bases and logs with other ranks' keepers, in one thread
``senders``      send bytes to the peer with a window of unacknowledged ones: steps of the log,
                 and bases at a pace
"""

from everstep.keeper.ship.couriers import Couriers
from everstep.keeper.ship.peer_copies import PeerCopies

__all__ = ["Couriers", "PeerCopies"]
