"""What step marks hold in full, from one to the next.

Each program says for itself what nothing changes (I8). Where one goes on from another's log, its
marks may hold less: what only those before have is from then on as the last of them has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.format.log import LogRecord
from everstep.state.layout.names import SAMPLE
from everstep.state.layout.shards import Placed

__all__ = ["MarkEntries", "dropped_from_marks", "mark_holds_less"]

MarkEntries = Sequence[tuple[LogRecord, Placed]]
"""Entries of a state, with the marks of one step that hold them."""


def dropped_from_marks(before: MarkEntries, now: MarkEntries) -> MarkEntries:
    """What the marks of a step hold, and those of the next do not."""
    names = {place.entry.name for _, place in now}
    return [one for one in before if one[1].entry.name not in names]


def mark_holds_less(mark: LogRecord, *, than: LogRecord) -> bool:
    """Whether a mark does not hold all that one before it does."""
    before, now = (
        {p.entry.name for p in one.layout.placed if not p.entry.name.startswith(SAMPLE)}
        for one in (than, mark)
    )
    return not before <= now
