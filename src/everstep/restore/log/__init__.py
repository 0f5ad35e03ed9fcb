"""The gradient log of one rank, and its reach.

Runs in the training process, and wherever a state is rebuilt offline. Read in this order:

``log_found``  records of the log in memory, in segments on disk, and in copies
``reach``      choice of a base and of the steps to replay on it
"""

from everstep.restore.log.reach import Reachable, current_first, nothing_restorable, reachable

__all__ = ["Reachable", "current_first", "nothing_restorable", "reachable"]
