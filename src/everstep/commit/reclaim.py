"""What each tier may forget once the watermark has moved.

TierCheck purges older differentials of the durable tier at once in its section 3.4, and keeps
them for one more base interval in its section 4. Here the safer one holds: a new host that has
nothing but the durable tier can go back one more base, and forward from there.

The log of durable tiers is let go of by :mod:`everstep.keeper.retain.deletion` and
:mod:`everstep.keeper.ship.log_mirror`.

What a rank sees of its own bases says nothing about the others: only the watermark does.
"""

from __future__ import annotations

from collections.abc import Collection

from everstep.commit.lineage import BaseId

__all__ = [
    "COPY_TIERS",
    "TIERS",
    "VOLATILE_TIERS",
    "reclaimable_bases",
]

TIERS = ("memory", "peer", "disk", "copy", "object")
"""Where bytes live, the cheapest to read first (TierCheck, section 3.3). A copy is one in a
directory that is not the run folder."""

VOLATILE_TIERS = ("memory", "peer")
"""Tiers that a power loss empties."""

COPY_TIERS = ("copy", "object")
"""Tiers that hold copies of what was on the ranks' own disks; all ranks read the same ones."""


def reclaimable_bases(held: Collection[BaseId], watermark: BaseId | None) -> list[BaseId]:
    """Bases in a volatile tier that may go: those older than the watermark. Durable tiers go by
    :func:`everstep.commit.retention.plan_retention`."""
    return [] if watermark is None else sorted(base for base in held if base < watermark)
