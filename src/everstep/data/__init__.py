"""Batches whose order is part of the state: a loader that resumes in mid-epoch, bit for bit.

``loader``  :class:`ResumableLoader`, the object that goes into the state
``orders``  the order of an epoch, and how ranks share it
``fetching``  what runs beside the data: in the workers, or in the training process
``draws``   random generators, seeded for a moment and put back
"""

from __future__ import annotations

from everstep.data.loader import ResumableLoader

__all__ = ["ResumableLoader"]
