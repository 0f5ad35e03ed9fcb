"""The run folder that a checkpoint is: begin a save, write a rank's share, commit, clean up.

Each save opens a timeline, which fences off an older save that still writes in the folder. Ranks
write their files and a marker; the coordinating rank writes its marker last, then the manifest.
Until that is durable, the checkpoint that the folder had is the one that is loaded. Afterwards it
is deleted, once the new one was read back (``adr/005``).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import torch

from everstep.capture.lane import LiveBody
from everstep.commit import BaseId, KeepRules
from everstep.errors import DamageError, FencedError, OptionError, StorageError
from everstep.format import (
    MANIFEST,
    BasePlan,
    FileRecord,
    Marker,
    ShardIdentity,
    TimelineRecord,
    base_dir,
    timeline_dir,
)
from everstep.format.header import plan_files
from everstep.format.names import (
    SLOTS_DIR,
    TEMPORARY_SUFFIX,
    TIMELINE_RECORD,
    marker_name,
    parse_rank,
    shard_name,
)
from everstep.format.reader import read_record_bytes
from everstep.format.records import canonical, manifest_of
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.integrations.dcp.items import newest_base, step_of
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.keeper.retain import Retention, delete_files
from everstep.run import Fence, Inventory, scan_base
from everstep.run.folder import open_run_folder
from everstep.seams import Seams, failpoint
from everstep.seams.fingerprint import process_name
from everstep.seams.progress import silent
from everstep.state.layout import Entry
from everstep.tiers import SlotStore, ensure_dir, remove_if_there, write_durably
from everstep.tiers.durable_files import create_exclusive

TIMEOUT_S = 120.0
"""Seconds after which a transfer counts as hung."""

_WRITTEN_BY = "written_by"
_DCP = "torch.distributed.checkpoint"
# Programs look for this name to find out if a folder has a checkpoint. torch's own file is a
# pickle; this is JSON, which torch's reader refuses at its first byte.
_METADATA = ".metadata"
_NOTE = {"format": "everstep", "read_with": "everstep.integrations.dcp"}


def begin(seams: Seams, folder: PurePath, world: int) -> tuple[Fence, list[Ticket]]:
    """Open the timeline of a save, and remove the leftovers of saves that were killed.

    Args:
        folder: run folder; created if it is missing.
        world: number of ranks.

    Returns:
        The fence of the save, and a ticket for each rank.

    Raises:
        OptionError: the folder is the run of a Checkpointer.
        FencedError: another process begins a save there at the same moment.
        ForeignDirectoryError, StorageError: the folder cannot be used.
    """
    filesystem = seams.filesystem
    inventory = open_run_folder(filesystem, folder)
    assert inventory.run is not None
    _refuse_other_writers(inventory)
    before = newest_base(inventory)
    for base in inventory.bases:
        if base.status == "complete" and base.manifest is not None:
            # Its save was killed just before the end. Retention deletes only what is committed.
            write_durably(filesystem, base.path / MANIFEST, base.manifest.encode())
    number = inventory.next_timeline
    record = TimelineRecord(
        run=inventory.run,
        timeline=number,
        # Forked from the present checkpoint, which counts until there is a new one.
        parent=None if before is None else before.id.timeline,
        fork_step=0 if before is None else before.id.step,
        exact=True,
        world=world,
        fingerprint={_WRITTEN_BY: _DCP, "process": process_name()},
        created_unix_s=seams.clock.unix_s(),
    )
    # The name of the directory is made durable before its record is created: a timeline that a
    # power loss removes would fence nobody off.
    ensure_dir(filesystem, timeline_dir(folder, number))
    path = timeline_dir(folder, number) / TIMELINE_RECORD
    unique = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if not create_exclusive(filesystem, path, record.encode(), unique=unique):
        raise FencedError(
            f"another process saves to {folder} at the same time",
            path=folder,
            hint="use a checkpoint_id of its own for each save",
        )
    fence = Fence(filesystem, folder, number)
    with _ring() as ring:
        retention = _retention(seams, fence, ring)
        retention.sweep(retention.scan())
    return fence, [Ticket(inventory.run, number, rank) for rank in range(world)]


def _refuse_other_writers(inventory: Inventory) -> None:
    for number, record in inventory.timelines.items():
        if record is not None and record.fingerprint.get(_WRITTEN_BY) != _DCP:
            raise OptionError(
                f"{inventory.path} is the run folder of a training: a Checkpointer has opened "
                f"timeline {number}",
                path=inventory.path,
                hint="save to another folder: this would stop the training from saving, and "
                "delete its bases",
            )


def _slots(seams: Seams, folder: PurePath, timeline: int) -> SlotStore:
    return SlotStore(seams.filesystem, timeline_dir(folder, timeline) / SLOTS_DIR)


def _retention(seams: Seams, fence: Fence, ring: ChunkRing) -> Retention:
    slots = _slots(seams, fence.run, fence.timeline)
    return Retention(fence, ring, slots, keep=KeepRules(1), timeout_s=TIMEOUT_S, clock=seams.clock)


@contextlib.contextmanager
def _ring() -> Iterator[ChunkRing]:
    with contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        yield ring


@dataclass(frozen=True, slots=True)
class Ticket:
    """Place of a rank in a save, which torch hands to it with its plan.

    Attributes:
        run, timeline: run and timeline of the save.
    """

    run: str
    timeline: int
    rank: int


@dataclass(slots=True)
class Share:
    """Files of one rank of a checkpoint that is being written.

    Attributes:
        seams: access to the file system.
        folder: run folder.
        identity: identity of the files.
        files: files that are durable.
    """

    seams: Seams
    folder: PurePath
    identity: ShardIdentity
    files: tuple[FileRecord, ...] = ()

    @classmethod
    def of(cls, seams: Seams, folder: PurePath, ticket: Ticket) -> Share:
        """Return the share of a rank in a save.

        Raises:
            StorageError: this rank does not see what the coordinating rank has begun.
            DamageError, FormatError: the record of the timeline cannot be read.
        """
        path = timeline_dir(folder, ticket.timeline) / TIMELINE_RECORD
        record = None
        with contextlib.suppress(FileNotFoundError):
            record = TimelineRecord.decode(read_record_bytes(seams.filesystem, path), path)
        if record is None or record.run != ticket.run:
            raise StorageError(
                f"rank {ticket.rank} does not see the save that the coordinating rank has begun",
                rank=ticket.rank,
                path=folder,
                hint="all ranks must see the same folder",
            )
        identity = ShardIdentity(
            run=record.run,
            timeline=ticket.timeline,
            step=step_of(folder),
            lsn=0,
            rank=ticket.rank,
            world=record.world,
            exact=True,
        )
        return cls(seams, folder, identity)

    @property
    def directory(self) -> PurePath:
        """Directory of the base."""
        return base_dir(self.folder, self.identity.timeline, self.identity.step)

    @property
    def _base(self) -> BaseId:
        return BaseId(self.identity.timeline, self.identity.step)

    def write(
        self,
        entries: Sequence[Entry],
        tensors: Mapping[str, torch.Tensor],
        objects: Mapping[str, bytes],
    ) -> None:
        """Write further files durably.

        Args:
            entries: entries of tensors.
            tensors: the tensors by name; each is looked up when it is written.
            objects: encoded objects by entry name.
        """
        sizes = {name: len(data) for name, data in objects.items()}
        planned = plan_files(self.identity, entries, {}, sizes)
        shards = tuple(
            replace(shard, name=shard_name(self.identity.rank, number))
            for number, shard in enumerate(planned, start=len(self.files))
        )
        last = shards[-1]
        bodies = [
            LiveBody(shard.layout, tensors, objects if shard is last else {}) for shard in shards
        ]
        slots = _slots(self.seams, self.folder, self.identity.timeline)
        with _ring() as ring:
            writer = ShardWriter(
                self.seams.filesystem, self.folder, ring, slots, timeout_s=TIMEOUT_S
            )
            written = writer.write(BasePlan(self.identity, shards), bodies, silent)
        self.files = (*self.files, *(one.record for one in written))

    def mark(self) -> Marker:
        """Write the marker: all files of this rank are durable."""
        failpoint("save.before_marker")
        marker = Marker.of(self.identity, self.files)
        path = self.directory / marker_name(self.identity.rank)
        write_durably(self.seams.filesystem, path, marker.encode())
        return marker

    def commit(self, fence: Fence) -> None:
        """Write the marker of this rank, the last one, and commit the checkpoint.

        Raises:
            StorageError: files of another rank are not in the folder.
            FencedError: another process saves to the folder meanwhile.
        """
        filesystem = self.seams.filesystem
        identity = self.identity
        found = scan_base(filesystem, self.folder, self._base)
        others = {one.rank: one for one in found.markers if found.has_files_of(one)}
        missing = sorted(set(range(identity.world)) - others.keys() - {identity.rank})
        if missing:
            raise StorageError(
                f"the files of rank(s) {', '.join(map(str, missing))} are not in the folder",
                path=self.folder,
                hint="all ranks must write to the same folder",
            )
        fence.check()
        manifest = manifest_of({**others, identity.rank: self.mark()})
        if manifest is None:
            raise StorageError("the ranks have written different checkpoints", path=self.folder)
        # Again: the files of a save that was overtaken do no harm, but its manifest would.
        fence.check()
        failpoint("save.before_manifest")
        # The commit point: the checkpoint exists if and only if this rename is durable.
        write_durably(filesystem, self.directory / MANIFEST, manifest.encode())
        failpoint("save.after_manifest")
        if _METADATA not in {entry.name for entry in filesystem.scan(self.folder)}:
            write_durably(filesystem, self.folder / _METADATA, canonical(_NOTE))

    def retain(self, fence: Fence) -> None:
        """Delete the checkpoint that the folder had before, after the new one was read back.

        Raises:
            DamageError: the new one is damaged when read back; the older one stays.
            FencedError: another process saves to the folder meanwhile.
            StorageError: the file system failed.
        """
        found: list[DamageError] = []
        with _ring() as ring:
            _retention(self.seams, fence, ring).run(found.append)
        # They save allocation for a next base, which this timeline will not have.
        _slots(self.seams, self.folder, self.identity.timeline).clear()
        if found:
            raise found[0]

    def withdraw(self) -> None:
        """Remove the files of this rank after a failure; the other ranks may still write."""
        rank = self.identity.rank
        filesystem = self.seams.filesystem
        with contextlib.suppress(OSError):
            names = [entry.name for entry in filesystem.scan(self.directory)]
            mine = [one for one in names if parse_rank(one.removesuffix(TEMPORARY_SUFFIX)) == rank]
            # The marker first: it would vouch for files that are not there.
            remove_if_there(filesystem, self.directory / marker_name(rank))
            filesystem.sync_dir(self.directory)
            for name in mine:
                remove_if_there(filesystem, self.directory / name)
            filesystem.remove_dir(self.directory)

    def withdraw_all(self) -> None:
        """Remove the files of all ranks after the commit failed, unless all are there: then the
        checkpoint is complete, and is loaded."""
        filesystem = self.seams.filesystem
        with contextlib.suppress(OSError):
            found = scan_base(filesystem, self.folder, self._base)
            if found.status == "incomplete":
                delete_files(filesystem, found, None)
