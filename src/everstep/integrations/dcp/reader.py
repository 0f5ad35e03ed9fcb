"""Storage reader of ``torch.distributed.checkpoint``: entries of a base for plans of torch.

Each entry is read completely and compared with its digest before any of it is copied to a tensor of
the program. Plain data is decoded by everstep. torch's planner takes it as a stream of
``torch.save``, which is made in memory.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from everstep.errors import (
    DamageError,
    EverstepError,
    ForeignDirectoryError,
    FormatError,
    MismatchError,
    OptionError,
    RecoveryError,
    StateError,
)
from everstep.format import FileRecord, digest
from everstep.format.header import ShardHeader
from everstep.format.reader import OpenShard, read_body
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.integrations.dcp.folder import TIMEOUT_S
from everstep.integrations.dcp.items import (
    INDEX,
    chunk_of,
    describe_gap,
    dims_of,
    folder_of,
    newest_base,
    path_of,
)
from everstep.restore.load.load import rank_contents
from everstep.run import BaseFound, scan_run
from everstep.run.open_base import open_ranks
from everstep.seams import FileSystem, Seams
from everstep.seams.progress import silent
from everstep.state.layout import Entry, Placed
from everstep.state.layout.shards import overlaps
from everstep.state.values.objects import TensorRef, join_path
from everstep.state.values.tensors import empty_like_entry, host_bytes
from everstep.state.values.tree import join, references
from everstep.tiers import storage_errors

_Take = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class _Piece:
    """An entry in a file of a base.

    Attributes:
        file, index: number of the file, and index of the entry in its header.
    """

    file: int
    index: int
    entry: Entry


@dataclass(slots=True)
class _Contents:
    """Headers and plain data of a base, verified.

    Attributes:
        source: timeline and step of the base, and the digest of its manifest.
        files: path and record of each file.
        pieces: slices of each tensor by entry name.
        trees: decoded object trees by section.
    """

    source: tuple[int, int, str]
    files: list[tuple[PurePath, FileRecord]] = field(default_factory=list)
    pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, filesystem: FileSystem, base: BaseFound) -> _Contents:
        """Read headers and plain data of all ranks.

        Raises:
            DamageError, FormatError: they are damaged.
            OSError: a file is missing or cannot be read.
        """
        assert base.manifest is not None
        source = base.id.timeline, base.id.step, digest(base.manifest.encode())
        found = cls(source)
        with open_ranks(filesystem, base) as ranks:
            for rank in ranks:
                found.trees |= rank_contents(rank)[0]
                for shard in rank.shards:
                    for index, place in enumerate(shard.header.placed):
                        piece = _Piece(len(found.files), index, place.entry)
                        found.pieces.setdefault(place.entry.name, []).append(piece)
                    found.files.append((shard.path, shard.record))
        return found

    def leaf(self, path: tuple[str | int, ...]) -> Any:
        """Return the value at a path of the nested state dict: a reference to a tensor, or plain
        data that may hold some."""
        section, *keys = path
        value = self.trees[join_path("", section)]
        for key in keys:
            value = value[key]
        return value

    def tensor(self, name: str, key: str) -> TensorStorageMetadata:
        """Return torch's description of a tensor.

        Raises:
            DamageError: some elements are missing.
            LookupError: no file has it.
        """
        pieces = self.slices(name)
        entry = pieces[0].entry
        found = TensorStorageMetadata(
            properties=TensorProperties(dtype=empty_like_entry(entry, "meta").dtype),
            size=torch.Size(entry.global_shape[: dims_of(entry)]),
            chunks=[chunk_of(piece.entry) for piece in pieces],
        )
        if gap := describe_gap(key, found):
            raise DamageError(gap, entry=name)
        return found

    def slices(self, name: str) -> list[_Piece]:
        """Return the slices of a tensor that have elements; of an empty one, any of them.

        A rank without elements has a slice as well, maybe at the offset of another.
        """
        pieces = self.pieces[name]
        return [piece for piece in pieces if piece.entry.size_bytes] or pieces[:1]


class _Unreadable(Metadata):
    """Metadata that cannot be read; the reason is raised where they are used.

    torch puts an AssertionError in the place of errors of ``read_metadata()``.
    """

    def __init__(self, error: EverstepError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> Any:  # type: ignore[override]
        raise self.error


class EverstepStorageReader(StorageReader):
    """Reader for ``torch.distributed.checkpoint.load``.

    Reads folders that :class:`EverstepStorageWriter` has written, with any number of ranks.

    Args:
        path: folder, if ``checkpoint_id`` is not passed to each load.
        seams: file system; tests replace it.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, seams: Seams | None = None
    ) -> None:
        self._path = path
        self._filesystem = Seams.parse(seams).filesystem
        self._contents: _Contents | None = None
        self._places: dict[MetadataIndex, _Piece] = {}
        self._objects: dict[str, Any] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Folder of the next load."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another folder if one is given."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._contents = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's description of the newest checkpoint in the folder.

        Errors are raised where it is used, and by :meth:`set_up_storage_reader`.
        """
        try:
            folder = folder_of(self._path)
            with storage_errors("read the checkpoint", folder):
                return self._read(folder)
        except EverstepError as error:
            return _Unreadable(error)

    def _read(self, folder: PurePath) -> Metadata:
        base = self._newest(folder)
        contents = _Contents.of(self._filesystem, base)
        index = contents.trees.get(INDEX)
        if index is None:
            raise OptionError(
                f"{folder} is the run folder of a training",
                path=folder,
                hint="everstep export --to dcp writes a folder that torch loads; everstep.load "
                "reads it as it is",
            )
        self._contents = contents
        self._places = {}
        self._objects = {}
        described: dict[str, Any] = {}
        try:
            for key in index["keys"]:
                leaf = contents.leaf(path_of(key, index["planner_data"]))
                if not isinstance(leaf, TensorRef):
                    described[key] = BytesStorageMetadata()
                    self._objects[key] = leaf
                    continue
                described[key] = found = contents.tensor(leaf.name, key)
                for chunk, piece in zip(found.chunks, contents.slices(leaf.name), strict=True):
                    self._places[MetadataIndex(key, chunk.offsets)] = piece
        except (LookupError, TypeError) as error:
            raise FormatError(f"{base.path}: the index of keys is invalid: {error!r}") from error
        return Metadata(
            described,
            planner_data=index["planner_data"],
            storage_meta=StorageMeta(checkpoint_id=str(folder)),
        )

    def _newest(self, folder: PurePath) -> BaseFound:
        """Return the base to load.

        Raises:
            RecoveryError: there is none.
            DamageError: the records of the newest are damaged. An older one is not taken for it.
            ForeignDirectoryError: the folder is not a run folder.
        """
        try:
            base = newest_base(scan_run(self._filesystem, folder))
        except ForeignDirectoryError as error:
            error.hint = (
                "torch.distributed.checkpoint.load without everstep reads a folder that torch's "
                "own writer has written"
            )
            raise
        if base is None:
            raise RecoveryError(
                f"there is no checkpoint in {folder}, or its save has not ended",
                path=folder,
                hint="everstep ls lists what is there",
            )
        if base.manifest is None:
            raise DamageError(
                f"{base.path}: {base.problem}",
                path=base.path,
                hint="everstep verify lists the damage",
            )
        return base

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raise the error of :meth:`read_metadata`, if there was one.

        Raises:
            DamageError, FormatError: the checkpoint is damaged.
            RecoveryError: there is no complete checkpoint.
            OptionError, ForeignDirectoryError, StorageError: the folder cannot be read.
        """
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to a plan the base that this rank reads."""
        assert self._contents is not None
        return replace(plan, storage_data=self._contents.source)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same base; called on the coordinating rank.

        Raises:
            StateError: a save has replaced it meanwhile.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            raise StateError(
                "ranks read different checkpoints: a save has replaced it meanwhile, or they see "
                "different folders",
                path=str(self._path),
                hint="load again after the save",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan needs.

        Raises:
            DamageError: names file and entry. No tensor has bytes of a damaged entry.
            StorageError: a file cannot be read.
        """
        contents = self._contents
        assert contents is not None
        wanted: dict[int, dict[int, list[_Take]]] = {}
        held: dict[str, torch.Tensor] = {}

        def want(piece: _Piece, take: _Take) -> None:
            wanted.setdefault(piece.file, {}).setdefault(piece.index, []).append(take)

        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                want(self._places[item.storage_index], partial(_copy, planner, item))
                continue
            for name in references(self._objects[item.storage_index.fqn]):
                want(contents.pieces[name][0], partial(held.__setitem__, name))
        with (
            storage_errors("read the checkpoint", folder_of(self._path)),
            contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring,
        ):
            for number, takes in sorted(wanted.items()):
                self._read_file(*contents.files[number], takes, ring)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(join(self._objects[item.storage_index.fqn], held), stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(
        self,
        path: PurePath,
        record: FileRecord,
        takes: Mapping[int, list[_Take]],
        ring: ChunkRing,
    ) -> None:
        shard = OpenShard.open(self._filesystem, path, record)
        try:
            entries = _EntryReads(shard.header, takes)
            read_body(
                shard,
                ring,
                timeout_s=TIMEOUT_S,
                progress=silent,
                sink=entries.sink,
                wanted=sorted(takes),
                on_entry=entries.done,
            )
        finally:
            shard.file.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if an id is the path of a local folder."""
        return "://" not in os.fspath(checkpoint_id)


class _EntryReads:
    """Collects the bytes of entries of a file, and hands out each entry once it is verified.

    Args:
        takes: functions that take the tensor of an entry, by its index in the header.
    """

    def __init__(self, header: ShardHeader, takes: Mapping[int, list[_Take]]) -> None:
        self._takes = takes
        self._header = header
        self._index: dict[int, int] = {}
        self._some: list[Placed] = []
        for index in sorted(takes):
            place = header.placed[index]
            # An empty entry begins where the next one does.
            if place.end > place.begin:
                self._index[place.begin] = index
                self._some.append(place)
        self._ends = [place.end for place in self._some]
        self._tensors: dict[int, torch.Tensor] = {}

    def sink(self, begin: int, piece: memoryview) -> None:
        """Take the next bytes of the body."""
        for place, start, stop in overlaps(self._some, self._ends, begin, piece.nbytes):
            index = self._index[place.begin]
            if index not in self._tensors:
                self._tensors[index] = empty_like_entry(place.entry)
            memory = host_bytes(self._tensors[index])
            memory[start - place.begin : stop - place.begin] = piece[start - begin : stop - begin]

    def done(self, index: int) -> None:
        """Hand out an entry whose digest is right."""
        tensor = self._tensors.pop(index, None)
        if tensor is None:
            tensor = empty_like_entry(self._header.placed[index].entry)
        for take in self._takes[index]:
            take(tensor)


def _copy(planner: LoadPlanner, item: ReadItem, source: torch.Tensor) -> None:
    """Copy an overlap of a slice to the tensor that the planner gives for it."""
    ranges = zip(item.storage_offsets, item.lengths, strict=True)
    part = source[tuple(slice(at, at + length) for at, length in ranges)]
    target = planner.resolve_tensor(item).detach()
    if target.size() != part.size():
        key = item.dest_index.fqn
        problem = f"saved {list(part.size())}, here {list(target.size())}"
        raise MismatchError(f"{key!r}: {problem}", mismatches=((key, problem),))
    target.copy_(part)
    planner.commit_tensor(item, target)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    **options: Any,
) -> None:
    """Load as :func:`torch.distributed.checkpoint.load` does, from a run folder.

    Args:
        state_dict: state to load into.
        checkpoint_id: run folder that :func:`save` or :func:`async_save` has written.
        storage_reader: another reader; None: an :class:`EverstepStorageReader`.
        options: further arguments of torch's function.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: a rank failed; its ``failures`` are
            the errors of :class:`EverstepStorageReader` by rank.
    """
    reader = storage_reader or EverstepStorageReader()
    dcp_load(state_dict, checkpoint_id=checkpoint_id, storage_reader=reader, **options)
