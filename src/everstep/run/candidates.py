"""Order in which a resume tries the bases, and reasons to skip some of them. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.commit.lineage import BaseId, split_by_history
from everstep.errors import RecoveryError
from everstep.run.scan import BaseFound, Inventory


@dataclass(frozen=True, slots=True)
class Skipped:
    """A base or log step that was skipped.

    Attributes:
        reason: why, in words.
    """

    timeline: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bases to try, best first, and bases skipped without being read.

    Attributes:
        damaged: those of ``skipped`` that belong to the history and may have been good. If nothing
            else can be tried, starting afresh would silently discard them.
    """

    ordered: tuple[BaseFound, ...]
    skipped: tuple[Skipped, ...]
    damaged: tuple[Skipped, ...] = ()


def candidates(inventory: Inventory, *, step: int | None = None) -> Candidates:
    """Return the bases along the history of the newest timeline, newest (timeline, step) first.

    Args:
        step: only bases of this step, in any timeline; those of the history come first.

    Raises:
        RecoveryError: no base has ``step``.
    """
    usable: dict[BaseId, BaseFound] = {}
    skipped: list[Skipped] = []
    damaged: dict[BaseId, Skipped] = {}
    for base in inventory.bases:
        if base.is_usable:
            usable[base.id] = base
        else:
            reason = "is being deleted" if base.status == "condemned" else base.problem
            skipped.append(Skipped(base.id.timeline, base.id.step, reason or "incomplete"))
            # Only these may have been good; incomplete bases never existed.
            if base.status == "damaged":
                damaged[base.id] = skipped[-1]
    here, elsewhere = split_by_history(usable, inventory.branches)
    lost, _ = split_by_history(damaged, inventory.branches)
    if step is None:
        chosen = here
        skipped += [
            Skipped(base.timeline, base.step, "not in the history of the newest timeline")
            for base in elsewhere
        ]
    else:
        chosen = [base for base in here + elsewhere if base.step == step]
        if not chosen:
            raise RecoveryError(
                f"there is no base of step {step}",
                step=step,
                path=inventory.path,
                hint="existing bases: " + (_listed(here + elsewhere) or "none"),
            )
    ordered = tuple(usable[base] for base in chosen)
    return Candidates(ordered, tuple(skipped), tuple(damaged[base] for base in lost))


def starts_with_job_base(inventory: Inventory, *, step: int | None = None) -> bool:
    """Return True if the first base to try was saved by several ranks.

    Args:
        step: ignore bases after this step, then consider other timelines as well; None: the newest
            base of the history.
    """
    worlds = {
        base.id: base.manifest.markers[0].world  # of a base in memory, only one marker is here
        for base in inventory.bases
        if base.is_usable and base.manifest is not None
    }
    here, elsewhere = split_by_history(worlds, inventory.branches)
    ordered = here if step is None else [base for base in here + elsewhere if base.step <= step]
    return bool(ordered) and worlds[ordered[0]] > 1


def _listed(bases: list[BaseId]) -> str:
    return ", ".join(str(base) for base in bases[:20]) + (", ..." if len(bases) > 20 else "")
