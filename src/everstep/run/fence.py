"""The fence (I11): whether a process may still commit and delete, or another has taken the run."""

from __future__ import annotations

from pathlib import PurePath

from everstep.commit.lineage import fenced_off
from everstep.errors import EverstepError, FencedError
from everstep.format.names import TIMELINE_RECORD, timeline_dir
from everstep.format.reader import read_record_bytes
from everstep.format.records import TimelineRecord
from everstep.run.scan import newest_timeline
from everstep.seams import FileSystem

__all__ = ["Fence", "timeline_bytes"]


class Fence:
    """Of the process that writes one timeline; made when that has been opened.

    A newer timeline fences it off. So does another of the same number: the folder was put back as
    it was once (from a copy, or a snapshot of its disk), and taken over by a process that could
    not know of this one.

    Attributes:
        timeline: that is written.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath, timeline: int) -> None:
        self._filesystem = filesystem
        self._run = run
        self.timeline = timeline
        self._record = timeline_bytes(filesystem, run, timeline)

    def newest(self) -> int:
        """The newest timeline of the run.

        Raises:
            FencedError: this one is no longer what it was.
        """
        newest = newest_timeline(self._filesystem, self._run)
        if self._record is None or newest > self.timeline:
            return newest
        what = "is gone"
        if newest == self.timeline:
            record = timeline_bytes(self._filesystem, self._run, newest)
            if record in (None, self._record):
                return newest
            what = "was opened by another one, too"
        raise FencedError(
            f"timeline {self.timeline}, which this process writes, {what}: the folder was put "
            "back as it was once",
            path=self._run,
            hint="end this one: what it trains belongs to no history of this folder",
        )

    def seen(self) -> int:
        """As :meth:`newest`, for whoever has something to undo first: where this timeline is no
        longer what it was, the number behind it."""
        try:
            return self.newest()
        except FencedError:
            return self.timeline + 1

    def check(self) -> None:
        """Looks for newer timelines.

        Raises:
            FencedError: there is one, or this one is no longer what it was.
        """
        newest = self.newest()
        if newest > self.timeline:
            who = _opened_by(self._filesystem, self._run, newest)
            raise fenced_off(self.timeline, newest, who=who, path=self._run)


def _opened_by(filesystem: FileSystem, run: PurePath, timeline: int) -> str:
    """Return which process has opened a timeline, as its record says; "" if it does not."""
    data = timeline_bytes(filesystem, run, timeline)
    path = timeline_dir(run, timeline)
    try:
        record = None if data is None else TimelineRecord.decode(data, path)
    except EverstepError:
        return ""
    return "" if record is None else record.fingerprint.get("process", "")


def timeline_bytes(filesystem: FileSystem, run: PurePath, number: int) -> bytes | None:
    """The record of a timeline, as it is on this disk now; None if it cannot be read."""
    try:
        return read_record_bytes(filesystem, timeline_dir(run, number) / TIMELINE_RECORD)
    except (OSError, EverstepError):
        return None
