"""Checkpoints of a DeepSpeed engine in everstep's verified files.

::

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = EverstepCheckpointEngine()

The files are those of :mod:`everstep.integrations.checkpoint_files`, under the names that DeepSpeed
gives them (``*_states.pt``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.tensor_fragment import fragment_address

from everstep.integrations.checkpoint_files import read_checkpoint, write_checkpoint

_KIND = "deepspeed object"
_KINDS = {one.__name__: one for one in (DynamicLossScaler, LossScaler, fragment_address)}
"""Classes of DeepSpeed whose objects are in its checkpoints, and are stored as attributes."""


class EverstepCheckpointEngine(CheckpointEngine):
    """Save and load the checkpoints of an engine in everstep's verified files.

    ``engine.save_checkpoint()`` and ``engine.load_checkpoint()`` then go through it. Nothing is
    pickled. Each file appears under its name completely, synced to disk and read back, or not at
    all; DeepSpeed writes the file ``latest`` after all of them.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "everstep"

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""

    def save(self, state_dict: Mapping[str, Any], path: str) -> bool:
        """Write one file of a checkpoint.

        Raises:
            UnsupportedStateError: a value cannot be stored; lists all of them. Nothing was written.
            OptionError: there is something else under the name.
            StorageError: the error of the file system.
        """
        write_checkpoint(_plain(state_dict), path, state_dict.get("global_steps"))
        return True

    def load(self, path: str, map_location: Any = None) -> dict[str, Any]:
        """Read one file of a checkpoint, and verify every byte of it.

        Args:
            path: name of the file.
            map_location: device of the tensors; a function counts as the CPU.

        Raises:
            FileNotFoundError: there is no such file.
            DamageError: it is damaged; with the entry.
            OptionError: it was not written by everstep.
        """
        device = None if callable(map_location) else map_location
        loaded: dict[str, Any] = _restored(read_checkpoint(path, device))
        return loaded

    def commit(self, info: Any) -> bool:
        """End a checkpoint: all of its files are on disk."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: of a view only its own elements are stored."""
        return False


def _plain(value: Any) -> Any:
    """Return nested values with DeepSpeed's objects as their attributes."""
    if isinstance(value, Enum):
        return value.value
    if type(value) in _KINDS.values():
        return {_KIND: type(value).__name__, "fields": _plain(dict(vars(value)))}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, torch.Size):
        return {_KIND: "Size", "fields": list(value)}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    return value


def _restored(value: Any) -> Any:
    """Return nested values with DeepSpeed's objects made again."""
    if isinstance(value, dict):
        if value.keys() == {_KIND, "fields"}:
            return _object(value[_KIND], _restored(value["fields"]))
        return {key: _restored(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_restored(one) for one in value)
    return value


def _object(name: str, fields: Any) -> Any:
    if name == "Size":
        return torch.Size(fields)
    kind: Any = _KINDS[name]
    made = kind.__new__(kind)
    vars(made).update(fields)
    return made
