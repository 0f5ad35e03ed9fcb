"""Write the state of a step in the format of another program.

The state is verified while it is read. What is written appears complete or not at all.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from everstep.convert.nested_files import write_dcp, write_torch
from everstep.convert.selection import Selection, TensorStream, tensors_in
from everstep.convert.tensor_files import (
    copy_model_files,
    order_of_shards,
    write_safetensors,
    write_shards,
)
from everstep.errors import OptionError, OutOfSpaceError
from everstep.look.load import Loaded
from everstep.look.open_state import OpenState, open_state
from everstep.seams import PosixFileSystem
from everstep.seams.progress import ProgressSink, progress
from everstep.tiers import storage_errors

Format = Literal["safetensors", "hf", "torch", "dcp"]
FORMATS: tuple[str, ...] = get_args(Format)
_BY_NAME = ("safetensors", "hf")
_SHARD_BYTES = 5_000_000_000
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        only: parts or patterns on names, as of :func:`everstep.load`; None: the only module for
            formats that hold tensors by name, everything for the others.
        dtype: dtype to convert floating-point tensors to; None: as they are.
        shard_bytes: most bytes of tensors in a file of a folder; None: 5 GB for ``"hf"``, one file
            for ``"safetensors"``.
        config: ``config.json`` of a Hugging Face model, or a folder with it and the files of the
            tokenizer; copied into the folder of ``"hf"``.
    """

    only: Sequence[str] | None = None
    dtype: torch.dtype | None = None
    shard_bytes: int | None = None
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        out: file or folder that was written.
        state: step, exactness and notes of the state.
        tensors: number of tensors.
        size_bytes: size of the tensors as they were written.
        files: number of files.
    """

    out: Path
    state: Loaded
    tensors: int
    size_bytes: int
    files: int


def export_state(
    run: str | os.PathLike[str],
    out: Path,
    to: Format,
    step: int | None = None,
    options: ExportOptions = ExportOptions(),
) -> Exported:
    """Write the state of a step of a run in another format.

    Args:
        run: run folder, or a place with copies; as ``path`` of :func:`everstep.load`.
        out: file or folder to create.
        to: format. ``"safetensors"``: a file, or a folder with ``shard_bytes``. ``"hf"``: a folder
            that ``from_pretrained`` opens. ``"torch"``: a file for ``torch.load``. ``"dcp"``: a
            folder for ``torch.distributed.checkpoint.load``.
        step: step to write; None: the newest.
        options: how it is written.

    Raises:
        OptionError: ``out`` exists, the selection does not fit the format, or an option is invalid.
        OutOfSpaceError: there is not enough free space.
        Otherwise as :func:`everstep.load`.
    """
    _check(out, to, options)
    with open_state(run, step, options.only) as state:
        narrowed = options.only is not None
        choose = Selection.by_name if to in _BY_NAME else Selection.nested
        selection = choose(state.outline, is_narrowed=narrowed)
        if options.dtype is not None and selection.has_optimizer:
            raise OptionError(
                "--dtype would round the state of an optimizer",
                step=state.outline.step,
                hint="choose a model with --only",
            )
        return _write(state, selection, out, to, options)


def _check(out: Path, to: Format, options: ExportOptions) -> None:
    if to not in FORMATS:
        raise OptionError(f"there is no format {to!r}", hint=f"formats: {', '.join(FORMATS)}")
    if os.path.lexists(out):
        raise OptionError(
            f"{out} exists", path=out, hint="choose another name; nothing is overwritten"
        )
    if options.shard_bytes is not None and (to not in _BY_NAME or options.shard_bytes < 1):
        raise OptionError(
            f"--shard-size {options.shard_bytes} with --to {to}",
            hint="only safetensors and hf are split into files, of one byte or more",
        )
    if options.config is not None and to != "hf":
        raise OptionError(f"--config with --to {to}", hint="only --to hf copies it")
    if options.dtype is not None and not options.dtype.is_floating_point:
        raise OptionError(f"--dtype {options.dtype} is not a floating-point dtype")
    if to == "hf":
        config = options.config
        if config is None:
            raise OptionError(
                "from_pretrained needs the configuration of the model",
                hint="name it with --config: a config.json, or the folder of the pretrained model",
            )
        if not (config / _CONFIG if config.is_dir() else config).is_file():
            raise OptionError(
                f"there is no {_CONFIG} in {config}",
                path=config,
                hint="save_pretrained() of the model's config writes one",
            )


def _write(
    state: OpenState, selection: Selection, out: Path, to: Format, options: ExportOptions
) -> Exported:
    shard_bytes = options.shard_bytes or (_SHARD_BYTES if to == "hf" else None)
    plain = TensorStream(state, tensors_in(selection.value), options.dtype)
    order = plain.order
    if to in _BY_NAME:
        order = order_of_shards(selection.tensors, plain, shard_bytes)
    plain.close()
    stream = TensorStream(state, order, options.dtype)
    step = state.outline.step
    with (
        closing(stream),
        storage_errors("write the export", out, step=step),
        _staged(out, stream.size_bytes) as staged,
        progress("export", stream.size_bytes) as bar,
    ):
        _write_as(to, staged, selection, stream, shard_bytes, bar)
        if options.config is not None:
            copy_model_files(options.config, staged)
        files = _make_durable(staged)
    return Exported(out, state.outline, len(stream.order), stream.size_bytes, files)


def _write_as(
    to: Format,
    staged: Path,
    selection: Selection,
    stream: TensorStream,
    shard_bytes: int | None,
    bar: ProgressSink,
) -> None:
    if to == "torch":
        write_torch(staged, selection.value, stream, bar)
    elif to == "dcp":
        staged.mkdir()
        write_dcp(staged, selection.value, stream, bar)
    elif shard_bytes is None:
        write_safetensors(staged, selection.tensors, stream, bar)
    else:
        staged.mkdir()
        write_shards(staged, "model", selection.tensors, stream, bar, shard_bytes)


@contextmanager
def _staged(out: Path, size_bytes: int) -> Iterator[Path]:
    """Yield the path to write under, which becomes ``out`` at the end; remove it on errors."""
    out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(out.parent).free
    if size_bytes > free_bytes:
        raise OutOfSpaceError(
            f"the export takes {size_bytes} bytes, and {free_bytes} are free",
            path=out,
            hint="free some space, or choose another place",
        )
    staged = out.with_name(f"{out.name}.partial-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        yield staged
        staged.rename(out)
        PosixFileSystem().sync_dir(out.parent)
    finally:
        if staged.is_dir():
            shutil.rmtree(staged, ignore_errors=True)
        else:
            staged.unlink(missing_ok=True)


def _make_durable(path: Path) -> int:
    """Make files durable; return their number."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        PosixFileSystem().sync_dir(path)
    return len(files)
