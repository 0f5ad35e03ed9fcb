"""Copies of a run in tiers, as one rank of a starting job sees them.

Every rank can read a copy, whatever disk it has. So each rank offers it beside its own disk
(``docs/design/tiers.md``), after it has looked for itself: I7 requires what every rank can really
read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.commit.job.offers import BaseOffer, Choice, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError, ForeignDirectoryError, RecoveryError, StorageError
from everstep.format.names import MANIFEST, RUN_RECORD, TIMELINE_RECORD, base_dir, timeline_dir
from everstep.format.reader import read_record_bytes
from everstep.format.records import RunRecord, TimelineRecord
from everstep.restore.fetch.rank_offers import base_offer
from everstep.run.scan import Inventory, scan_run
from everstep.run.uncondemn import uncondemn_in_tier
from everstep.seams.files.filesystem import DirEntry, FileSystem, ReadFile
from everstep.tiers.contract import Tier
from everstep.tiers.files import ReadingFileSystem, TierFileSystem
from everstep.tiers.memory import MemoryFile

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

    @classmethod
    def of(cls, tier: Tier, run: PurePath) -> CopyOfRun:
        return cls(tier, TierFileSystem(tier, run))

    @property
    def kind(self) -> str:
        """One of :data:`everstep.commit.retention.COPY_TIERS`."""
        return "object" if self.tier.traits.kind == "object" else "copy"


class Copies:
    """All places with copies of a run.

    Args:
        tiers: the places.
        run: run folder, whose path also names the files in each place.
    """

    def __init__(self, tiers: Sequence[Tier], run: PurePath) -> None:
        by_cost = sorted(tiers, key=lambda tier: tier.traits.cost)
        self.places = tuple(CopyOfRun.of(tier, run) for tier in by_cost)
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
        for place in self.places:
            with tier_errors():
                try:
                    path = self._run / RUN_RECORD
                    record = RunRecord.decode(read_record_bytes(place.files, path), path)
                except FileNotFoundError:
                    continue
            if found is not None and record.run != found:
                raise _foreign(place.tier, f"of another run than {self.places[0].tier.url}")
            found = record.run
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
                raise _foreign(place.tier, "of another run")

    def unseen(self, run_id: str) -> str:
        """Return the first place that does not show this run although it was published; "" if all
        do.

        Raises:
            StorageError: a place cannot be read.
        """
        path = self._run / RUN_RECORD
        for place in self.places:
            with tier_errors():
                try:
                    record = RunRecord.decode(read_record_bytes(place.files, path), path)
                except FileNotFoundError:
                    return place.tier.url
            if record.run != run_id:
                return place.tier.url
        return ""

    def add_to(self, offer: Offer) -> Offer:
        """Return the offer of a rank with the contents of the copies.

        Raises:
            RecoveryError: a copy has another history than the disk.
            ForeignDirectoryError: it is of another run.
            StorageError: it cannot be read.
        """
        self._found = []
        for place, files in zip(self.places, self._small, strict=True):
            with tier_errors():
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


@contextlib.contextmanager
def tier_errors() -> Iterator[None]:
    """Re-raise a tier's own error from the file system error that wraps it."""
    try:
        yield
    except FileNotFoundError:
        # A missing object is an answer of the tier, not a failure to read it.
        raise
    except OSError as error:
        if isinstance(error.__cause__, EverstepError):
            raise error.__cause__ from None
        raise StorageError(f"could not read a copy: {error}") from error


def _with_copy(offer: Offer, place: CopyOfRun, inventory: Inventory) -> Offer:
    if None not in (offer.run, inventory.run) and offer.run != inventory.run:
        raise _foreign(place.tier, "of another run than the run folder")
    timelines = dict(offer.timelines)
    for number, record in inventory.timelines.items():
        mine = timelines.get(number)
        if mine is not None and record is not None and mine != record:
            raise RecoveryError(
                f"timeline {number} of {place.tier.url} was opened by another process, without "
                "this run's disk: the copies and the disk have diverged",
                rank=offer.rank,
                path=place.tier.url,
                hint="resume from one of them: omit tiers=, or empty the run folders",
            )
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


def _foreign(tier: Tier, of: str) -> ForeignDirectoryError:
    return ForeignDirectoryError(
        f"{tier.url} holds copies {of}",
        tier=tier.traits.kind,
        path=tier.url,
        hint="use a separate place for each run",
    )
