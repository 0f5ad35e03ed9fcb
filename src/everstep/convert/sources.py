"""States that other programs have written: files of ``torch.save`` and safetensors, Hugging Face
folders, folders of ``torch.distributed.checkpoint``, and runs of everstep."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from everstep.errors import DamageError, OptionError
from everstep.format.names import RUN_RECORD
from everstep.look.load import load

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin")
_DCP = ".metadata"
_READABLE = (
    "a file of torch.save or safetensors, a Hugging Face folder, a folder of "
    "torch.distributed.checkpoint, or a run folder"
)
_MAGIC = {
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip archive",
    b"\x93NUM": "a file of numpy.save",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"version https://git-lfs": "a Git LFS pointer: git lfs pull fetches the file",
}
_FOLDERS = {
    "latest": "a folder of DeepSpeed: its zero_to_fp32.py makes a file of torch.save of it",
    "trainer_state.json": "a checkpoint of a Hugging Face Trainer without weights",
}


@dataclass(frozen=True, slots=True)
class Source:
    """State written by another program.

    Attributes:
        path: file or folder; None if the program gave it.
        kind: its format, in words.
        value: nested state. Tensors of safetensors and torch files are mapped, so bytes are read
            when they are used.
    """

    path: Path | None
    kind: str
    value: Any

    @property
    def name(self) -> str:
        """Format and path, in words."""
        return self.kind if self.path is None else f"{self.kind} {self.path}"


def open_source(path: Path) -> Source:
    """Open a state that another program has written.

    Raises:
        OptionError: the path does not exist, or is none of the formats; with what it looks like.
        DamageError: the file is damaged.
    """
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    raise OptionError(f"{path} does not exist", path=path, hint=f"give {_READABLE}")


def _folder(path: Path) -> Source:
    if (path / RUN_RECORD).is_file():
        return Source(path, "run", dict(load(path).objects))
    if (path / _DCP).is_file():
        return Source(path, "folder of torch.distributed.checkpoint", _dcp(path))
    if index := next((path / name for name in _INDEXES if (path / name).is_file()), None):
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return _hugging_face(path, [path / name for name in files])
    if weights := [path / name for name in _WEIGHTS if (path / name).is_file()]:
        return _hugging_face(path, weights[:1])
    if len(found := sorted(path.glob("*.safetensors"))) == 1:
        return _hugging_face(path, found)
    raise _unknown(path, _describe_folder(path))


def _hugging_face(path: Path, files: Sequence[Path]) -> Source:
    value: dict[str, Any] = {}
    for file in files:
        if not file.is_file():
            raise OptionError(f"{file} is missing", path=path, hint="copy the folder again")
        value |= _file(file).value
    return Source(path, "Hugging Face folder", value)


def _file(path: Path) -> Source:
    with path.open("rb") as file:
        head = file.read(32)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return Source(path, "safetensors file", _safetensors(path))
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith("/data.pkl") for name in names):
            return Source(path, "file of torch.save", _torch(path, mmap=True))
        raise _unknown(path, "an archive of arrays (npz)" if names[0].endswith(".npy") else "a zip")
    if head[:1] == b"\x80":
        return Source(path, "file of torch.save", _torch(path, mmap=False))
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            raise _unknown(path, kind)
    raise _unknown(path, "an empty file" if not head else f"a file that begins with {head[:8]!r}")


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamageError(f"{path} is not a whole safetensors file: {error}", path=path) from error


def _torch(path: Path, *, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise OptionError(
            f"{path} holds Python objects that torch.load(weights_only=True) refuses: "
            f"{str(error).splitlines()[0]}",
            path=path,
            hint="if you trust it, load it yourself and pass the state_dict",
        ) from error
    except (RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise DamageError(
            f"{path} is not a whole file of torch.save: {reason}", path=path
        ) from error


def _dcp(path: Path) -> Any:
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    state: dict[str, Any] = {}
    for name, described in metadata.state_dict_metadata.items():
        state[name] = None
        if isinstance(described, TensorStorageMetadata):
            state[name] = torch.empty(described.size, dtype=described.properties.dtype)
    # Keys are flat here already.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp_load(state, storage_reader=reader, planner=planner, no_dist=True)
    return _nested(state, metadata.planner_data or {})


def _nested(flat: Mapping[str, Any], paths: Mapping[str, Sequence[Any]]) -> Any:
    """Return the nested state that a planner has flattened, given the path of each key.

    In a path an index of a list is an ``int``, and each key of a dict a ``str``.
    """
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        *above, last = paths.get(name, (name,))
        place = root
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return _with_keys(root)


def _with_keys(value: Any) -> Any:
    """Return nested dicts with lists in place of those with ``int`` keys, and the ``int`` keys of
    an optimizer's state."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_keys(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items):
        return [items[index] for index in sorted(items)]
    state = items.get("state")
    if "param_groups" in items and isinstance(state, dict):
        items["state"] = {int(k) if k.isdecimal() else k: one for k, one in state.items()}
    return items


def _describe_folder(path: Path) -> str:
    names = sorted(one.name for one in path.iterdir())
    for name, kind in _FOLDERS.items():
        if name in names:
            return kind
    inside = [name for name in names if name.startswith("checkpoint-")]
    if inside:
        return f"a folder of checkpoints: choose one of them, for example {inside[-1]}"
    return f"a folder with {', '.join(names[:5]) or 'nothing in it'}"


def _unknown(path: Path, looks_like: str) -> OptionError:
    return OptionError(f"{path} is {looks_like}", path=path, hint=f"give {_READABLE}")
