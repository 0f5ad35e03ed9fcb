"""The event log in the run folder: JSON lines, written for people and dashboards.

``RUN/events/timeline-00001/rank-00000.jsonl``: each process writes the events of the timelines
that it opens, so no two processes write to one file. No recovery reads these files, and nothing is
synced: they may be deleted at any time. A file that has grown to :data:`FILE_BYTES_MAX` is renamed
to ``rank-00000.1.jsonl``, in place of the one before it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import PurePath

from everstep.events.event import Event
from everstep.format.names import parse_timeline, timeline_dir
from everstep.seams import FileSystem, PosixFileSystem, ReadFile, WriteFile

EVENTS_DIR = "events"
FILE_BYTES_MAX = 8 << 20
_FIRST_LINE_BYTES = 1024

_RANK = re.compile(r"rank-(\d{5,9})(\.1)?\.jsonl", re.ASCII)


def event_file(run: PurePath, timeline: int, rank: int, *, older: bool = False) -> PurePath:
    """Return the path of the event log of one rank and timeline."""
    folder = timeline_dir(run / EVENTS_DIR, timeline)
    return folder / f"rank-{rank:05d}{'.1' * older}.jsonl"


class EventLog:
    """Listener that appends each event to the event log of its timeline.

    Args:
        bytes_max: size at which a file is renamed, and a new one begun.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        *,
        bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._rank = rank
        self._bytes_max = bytes_max
        self._timeline = 0
        self._file: WriteFile | None = None
        self._size_bytes = 0
        self._early: list[Event] = []  # before the first timeline

    def __repr__(self) -> str:
        return f"the event log in {self._run / EVENTS_DIR}"

    def __call__(self, event: Event) -> None:
        """Append an event.

        Raises:
            OSError: the file cannot be written.
        """
        if event.timeline == 0:
            self._early.append(event)
            return
        if event.timeline != self._timeline or self._size_bytes >= self._bytes_max:
            self._open(event.timeline)
        for one in [*self._early, event]:
            self._append(one.to_line())
        self._early = []

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(memoryview(line), self._size_bytes)
        self._size_bytes += len(line)

    def _open(self, timeline: int) -> None:
        self.close()
        path = event_file(self._run, timeline, self._rank)
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(FileExistsError):
                self._filesystem.make_dir(folder)
        # There is one if it has grown large, or is that of a run that was deleted before.
        with contextlib.suppress(FileNotFoundError):
            older = event_file(self._run, timeline, self._rank, older=True)
            self._filesystem.rename(path, older)
        self._file = self._filesystem.create(path)
        self._timeline = timeline
        self._size_bytes = 0

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


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
        # By the first line, which tells a file whatever its name: a large one is renamed.
        self._offsets: dict[bytes, int] = {}

    def read(self) -> list[Event]:
        """Return the events since the last call, in the order of their times.

        Raises:
            OSError: a file cannot be read.
        """
        found: list[Event] = []
        for path in self._files():
            # Deleted, or renamed a moment ago: the next call finds it by its new name.
            with contextlib.suppress(FileNotFoundError):
                lines = self._new_lines(path)
                found.extend(one for line in lines if (one := Event.from_line(line)) is not None)
        return sorted(found, key=lambda event: event.unix_s)

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

    def _files(self) -> Iterator[PurePath]:
        folder = self._run / EVENTS_DIR
        try:
            names = [entry.name for entry in self._filesystem.scan(folder)]
        except FileNotFoundError:
            return
        timelines = sorted((n, name) for name in names if (n := parse_timeline(name)) is not None)
        for _, name in timelines[-(self._newest or 0) :]:
            for file in self._filesystem.scan(folder / name):
                match = _RANK.fullmatch(file.name)
                if match is not None and self._rank in (None, int(match[1])):
                    yield folder / name / file.name


def _read(file: ReadFile, offset: int, size_bytes: int) -> bytes:
    buffer = bytearray(max(0, size_bytes))
    done = 0
    while done < len(buffer):
        count = file.read_into(memoryview(buffer)[done:], offset + done)
        if count == 0:
            break
        done += count
    return bytes(buffer[:done])
