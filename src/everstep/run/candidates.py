"""In which order bases are tried, and why some are not. Without I/O."""

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
    """A base that was passed over.

    Attributes:
        reason: in words.
    """

    timeline: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A part of the present history that is there, or was, and cannot be read.

    Attributes:
        why: in words that follow the path.
        without: the newest base that is older than it.
    """

    timeline: int
    path: PurePath
    why: str
    without: BaseId | None = None

    @property
    def told(self) -> str:
        return f"{self.path} {self.why}"

    @property
    def hint(self) -> str:
        """What to do about it."""
        found = "put it back in its place (a link to the whole run folder works)"
        if self.without is not None:
            found += f"; resume(step={self.without.step}) goes on from {self.without} without it"
        return f"{found}; resume(step=0) starts from scratch"

    def error(self) -> RecoveryError:
        return RecoveryError(
            f"{self.told}: what it holds may be newer than all that can be read, and would be lost "
            "without a word",
            path=self.path,
            hint=self.hint,
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Bases to try, best first, and what was passed over without being read.

    Attributes:
        damaged: of ``skipped``, those of the history that may have been good: with nothing else to
            try, starting afresh would throw them away unnoticed.
        unreachable: what may be newer than the bases that are left out because of it: unless one of
            ``ordered`` can be used, nothing may be restored unasked.
    """

    ordered: tuple[BaseFound, ...]
    skipped: tuple[Skipped, ...]
    damaged: tuple[Skipped, ...] = ()
    unreachable: Unreachable | None = None


def newest_unreachable(inventory: Inventory) -> Unreachable | None:
    """Return the newest part of the present history that cannot be read, as far as names and
    records tell; None if all of it can be.

    A timeline that is newer than all that can be read may be the present one. The directory of one
    that a younger one forked from stays for ever, even where nothing is left in it."""
    found = {number: dict(parts) for number, parts in inventory.unreachable.items()}
    number: int | None = max(inventory.timelines, default=None)
    history = set()  # all timelines before the one whose record cannot be read count
    before = 0
    newest = number or 0
    while number is not None:
        history.add(number)
        there = number in inventory.timelines or number in inventory.abandoned
        if not there and number not in found:
            path = timeline_dir(inventory.path, number)
            why = f"is missing, and timeline {min(history - {number})} began there"
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
    hidden = newest_unreachable(inventory)
    if step is None:
        chosen = here
        if hidden is not None:
            chosen = [base for base in here if base.timeline > hidden.timeline]
            older = [base for base in here if base.timeline <= hidden.timeline]
            skipped += [Skipped(base.timeline, base.step, hidden.told) for base in older]
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
                hint="bases there are: "
                + (_listed(here + elsewhere) or "none")
                + ("" if hidden is None else f"; {hidden.told}"),
            )
        hidden = None
    ordered = tuple(usable[base] for base in chosen)
    return Candidates(ordered, tuple(skipped), tuple(damaged[base] for base in lost), hidden)


def refuse_unreachable(inventory: Inventory) -> None:
    """Refuse to restore anything, where no step was asked for and what cannot be read may be newer
    than all that can be.

    Raises:
        RecoveryError: with the path.
    """
    found = candidates(inventory)
    if found.unreachable is not None and not found.ordered:
        raise found.unreachable.error()


def starts_with_job_base(inventory: Inventory, *, step: int | None = None) -> bool:
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
