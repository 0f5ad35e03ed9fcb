"""Storage writer of ``torch.distributed.checkpoint``: plans of torch become shares of a base.

Plain data never becomes a pickle. torch's planner offers it as a stream of ``torch.save``; the
object itself is taken from the planner's state dict instead, and encoded as everstep encodes all
plain data. What cannot be encoded is refused by name.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future as UploadFuture
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from everstep.errors import OptionError, StateError, UnsupportedStateError
from everstep.integrations.dcp.folder import Share, begin
from everstep.integrations.dcp.items import (
    INDEX,
    describe_gap,
    entry_of,
    folder_of,
    name_of,
    path_of,
)
from everstep.run.fence import Fence
from everstep.seams import Seams
from everstep.state.layout import OBJECT_PREFIX, Entry
from everstep.state.values.objects import Encoded, TensorRef, encode, join_path
from everstep.state.values.tensors import tensor_entry, why_not_storable
from everstep.state.values.tree import split
from everstep.tiers import storage_errors

_DIFFERENT = "a rank has saved it under another path"


@dataclass(slots=True)
class _Save:
    """A save of this rank.

    Attributes:
        folder: run folder.
        fence: fence of the save; only of the coordinating rank.
        share: files of this rank, from when it writes.
    """

    folder: PurePath
    fence: Fence | None = None
    share: Share | None = None


class EverstepStorageWriter(StorageWriter):
    """Writer for ``torch.distributed.checkpoint.save`` and ``async_save``.

    A checkpoint is a run folder with one base. A save to a folder that has a checkpoint replaces
    it: until the new one is complete and durable, the older one is loaded.

    Args:
        path: folder, if ``checkpoint_id`` is not passed to each save.
        seams: file system and clock; tests replace them.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, seams: Seams | None = None
    ) -> None:
        self._path = path
        # Made when they are used: torch may send the writer to another process.
        self._seams = seams
        # By thread: saves of one writer may overlap, each in a thread of its own.
        self._saves: dict[int, _Save] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Folder of the next save."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to another folder if one is given."""
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._saves[threading.get_ident()] = _Save(folder_of(self._path))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check how torch is going to save.

        Raises:
            OptionError: without collectives, or there is no folder.
        """
        if not kwargs.get("use_collectives", True):
            raise OptionError(
                "use_collectives=False cannot be used with everstep: a checkpoint is committed "
                "when every rank has written its share",
                hint="leave use_collectives out",
            )
        save = self._saves.get(threading.get_ident())
        if save is None or save.fence is not None or save.share is not None:
            self.reset()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            OptionError: it is one that torch has cached.
        """
        _refuse_cached(not plan.usable)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save in the folder, and number the ranks; called on the coordinating rank."""
        save = self._save
        with storage_errors("begin the checkpoint", save.folder):
            save.fence, tickets = begin(Seams.parse(self._seams), save.folder, len(plans))
        return [
            replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share; its tensors and the marker are durable afterwards.

        Raises:
            UnsupportedStateError: a value cannot be stored.
            StateError: the planner gives another tensor than it has planned.
            OptionError: torch caches plans.
            StorageError: the file system failed; no files of this rank stay.
        """
        _refuse_cached(getattr(planner, "_enable_plan_caching", False))
        save = self._save
        with storage_errors("write the checkpoint", save.folder, rank=plan.storage_data.rank):
            save.share = share = Share.of(Seams.parse(self._seams), save.folder, plan.storage_data)
            tensors = _Tensors(planner)
            results = [tensors.add(item, plan.planner_data) for item in plan.items]
            try:
                share.write(list(tensors.entries.values()), tensors, {})
                # That of the coordinating rank vouches for the plain data as well: see finish().
                if save.fence is None:
                    share.mark()
            except BaseException:
                share.withdraw()
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the plain data of all ranks, and commit; called on the coordinating rank.

        Raises:
            StateError: the slices of a tensor are not all of it.
            UnsupportedStateError: values of different ranks do not fit each other.
            FencedError: another process saves to the same folder.
            StorageError: the file system failed. No files stay, unless the checkpoint was complete.
        """
        save = self._save
        share = save.share
        fence = save.fence
        assert share is not None
        assert fence is not None
        with storage_errors("commit the checkpoint", save.folder, rank=share.identity.rank):
            try:
                share.write([], {}, _objects(metadata, results))
                share.commit(fence)
            except BaseException:
                share.withdraw_all()
                raise
            share.retain(fence)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if an id is the path of a local folder."""
        return "://" not in os.fspath(checkpoint_id)

    @property
    def _save(self) -> _Save:
        return self._saves[threading.get_ident()]


class _Tensors(Mapping[str, torch.Tensor]):
    """Tensors of a rank by entry name; the planner gives each when it is looked up.

    Attributes:
        entries: their entries.
    """

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._items: dict[str, WriteItem] = {}
        self._inside: dict[str, torch.Tensor] = {}
        self.entries: dict[str, Entry] = {}

    def add(self, item: WriteItem, planner_data: Any) -> WriteResult:
        """Add an item of a plan.

        Returns:
            A result whose ``storage_data`` is the name of the entry, or encoded plain data.

        Raises:
            UnsupportedStateError: it cannot be stored.
        """
        key = item.index.fqn
        name = name_of(key, path_of(key, planner_data))
        if item.type == WriteItemType.BYTE_IO:
            data = self._encoded(item, name)
            return WriteResult(item.index, len(data), data)
        if name in self.entries:
            raise _unsupported(key, "a rank has two slices of it, and can store one")
        self._items[name] = item
        self.entries[name] = entry = entry_of(name, item)
        return WriteResult(item.index, entry.size_bytes, name)

    def _encoded(self, item: WriteItem, name: str) -> bytes:
        """Return encoded plain data; tensors within it become entries of their own."""
        inside: dict[str, torch.Tensor] = {}
        data = encode(split(_object_of(item, self._planner), name, inside), name)
        for inner, tensor in inside.items():
            reason = why_not_storable(tensor)
            if reason or inner in self.entries:
                raise _unsupported(inner, reason or "its name is that of another tensor")
            self.entries[inner] = replace(tensor_entry(inner, tensor), stride=None)
        self._inside |= inside
        return data

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._inside:
            return self._inside[name]
        item = self._items[name]
        tensor = self._planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        if reason := why_not_storable(tensor.detach()):
            raise _unsupported(item.index.fqn, reason)
        # The file is laid out by the plan.
        planned = item.tensor_data
        assert planned is not None
        form = planned.properties.dtype, torch.Size(planned.chunk.sizes)
        if (tensor.dtype, tensor.shape) != form:
            raise StateError(
                f"the planner gives {item.index.fqn!r} as {tensor.dtype} {list(tensor.shape)}, and "
                f"has planned {form[0]} {list(form[1])}",
                hint="change dtype and shape in create_local_plan() as well",
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _object_of(item: WriteItem, planner: SavePlanner) -> object:
    """Return the plain data of an item.

    Raises:
        UnsupportedStateError: a planner of the user's own gives more than plain data.
    """
    kind: Any = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    ):
        found: object = planner.lookup_object(item.index)
        return found
    # Another planner may change the object. Its stream is read where it was made, and only plain
    # data is taken from it.
    stream = planner.resolve_data(item)
    assert isinstance(stream, io.BytesIO)
    stream.seek(0)
    try:
        return torch.load(stream, weights_only=True)
    except Exception as error:
        why = str(error).partition(". ")[0]
        reason = f"{kind.__name__} gives a stream of other data than plain: {why}"
        raise _unsupported(item.index.fqn, reason) from error


def _objects(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, bytes]:
    """Return the encoded objects of a checkpoint by entry name: the nested state dict by section,
    with references in the place of tensors, and the index.

    Raises:
        StateError: the slices of a tensor are not all of it.
        UnsupportedStateError: ranks had different names for a tensor, or planner data is not plain.
    """
    leaves: dict[str, TensorRef | Encoded] = {}
    for one in (one for some in results for one in some):
        data = one.storage_data
        leaf = Encoded(data) if isinstance(data, bytes) else TensorRef(data)
        if leaves.setdefault(one.index.fqn, leaf) != leaf:
            raise _unsupported(one.index.fqn, _DIFFERENT)
    tree: dict[str, Any] = {}
    for key, kind in metadata.state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata) and (gap := describe_gap(key, kind)):
            raise StateError(gap, hint="all ranks that have slices of a tensor save together")
        path = path_of(key, metadata.planner_data)
        leaf = leaves[key]
        if isinstance(leaf, TensorRef) and leaf.name != name_of(key, path):
            raise _unsupported(key, _DIFFERENT)
        set_element(tree, path, leaf)
    tree[INDEX] = {
        "keys": list(metadata.state_dict_metadata),
        "planner_data": metadata.planner_data,
    }
    return {
        OBJECT_PREFIX + (section if section == INDEX else join_path("", section)): encode(
            value, section
        )
        for section, value in tree.items()
    }


def _refuse_cached(is_cached: bool) -> None:
    # A cached plan belongs to an earlier save, and leads a rank to the folder of that save.
    if is_cached:
        raise OptionError(
            "plans that torch has cached cannot be used with everstep",
            hint="leave out enable_plan_caching of DefaultSavePlanner",
        )


def _unsupported(key: str, reason: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{key!r} cannot be stored: {reason}", leaves=((key, reason),))


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    **options: Any,
) -> Metadata:
    """Save as :func:`torch.distributed.checkpoint.save` does, to a run folder.

    Args:
        state_dict: state to save.
        checkpoint_id: run folder.
        storage_writer: another writer; None: an :class:`EverstepStorageWriter`.
        options: further arguments of torch's function.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: a rank failed; its ``failures`` are
            the errors of :class:`EverstepStorageWriter` by rank.
    """
    writer = storage_writer or EverstepStorageWriter()
    found: Metadata = dcp_save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options
    )
    return found


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    **options: Any,
) -> UploadFuture[Metadata] | AsyncSaveResponse:
    """Save as :func:`torch.distributed.checkpoint.async_save` does, to a run folder.

    Arguments as of :func:`save`; the returned future raises its errors.
    """
    writer = storage_writer or EverstepStorageWriter()
    return dcp_async_save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, **options)
