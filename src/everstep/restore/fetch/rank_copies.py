"""Copies of a run in tiers, as one rank of a starting job sees them.

Every rank can read a copy, whatever disk it has. So each rank offers it beside its own disk
(``docs/design/tiers.md``), after it has looked for itself: I7 requires what every rank can really
read.

Disk of one rank at a start of the job: offer what it can read, open timelines.

The decisions are made in :mod:`everstep.commit.job.offers` and
:mod:`everstep.commit.job.agreement`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit import BaseId
from everstep.commit.job import Choice, Offer
from everstep.commit.job.offers import BaseOffer, Piece
from everstep.errors import EverstepError, ForeignDirectoryError, RecoveryError
from everstep.format import (
    MANIFEST,
    Manifest,
    Marker,
    TimelineRecord,
    base_dir,
    digest,
    timeline_dir,
)
from everstep.format.names import CONDEMNED, DELETING, RUN_RECORD, TIMELINE_RECORD
from everstep.format.reader import read_body, read_record_bytes
from everstep.format.records import RunRecord
from everstep.format.writer import ChunkRing
from everstep.run import BaseFound, Inventory, OpenBase, scan_base, scan_run
from everstep.run.uncondemn import uncondemn, uncondemn_in_tier
from everstep.seams import DirEntry, FileSystem, ReadFile
from everstep.seams.progress import silent
from everstep.tiers import MemoryFile, Tier, ensure_dir
from everstep.tiers.durable_files import create_exclusive, ensure_dirs, sync_if_allowed
from everstep.tiers.files import ReadingFileSystem, TierFileSystem, tier_errors


def offer_of(
    filesystem: FileSystem,
    inventory: Inventory,
    rank: int,
    disk: str,
    held: Iterable[tuple[Marker, str]] = (),
    *,
    partly: bool = False,
) -> Offer:
    """Return what a rank can read, from names and lengths; bytes are verified when they are loaded.

    An offer is a promise: a marker that its writer could not sync any more is synced now, as
    another disk may get a manifest because of it (I5).

    Args:
        filesystem: file system of the disk.
        inventory: contents of the disk.
        rank: this rank.
        disk: name of the disk.
        held: pieces in other tiers: marker and tier of each.
        partly: also list markers from manifests whose files are missing.
    """
    bases: dict[BaseId, BaseOffer] = {}
    lost = [base.id for base in inventory.bases if base.status == "damaged"]
    for found in inventory.bases:
        offer = base_offer(found)
        if _is_foreign(offer, inventory.run):
            lost.append(found.id)
            continue
        if partly and offer.manifest is not None and found.manifest is not None:
            others = (m for m in found.manifest.markers if m.rank not in offer.pieces)
            offer = replace(offer, listed=tuple(others))
        if offer.pieces and offer.manifest is None:
            _sync_names(filesystem, found.path)
        if offer.pieces or offer.manifest is not None:
            bases[found.id] = offer
    for marker, tier in held:
        add_piece(bases, marker, tier)
    timelines = dict(inventory.timelines)
    return Offer(rank, disk, inventory.run, inventory.next_timeline, timelines, bases, tuple(lost))


def add_piece(bases: dict[BaseId, BaseOffer], marker: Marker, tier: str) -> bool:
    """Add one rank's files of a base that lie in another tier; return False if other ranks know
    another marker: the one on the disk. A second one would make the base contradictory.
    """
    base = BaseId(marker.timeline, marker.step)
    old = bases.get(base, BaseOffer({}))
    known = old.pieces.get(marker.rank)
    if known is not None and known.marker != marker:
        return False
    tiers = (tier, *(() if known is None else known.tiers))
    bases[base] = replace(old, pieces={**old.pieces, marker.rank: Piece(marker, tiers)})
    return True


def _is_foreign(offer: BaseOffer, run: str | None) -> bool:
    """Return True if the files of a base belong to another run.

    Such files, put here by hand, may have the timeline and step of any base of this run, and their
    digests match.
    """
    runs = {piece.marker.run for piece in offer.pieces.values()}
    return run is not None and bool(runs - {run})


def open_on_disk(
    filesystem: FileSystem, run: PurePath, record: TimelineRecord, choice: Choice, unique: str
) -> bool:
    """Make a disk part of a run and open a timeline there, last: it is the fence (I11).

    Existing files stay, so several ranks may do this on one disk. If the chosen base is marked for
    deletion, the mark is removed, after the fence (``adr/004``).

    Args:
        filesystem: file system of the disk.
        run: run folder.
        record: timeline to open.
        choice: base and history that all ranks agreed on.
        unique: suffix of this process's temporary names.

    Returns:
        True if the timeline there is ``record``; False if its number was taken.
    """
    ensure_dirs(filesystem, run)
    # The rank that created the folder may have died before it could sync it.
    sync_if_allowed(filesystem, run.parent)
    if RUN_RECORD not in _names(filesystem, run):
        # Another rank with this disk may be first: its record has the same bytes.
        create_exclusive(filesystem, run / RUN_RECORD, RunRecord(record.run).encode(), unique)
    for old in choice.timelines:
        _keep_timeline(filesystem, run, old, unique)
    for manifest in choice.complete:
        keep_manifest(filesystem, run, manifest, unique)
    # Last: the new timeline fences off older processes, so the history must be complete before it
    # (I11).
    if not _keep_timeline(filesystem, run, record, unique):
        return False
    if choice.base is not None:
        directory = base_dir(run, choice.base.timeline, choice.base.step)
        with contextlib.suppress(FileNotFoundError):  # the base is not on this disk
            if CONDEMNED in _names(filesystem, directory):
                # Without effect if files are being deleted already. The ranks then notice in their
                # second inventory, and choose again (``adr/004``).
                uncondemn(filesystem, directory)
    return True


def keep_manifest(
    filesystem: FileSystem, run: PurePath, manifest: Manifest, unique: str, *, make: bool = True
) -> None:
    """Write a manifest to a disk, durably, unless it exists or is being deleted there.

    The names of markers and files beside it are made durable as well.

    Args:
        filesystem: file system of the disk.
        run: run folder.
        manifest: manifest to write.
        unique: suffix of this process's temporary names.
        make: also create the directory of the base.

    Raises:
        FileNotFoundError: without ``make``, if the disk has nothing of the base any more.
    """
    directory = base_dir(run, manifest.timeline, manifest.step)
    if make:
        ensure_dirs(filesystem, directory)
    # Markers must be durable before the manifest that counts on them.
    _sync_names(filesystem, directory)
    names = _names(filesystem, directory)
    # A manifest beside the mark would make a base count as committed that is about to be deleted.
    if CONDEMNED in names or DELETING in names:
        return
    if MANIFEST in names or not create_exclusive(
        filesystem, directory / MANIFEST, manifest.encode(), unique
    ):
        # The rank that created the manifest may have died before this sync.
        filesystem.sync_dir(directory)


def verify_rank(
    filesystem: FileSystem,
    run: PurePath,
    base: BaseId,
    rank: int,
    ring: ChunkRing,
    *,
    timeout_s: float,
) -> str:
    """Read one rank's files of a committed base back; return the problem, or ""."""
    try:
        found = scan_base(filesystem, run, base)
        if found.manifest is None:
            return f"{found.path} has no manifest that can be read"
        opened = OpenBase.open(filesystem, found, rank)
        try:
            for shard in opened.files:
                read_body(shard, ring, timeout_s=timeout_s, progress=silent)
        finally:
            opened.close()
    except (OSError, EverstepError) as error:
        return str(error)
    return ""


def _keep_timeline(
    filesystem: FileSystem, run: PurePath, record: TimelineRecord, unique: str
) -> bool:
    directory = timeline_dir(run, record.timeline)
    path = directory / TIMELINE_RECORD
    ensure_dir(filesystem, directory)
    data = record.encode()
    there = TIMELINE_RECORD in _names(filesystem, directory)
    if not there and create_exclusive(filesystem, path, data, unique):
        return True
    # The record may be that of another rank, not yet durable. This rank reports the timeline as
    # open.
    filesystem.sync_dir(directory)
    try:
        return read_record_bytes(filesystem, path) == data
    except EverstepError:
        return False  # damaged, so not this process's record


def _sync_names(filesystem: FileSystem, directory: PurePath) -> None:
    """Make the names in a base's directory durable, and those of the directories above it."""
    timeline = directory.parent.parent
    for each in (timeline.parent, timeline, directory.parent, directory):
        filesystem.sync_dir(each)


def _names(filesystem: FileSystem, directory: PurePath) -> set[str]:
    return {entry.name for entry in filesystem.scan(directory)}


def base_offer(found: BaseFound) -> BaseOffer:
    """Return what can be read of a base, from names and lengths."""
    if found.status == "condemned" and found.manifest is not None:
        # Each disk has its own mark: files that no deletion has begun to remove are usable.
        mine = [marker for marker in found.manifest.markers if found.has_files_of(marker)]
        pieces = {marker.rank: Piece(marker) for marker in mine}
        return BaseOffer(pieces, digest(found.manifest.encode()) if pieces else None)
    if found.status == "condemned":
        return BaseOffer({})
    markers = found.markers if found.manifest is None else found.manifest.markers
    sizes = {entry.name: entry.size_bytes for entry in found.files if entry.kind == "file"}
    pieces = {
        marker.rank: Piece(marker)
        for marker in markers
        if all(sizes.get(file.name) == file.length for file in marker.files)
    }
    # The manifest of a ``complete`` base was computed from its markers and never written, so it
    # does not count as committed.
    committed = found.manifest is not None and found.status == "committed"
    manifest = digest(found.manifest.encode()) if committed and found.manifest else None
    return BaseOffer(pieces, manifest)


_SMALL_BYTES = 1 << 20
_KEPT_BYTES_MAX = 64 << 20


class SmallFiles(ReadingFileSystem):
    """Read-only view of a file system; caches files of up to 1 MiB, 64 MiB in total."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        self._kept: dict[PurePath, MemoryFile] = {}
        self._listed: dict[PurePath, tuple[int, float]] = {}
        # Several threads read segments through this object. Without a lock the limit is
        # approximate.
        self._left_bytes = _KEPT_BYTES_MAX

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        found = self._kept.get(path)
        if found is not None:
            return found
        file = self._files.open(path, direct=direct)
        size_bytes = file.size_bytes
        if size_bytes > min(_SMALL_BYTES, self._left_bytes):
            return file
        try:
            data = memoryview(bytearray(size_bytes))
            got = file.read_into(data, 0)
        finally:
            file.close()
        found = MemoryFile([data[:got]])
        self._kept[path] = found
        self._left_bytes -= size_bytes
        return found

    def forget(self) -> None:
        """Release the memory; later reads go to the file system again."""
        self._kept.clear()
        self._listed.clear()
        self._left_bytes = _KEPT_BYTES_MAX

    def scan(self, path: PurePath) -> list[DirEntry]:
        """List a directory; drop cached files whose size or time changed since the last listing,
        such as an audit that replaced an older one."""
        found = self._files.scan(path)
        for entry in found:
            name = path / entry.name
            stamp = (entry.size_bytes, entry.mtime_s)
            if self._listed.setdefault(name, stamp) == stamp:
                continue
            self._listed[name] = stamp
            if (kept := self._kept.pop(name, None)) is not None:
                self._left_bytes += kept.size_bytes
        return found


@dataclass(frozen=True, slots=True)
class CopyOfRun:
    """Place with copies of a run.

    Attributes:
        tier: the place.
        files: the place as a file system, under the path of the run folder.
    """

    tier: Tier
    files: TierFileSystem

    @property
    def kind(self) -> str:
        """One of :data:`everstep.commit.retention.COPY_TIERS`."""
        return "object" if self.tier.traits.kind == "object" else "copy"


def copies_of_run(tiers: Sequence[Tier], run: PurePath) -> tuple[CopyOfRun, ...]:
    """Return the places with copies of a run, cheapest first."""
    by_cost = sorted(tiers, key=lambda tier: tier.traits.cost)
    return tuple(CopyOfRun(tier, TierFileSystem(tier, run)) for tier in by_cost)


class Copies:
    """All places with copies of a run.

    Args:
        tiers: the places.
        run: run folder, whose path also names the files in each place.
    """

    def __init__(self, tiers: Sequence[Tier], run: PurePath) -> None:
        self.places = copies_of_run(tiers, run)
        self._small = [SmallFiles(place.files) for place in self.places]
        self._run = run
        self._found: list[tuple[CopyOfRun, Inventory]] = []

    def forget(self) -> None:
        """Release cached files."""
        for files in self._small:
            files.forget()

    def run_id(self) -> str | None:
        """Return the id of the run whose copies they are; None if there are none yet.

        Raises:
            ForeignDirectoryError: the places hold copies of different runs.
            StorageError: a place cannot be read.
        """
        found: str | None = None
        for place, run_id in self._run_ids():
            if found is not None and run_id not in (None, found):
                raise foreign(place.tier, f"of another run than {self.places[0].tier.url}")
            found = found or run_id
        return found

    def publish(self, run_id: str) -> None:
        """Create the run record in every place.

        Raises:
            ForeignDirectoryError: a place belongs to another run.
            StorageError: it cannot be written.
        """
        for place in self.places:
            # create() accepts equal bytes, so every rank may publish the record.
            if not place.tier.create(RUN_RECORD, RunRecord(run_id).encode()):
                raise foreign(place.tier, "of another run")

    def unseen(self, run_id: str) -> str:
        """Return the first place that does not show this run although it was published; "" if all
        do.

        Raises:
            StorageError: a place cannot be read.
        """
        others = (place.tier.url for place, found in self._run_ids() if found != run_id)
        return next(others, "")

    def _run_ids(self) -> Iterator[tuple[CopyOfRun, str | None]]:
        """Yield the places, each with the id in its run record; None if it has none."""
        path = self._run / RUN_RECORD
        for place in self.places:
            run_id = None
            with tier_errors(FileNotFoundError), contextlib.suppress(FileNotFoundError):
                run_id = RunRecord.decode(read_record_bytes(place.files, path), path).run
            yield place, run_id

    def add_to(self, offer: Offer) -> Offer:
        """Return the offer of a rank with the contents of the copies.

        Raises:
            RecoveryError: a copy has another history than the disk.
            ForeignDirectoryError: it is of another run.
            StorageError: it cannot be read.
        """
        self._found = []
        for place, files in zip(self.places, self._small, strict=True):
            with tier_errors(FileNotFoundError):
                inventory = scan_run(files, self._run)
            self._found.append((place, inventory))
            offer = _with_copy(offer, place, inventory)
        return offer

    @property
    def logs(self) -> list[tuple[FileSystem, Inventory]]:
        """Places to look for a log, cheapest first, each with its last inventory."""
        found = zip(self._small, self._found, strict=True)
        return [(files, inventory) for files, (_, inventory) in found]

    @property
    def problems(self) -> tuple[str, ...]:
        """Damage to records found at the last look, as text."""
        return tuple(
            f"{place.tier.url}/{path.relative_to(self._run)}: {problem}"
            for place, inventory in self._found
            for path, problem in inventory.problems
        )

    def prepare(self, choice: Choice) -> None:
        """Create missing timelines, and commit manifests that markers yield, in all places (I5).
        Called by rank 0 before a timeline is opened.

        Raises:
            StorageError: a place cannot be written.
        """
        # Before the new timeline: a place without the older ones would show a history with a gap.
        for place, inventory in self._found:
            # The results are not needed: a different record that another process creates now is
            # found by the inventory that follows (the phase "confirm").
            for old in choice.timelines:
                if old.timeline not in inventory.timelines:
                    place.tier.create(self._name(old.timeline), old.encode())
            self._roll_forward(place.tier, inventory)

    def open_timeline(self, record: TimelineRecord) -> bool:
        """Open a timeline in every place: from now on older processes write nothing there (I11).

        Every rank does so before it opens the timeline on its disk, with the same bytes, and all
        take the places in the same order: if the number was taken anywhere, no disk gets it.

        Args:
            record: timeline record.

        Returns:
            False if the number was taken in some place.

        Raises:
            StorageError: a place cannot be written.
        """
        name = self._name(record.timeline)
        data = record.encode()
        # In one order on all ranks: if the number is taken in a place, no later place, and no disk,
        # gets it.
        return all(place.tier.create(name, data) for place in self.places)

    def take_back(self, base: BaseId) -> None:
        """Remove the deletion mark of the chosen base in all places, after the fence (``adr/004``).

        Raises:
            EverstepError: from a place.
        """
        for place in self.places:
            uncondemn_in_tier(place.tier, self._folder(base))

    def _roll_forward(self, tier: Tier, inventory: Inventory) -> None:
        for base in inventory.bases:
            if base.status != "complete" or base.manifest is None:
                continue
            # Markers do not prove that the files are still there. A base without one of them must
            # not be committed (I5).
            if all(base.has_files_of(marker) for marker in base.manifest.markers):
                tier.create(f"{self._folder(base.id)}/{MANIFEST}", base.manifest.encode())

    def _folder(self, base: BaseId) -> str:
        path = base_dir(self._run, base.timeline, base.step)
        return path.relative_to(self._run).as_posix()

    def _name(self, timeline: int) -> str:
        path = timeline_dir(self._run, timeline) / TIMELINE_RECORD
        return path.relative_to(self._run).as_posix()


def _with_copy(offer: Offer, place: CopyOfRun, inventory: Inventory) -> Offer:
    if None not in (offer.run, inventory.run) and offer.run != inventory.run:
        raise foreign(place.tier, "of another run than the run folder")
    timelines = dict(offer.timelines)
    for number, record in inventory.timelines.items():
        mine = timelines.get(number)
        if mine is not None and record is not None and mine != record:
            raise diverged(place.tier, number, offer.rank)
        timelines[number] = record if mine is None else mine
    bases = dict(offer.bases)
    for found in inventory.bases:
        theirs = base_offer(found)
        if theirs.pieces or theirs.manifest is not None:
            bases[found.id] = _joined(bases.get(found.id), theirs, place.kind)
    lost = [base.id for base in inventory.bases if base.status == "damaged"]
    return replace(
        offer,
        run=offer.run or inventory.run,
        # The number must be free in every place, since the timeline is opened in all of them.
        next_timeline=max(offer.next_timeline, inventory.next_timeline),
        timelines=timelines,
        bases=bases,
        lost=tuple(dict.fromkeys([*offer.lost, *lost])),
    )


def _joined(mine: BaseOffer | None, theirs: BaseOffer, kind: str) -> BaseOffer:
    """Merge what a disk and a copy have of a base. If they contradict each other, the base is
    marked as unusable by a manifest that no markers yield."""
    if mine is None:
        pieces = {rank: Piece(piece.marker, (kind,)) for rank, piece in theirs.pieces.items()}
        return BaseOffer(pieces, theirs.manifest)
    pieces = dict(mine.pieces)
    manifest = mine.manifest or theirs.manifest
    for rank, piece in theirs.pieces.items():
        old = pieces.get(rank)
        if old is None:
            pieces[rank] = Piece(piece.marker, (kind,))
        elif old.marker != piece.marker:
            manifest = "contradicted"
        elif kind not in old.tiers:
            pieces[rank] = Piece(old.marker, (*old.tiers, kind))
    if mine.manifest and theirs.manifest and mine.manifest != theirs.manifest:
        manifest = "contradicted"
    return BaseOffer(pieces, manifest)


def diverged(tier: Tier, timeline: int, rank: int | None = None) -> RecoveryError:
    """Return the error for copies that have another timeline of that number than the disk."""
    return RecoveryError(
        f"timeline {timeline} of {tier.url} was opened by another process, without this run's "
        "disk: the copies and the disk have diverged",
        rank=rank,
        tier=tier.traits.kind,
        path=tier.url,
        hint="resume from one of them: omit tiers=, or empty the run folder (on every rank)",
    )


def foreign(tier: Tier, of: str) -> ForeignDirectoryError:
    """Return the error for a place that holds copies of another run."""
    return ForeignDirectoryError(
        f"{tier.url} holds copies {of}",
        tier=tier.traits.kind,
        path=tier.url,
        hint="use a separate place for each run",
    )
