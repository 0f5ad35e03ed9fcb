"""The watermark: the newest base that is durable on all ranks (I6).

It is what everything that forgets goes by (TierCheck, section 3.4, "watermark-driven global
reclamation"): a rank that finished early knows nothing of the others, and may let go of an older
base only when the watermark has passed it. Bases are compared by (timeline, step), never by the
number of the step alone. It never decreases: news that come twice, late or from an older
timeline change nothing.
"""

from __future__ import annotations

from everstep.commit.lineage import BaseId

__all__ = ["Watermark"]


class Watermark:
    """One rank's knowledge of the watermark, within one timeline.

    Args:
        base: what the timeline began with, if that is durable on all ranks.

    Attributes:
        base: the newest base known to be durable on all ranks.
        before: the one before it.
    """

    def __init__(self, base: BaseId | None = None) -> None:
        self.base = base
        self.before: BaseId | None = None

    def advance(self, base: BaseId) -> bool:
        """Takes note that ``base`` is durable on all ranks; whether that was news."""
        if self.base is not None and base <= self.base:
            return False
        self.before = self.base
        self.base = base
        return True
