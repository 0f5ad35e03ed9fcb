"""Order in which a resume tries the bases, and reasons to skip some of them. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit.lineage import BaseId, split_by_history
from everstep.errors import RecoveryError
from everstep.format.names import timeline_dir
from everstep.run.scan import BaseFound, Inventory

__all__ = [
    "Candidates",
    "Skipped",
    "Unreachable",
    "candidates",
    "newest_unreachable",
    "refuse_unreachable",
    "starts_with_job_base",
]


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
class Unreachable:
    """A path of the current history that exists, or did, and cannot be read.

    Attributes:
        why: reason, worded to follow the path.
        without: newest base that is older than it.
    """

    timeline: int
    path: PurePath
    why: str
    without: BaseId | None = None

    @property
    def message(self) -> str:
        """The path and the reason."""
        return f"{self.path} {self.why}"

    @property
    def hint(self) -> str:
        """Advice for the user."""
        found = "move it back to its place (a symbolic link to the entire run folder works)"
        if self.without is not None:
            found += f"; resume(step={self.without.step}) continues from {self.without} without it"
        return f"{found}; resume(step=0) starts from scratch"

    def error(self) -> RecoveryError:
        """Return the error to raise if nothing newer can be restored."""
        return RecoveryError(
            f"{self.message}: its contents may be newer than everything readable, and would "
            "be lost silently",
            path=self.path,
            hint=self.hint,
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bases to try, best first, and bases skipped without being read.

    Attributes:
        damaged: those of ``skipped`` that belong to the history and may have been good. If nothing
            else can be tried, starting afresh would silently discard them.
        unreachable: path whose contents may be newer than the older bases, which are left out of
            ``ordered`` because of it. Unless a base of ``ordered`` can be used, nothing may be
            restored without an explicit step.
    """

    ordered: tuple[BaseFound, ...]
    skipped: tuple[Skipped, ...]
    damaged: tuple[Skipped, ...] = ()
    unreachable: Unreachable | None = None


def newest_unreachable(inventory: Inventory) -> Unreachable | None:
    """Return the newest path of the current history that cannot be read, judging by names and
    records; None if there is none.

    A timeline newer than everything readable may be the current one. The directory of a timeline
    that a younger one forked from is never removed, even when it is empty, so its absence counts as
    well.
    """
    found = {number: dict(parts) for number, parts in inventory.unreachable.items()}
    number: int | None = max(inventory.timelines, default=None)
    # If a record is unreadable, its parent is unknown: every older timeline may belong to the
    # history.
    history = set()
    before = 0
    newest = number or 0
    while number is not None:
        history.add(number)
        there = number in inventory.timelines or number in inventory.abandoned
        if not there and number not in found:
            path = timeline_dir(inventory.path, number)
            why = f"is missing, although timeline {min(history - {number})} forked from it"
            found[number] = {path: why}
        record = inventory.timelines.get(number)
        if record is None:
            before = number
            break
        number = record.parent
    for number in sorted(found, reverse=True):
        if number > newest or number in history or number < before:
            path, why = next(iter(found[number].items()))
            return Unreachable(number, path, why)
    return None


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
            if base.status == "damaged":
                damaged[base.id] = skipped[-1]
    here, elsewhere = split_by_history(usable, inventory.branches)
    lost, _ = split_by_history(damaged, inventory.branches)
    hidden = newest_unreachable(inventory)
    if step is None:
        chosen = here
        if hidden is not None:
            chosen = [base for base in here if base.timeline > hidden.timeline]
            older = [base for base in here if base.timeline <= hidden.timeline]
            skipped += [Skipped(base.timeline, base.step, hidden.message) for base in older]
            hidden = replace(hidden, without=max(older, default=None))
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
                hint="existing bases: "
                + (_listed(here + elsewhere) or "none")
                + ("" if hidden is None else f"; {hidden.message}"),
            )
        hidden = None
    ordered = tuple(usable[base] for base in chosen)
    return Candidates(ordered, tuple(skipped), tuple(damaged[base] for base in lost), hidden)


def refuse_unreachable(inventory: Inventory) -> None:
    """Refuse to restore the newest state while an unreadable path may hold a newer one.

    Raises:
        RecoveryError: with the path.
    """
    found = candidates(inventory)
    if found.unreachable is not None and not found.ordered:
        raise found.unreachable.error()


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
