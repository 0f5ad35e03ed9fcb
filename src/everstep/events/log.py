"""The event log in the run folder: JSON lines, written for people and dashboards.

``RUN/events/timeline-00001/rank-00000.jsonl``: each process writes the events of the timelines
that it opens, so no two processes write to one file. No recovery reads these files, and nothing is
synced: they may be deleted at any time. A file that has grown to :data:`FILE_BYTES_MAX` is renamed
to ``rank-00000.1.jsonl``, in place of the one before it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from everstep.events.event import Event
from everstep.format.names import parse_timeline, timeline_dir
from everstep.seams import FileSystem, PosixFileSystem, ReadFile, WriteFile

EVENTS_DIR = "events"
FILE_BYTES_MAX = 8 << 20
_FIRST_LINE_BYTES = 1024
RETRY_S = 30.0

_log = logging.getLogger("everstep")

# In the order of their names the older file of a rank comes first.
_RANK = re.compile(r"rank-(\d{5,9})(\.1)?\.jsonl", re.ASCII)


def event_file(run: PurePath, timeline: int, rank: int, *, older: bool = False) -> PurePath:
    """Return the path of the event log of one rank and timeline."""
    folder = timeline_dir(run / EVENTS_DIR, timeline)
    return folder / f"rank-{rank:05d}{'.1' * older}.jsonl"


class EventLog:
    """Listener that appends each event to the event log of its timeline.

    If a file cannot be written (a full disk), the events of the next :data:`RETRY_S` seconds are
    dropped, and then it tries again. A folder that was deleted is made again.

    Args:
        bytes_max: size at which a file is renamed, and a new one begun.
        now_s: clock for the next try.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        *,
        bytes_max: int = FILE_BYTES_MAX,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._rank = rank
        self._bytes_max = bytes_max
        self._now_s = now_s
        self._timeline = 0
        self._file: WriteFile | None = None
        self._size_bytes = 0
        self._early: list[Event] = []  # before the first timeline
        self._pause_until_s = -math.inf
        self._has_warned = False

    def __str__(self) -> str:
        return str(self._run / EVENTS_DIR)

    def __call__(self, event: Event) -> None:
        """Append an event."""
        if event.timeline == 0:
            self._early.append(event)
            return
        # Of a timeline that was left, and delivered late: its file is closed.
        if event.timeline < self._timeline or self._now_s() < self._pause_until_s:
            return
        try:
            self._write([*self._early, event])
            self._early = []
        except OSError as error:
            self._pause_until_s = self._now_s() + RETRY_S
            with contextlib.suppress(OSError):
                self.close()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the event log has gaps: %s cannot be written: %s", self, error)

    def _write(self, events: Sequence[Event]) -> None:
        timeline = events[-1].timeline
        opens = timeline != self._timeline or self._file is None
        opens = opens or self._size_bytes >= self._bytes_max
        # Looked at now and then: somebody may have deleted the folder.
        if opens or (events[-1].kind == "progress" and not self._is_there()):
            self._open(timeline)
        for event in events:
            line = event.to_line()
            assert self._file is not None
            self._file.write(memoryview(line), self._size_bytes)
            self._size_bytes += len(line)

    def _is_there(self) -> bool:
        path = event_file(self._run, self._timeline, self._rank)
        try:
            return path.name in {entry.name for entry in self._filesystem.scan(path.parent)}
        except FileNotFoundError:
            return False

    def _open(self, timeline: int) -> None:
        self.close()
        path = event_file(self._run, timeline, self._rank)
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(FileExistsError):
                self._filesystem.make_dir(folder)
        # There is one if it has grown large, could not be written, or is that of a run that was
        # deleted before.
        with contextlib.suppress(FileNotFoundError):
            older = event_file(self._run, timeline, self._rank, older=True)
            self._filesystem.rename(path, older)
        self._file = self._filesystem.create(path)
        self._timeline = timeline
        self._size_bytes = 0

    def close(self) -> None:
        """Close the file."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()


def read_events(
    run: str | os.PathLike[str],
    *,
    rank: int | None = None,
    newest: int | None = None,
    filesystem: FileSystem | None = None,
) -> list[Event]:
    """Return the events of a run in the order of their times; none if it has no event log.

    Args:
        run: run folder.
        rank: rank whose events are wanted; None for all.
        newest: number of newest timelines to read; None for all.
        filesystem: where the folder is; None: this machine.

    Raises:
        OSError: a file cannot be read.
    """
    return EventFollower(run, rank=rank, newest=newest, filesystem=filesystem).read()


class EventFollower:
    """Reads the events of a run as they are written.

    Args:
        run: run folder.
        rank: rank whose events are wanted; None for all.
        newest: number of newest timelines to read; None for all.
        filesystem: where the folder is; None: this machine.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        rank: int | None = None,
        newest: int | None = None,
        filesystem: FileSystem | None = None,
    ) -> None:
        self._run = PurePath(run)
        self._rank = rank
        self._newest = newest
        self._filesystem = PosixFileSystem() if filesystem is None else filesystem
        # By the first line, which identifies a file whatever its name: a large one is renamed.
        self._offsets: dict[bytes, int] = {}

    def read(self) -> list[Event]:
        """Return the events since the last call: by timeline, and in each by time.

        The events of one rank keep their order, whatever its clock did. Lines that are no events of
        the file's rank and timeline are left out, and so is a file that cannot be read.

        Raises:
            OSError: the folder cannot be read.
        """
        found: list[tuple[int, float, Event]] = []
        for path, timeline, rank in self._files():
            # Deleted or renamed a moment ago, or no regular file.
            with contextlib.suppress(OSError):
                latest_s = 0.0
                for line in self._new_lines(path):
                    event = Event.from_line(line)
                    if event is None or event.rank != rank or event.timeline not in (0, timeline):
                        continue
                    latest_s = max(latest_s, event.unix_s)
                    found.append((timeline, latest_s, event))
        return [event for _, _, event in sorted(found, key=lambda one: one[:2])]

    def _new_lines(self, path: PurePath) -> list[bytes]:
        file = self._filesystem.open(path)
        try:
            first, _, _ = _read(file, 0, _FIRST_LINE_BYTES).partition(b"\n")
            offset = self._offsets.get(first, 0)
            content = _read(file, offset, file.size_bytes - offset)
        finally:
            file.close()
        # A line whose end is not there yet is read again.
        whole = content[: content.rfind(b"\n") + 1]
        self._offsets[first] = offset + len(whole)
        return whole.splitlines()

    def _files(self) -> Iterator[tuple[PurePath, int, int]]:
        """Yield the files, with their timelines and ranks; older ones first."""
        folder = self._run / EVENTS_DIR
        try:
            names = [entry.name for entry in self._filesystem.scan(folder) if entry.kind == "dir"]
        except FileNotFoundError:
            return
        timelines = sorted((n, name) for name in names if (n := parse_timeline(name)) is not None)
        for timeline, name in timelines[-(self._newest or 0) :]:
            for file in self._filesystem.scan(folder / name):
                match = _RANK.fullmatch(file.name)
                if match is None or file.kind != "file" or self._rank not in (None, int(match[1])):
                    continue
                yield folder / name / file.name, timeline, int(match[1])


def _read(file: ReadFile, offset: int, size_bytes: int) -> bytes:
    buffer = bytearray(max(0, size_bytes))
    done = 0
    while done < len(buffer):
        count = file.read_into(memoryview(buffer)[done:], offset + done)
        if count == 0:
            break
        done += count
    return bytes(buffer[:done])
