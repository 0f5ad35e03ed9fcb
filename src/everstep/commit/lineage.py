"""Timelines and history: the bases that the newest timeline descends from.

Every process that takes a run over opens a new timeline, which forks from a base of an older one
(as PostgreSQL's timelines do). Bases of the parent after the fork are not in the history of the new
timeline: a rewind to step 100 is not undone by an abandoned base of step 500, and a late commit of
a fenced process is not mistaken for progress (``adr/003``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath

import msgspec

from everstep.errors import FencedError
from everstep.format import TimelineRecord
from everstep.format.message_codec import Count


class BaseId(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Identity of a base within a run; along one history the order is the order of creation."""

    timeline: Count
    step: Count

    def __str__(self) -> str:
        return f"step {self.step} of timeline {self.timeline}"


@dataclass(frozen=True, slots=True)
class Branch:
    """Fork point of a timeline.

    Attributes:
        parent: parent timeline; None for a fresh start.
        fork_step: last step of the parent in this timeline's history. None if the record of the
            timeline is damaged; then the entire parent is in the history.
    """

    timeline: int
    parent: int | None
    fork_step: int | None


def branches_of(
    timelines: Mapping[int, TimelineRecord | None],
    there: Collection[BaseId],
    logged: Collection[int] = (),
) -> dict[int, Branch]:
    """Return the fork point of each timeline.

    A timeline with a damaged record counts as forked from the end of the timeline before it.

    A timeline without bases whose own base was deleted while it was opened was never trained on and
    must not hide newer bases. It counts as forked from the end of the newest earlier timeline that
    has bases or forked from one.

    Args:
        timelines: record by timeline number; None where the record is damaged.
        there: bases that exist, or may exist.
        logged: timelines with gradient logs; they were trained on as well.
    """
    found: dict[int, Branch] = {}
    used = {base.timeline for base in there} | set(logged)
    resting: int | None = None  # newest timeline so far that has bases or forked from a base
    # In ascending order: each timeline refers to those before it.
    for number in sorted(timelines):
        record = timelines[number]
        if record is None:
            found[number] = Branch(number, max(found, default=None), None)
            resting = number if number in used else resting
        elif _is_void(record, timelines, there, used):
            found[number] = Branch(number, record.parent if resting is None else resting, None)
        else:
            found[number] = Branch(number, record.parent, record.fork_step)
            resting = number if number in used or record.parent is not None else resting
    return found


def _is_void(
    record: TimelineRecord,
    timelines: Collection[int],
    there: Collection[BaseId],
    used: Collection[int],
) -> bool:
    if record.parent is None or record.timeline in used:
        return False
    # The directory of a parent is never removed, so a missing one was lost, with newer bases.
    if record.parent not in timelines:
        return False
    return BaseId(*(record.base or (record.parent, record.fork_step))) not in there


def history(newest: int, branches: Mapping[int, Branch]) -> list[tuple[int, int | None]]:
    """Return ``(timeline, last step in the history)`` from ``newest`` back to its first
    ancestor."""
    found: list[tuple[int, int | None]] = []
    timeline: int | None = newest
    limit: int | None = None
    while timeline is not None:
        found.append((timeline, limit))
        branch = branches.get(timeline)
        # A forged record may name a younger parent, and the loop would not end.
        if branch is None or branch.parent is None or branch.parent >= timeline:
            break
        timeline = branch.parent
        limit = branch.fork_step
    return found


def describe_abandoned(end: BaseId, branches: Mapping[int, Branch]) -> str | None:
    """Explain that a state is not in the newest timeline's history.

    The message is for a user who requested that step: another training produced it, and the step
    number alone does not show that. None if the state is in the history.

    Args:
        end: timeline and step of the state.
    """
    if not branches or not split_by_history([end], branches)[1]:
        return None
    return (
        f"{end} is on an abandoned branch: the history of timeline {max(branches)}, the newest "
        f"until now, has no step {end.step} that can be restored"
    )


def describe_lost_steps(
    end: BaseId, branches: Mapping[int, Branch], kept: tuple[BaseId, str] | None = None
) -> str | None:
    """Describe steps of the newest timeline's history that come after the newest restorable state.

    Return None if neither the log nor the forks show such steps.

    Args:
        kept: last step that the log reaches after that state, and the reason why this start did
            not replay it; None if the log reaches no further.
    """
    notes = list[str]()
    known = end.step
    if kept is not None and kept[0].step > known:
        last, why = kept
        notes.append(
            f"the log reaches {last}, but could not be replayed here ({why}): "
            f"{_steps(known, last.step)} must be trained again; resume(step={last.step}) restores "
            "that step where the log can be replayed"
        )
        known = last.step
    path = history(max(branches, default=end.timeline), branches)
    for (younger, _), (timeline, fork) in pairwise(path):
        if fork is not None and fork > known:
            notes.append(
                f"timeline {younger} started at {BaseId(timeline, fork)}, which no base or log "
                f"reaches any more: {_steps(known, fork)} must be trained again"
            )
            break
    return "; ".join(notes) or None


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
    """Return the error for a process that a newer timeline has fenced off.

    Args:
        timeline: timeline of this process.
        newest: timeline that the other process opened.
        then: consequence for the caller, in words.
        who: description of the other process, if its record has one.
        step, rank, path: location, as in all errors.
    """
    opened_by = f" ({who})" if who else ""
    consequence = f"; {then}" if then else ""
    return FencedError(
        f"another process{opened_by} has resumed this run: timeline {newest} has taken the run "
        f"over from timeline {timeline}, which this process writes{consequence}",
        step=step,
        rank=rank,
        path=path,
        hint="stop this process: nothing that it trains from now on is saved. A run has one "
        "trainer at a time. Use another run folder for a second training, and "
        "everstep.load(path) to read a run without taking it over",
    )


def describe_missing_steps(
    timelines: Mapping[int, TimelineRecord | None], branches: Mapping[int, Branch]
) -> str | None:
    """Explain why a start that finds nothing to restore must not silently begin at step 0.

    The newest timeline's history contains steps that a process continued from. Return None if
    nothing shows such steps. A process killed before its first durable base leaves no such
    timeline.

    Args:
        timelines: record by timeline number; None where it is damaged. Records count even if all
            bases they refer to are missing (:func:`branches_of` ignores those).
    """
    for number, _ in history(max(branches), branches) if branches else ():
        record = timelines.get(number)
        if record is None and any(other < number for other in timelines):
            return (
                f"the record of timeline {number} is damaged, so it may have started from an older "
                "timeline, and its history has nothing left to restore"
            )
        if record is not None and record.parent is not None and record.fork_step > 0:
            return (
                f"the history of this run had step {record.fork_step} (timeline {number} started "
                f"there, from timeline {record.parent}), but no base is left from which it can be "
                "reached"
            )
    return None


def describe_unused(left: Iterable[BaseId], branches: Mapping[int, Branch]) -> str | None:
    """Describe incomplete data that a start at step 0 does not use; None if there is none.

    Args:
        left: incomplete bases, and last steps of logs.
    """
    there, _ = split_by_history(left, branches)
    if not there:
        return None
    return (
        f"training starts at step 0: there is incomplete data of {there[0]}, but no complete base "
        "to restore from"
    )


def _steps(after: int, last: int) -> str:
    return f"step {last}" if last == after + 1 else f"steps {after + 1} to {last}"


def split_by_history(
    bases: Iterable[BaseId], branches: Mapping[int, Branch]
) -> tuple[list[BaseId], list[BaseId]]:
    """Split bases into those in the newest timeline's history and all others.

    Returns:
        Both lists, newest first.
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
