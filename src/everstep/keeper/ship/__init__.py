"""Copies of bases and log, sent to other tiers and to the memory of a peer node.

Runs in the keeper process, after the commit; training never waits for it. Read in this order:

``couriers``        all copies of one keeper to the places in ``tiers=``
``courier``         copy to one place: thread, turns, failures
``base_copies``     copy committed bases
``rank_copies``     the same with several ranks: rank 0 chooses the base and commits
``copy_retention``  delete old copies
``log_copies``      copy log segments
``place``           one place: its fence, its records, its inventory
``peer_copies``     copies in the memory of another node: start and stop, find bases to send
``peer_exchange``   exchange bases and logs with other ranks' keepers, in one thread
``base_sender``     send bases to the peer, at a pace
``log_sender``      send steps of the log to the peer
``transfer``        send bytes with a window of unacknowledged ones; what both senders share
``lossy_log``       approximate copies of log records for ``log="adaptive"``
"""
