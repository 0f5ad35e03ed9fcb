"""One life of a Checkpointer: start, step mark, base, close.

Runs in the training process. Read in this order:

- ``session``: the order of the work in each call; drives the participants
  (:mod:`everstep.trainer.participant`). The end: last bases, lost steps, and the keeper that stays
  or goes.
- ``components``: chooses and builds the participants of a method.
- ``footprint``: memory and disk space that they will need; checked, and printed.
- ``calls``: checks before a call does anything; one call at a time.
- ``start``: takes over a run, by a resume or a fresh start.
- ``state_watch``: position in training; tracks updates, and whether the live state is that of a
  step mark.
- ``cadence``: decides when a base is due, with one interval for all ranks.
- ``step_consensus``: collective decisions of all ranks at a step boundary.
- ``replica_bases``: requests bases from the keeper's replica.
- ``preemption``: a last base before the job is killed.
- ``stats``: costs and results.
- ``disabled``: stand-in for a session that does nothing (``EVERSTEP_DISABLE``).
"""
