"""Which bases may go. Never the last one that is known to be good (I5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from everstep.commit.lineage import BaseId, Branch, split_by_history

__all__ = [
    "COPY_TIERS",
    "TIERS",
    "VOLATILE_TIERS",
    "RetentionPlan",
    "Watermark",
    "plan_retention",
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


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What retention should do next.

    Attributes:
        delete: bases to delete, oldest first; empty while ``verify`` is set.
        verify: a base to read back first, because nothing that would stay has been verified.
    """

    delete: tuple[BaseId, ...] = ()
    verify: BaseId | None = None


def plan_retention(
    committed: Iterable[BaseId],
    branches: Mapping[int, Branch],
    *,
    keep: int,
    verified: Collection[BaseId],
    damaged: Collection[BaseId],
    spared: Collection[BaseId] = (),
    needed: Collection[BaseId] = (),
) -> RetentionPlan:
    """Keeps the ``keep`` newest good bases, those of the current history first.

    Bases of abandoned branches rank behind all bases of the history, so they go as new ones
    are committed. Something is deleted only if a base that was read back and verified stays:
    with ``keep`` bases that takes one read-back every ``keep`` commits.

    Args:
        keep: at least 1.
        verified: bases that this process has read back whole.
        damaged: bases found damaged; they neither count nor are kept once enough good ones are.
        spared: good ones among them stay, in the place of others; the newest stays beside them.
        needed: good ones among them stay, beyond ``keep``.
    """
    good = [base for base in committed if base not in damaged]
    here, elsewhere = split_by_history(good, branches)
    ranked = here + elsewhere
    staying = {*ranked[:1], *(base for base in ranked if base in spared)}
    for base in ranked:
        if len(staying) < keep:
            staying.add(base)
    stay = [base for base in ranked if base in staying]
    go = [base for base in ranked if base not in staying and base not in needed]
    if len(stay) >= keep:
        go += [base for base in committed if base in damaged]
    if not go:
        return RetentionPlan()
    if not any(base in verified for base in stay):
        return RetentionPlan(verify=stay[0])
    return RetentionPlan(delete=tuple(reversed(go)))
