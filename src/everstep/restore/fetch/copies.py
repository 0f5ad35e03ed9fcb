"""A run folder together with its copies in tiers, as one file system to resume from.

Files on the disk are read there; files that exist only in a copy are read from it; a listing shows
both. So a machine that lost its disk, or never had one, resumes by the same code as any other,
straight from the store into memory.

Two records are created in every place or in none, in the copies first: the run record and the
timeline records. They keep two processes apart (I11), even if these never shared a disk. Nothing
else is written to a copy except a manifest that follows from its markers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from everstep.errors import (
    DamageError,
    FormatError,
    StorageError,
)
from everstep.format import MANIFEST, TimelineRecord, timeline_dir
from everstep.format.names import CONDEMNED, DELETING, RUN_RECORD, TIMELINE_RECORD
from everstep.format.reader import read_record_bytes
from everstep.restore.fetch.rank_copies import copies_of_run, diverged, foreign
from everstep.run.uncondemn import uncondemn_in_tier
from everstep.seams import DirEntry, FileSystem, ReadFile, WriteFile
from everstep.tiers import Tier, read_record, write_durably

# Their creation decides between processes, so link() must be exclusive in the tiers as well.
_EXCLUSIVE = (RUN_RECORD, TIMELINE_RECORD)
_MARKS = {CONDEMNED, DELETING}
_PARALLEL_READS = 8


class RunWithCopies:
    """File system (:class:`everstep.seams.filesystem.FileSystem`) over a disk and tiers.

    Args:
        local: file system of the disk.
        run: run folder on ``local``.
        tiers: places with copies, in any order.

    Attributes:
        local: file system of the disk.
        places: places with copies, cheapest first.
    """

    def __init__(self, local: FileSystem, run: PurePath, tiers: Sequence[Tier]) -> None:
        self.local = local
        self._run = run
        self.places = copies_of_run(tiers, run)
        self._read_from: dict[PurePath, Tier] = {}
        self._distrusted: set[PurePath] = set()

    def source_of(self, directory: PurePath) -> str | None:
        """Return the kind of the tier from which a file of this directory was read; None if none
        was."""
        kinds = [t.traits.kind for path, t in self._read_from.items() if path.parent == directory]
        return kinds[0] if kinds else None

    def check_run(self, run_id_record: bytes) -> None:
        """Check that the copies belong to this run.

        Raises:
            ForeignDirectoryError: a place holds copies of another run.
        """
        for place in self.places:
            if read_record(place.tier, RUN_RECORD) not in (None, run_id_record):
                raise foreign(place.tier, f"of another run than {self._run}")

    def check_timelines(self, timelines: Mapping[int, TimelineRecord | None]) -> None:
        """Check that the disk and the copies have the same timelines.

        If one process continued without the copies and another one from them, both opened the same
        number. A base of one with the log of the other would be a state that never existed.

        Args:
            timelines: of the disk and the copies together; the disk's take precedence.

        Raises:
            RecoveryError: they have diverged.
        """
        for number, record in timelines.items():
            path = timeline_dir(self._run, number) / TIMELINE_RECORD
            for place in self.places:
                try:
                    theirs = TimelineRecord.decode(read_record_bytes(place.files, path), path)
                except (FileNotFoundError, DamageError, FormatError):
                    # A record that is missing or damaged in a copy does not prove that the
                    # histories diverged.
                    continue
                if record is not None and theirs != record:
                    raise diverged(place.tier, number)

    def distrust(self, directory: PurePath) -> bool:
        """Read the files of this directory from a copy from now on, since those on the disk are
        damaged. Return False if that is so already, or if there is no copy."""
        # False at the second call ends the retries of the caller: the copy is damaged as well. A
        # tier lists a missing directory as empty.
        if directory in self._distrusted or not any(
            place.files.scan(directory) for place in self.places
        ):
            return False
        self._distrusted.add(directory)
        return True

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        # A damaged file on the disk is read here, too. The caller detects it by its digest and then
        # calls distrust().
        if path.parent not in self._distrusted:
            try:
                return self.local.open(path, direct=direct)
            except FileNotFoundError:
                if not self._inside(path):
                    raise
        for place in self.places:
            with contextlib.suppress(FileNotFoundError):
                file = place.files.open(path)
                self._read_from[path] = place.tier
                return file
        # Raises the original error if it is still missing.
        return self.local.open(path, direct=direct)

    def scan(self, path: PurePath) -> list[DirEntry]:
        inside = self._inside(path) or path == self._run
        places = [self.local, *(place.files for place in self.places if inside)]
        found: dict[str, DirEntry] = {}
        missing: FileNotFoundError | None = None
        unmarked = False
        for place in places:
            try:
                entries = {entry.name: entry for entry in place.scan(path)}
            except FileNotFoundError as error:
                missing = error
                continue
            unmarked |= MANIFEST in entries and not _MARKS & entries.keys()
            # The nearest place wins, as in open().
            found = {**entries, **found}
        # A base that is being deleted in one place but intact in another is usable.
        if unmarked:
            found = {name: entry for name, entry in found.items() if name not in _MARKS}
        # Only the disk reports a missing directory; a tier lists it as empty. It is missing if no
        # place has an entry.
        if not found and missing is not None:
            raise missing
        return [found[name] for name in sorted(found)]

    def link(self, source: PurePath, target: PurePath) -> None:
        if target.name in _EXCLUSIVE and self._inside(target):
            # Copies first: if the number is taken in one of them, the disk must not get the record
            # (I11).
            data = read_record_bytes(self.local, source)
            # All processes with these tiers take them in order of cost. The loser of a race fails
            # at the first one and leaves its record nowhere. create() accepts equal bytes, so a
            # repetition is harmless.
            for place in self.places:
                if not place.tier.create(self._name(target), data):
                    raise FileExistsError(f"{place.tier.url}/{self._name(target)}")
        self.local.link(source, target)

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        return self.local.create(path, direct=direct)

    def rename(self, source: PurePath, target: PurePath) -> None:
        if source.name == CONDEMNED and self._inside(source):
            self._lift(source, target)
        else:
            self.local.rename(source, target)

    def put_manifest(self, path: PurePath, data: bytes) -> None:
        """Commit a base that has all markers: on the disk, or in the copies that hold it."""
        try:
            write_durably(self.local, path, data)
            return
        except FileNotFoundError:  # the disk does not have the base
            name = self._name(path)
        for place in self.places:
            tier = place.tier
            # The manifest is a pure function of the markers: other bytes there are of another base.
            if place.files.scan(path.parent) and not tier.create(name, data):
                raise StorageError(
                    f"{tier.url}/{name} does not match the markers beside it",
                    tier=tier.traits.kind,
                    path=f"{tier.url}/{name}",
                    hint="another process wrote there",
                )

    def sync_dir(self, path: PurePath) -> None:
        try:
            self.local.sync_dir(path)
        except FileNotFoundError:
            if not self._inside(path):
                raise
            # Objects in a tier are durable once they exist: nothing to sync.
            if not self.scan(path):
                raise

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        return self.local.reuse(path, direct=direct)

    def unlink(self, path: PurePath) -> None:
        self.local.unlink(path)

    def make_dir(self, path: PurePath) -> None:
        self.local.make_dir(path)

    def remove_dir(self, path: PurePath) -> None:
        self.local.remove_dir(path)

    def free_bytes(self, path: PurePath) -> int:
        return self.local.free_bytes(path)

    def _lift(self, source: PurePath, target: PurePath) -> None:
        """Remove the deletion mark of a base in all places that have it."""
        # A list, since any() over a generator would stop at the first place. Each place has a mark
        # of its own (``adr/004``).
        directory = self._name(source.parent)
        lifted = [uncondemn_in_tier(place.tier, directory) for place in self.places]
        try:
            self.local.rename(source, target)
        except FileNotFoundError:
            if not any(lifted):
                raise

    def _inside(self, path: PurePath) -> bool:
        return self._run in path.parents

    def _name(self, path: PurePath) -> str:
        return path.relative_to(self._run).as_posix()


def switch_to_copy(filesystem: FileSystem, directory: PurePath) -> bool:
    """Read a damaged directory from a copy from now on; return False if there is none to try."""
    return isinstance(filesystem, RunWithCopies) and filesystem.distrust(directory)


def write_manifest(filesystem: FileSystem, path: PurePath, data: bytes) -> None:
    """Commit a base that has all markers, where its files are."""
    if isinstance(filesystem, RunWithCopies):
        filesystem.put_manifest(path, data)
    else:
        write_durably(filesystem, path, data)


def parallel_reads(filesystem: FileSystem) -> int:
    """Return how many small files to read in parallel: more than one if each read waits for a
    network."""
    return _PARALLEL_READS if isinstance(filesystem, RunWithCopies) else 1
