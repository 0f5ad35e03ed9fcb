"""Makes one base durable: drives the commit machine over the file system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import torch

from everstep.capture.base import Body
from everstep.commit.lineage import BaseId
from everstep.commit.machine import (
    Action,
    BaseCommit,
    CheckFence,
    Event,
    FenceSeen,
    FilesDurable,
    GatherMarkers,
    ManifestDurable,
    MarkerDurable,
    MarkersSeen,
    WriteFiles,
    WriteManifest,
    WriteMarker,
)
from everstep.errors import FencedError, OutOfSpaceError
from everstep.format.header import ShardIdentity, header_room_bytes
from everstep.format.names import MANIFEST, base_dir, marker_name, shard_name
from everstep.format.reader import read_record_bytes
from everstep.format.records import FileRecord, Marker
from everstep.format.writer import ChunkRing, write_shard
from everstep.recover.scan import newest_timeline, scan_base
from everstep.seams.failpoints import failpoint
from everstep.seams.filesystem import FileSystem, WriteFile
from everstep.seams.progress import ProgressSink
from everstep.state.image import StateImage
from everstep.state.layout import Placed, append_objects, plan_shards
from everstep.tiers.disk import (
    ensure_dir,
    remove_if_there,
    storage_errors,
    temporary,
    write_durably,
)
from everstep.tiers.slots import SlotStore

__all__ = ["BasePlan", "Persister", "ShardPlan", "plan_base"]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file of a base before it is written."""

    name: str
    placed: tuple[Placed, ...]
    aliases: Mapping[str, str]
    room_bytes: int

    @property
    def body_bytes(self) -> int:
        return self.placed[-1].end if self.placed else 0

    @property
    def size_bytes(self) -> int:
        return self.room_bytes + self.body_bytes


@dataclass(frozen=True, slots=True)
class BasePlan:
    """All files of this rank, and the tensors (objects as ``uint8``) that go into them."""

    identity: ShardIdentity
    shards: tuple[ShardPlan, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def base(self) -> BaseId:
        return BaseId(self.identity.timeline, self.identity.step)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


def plan_base(image: StateImage, identity: ShardIdentity) -> BasePlan:
    """Lays an image out in files; objects go to the end of the last one."""
    layouts = list(plan_shards(image.entries))
    shards = []
    for part, layout in enumerate(layouts):
        last = part == len(layouts) - 1
        names = {place.entry.name for place in layout.placed}
        aliases = {other: name for other, name in image.aliases.items() if name in names}
        objects = image.objects if last else {}
        room_bytes = header_room_bytes(identity, layout.placed, list(objects), aliases)
        placed = append_objects(layout, objects, lsn=identity.lsn).placed
        shards.append(ShardPlan(shard_name(identity.rank, part), placed, aliases, room_bytes))
    tensors = dict(image.tensors)
    for name, data in image.objects.items():
        tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return BasePlan(identity, tuple(shards), tensors)


class Persister:
    """Writes bases of one timeline, one after the other.

    Args:
        run: the run folder.
        timeout_s: a single transfer that takes longer counts as hung.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        ring: ChunkRing,
        slots: SlotStore,
        *,
        timeout_s: float,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._ring = ring
        self._slots = slots
        self._has_base_dir = False
        self._timeout_s = timeout_s

    def persist(self, plan: BasePlan, bodies: Sequence[Body], progress: ProgressSink) -> None:
        """Returns when the base is committed.

        Raises:
            FencedError: when a newer timeline has taken over.
            StorageError: with what the file system said; nothing half-made is left behind.
        """
        commit = BaseCommit(plan.identity)
        directory = base_dir(self._run, plan.identity.timeline, plan.identity.step)
        where = {"step": plan.identity.step, "rank": plan.identity.rank}
        with storage_errors("write the base", directory, **where):
            if self._is_committed(plan):
                # An attempt that failed after its commit: nothing may be written over it.
                self._filesystem.sync_dir(directory)
                return
            try:
                action: Action | None = commit.start()
                while action is not None:
                    action = commit.on(self._perform(action, plan, bodies, directory, progress))
            except FencedError:
                raise  # what lies there is the new timeline's to judge and to delete
            except FileNotFoundError:  # swept away by whoever has taken the run over?
                BaseCommit(plan.identity).on(self._look_at_fence())
                self._clean_up(plan, directory)
                raise
            except BaseException:
                self._clean_up(plan, directory)
                raise

    def _look_at_fence(self) -> FenceSeen:
        return FenceSeen(newest_timeline(self._filesystem, self._run))

    def _is_committed(self, plan: BasePlan) -> bool:
        try:
            return scan_base(self._filesystem, self._run, plan.base).status == "committed"
        except FileNotFoundError:
            return False

    def _perform(
        self,
        action: Action,
        plan: BasePlan,
        bodies: Sequence[Body],
        directory: PurePath,
        progress: ProgressSink,
    ) -> Event:
        if isinstance(action, CheckFence):
            return self._look_at_fence()
        if isinstance(action, WriteFiles):
            return FilesDurable(self._write_files(plan, bodies, directory, progress))
        if isinstance(action, WriteMarker):
            failpoint("save.before_marker")
            path = directory / marker_name(action.marker.rank)
            write_durably(self._filesystem, path, action.marker.encode())
            return MarkerDurable()
        if isinstance(action, GatherMarkers):
            return MarkersSeen(self._markers(plan, directory))
        assert isinstance(action, WriteManifest)
        failpoint("save.before_manifest")
        write_durably(self._filesystem, directory / MANIFEST, action.manifest.encode())
        failpoint("save.after_manifest")
        return ManifestDurable()

    def _write_files(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        directory: PurePath,
        progress: ProgressSink,
    ) -> tuple[FileRecord, ...]:
        failpoint("save.before_write")
        self._slots.count_max = len(plan.shards)
        self._slots.drop_unfit(shard.size_bytes for shard in plan.shards)
        filesystem = self._filesystem
        self._check_space(plan)
        if not self._has_base_dir:  # its name is durable from the first base on
            ensure_dir(filesystem, directory.parent)
            self._has_base_dir = True
        ensure_dir(filesystem, directory)
        records = []
        for shard, body in zip(plan.shards, bodies, strict=True):
            path = directory / shard.name
            file = self._open(temporary(path), shard.size_bytes)
            try:
                record = write_shard(
                    file,
                    shard.name,
                    plan.identity,
                    shard.placed,
                    shard.aliases,
                    shard.room_bytes,
                    body,
                    self._ring,
                    timeout_s=self._timeout_s,
                    progress=progress,
                )
            finally:
                file.close()
            records.append(record)
            failpoint("save.before_rename")
            filesystem.rename(temporary(path), path)
        filesystem.sync_dir(directory)
        return tuple(records)

    def _open(self, path: PurePath, size_bytes: int) -> WriteFile:
        recycled = self._slots.claim(path, size_bytes)
        if recycled is not None:
            return recycled
        remove_if_there(self._filesystem, path)
        return self._filesystem.create(path, direct=True)

    def _markers(self, plan: BasePlan, directory: PurePath) -> dict[int, Marker]:
        found = {}
        for rank in range(plan.identity.world):
            path = directory / marker_name(rank)
            found[rank] = Marker.decode(read_record_bytes(self._filesystem, path), path)
        return found

    def _check_space(self, plan: BasePlan) -> None:
        """Refuses before writing what cannot fit; parked files count as room."""
        room = self._filesystem.free_bytes(self._run) + self._slots.parked_bytes()
        if room < plan.size_bytes:
            raise OutOfSpaceError(
                f"a base takes {plan.size_bytes} bytes, {room} are free",
                step=plan.identity.step,
                rank=plan.identity.rank,
                tier="disk",
                path=self._run,
                hint="free some space, or keep fewer bases (keep=, everstep rm)",
            )

    def _clean_up(self, plan: BasePlan, directory: PurePath) -> None:
        """Leaves nothing of a base that failed: marker first, so that no mixture can be
        rolled forward, then the files. A committed base is past this."""
        filesystem = self._filesystem
        try:
            names = {entry.name for entry in filesystem.scan(directory)}
            if MANIFEST in names:
                return
            marker = marker_name(plan.identity.rank)
            if marker in names:
                filesystem.unlink(directory / marker)
                filesystem.sync_dir(directory)
            mine = {shard.name for shard in plan.shards} | {marker, MANIFEST}
            for name in mine | {temporary(PurePath(name)).name for name in mine}:
                remove_if_there(filesystem, directory / name)
            if not filesystem.scan(directory):
                filesystem.remove_dir(directory)
        except OSError:
            pass  # the disk that failed the save may fail this too; retention cleans up later
