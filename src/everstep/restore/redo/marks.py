"""Comparison of the entries that consecutive step marks hold in full.

Each program declares for itself which entries nothing changes (I8). When a program continues the
log of another one, its marks may hold fewer entries: an entry that only the earlier marks hold
keeps its value from the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.format.log import LogRecord
from everstep.state.layout.names import SAMPLE
from everstep.state.layout.shards import Placed

__all__ = ["MarkEntries", "dropped_from_marks", "mark_holds_less"]

MarkEntries = Sequence[tuple[LogRecord, Placed]]
"""Entries of a state, each with the mark that holds it, all marks of one step."""


def dropped_from_marks(before: MarkEntries, now: MarkEntries) -> MarkEntries:
    """Return the entries that the marks of one step hold and those of the next step do not."""
    names = {place.entry.name for _, place in now}
    return [one for one in before if one[1].entry.name not in names]


def mark_holds_less(mark: LogRecord, *, than: LogRecord) -> bool:
    """Return True if a mark lacks an entry that the earlier mark ``than`` holds."""
    before, now = (
        {p.entry.name for p in one.layout.placed if not p.entry.name.startswith(SAMPLE)}
        for one in (than, mark)
    )
    return not before <= now
