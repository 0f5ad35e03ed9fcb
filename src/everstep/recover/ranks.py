"""What one rank of a job that starts does on its disk: says what it can read, opens timelines.

The decisions are in :mod:`everstep.commit.offers` and :mod:`everstep.commit.agreement`; here they
are carried out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import PurePath

from everstep.commit.lineage import BaseId
from everstep.commit.offers import BaseOffer, Choice, Offer, Piece
from everstep.errors import EverstepError
from everstep.format.digests import digest
from everstep.format.names import (
    CONDEMNED,
    MANIFEST,
    RUN_RECORD,
    TIMELINE_RECORD,
    base_dir,
    timeline_dir,
)
from everstep.format.reader import read_record_bytes
from everstep.format.records import Manifest, Marker, RunRecord, TimelineRecord
from everstep.recover.scan import BaseFound, Inventory
from everstep.seams.filesystem import FileSystem
from everstep.tiers.disk import create_exclusive, ensure_dir, ensure_dirs

__all__ = ["keep_manifest", "offer_of", "open_on_disk"]


def offer_of(
    filesystem: FileSystem,
    inventory: Inventory,
    rank: int,
    disk: str,
    held: Iterable[tuple[Marker, str]] = (),
) -> Offer:
    """What a rank can read, from names and lengths; bytes are checked when they are loaded.

    An offer is a promise: a marker that its writer could not sync any more is synced now, as
    another disk may get a manifest because of it (I5).

    Args:
        disk: name of the disk that ``inventory`` is of.
        held: what is in other tiers: marker and tier of each piece.
    """
    bases: dict[BaseId, BaseOffer] = {}
    for found in inventory.bases:
        offer = _base_offer(found)
        if offer.pieces and offer.manifest is None:
            _sync_names(filesystem, found.path)
        if offer.pieces or offer.manifest is not None:
            bases[found.id] = offer
    for marker, tier in held:
        base = BaseId(marker.timeline, marker.step)
        old = bases.get(base, BaseOffer({}))
        piece = old.pieces.get(marker.rank)
        if piece is not None and piece.marker != marker:
            continue  # the disk's is the one that others know of
        tiers = (tier, *(piece.tiers if piece is not None else ()))
        pieces = {**old.pieces, marker.rank: Piece(marker, tiers)}
        bases[base] = BaseOffer(pieces, old.manifest)
    lost = tuple(base.id for base in inventory.bases if base.status == "damaged")
    timelines = dict(inventory.timelines)
    return Offer(rank, disk, inventory.run, inventory.next_timeline, timelines, bases, lost)


def open_on_disk(
    filesystem: FileSystem, run: PurePath, record: TimelineRecord, choice: Choice, unique: str
) -> bool:
    """Makes a disk part of a run and opens a timeline there, last: it is the fence (I11).

    Whatever of it is there already stays as it is, so several ranks may do it on one disk.

    Args:
        unique: makes the temporary names this process's own.

    Returns:
        Whether the timeline there is ``record``; False where its number was taken.
    """
    ensure_dirs(filesystem, run)
    with contextlib.suppress(PermissionError):  # a folder that was made for us: its owner's affair
        filesystem.sync_dir(run.parent)  # a rank that made it may have died before it could
    if RUN_RECORD not in _names(filesystem, run):
        create_exclusive(filesystem, run / RUN_RECORD, RunRecord(record.run).encode(), unique)
    for old in choice.timelines:
        _keep_timeline(filesystem, run, old, unique)
    for manifest in choice.complete:
        keep_manifest(filesystem, run, manifest, unique)
    return _keep_timeline(filesystem, run, record, unique)


def keep_manifest(
    filesystem: FileSystem, run: PurePath, manifest: Manifest, unique: str, *, make: bool = True
) -> None:
    """Writes a manifest to a disk, durably, unless it is there or being deleted there.

    The names of markers and files beside it are durable then, too, whoever has put them there.

    Args:
        make: where the disk has nothing of the base, too.

    Raises:
        FileNotFoundError: without ``make``: it has nothing of the base any more.
    """
    directory = base_dir(run, manifest.timeline, manifest.step)
    if make:
        ensure_dirs(filesystem, directory)
    _sync_names(filesystem, directory)  # markers before the manifest
    names = _names(filesystem, directory)
    if CONDEMNED in names:
        return
    if MANIFEST in names or not create_exclusive(
        filesystem, directory / MANIFEST, manifest.encode(), unique
    ):
        filesystem.sync_dir(directory)


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
    filesystem.sync_dir(directory)
    try:
        return read_record_bytes(filesystem, path) == data
    except EverstepError:
        return False  # damaged: not ours


def _sync_names(filesystem: FileSystem, directory: PurePath) -> None:
    """Makes the names in a base's directory durable, and those that lead to it."""
    timeline = directory.parent.parent
    for each in (timeline.parent, timeline, directory.parent, directory):
        filesystem.sync_dir(each)


def _names(filesystem: FileSystem, directory: PurePath) -> set[str]:
    return {entry.name for entry in filesystem.scan(directory)}


def _base_offer(found: BaseFound) -> BaseOffer:
    if found.status == "condemned":
        return BaseOffer({})
    markers = found.markers if found.manifest is None else found.manifest.markers
    sizes = {entry.name: entry.size_bytes for entry in found.files if entry.kind == "file"}
    pieces = {
        marker.rank: Piece(marker)
        for marker in markers
        if all(sizes.get(file.name) == file.length for file in marker.files)
    }
    committed = found.manifest is not None and found.status == "committed"
    manifest = digest(found.manifest.encode()) if committed and found.manifest else None
    return BaseOffer(pieces, manifest)
