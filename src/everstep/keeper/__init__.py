"""Everything that runs in the keeper process (``python -m everstep.keeper``), without torch.

``process``  accepts trainers, dispatches messages to duties
``persist``  writes, commits and audits bases
``log``      receives and writes the gradient log
``replica``  a copy of the state that follows the log; the only room that imports torch
``retain``   deletes what nothing needs any more
``ship``     sends copies to tiers and peers
``held``     captures and copies in memory
"""
