"""Formats that hold tensors by name: safetensors, and the folders of Hugging Face.

The safetensors library writes a file only from tensors that are all in memory; here one group of
them is. The files are read by it in the tests.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from everstep.convert.selection import TensorStream
from everstep.seams.progress import ProgressSink
from everstep.state.values.tensors import DTYPE_CODES, host_bytes

_ALIGNMENT_BYTES = 8
_PLAIN = {"format": "pt"}
_MODEL_FILES = (".json", ".jinja", ".model", ".py", ".txt")
_INDEX = "{name}.safetensors.index.json"


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], stream: TensorStream, bar: ProgressSink
) -> None:
    """Write one safetensors file.

    Args:
        path: file to create.
        tensors: tensors of the outline by name.
        stream: reads them.
        bar: counts bytes.
    """
    header: dict[str, object] = {"__metadata__": _PLAIN}
    # Large elements first, as the library does: each tensor is aligned to its elements then.
    ordered = _by_element_size(tensors, stream)
    end = 0
    for name, tensor in ordered:
        dtype = stream.dtype_of(tensor)
        begin = end
        end += tensor.numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_CODES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            value = stream.read(tensor)
            file.write(host_bytes(value))
            bar.advance(value.nbytes)


def write_shards(
    folder: Path,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    stream: TensorStream,
    bar: ProgressSink,
    shard_bytes: int,
) -> None:
    """Write safetensors files of limited size, and the index that says which has which tensor.

    One file has no index, as ``from_pretrained`` expects it.

    Args:
        folder: folder to write into.
        name: first part of the names of the files.
        tensors: tensors of the outline by name.
        stream: reads them.
        bar: counts bytes.
        shard_bytes: most bytes of tensors in a file; a larger tensor has a file of its own.
    """
    shards = _shards(tensors, stream, shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / f"{name}.safetensors", shards[0], stream, bar)
        return
    weight_map = dict[str, str]()
    for number, shard in enumerate(shards, start=1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard, stream, bar)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(_size_bytes(one, stream) for one in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / _INDEX.format(name=name)).write_text(json.dumps(index, indent=2) + "\n")


def order_of_shards(
    tensors: Mapping[str, torch.Tensor], stream: TensorStream, shard_bytes: int | None
) -> list[torch.Tensor]:
    """Return the tensors in the order in which they are written."""
    shards = [tensors] if shard_bytes is None else _shards(tensors, stream, shard_bytes)
    return [tensor for shard in shards for _, tensor in _by_element_size(shard, stream)]


def copy_model_files(config: Path, folder: Path) -> None:
    """Copy the configuration of a model, and of its tokenizer, next to its weights.

    Args:
        config: ``config.json``, or a folder with it.
        folder: folder of the weights.
    """
    if not config.is_dir():
        shutil.copyfile(config, folder / "config.json")
        return
    for file in sorted(config.iterdir()):
        # Not the weights, and not the index of their files.
        if file.suffix in _MODEL_FILES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)


def _size_bytes(tensor: torch.Tensor, stream: TensorStream) -> int:
    return tensor.numel() * stream.dtype_of(tensor).itemsize


def _by_element_size(
    tensors: Mapping[str, torch.Tensor], stream: TensorStream
) -> list[tuple[str, torch.Tensor]]:
    return sorted(tensors.items(), key=lambda one: -stream.dtype_of(one[1]).itemsize)


def _shards(
    tensors: Mapping[str, torch.Tensor], stream: TensorStream, shard_bytes: int
) -> Sequence[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size_bytes = _size_bytes(tensor, stream)
        if shards[-1] and filled + size_bytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size_bytes
    return shards
