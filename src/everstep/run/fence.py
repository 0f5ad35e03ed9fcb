"""The fence (I11): detection of a newer process that has taken the run over."""

from __future__ import annotations

from pathlib import PurePath

from everstep.commit.lineage import fenced_error
from everstep.errors import EverstepError, FencedError
from everstep.format import TimelineRecord, timeline_dir
from everstep.format.names import TIMELINE_RECORD
from everstep.format.reader import read_record_bytes
from everstep.run.scan import newest_timeline
from everstep.seams import FileSystem


class Fence:
    """Fence of the process that writes one timeline; created when the timeline has been opened.

    A newer timeline fences the process off. So does another record of the same timeline number:
    then the folder was restored to an earlier state, from a copy or a snapshot of its disk, and
    taken over by a process that could not know of this one.

    Attributes:
        filesystem, run: the run folder.
        timeline: number of the timeline being written.
    """

    def __init__(self, filesystem: FileSystem, run: PurePath, timeline: int) -> None:
        self.filesystem = filesystem
        self.run = run
        self.timeline = timeline
        # Remember the exact bytes: another process may open a timeline of the same number in a
        # restored folder.
        self._record = timeline_bytes(filesystem, run, timeline)

    def newest(self) -> int:
        """Return the newest timeline of the run.

        Raises:
            FencedError: the record of this timeline is missing or was replaced.
        """
        newest = newest_timeline(self.filesystem, self.run)
        # An older number means that the newest timeline has disappeared: checked below.
        # Without the own record there is nothing to compare: only the number counts.
        if self._record is None or newest > self.timeline:
            return newest
        change = "has disappeared"
        if newest == self.timeline:
            record = timeline_bytes(self.filesystem, self.run, newest)
            # A record that cannot be read at the moment does not show that it was replaced.
            if record in (None, self._record):
                return newest
            change = "was also opened by another process"
        raise FencedError(
            f"timeline {self.timeline}, which this process writes, {change}: the folder "
            "was restored to an earlier state",
            path=self.run,
            hint="stop this process: its training is not part of any history of this folder",
        )

    def newest_or_next(self) -> int:
        """Return the newest timeline, or the next number if this timeline was replaced.

        For callers that must undo something before they raise.
        """
        try:
            return self.newest()
        except FencedError:
            return self.timeline + 1

    def check(self) -> None:
        """Check for newer timelines.

        Raises:
            FencedError: there is a newer timeline, or this one was replaced.
        """
        newest = self.newest()
        if newest > self.timeline:
            who = _opened_by(self.filesystem, self.run, newest)
            raise fenced_error(self.timeline, newest, who=who, path=self.run)


def _opened_by(filesystem: FileSystem, run: PurePath, timeline: int) -> str:
    """Return the process that opened a timeline, from its record; "" if unknown."""
    data = timeline_bytes(filesystem, run, timeline)
    path = timeline_dir(run, timeline)
    try:
        # Only for the message: a damaged record must not replace the FencedError.
        record = None if data is None else TimelineRecord.decode(data, path)
    except EverstepError:
        return ""
    return "" if record is None else record.fingerprint.get("process", "")


def timeline_bytes(filesystem: FileSystem, run: PurePath, number: int) -> bytes | None:
    """Return the record of a timeline as it is on disk now; None if it cannot be read."""
    try:
        return read_record_bytes(filesystem, timeline_dir(run, number) / TIMELINE_RECORD)
    except (OSError, EverstepError):
        return None
