"""Disk of one rank at a start of the job: offer what it can read, open timelines.

The decisions are made in :mod:`everstep.commit.job.offers` and
:mod:`everstep.commit.job.agreement`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath

from everstep.commit.job.offers import BaseOffer, Choice, Offer, Piece
from everstep.commit.lineage import BaseId
from everstep.errors import EverstepError
from everstep.format.digests import digest
from everstep.format.names import (
    CONDEMNED,
    DELETING,
    MANIFEST,
    RUN_RECORD,
    TIMELINE_RECORD,
    base_dir,
    timeline_dir,
)
from everstep.format.reader import read_body, read_record_bytes
from everstep.format.records import Manifest, Marker, RunRecord, TimelineRecord
from everstep.format.writer import ChunkRing
from everstep.run.open_base import OpenBase
from everstep.run.scan import BaseFound, Inventory, scan_base
from everstep.run.uncondemn import uncondemn
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.progress import silent
from everstep.tiers.durable_files import create_exclusive, ensure_dir, ensure_dirs, sync_if_allowed


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
    _add_held(bases, held)
    timelines = dict(inventory.timelines)
    return Offer(rank, disk, inventory.run, inventory.next_timeline, timelines, bases, tuple(lost))


def _add_held(bases: dict[BaseId, BaseOffer], held: Iterable[tuple[Marker, str]]) -> None:
    """Add pieces in other tiers to the offers of their bases."""
    for marker, tier in held:
        base = BaseId(marker.timeline, marker.step)
        old = bases.get(base, BaseOffer({}))
        piece = old.pieces.get(marker.rank)
        if piece is not None and piece.marker != marker:
            continue  # other ranks know the one on the disk
        tiers = (tier, *(piece.tiers if piece is not None else ()))
        pieces = {**old.pieces, marker.rank: Piece(marker, tiers)}
        bases[base] = replace(old, pieces=pieces)


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
            for file, record, header, path in opened.files:
                read_body(file, header, record, path, ring, timeout_s=timeout_s, progress=silent)
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
