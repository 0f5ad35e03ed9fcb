"""Formats that hold nested state: files of ``torch.save`` and folders of
``torch.distributed.checkpoint``.

torch writes both; the bytes of the tensors are read only when it is their turn.
"""

from __future__ import annotations

import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.convert.selection import TensorStream, with_tensors
from everstep.errors import FormatError
from everstep.seams.progress import ProgressSink
from everstep.state.values.tensors import host_bytes

_LOCAL_HEADER_BYTES = 30
_LENGTHS_AT = 26  # of the name and of the extra field, in the local header of a zip entry


def write_torch(path: Path, value: Any, stream: TensorStream, bar: ProgressSink) -> None:
    """Write a file that ``torch.load`` reads.

    torch writes the file with holes in place of the tensors, which are filled one after the other.
    So the check sums of the zip format are not those of the tensors; ``torch.load`` does not look
    at them.

    Args:
        path: file to create.
        value: nested state, with tensors of the outline.
        stream: reads them; its order must be that of ``value``.
        bar: counts bytes.

    Raises:
        FormatError: this version of torch writes another format.
    """
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        holes = {
            id(one): torch.empty(one.shape, dtype=stream.dtype_of(one)) for one in stream.order
        }
        torch.save(with_tensors(value, holes), path)
    with zipfile.ZipFile(path) as archive:
        there = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    with path.open("r+b") as file:
        # Storages are numbered in the order in which they were pickled.
        for number, one in enumerate(stream.order):
            info = there.get(f"data/{number}")
            value = stream.read(one)
            if info is None or info.file_size != value.nbytes:
                raise FormatError(
                    f"torch {torch.__version__} wrote a file whose tensors are not found",
                    path=path,
                    hint="write it with --to safetensors",
                )
            file.seek(info.header_offset + _LENGTHS_AT)
            lengths = struct.unpack("<HH", file.read(4))
            file.seek(info.header_offset + _LOCAL_HEADER_BYTES + sum(lengths))
            file.write(host_bytes(value))
            bar.advance(value.nbytes)


class _Planner(DefaultSavePlanner):
    """Planner that reads a tensor when it is written, and frees it when the next one is.

    The writer of torch keeps all tensors to its end, so their memory is taken from them.
    """

    def __init__(
        self, stream: TensorStream, outline: Mapping[int, torch.Tensor], bar: ProgressSink
    ) -> None:
        super().__init__()
        self._stream = stream
        self._outline = outline
        self._bar = bar
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, torch.Tensor):
            return found
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        # A copy: a tensor with several names is written once for each.
        self._written = self._stream.read(self._outline[id(found)]).clone()
        self._bar.advance(self._written.nbytes)
        return self._written


def write_dcp(folder: Path, value: Any, stream: TensorStream, bar: ProgressSink) -> None:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads.

    Args:
        folder: folder to write into.
        value: nested state, with tensors of the outline.
        stream: reads them.
        bar: counts bytes.
    """
    written = {
        id(one): torch.empty(one.shape, dtype=stream.dtype_of(one), device="meta")
        for one in stream.order
    }
    outline = {id(written[id(one)]): one for one in stream.order}
    try:
        with warnings.catch_warnings():
            # That there is no process group is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(
                with_tensors(value, written),
                # One tensor after the other, on machines with a GPU as well.
                storage_writer=FileSystemWriter(folder, per_thread_copy_ahead=0),
                planner=_Planner(stream, outline, bar),
                no_dist=True,
            )
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
