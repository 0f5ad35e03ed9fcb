"""When a job finds nothing that all of its ranks can read: whether it may start afresh, and what it
says else. Decisions without I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from everstep.commit.lineage import BaseId, Branch, split_by_history
from everstep.errors import RecoveryError

if TYPE_CHECKING:
    from everstep.commit.job.offers import Offer

__all__ = ["given_up", "is_fresh", "nothing_readable", "way_back"]

_FROM_SCRATCH = "resume(step=0) starts from scratch"


def way_back(elsewhere: Sequence[BaseId] = ()) -> str:
    """What to do where a run has had steps, and no base of them is left.

    Args:
        elsewhere: bases that its history has turned away from, the newest first.
    """
    if elsewhere:
        first = elsewhere[0]
        return f"resume(step={first.step}) goes on from {first}; {_FROM_SCRATCH}"
    return (
        "bring back what was deleted (of a copy that was made while training went on: copy once "
        f"more), or the tiers= that have copies; {_FROM_SCRATCH}"
    )


def given_up(
    bases: Iterable[BaseId], branches: Mapping[int, Branch], offers: Sequence[Offer]
) -> set[BaseId]:
    """Which of some bases the newest timeline has turned away from, by a start that every rank that
    has something of them took part in: what hosts did without them gives nothing up."""
    _, elsewhere = split_by_history(bases, branches)

    def knows(offer: Offer, base: BaseId) -> bool:
        has = base in offer.bases or base in offer.lost
        return not has or max(branches) in offer.timelines

    return {base for base in elsewhere if all(knows(offer, base) for offer in offers)}


def is_fresh(step: int | None, good: Collection[BaseId], had: str | None) -> bool:
    """Whether starting afresh throws nothing away, or is what was asked for.

    Args:
        step: that was asked for.
        good: bases that are, or may have been, whole, and were not given up.
        had: see :func:`everstep.commit.lineage.had_steps`.
    """
    return step == 0 if step is not None else not good and had is None


def nothing_readable(
    step: int | None,
    why: Mapping[BaseId, str],
    lost: Iterable[BaseId],
    readable: Sequence[BaseId],
    world: int,
    had: str | None,
) -> RecoveryError:
    """What is said where a job may not start afresh.

    Args:
        why: of bases that there are: why they cannot be used.
        lost: bases of which there is something that cannot be read.
        readable: those that can, of any timeline.
        had: what the history has had, where there is no base of it.
    """
    can_read = "can be read" if world == 1 else "every rank can read"
    if step is not None:
        return RecoveryError(
            f"there is no base of step {step} that {can_read}",
            step=step,
            hint="bases there are: " + (", ".join(map(str, readable[:20])) or "none"),
        )
    reasons = [f"  {base}: {reason}" for base, reason in sorted(why.items(), reverse=True)]
    reasons += [f"  {base}: its records are damaged" for base in sorted(set(lost) - why.keys())]
    hint = _FROM_SCRATCH if had is None else way_back()
    hint = f"start with the hosts that have the missing files; {hint}"
    hint = way_back(readable) if readable else hint
    said = had or f"there are bases, but none that {can_read}"
    return RecoveryError("\n".join([f"{said}:" if reasons else said, *reasons]), hint=hint)
