"""One life of a Checkpointer: start, step mark, base, close.

Runs in the training process. Read in this order:

- ``components``: builds everything that a Checkpointer consists of.
- ``guards``: checks before a call does anything.
- ``start``: takes over a run, by a resume or a fresh start.
- ``state_watch``: tracks updates, and whether the live state is that of a step mark.
- ``cadence``: decides when a base is due; ``interval_vote``: one interval for all ranks.
- ``step_consensus``: collective decisions of all ranks at a step boundary.
- ``replica_bases``: requests bases from the keeper's replica.
- ``preemption``: a last base when the job is going to be killed.
- ``closing``: last bases, lost steps, and the keeper that stays or goes.
- ``stats``: costs and results.
"""
