"""The replica: a copy of the state that the keeper updates from the log (LowDiff+).

Also completes bases that were captured over several steps (GoCkpt). Runs in the keeper process. The
only package of the keeper that imports torch, and only when it is needed: ``replica_state`` and
``lossy_update`` are imported in background threads. Read in this order:

``served_replica``  start and stop the replica of the attached training process; its messages
``replica``         one replica: its thread, the bases requested of it, its stop at a takeover
``replica_state``   the state in memory: apply steps (torch); assemble multi-step bases
``rebuilds``        complete multi-step bases after their last message; or add the gradients with
                    which a restore completes them
``lossy_update``    approximate copies of gradients for ``log="adaptive"`` (torch)
"""

from everstep.keeper.replica.rebuilds import Rebuilds
from everstep.keeper.replica.served_replica import ServedReplica

__all__ = ["Rebuilds", "ServedReplica"]
