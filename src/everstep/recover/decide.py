"""In which order bases are tried, and why some are not. Without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.commit.lineage import BaseId, split_by_history
from everstep.errors import RecoveryError
from everstep.recover.scan import BaseFound, Inventory

__all__ = ["Candidates", "Skipped", "begins_with_several", "candidates"]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A base that was passed over.

    Attributes:
        reason: in words.
    """

    timeline: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bases to try, best first, and what was passed over without being read.

    Attributes:
        damaged: of ``skipped``, those of the history that may have been good: with nothing else to
            try, starting afresh would throw them away unnoticed.
    """

    ordered: tuple[BaseFound, ...]
    skipped: tuple[Skipped, ...]
    damaged: tuple[Skipped, ...] = ()


def candidates(inventory: Inventory, *, step: int | None = None) -> Candidates:
    """The newest (timeline, step) first, along the history of the newest timeline.

    Args:
        step: only bases of this step, in any timeline, those of the history first.

    Raises:
        RecoveryError: when ``step`` is asked for and no base has it.
    """
    usable: dict[BaseId, BaseFound] = {}
    skipped: list[Skipped] = []
    damaged: dict[BaseId, Skipped] = {}
    for base in inventory.bases:
        if base.is_usable:
            usable[base.id] = base
        else:
            reason = "it is being deleted" if base.status == "condemned" else base.problem
            skipped.append(Skipped(base.id.timeline, base.id.step, reason or "incomplete"))
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
                hint="bases there are: " + (_listed(here + elsewhere) or "none"),
            )
    return Candidates(
        tuple(usable[base] for base in chosen), tuple(skipped), tuple(damaged[b] for b in lost)
    )


def begins_with_several(inventory: Inventory, *, step: int | None = None) -> bool:
    """Whether the base to begin with is one of several ranks: the newest in the history.

    Args:
        step: none behind this one, then those of other timelines.
    """
    worlds = {
        base.id: base.manifest.markers[0].world  # of what is in memory only one has come
        for base in inventory.bases
        if base.is_usable and base.manifest is not None
    }
    here, elsewhere = split_by_history(worlds, inventory.branches)
    ordered = here if step is None else [base for base in here + elsewhere if base.step <= step]
    return bool(ordered) and worlds[ordered[0]] > 1


def _listed(bases: list[BaseId]) -> str:
    return ", ".join(str(base) for base in bases[:20]) + (", ..." if len(bases) > 20 else "")
