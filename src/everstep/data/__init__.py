"""Batches whose order is part of the state: a loader that resumes mid-epoch, bit for bit.

Runs in the training process and in the loader's worker processes. Read in this order:

``loader``    :class:`ResumableLoader`, the object that goes into the state
``orders``    the order of an epoch, and its division among ranks; random generators, seeded
              temporarily and restored
``fetching``  datasets that make the batches, in workers or in the training process
"""

from __future__ import annotations

from everstep.data.loader import ResumableLoader

__all__ = ["ResumableLoader"]
