"""Copy a run, whole, while it may be training.

Retention of the training process may delete a file between the listing and the copy. Then the pass
begins again: a pass in which nothing has vanished has copied everything that its listing found,
which is a run that a resume can read. What an earlier pass has copied is not copied again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from everstep.errors import DamageError, FormatError, StorageError
from everstep.format import MANIFEST, FileRecord, Marker, timeline_dir
from everstep.format.names import (
    ANNOTATIONS,
    AUDIT_RECORD,
    LOG_DIR,
    LOSSY_DIR,
    PIN_RECORD,
    marker_name,
    parse_marker,
    parse_segment,
)
from everstep.format.reader import CheckedFile, OpenShard, read_record_bytes
from everstep.keeper.ship.courier import CopyPlace
from everstep.run import BaseFound, Inventory, scan_run
from everstep.seams import FileSystem
from everstep.seams.progress import ProgressSink, silent
from everstep.tiers import MemoryFile, Tier, read_record

_ATTEMPTS = 16


@dataclass(slots=True)
class CopiedRun:
    """Contents of a copy that was just made.

    Attributes:
        bases, segments: number of bases and of log segments.
        size_bytes: size of their files.
        copied_bytes: bytes that were not there before.
        damaged: path and problem of each base or segment that was left out.
    """

    bases: int = 0
    segments: int = 0
    size_bytes: int = 0
    copied_bytes: int = 0
    damaged: list[tuple[PurePath, str]] = field(default_factory=list)


def copy_run(
    filesystem: FileSystem, run: PurePath, tier: Tier, *, shown: ProgressSink = silent
) -> CopiedRun:
    """Copy the timelines, bases and logs of a run to an empty place, or to an earlier copy of it.

    Every byte is verified while it is read. Of ranks on separate disks, the files in this folder
    are copied: repeat it on each node, into the same place.

    Args:
        filesystem: file system of the run.
        run: run folder.
        tier: place of the copy.
        shown: receives the number of bytes copied.

    Raises:
        ForeignDirectoryError: The place has files of something else.
        FencedError: The place has a newer timeline than the run.
        StorageError: The place or the run folder failed, or retention was always faster.
        NewerFormatError: A newer version of everstep wrote the run.
    """
    copied_bytes = 0
    for _ in range(_ATTEMPTS):
        copy = _Pass(filesystem, run, tier, shown)
        try:
            copy.run()
        except FileNotFoundError:
            # Deleted by retention after it was listed.
            copied_bytes += copy.done.copied_bytes
        else:
            copy.done.copied_bytes += copied_bytes
            return copy.done
    raise StorageError(
        f"{run}: files were deleted while they were copied, {_ATTEMPTS} times in a row",
        path=run,
        hint="the training process keeps too few bases for the speed of this copy: raise keep=, or "
        "every=",
    )


class _Pass:
    """One pass over a run.

    Args:
        shown: receives the number of bytes copied.

    Attributes:
        done: contents of the copy so far.
    """

    def __init__(
        self, filesystem: FileSystem, run: PurePath, tier: Tier, shown: ProgressSink
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._tier = tier
        self._shown = shown
        self.done = CopiedRun()

    def run(self) -> None:
        """Copy everything that is in the run folder now.

        Raises:
            FileNotFoundError: A file has vanished since it was listed.
        """
        inventory = scan_run(self._filesystem, self._run)
        place = CopyPlace(self._tier, max(inventory.timelines, default=0))
        place.check_fence()
        place.publish(inventory, self._filesystem)
        # Oldest first: retention deletes these first.
        for base in sorted(inventory.bases, key=lambda base: base.id):
            if base.manifest is not None and base.is_usable:
                self._copy_base(place, base)
            elif base.status == "damaged":
                self.done.damaged.append((base.path, base.problem or "it is damaged"))
        for segment in self._segments(inventory):
            self._copy_segment(place, segment)

    def _copy_base(self, place: CopyPlace, base: BaseFound) -> None:
        assert base.manifest is not None
        manifest = base.manifest.encode()
        markers = [one for one in base.manifest.markers if base.has_files_of(one)]
        records = [(base.path / one.name, one) for marker in markers for one in marker.files]
        is_there = read_record(self._tier, self._name(base.path / MANIFEST)) == manifest and all(
            place.has_rank_files(self._name(base.path), marker) for marker in markers
        )
        if not is_there:
            with self._whole(base.path, records, markers):
                self._copy_files(records)
                for marker in markers:
                    path = base.path / marker_name(marker.rank)
                    place.create(self._name(path), marker.encode())
                # The commit: before it, nobody reads the copies of the files.
                place.check_fence()
                place.create(self._name(base.path / MANIFEST), manifest)
        if self._is_left_out(base.path):
            return
        for name in (AUDIT_RECORD, ANNOTATIONS, PIN_RECORD):
            if any(file.name == name for file in base.files):
                data = read_record_bytes(self._filesystem, base.path / name)
                self._tier.put(self._name(base.path / name), MemoryFile([memoryview(data)]))
        self.done.bases += 1
        self.done.size_bytes += sum(record.length for _, record in records)

    def _segments(self, inventory: Inventory) -> Iterator[PurePath]:
        for number in sorted(inventory.timelines):
            for kind in (LOG_DIR, LOSSY_DIR):
                directory = timeline_dir(self._run, number) / kind
                with contextlib.suppress(FileNotFoundError):
                    for entry in sorted(
                        self._filesystem.scan(directory), key=lambda entry: entry.name
                    ):
                        if entry.kind == "dir" and parse_segment(entry.name) is not None:
                            yield directory / entry.name

    def _copy_segment(self, place: CopyPlace, path: PurePath) -> None:
        for entry in self._filesystem.scan(path):
            if parse_marker(entry.name) is None:
                continue
            marked = path / entry.name
            try:
                data = read_record_bytes(self._filesystem, marked)
                marker = Marker.decode(data, marked)
            except (DamageError, FormatError) as error:
                self.done.damaged.append((marked, error.message))
                continue
            records = [(path / one.name, one) for one in marker.files]
            if not place.has_rank_files(self._name(path), marker):
                # A longer segment may have replaced one of the same name: without its marker
                # nobody reads the copy until it is complete.
                self._tier.delete(self._name(marked))
                with self._whole(path, records, [marker]):
                    self._copy_files(records)
                    place.check_fence()
                    place.create(self._name(marked), data)
            if not self._is_left_out(path):
                self.done.segments += 1
                self.done.size_bytes += sum(record.length for _, record in records)

    def _copy_files(self, records: list[tuple[PurePath, FileRecord]]) -> None:
        for path, record in records:
            with contextlib.closing(
                CheckedFile(OpenShard.open(self._filesystem, path, record))
            ) as source:
                self._tier.put(self._name(path), source)
            self.done.copied_bytes += record.length
            self._shown.advance(record.length)

    @contextlib.contextmanager
    def _whole(
        self,
        path: PurePath,
        records: list[tuple[PurePath, FileRecord]],
        markers: list[Marker],
    ) -> Iterator[None]:
        """Remove a copy that is not completed; leave a damaged base or segment out."""
        try:
            yield
        except BaseException as error:
            names = [path / marker_name(marker.rank) for marker in markers]
            # Markers first: a marker promises that its files are there.
            for one in [*names, *(file for file, _ in records)]:
                with contextlib.suppress(StorageError):
                    self._tier.delete(self._name(one))
            with contextlib.suppress(StorageError):
                self._tier.sweep(self._name(path))
            if not isinstance(error, DamageError | FormatError):
                raise
            self.done.damaged.append((path, error.message))

    def _is_left_out(self, path: PurePath) -> bool:
        return any(path == damaged for damaged, _ in self.done.damaged)

    def _name(self, path: PurePath) -> str:
        return path.relative_to(self._run).as_posix()
