"""Timelines and history: which bases the newest timeline descends from.

Every process that takes a run over opens a new timeline, which forks from a base of an
older one (PostgreSQL's timelines). A base of the parent after the fork is not part of the
new timeline's history: a rewind to step 100 is not undone by the base of step 500 that it
turned away from, and a late commit of a fenced process is not mistaken for progress.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from everstep.format.records import TimelineRecord

__all__ = ["BaseId", "Branch", "branches_of", "history", "split_by_history"]


@dataclass(frozen=True, slots=True, order=True)
class BaseId:
    """Names a base within a run; ordered as they were made along a history."""

    timeline: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of timeline {self.timeline}"


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a timeline forked from.

    Attributes:
        parent: None for a fresh start.
        fork_step: last step of the parent that belongs to this timeline's history; None when
            the timeline's record cannot be read, then all of the parent counts.
    """

    timeline: int
    parent: int | None
    fork_step: int | None


def branches_of(
    timelines: Mapping[int, TimelineRecord | None],
    there: Collection[BaseId],
    logged: Collection[int] = (),
) -> dict[int, Branch]:
    """Where each timeline forked from. With a damaged record: from all of the one before it.

    A timeline without bases whose own base was deleted while it was opened: nobody has trained on
    it, and it must not hide what is newer. It counts as forked from all of the newest one before
    it that rests on something.

    Args:
        timelines: their records by number; None where the record is damaged.
        there: bases that are there, or may be.
        logged: timelines that a log is of: they were trained on, too.
    """
    found: dict[int, Branch] = {}
    used = {base.timeline for base in there} | set(logged)
    resting: int | None = None  # the newest so far that has bases, or forked from one
    for number in sorted(timelines):
        record = timelines[number]
        if record is None:
            found[number] = Branch(number, max(found, default=None), None)
            resting = number if number in used else resting
        elif _is_void(record, there, used):
            found[number] = Branch(number, record.parent if resting is None else resting, None)
        else:
            found[number] = Branch(number, record.parent, record.fork_step)
            resting = number if number in used or record.parent is not None else resting
    return found


def _is_void(record: TimelineRecord, there: Collection[BaseId], used: Collection[int]) -> bool:
    if record.parent is None or record.timeline in used:
        return False
    return BaseId(*(record.base or (record.parent, record.fork_step))) not in there


def history(newest: int, branches: Mapping[int, Branch]) -> list[tuple[int, int | None]]:
    """``(timeline, last step that counts)`` from ``newest`` back to its first ancestor."""
    found: list[tuple[int, int | None]] = []
    timeline: int | None = newest
    limit: int | None = None
    while timeline is not None:
        found.append((timeline, limit))
        branch = branches.get(timeline)
        if branch is None or branch.parent is None or branch.parent >= timeline:
            break
        timeline, limit = branch.parent, branch.fork_step
    return found


def split_by_history(
    bases: Iterable[BaseId], branches: Mapping[int, Branch]
) -> tuple[list[BaseId], list[BaseId]]:
    """Sorts bases into those in the newest timeline's history and the others.

    Returns:
        Both lists newest first.
    """
    ordered = sorted(bases, reverse=True)
    if not branches:
        return [], ordered
    limits = dict(history(max(branches), branches))

    def counts(base: BaseId) -> bool:
        if base.timeline not in limits:
            return False
        limit = limits[base.timeline]
        return limit is None or base.step <= limit

    return [base for base in ordered if counts(base)], [b for b in ordered if not counts(b)]
