"""Data that is part of the state: a loader that resumes mid-epoch, bit for bit; registration of the
user's classes.

Runs in the training process and in the loader's worker processes. Read in this order:

``loader``    :class:`ResumableLoader`, the object that goes into the state
``orders``    the order of an epoch, and its division among ranks; random generators, seeded
              temporarily and restored
``fetching``  datasets that make the batches, in workers or in the training process

:func:`register_type` is in ``state/values/registered.py``.
"""

from __future__ import annotations

from everstep.data.loader import ResumableLoader
from everstep.state.values.registered import register_type

__all__ = ["ResumableLoader", "register_type"]
