"""Which timelines a keeper has served, and whether they still are those of the folder."""

from __future__ import annotations

from pathlib import PurePath

from everstep.run.fence import timeline_bytes
from everstep.seams import FileSystem

__all__ = ["Histories"]


class Histories:
    """The timelines that were served, by what their records were then.

    A folder that is put back as it was once (from a copy, or a snapshot of its disk) has the same
    run and the same path, so the next process finds the same keeper; but it opens a timeline of a
    number that there was already, and what the keeper has of that one and those behind it is
    of a history that the folder knows nothing of.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath) -> None:
        self._filesystem = filesystem
        self._run = run
        self._records: dict[int, bytes] = {}

    def begins(self, timeline: int) -> bool:
        """A timeline is served from now on; returns whether what there is of it and of those behind
        it is of another history."""
        known = self._records
        record = timeline_bytes(self._filesystem, self._run, timeline)
        other = known.get(timeline) not in (None, record) or any(n > timeline for n in known)
        self._records = {number: known[number] for number in known if number < timeline}
        if record is not None:
            self._records[timeline] = record
        return other

    def to_wire(self) -> list[list[int | bytes]]:
        """For ``recalled``."""
        return [[number, record] for number, record in self._records.items()]
