"""Timelines and history: which bases the newest timeline descends from.

Every process that takes a run over opens a new timeline, which forks from a base of an
older one (PostgreSQL's timelines). A base of the parent after the fork is not part of the
new timeline's history: a rewind to step 100 is not undone by the base of step 500 that it
turned away from, and a late commit of a fenced process is not mistaken for progress.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

from everstep.errors import FencedError
from everstep.format.records import TimelineRecord

__all__ = [
    "BaseId",
    "Branch",
    "branches_of",
    "describe_abandoned",
    "describe_lost_steps",
    "describe_missing_steps",
    "describe_unused",
    "fenced_error",
    "history",
    "split_by_history",
]


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
        timeline = branch.parent
        limit = branch.fork_step
    return found


def describe_abandoned(end: BaseId, branches: Mapping[int, Branch]) -> str | None:
    """Where the newest timeline's history parts from a state that is not in it, in words for
    whoever has asked for that step; None: it is in it. Another training had that step, and nothing
    else tells the two apart.

    Args:
        end: timeline and step of the state.
    """
    if not branches or not split_by_history([end], branches)[1]:
        return None
    path = history(max(branches), branches)
    limits = dict(path)
    origin = next((item for item in history(end.timeline, branches) if item[0] in limits), None)
    if origin is None:
        how = f"timeline {path[-1][0]} began from scratch, without it"
    else:
        common, own = origin
        younger = [timeline for timeline, _ in path if timeline > common]
        left = limits[common]
        steps = [step for step in (own, left) if step is not None]
        where = BaseId(common, min(steps)) if steps else f"timeline {common}"
        # The two may have parted before the one that left began: then it is that which forked.
        if left is None or (own is not None and own < left):
            how = f"it parted at {where}, and training went on without it"
        else:
            how = f"timeline {min(younger)} began at {where}, and left it behind"
    return (
        f"{end} is of a branch that was given up: {how}. The history of timeline {path[0][0]}, the "
        f"newest until now, has no step {end.step} that can be restored"
    )


def describe_lost_steps(
    end: BaseId, branches: Mapping[int, Branch], kept: tuple[BaseId, str] | None = None
) -> str | None:
    """What the newest timeline's history has, or has had, behind the newest state that could be
    restored of it, in words; None: nothing that its log or its forks tell of.

    Args:
        kept: how far the log leads behind that state, and why this start has not gone there; None:
            no further.
    """
    said = list[str]()
    known = end.step
    if kept is not None and kept[0].step > known:
        last, why = kept
        said.append(
            f"the log leads on to {last}, but could not be replayed here ({why}): "
            f"{_steps(known, last.step)} must be trained again, or resume(step={last.step}) goes "
            "back there, where it can be"
        )
        known = last.step
    path = history(max(branches, default=end.timeline), branches)
    for (younger, _), (timeline, fork) in pairwise(path):
        if fork is not None and fork > known:
            said.append(
                f"timeline {younger} began at {BaseId(timeline, fork)}, and neither a base nor a "
                f"log leads there any more: {_steps(known, fork)} must be trained again"
            )
            break
    return "; ".join(said) or None


def fenced_error(
    timeline: int,
    newest: int,
    then: str = "",
    who: str = "",
    *,
    step: int | None = None,
    rank: int | None = None,
    path: PurePath | None = None,
) -> FencedError:
    """Return the error of a process that another one has fenced off.

    Args:
        timeline: that it writes.
        newest: that the other one has opened.
        then: what that means here, in words.
        who: the other one, where its record says so.
        step, rank, path: as of all errors.
    """
    return FencedError(
        f"another process{f' ({who})' if who else ''} has resumed this run: timeline {newest} has "
        f"taken the run over from timeline {timeline}, which this process writes"
        f"{f': {then}' if then else ''}",
        step=step,
        rank=rank,
        path=path,
        hint="this process must end: nothing that it trains from now on is saved. A run has one "
        "trainer at a time: use another run folder for a second training, and everstep.load(path) "
        "to read a run without taking it over",
    )


def describe_missing_steps(
    timelines: Mapping[int, TimelineRecord | None], branches: Mapping[int, Branch]
) -> str | None:
    """Why a start that finds nothing to restore must not begin afresh unasked, in words: the newest
    timeline's history has had steps that a process went on from; None: nothing says so. A process
    that was killed before its first base was durable has left no such timeline.

    Args:
        timelines: their records by number, which say so also where all that they rest on is gone
            (:func:`branches_of` leaves that out); None where the record is damaged.
    """
    for number, _ in history(max(branches), branches) if branches else ():
        record = timelines.get(number)
        if record is None and any(other < number for other in timelines):
            return (
                f"the record of timeline {number} is damaged, which says whether it began at a "
                "step of an older one, and nothing that could be restored is left in its history"
            )
        if record is not None and record.parent is not None and record.fork_step > 0:
            return (
                f"the history of this run had step {record.fork_step} (timeline {number} began "
                f"there, behind timeline {record.parent}), and no base is left that leads there"
            )
    return None


def describe_unused(left: Iterable[BaseId], branches: Mapping[int, Branch]) -> str | None:
    """What is to be said of a start that begins afresh, though there is something of a step in the
    newest timeline's history; None: there is nothing.

    Args:
        left: bases that are not whole, and steps of logs.
    """
    there, _ = split_by_history(left, branches)
    if not there:
        return None
    return (
        f"training starts at step 0: there is something of {there[0]}, and no base that was "
        "finished, which it could be restored from"
    )


def _steps(after: int, last: int) -> str:
    return f"step {last}" if last == after + 1 else f"steps {after + 1} to {last}"


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
