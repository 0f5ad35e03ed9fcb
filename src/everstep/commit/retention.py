"""Retention: the bases to delete, and the watermark that permits it (I5, I6).

Never delete the last base that is known to be good. The watermark is the newest base that is
durable on all ranks; everything that deletes goes by it (TierCheck, section 3.4, "watermark-driven
global reclamation"), because a rank that finished early has no information about the others.
Bases are compared by (timeline, step), never by the step number alone.

TierCheck deletes older differentials of the durable tier at once in its section 3.4, and keeps them
for one more base interval in its section 4. everstep does the safer: a new host that has only the
durable tier can go back one more base and replay from there. The logs of durable tiers are deleted
by :mod:`everstep.keeper.retain.retention` and :mod:`everstep.keeper.ship.log_copies`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from everstep.commit.lineage import BaseId, Branch, split_by_history

TIERS = ("memory", "peer", "disk", "copy", "object")
"""Tiers in the order of the cost of reading (TierCheck, section 3.3). ``copy`` is a directory other
than the run folder."""

Tier = Annotated[str, Meta(pattern=f"^({'|'.join(TIERS)})$")]
"""Name of a tier."""

TierIndex = Annotated[int, Meta(ge=0, lt=len(TIERS))]
"""Index of a tier in :data:`TIERS`."""

VOLATILE_TIERS = ("memory", "peer")
"""Tiers that lose their contents in a power loss."""

COPY_TIERS = ("copy", "object")
"""Tiers with copies of files from the ranks' own disks; all ranks read the same copies."""


class Watermark:
    """Watermark of one timeline, as known to one rank.

    It never decreases: a notification that arrives twice, late or from an older timeline has no
    effect.

    Args:
        base: base that the timeline started from, if it is durable on all ranks.

    Attributes:
        base: newest base known to be durable on all ranks.
        before: previous watermark.
    """

    def __init__(self, base: BaseId | None = None) -> None:
        self.base = base
        self.before: BaseId | None = None

    def advance(self, base: BaseId) -> bool:
        """Record that ``base`` is durable on all ranks; return True if that moves the watermark."""
        if self.base is not None and base <= self.base:
            return False
        self.before = self.base
        self.base = base
        return True


@dataclass(frozen=True, slots=True)
class BestRule:
    """Keep the bases with the best values of a metric.

    Attributes:
        metric: name of the metric.
        bases: number of bases.
        largest: the largest values are the best ones; otherwise the smallest.
    """

    metric: str
    bases: int
    largest: bool = False


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Bases that retention keeps.

    Attributes:
        newest: number of newest bases, at least 1.
        every_steps: for each number, the first base at or after each multiple of it is kept for
            ever.
        best: bases with the best metrics.
    """

    newest: int
    every_steps: tuple[int, ...] = ()
    best: tuple[BestRule, ...] = ()

    @property
    def bases_max(self) -> int:
        """Largest number of bases kept at a time, except for those of :attr:`every_steps`."""
        return self.newest + sum(rule.bases for rule in self.best)

    @property
    def in_words(self) -> str:
        """The rules as one phrase."""
        parts = [str(self.newest)]
        parts += [f"one every {steps} steps" for steps in self.every_steps]
        parts += [f"best {rule.bases} by {rule.metric}" for rule in self.best]
        return ", ".join(parts)

    def kept(
        self,
        metrics: Mapping[BaseId, Mapping[str, float]],
        pinned: Collection[BaseId],
        branches: Mapping[int, Branch],
    ) -> set[BaseId]:
        """Return the bases that stay in addition to the newest ones.

        Only bases of the current history count, except for pinned ones.

        Args:
            metrics: metrics of each good base.
            pinned: bases that the user has pinned.
        """
        here, _ = split_by_history(metrics, branches)
        kept = {base for base in metrics if base in pinned}
        for every in self.every_steps:
            # Oldest last: of several bases between two multiples, the first one stays.
            first = {base.step // every: base for base in here}
            kept |= {base for multiple, base in first.items() if multiple > 0 or base.step == 0}
        for rule in self.best:
            # Newest first, and sorting is stable: of equal values the newest one counts.
            known = [base for base in here if rule.metric in metrics[base]]
            known.sort(key=lambda base: metrics[base][rule.metric], reverse=rule.largest)
            kept.update(known[: rule.bases])
        return kept


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Next work of retention.

    Attributes:
        delete: bases to delete, oldest first; empty while ``verify`` is set.
        verify: base to read back first, because no base that would stay has been verified.
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
    """Keep the ``keep`` newest good bases; bases of the current history take precedence.

    Bases of abandoned branches rank after all bases of the history, so they are deleted as new ones
    are committed. Bases are deleted only if a base that was read back and verified stays
    (``adr/005``). With ``keep`` bases that takes one read-back every ``keep`` commits.

    Args:
        keep: number of bases to keep, at least 1.
        verified: bases that this process has read back without errors.
        damaged: bases found damaged. They do not count, and are deleted once ``keep`` good bases
            exist.
        spared: good bases among these stay in place of others; the newest base stays as well.
        needed: good bases among these stay in addition to ``keep``.
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
    # The newest: it stays for the next `keep` commits, so one read-back serves them all.
    if not any(base in verified for base in stay):
        return RetentionPlan(verify=stay[0])
    return RetentionPlan(delete=tuple(reversed(go)))
