"""Checkpoints that frameworks save under a name of theirs, in everstep's verified files.

A checkpoint is a run folder with one base, under the name that the framework gives it. Each item of
the checkpoint is a part of the state: ``everstep verify``, ``ls``, ``diff`` and ``export`` read it,
and ``resume(initial=...)`` begins a run with its weights. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

import everstep
from everstep.convert.importing import state_of
from everstep.convert.run_folder import (
    put_earlier_back,
    refuse_others,
    remove_run,
    replace_run,
)
from everstep.errors import DamageError, OptionError, RecoveryError, UnsupportedStateError
from everstep.format.names import RUN_RECORD
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.run.folder import run_path
from everstep.seams import PosixFileSystem

_RESERVED = ("everstep", "__metadata__")


def write_checkpoint(checkpoint: Mapping[str, Any], path: str | Path, step: object) -> None:
    """Write a checkpoint, synced to disk, or replace one in one step.

    Args:
        checkpoint: nested state.
        path: folder to create or to replace.
        step: number of the step; anything else counts as 0.

    Raises:
        UnsupportedStateError: a value cannot be stored; lists all of them. Nothing was written.
        OptionError: there is something else under the name, or the path is no local path.
        StorageError: the error of the file system.
    """
    out = _local(path)
    refuse_others(out)
    state = state_of(_parts(checkpoint), step if isinstance(step, int) and step >= 0 else 0)
    with contextlib.closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        replace_run(PosixFileSystem(), out, state, ring)


def read_checkpoint(path: str | Path, map_location: Any | None = None) -> dict[str, Any]:
    """Read a checkpoint, and verify every byte of it.

    Args:
        path: folder of the checkpoint.
        map_location: device of the tensors; None: the CPU.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamageError: it is damaged; with the file and the entry.
        OptionError: it was not written by everstep, or ``map_location`` is no device.
    """
    out = _local(path)
    put_earlier_back(PosixFileSystem(), out)
    folder = Path(out)
    if not folder.exists():
        raise FileNotFoundError(f"Checkpoint not found: {path}")
    if not (folder / RUN_RECORD).is_file():
        raise OptionError(
            f"{path} was not written by everstep",
            path=folder,
            hint="load it without everstep's plugin",
        )
    if not isinstance(map_location, (str, torch.device, type(None))):
        raise OptionError(f"map_location must be a device, not {map_location!r}")
    try:
        loaded = everstep.load(folder, map_location=map_location)
    except RecoveryError as error:
        # Its first line speaks of the bases of a run.
        reasons = error.message.partition("\n")[2].strip()
        raise DamageError(
            f"the checkpoint cannot be read: {reasons or error.message}",
            path=folder,
            hint="everstep verify lists the damage; load an older checkpoint",
        ) from error
    return {_key(part): value for part, value in loaded.objects.items()}


def remove_checkpoint(path: str | Path) -> None:
    """Remove a checkpoint, if it is there.

    Args:
        path: folder of the checkpoint.

    Raises:
        OptionError: there is something else under the name.
    """
    remove_run(PosixFileSystem(), _local(path))


def _local(path: str | Path) -> PurePath:
    return run_path(Path(path).parent) / Path(path).name


def _parts(checkpoint: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the items of a checkpoint under names of parts.

    Raises:
        UnsupportedStateError: a key cannot be the name of a part.
    """
    bad = [
        (str(key), "a key must be a string with a name of its own")
        for key in checkpoint
        if not isinstance(key, str) or not key or key in _RESERVED
    ]
    if bad:
        raise UnsupportedStateError(
            f"{bad[0][0]!r} cannot be a key of a checkpoint", leaves=tuple(bad)
        )
    return {_part(key): value for key, value in checkpoint.items()}


def _part(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _key(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
