"""How long segments of the log have been on disk, told late rather than early.

What ``history="2h"`` promises must not go because a clock has jumped: that of the calendar does
(NTP, a boot with a wrong one), and it is not that of the server of a network file system. So it is
not asked. A clock that never jumps says how long a process has seen a segment. How old one was that
was there before, only times of files can say, one beside the other.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import PurePath

from everstep.format.names import LOG_DIR, LOSSY_DIR, parse_segment, timeline_dir
from everstep.run.scan import Inventory
from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import FileSystem

__all__ = ["SegmentAges"]

_USUAL_MAX = 4
"""Times that a pause between segments may be as long as usual and count as what it is."""


class SegmentAges:
    """Ages of segments, as one process sees them.

    What it finds when it first looks is as old as the segments that came behind it took, by the
    times of their files: a longer pause between two of them than is usual is one of training, or a
    clock that has jumped, and counts for little. What comes later is young when it is first seen.
    From then on all of them age by the monotonic clock.
    """

    def __init__(self, filesystem: FileSystem, clock: Clock) -> None:
        self._filesystem = filesystem
        self._now_s = clock.monotonic_s
        # When it got its last name (of its marker), by the disk: another one may take its place.
        self._written: dict[tuple[PurePath, float], float] | None = None
        self._since_s: dict[PurePath, float] = {}

    def look(self, inventory: Inventory) -> None:
        """Takes note of what is there."""
        now_s = self._now_s()
        found = self._found(inventory)
        if self._written is None:
            before = _ages([stamp for _, stamp in found])
            self._written = {one: now_s - age_s for one, age_s in zip(found, before, strict=True)}
        self._written = {one: self._written.get(one, now_s) for one in found}
        self._since_s = {path: since_s for (path, _), since_s in self._written.items()}

    def of_s(self, path: PurePath) -> float:
        """Seconds that a segment is old, at least; none where it was not seen yet."""
        now_s = self._now_s()
        return now_s - self._since_s.get(path, now_s)

    def _found(self, inventory: Inventory) -> list[tuple[PurePath, float]]:
        """Directories of segments in the order in which they were written, and their times."""
        found = []
        for timeline in inventory.timelines:
            for kind in (LOG_DIR, LOSSY_DIR):
                if not inventory.may_hold(timeline, kind):
                    continue
                directory = timeline_dir(inventory.path, timeline) / kind
                with contextlib.suppress(FileNotFoundError):
                    for entry in self._filesystem.scan(directory):
                        if (steps := parse_segment(entry.name)) is not None:
                            path = directory / entry.name
                            found.append((timeline, steps[1], path, entry.mtime_s))
        return [(path, stamp) for _, _, path, stamp in sorted(found)]


def _ages(stamps: Sequence[float]) -> list[float]:
    """How much older than the last one each of them is."""
    gaps = [max(0.0, later - earlier) for earlier, later in pairwise(stamps)]
    # The longest says nothing of what is usual: of two, one may be the jump.
    others = sorted(gap for gap in gaps if gap > 0)[:-1]
    most = _USUAL_MAX * statistics.median_low(others) if others else 0.0
    ages = list(accumulate((min(gap, most) for gap in reversed(gaps)), initial=0.0))
    return ages[::-1][len(ages) - len(stamps) :]
