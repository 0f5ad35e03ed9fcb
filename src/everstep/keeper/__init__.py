"""The keeper process (``python -m everstep.keeper``): everything that runs in it.

Read it in this order:

``process``  accept trainers and pass their messages to *duties* (handlers by subject)
``persist``  write, commit and audit bases
``log``      receive the gradient log and write it to segments
``replica``  apply the log to a copy of the state; the only package here that imports torch
``retain``   delete bases and segments that are no longer needed
``ship``     send copies to tiers and peers
``held``     hold captures and peers' copies in memory
"""
