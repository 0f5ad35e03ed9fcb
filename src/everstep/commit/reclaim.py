"""What each tier may forget once the watermark has moved.

TierCheck purges older differentials of the durable tier at once in its section 3.4, and keeps
them for one more base interval in its section 4. Here the safer one holds: a new host that has
nothing but the durable tier can go back one more base, and forward from there.

What a rank sees of its own bases says nothing about the others: only the watermark does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from everstep.commit.lineage import BaseId

__all__ = [
    "COPY_TIERS",
    "TIERS",
    "VOLATILE_TIERS",
    "Segment",
    "reclaimable_bases",
    "reclaimable_segments",
]

TIERS = ("memory", "peer", "disk", "copy", "object")
"""Where bytes live, the cheapest to read first (TierCheck, section 3.3). A copy is one in a
directory that is not the run folder."""

VOLATILE_TIERS = ("memory", "peer")
"""Tiers that a power loss empties."""

COPY_TIERS = ("copy", "object")
"""Tiers that hold copies of what was on the ranks' own disks; all ranks read the same ones."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Steps ``(after, last]`` of the log of a timeline."""

    timeline: int
    after: int
    last: int


def reclaimable_bases(held: Collection[BaseId], watermark: BaseId | None) -> list[BaseId]:
    """Bases in a volatile tier that may go: those older than the watermark. Durable tiers go by
    :func:`everstep.commit.retention.plan_retention`."""
    return [] if watermark is None else sorted(base for base in held if base < watermark)


def reclaimable_segments(
    held: Collection[Segment], watermark: BaseId | None, before: BaseId | None, *, tier: str
) -> list[Segment]:
    """Segments of the log that may go: in volatile tiers those that lead up to the watermark; in
    durable tiers only those that lead up to the watermark ``before``.

    Args:
        before: the watermark before; None: there was none.
    """
    assert tier in TIERS
    limit = watermark if tier in VOLATILE_TIERS else before
    if limit is None:
        return []
    return sorted(s for s in held if (s.timeline, s.last) <= (limit.timeline, limit.step))
