"""Checkpoints of Lightning's Trainer and of Fabric in everstep's verified files.

::

    trainer = Trainer(plugins=[EverstepCheckpointIO()])
    trainer.fit(module, loader, ckpt_path="last")

The files are those of :mod:`everstep.integrations.checkpoint_files`, under the names that Lightning
gives them (``*.ckpt``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from everstep.errors import OptionError
from everstep.integrations.checkpoint_files import (
    read_checkpoint,
    remove_checkpoint,
    write_checkpoint,
)


class EverstepCheckpointIO(CheckpointIO):
    """Save and load the checkpoints of a Trainer or of Fabric in everstep's verified files.

    For ``plugins=[...]``, alone or inside of Lightning's ``AsyncCheckpointIO``. All that saves and
    loads checkpoints then goes through it: ``ModelCheckpoint``, ``Trainer.save_checkpoint()``,
    ``fit(ckpt_path=...)``, ``Fabric.save()`` and ``Fabric.load()``.

    Nothing is pickled. A checkpoint appears under its name completely, synced to disk and read
    back, or not at all; one that is saved again under the same name is replaced in one step.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: nested state.
            path: folder to create or to replace.
            storage_options: not supported.

        Raises:
            UnsupportedStateError: a value cannot be stored; lists all of them. Nothing was written.
            OptionError: there is something else under the name, or the path is no local path.
            StorageError: the error of the file system.
        """
        if storage_options is not None:
            raise OptionError("storage_options are not supported by EverstepCheckpointIO")
        write_checkpoint(checkpoint, path, checkpoint.get("global_step"))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, and verify every byte of it.

        Args:
            path: folder of the checkpoint.
            map_location: device of the tensors; None: the CPU.
            weights_only: as of torch; without effect, since no code is loaded in any case.

        Raises:
            FileNotFoundError: there is no checkpoint.
            DamageError: it is damaged; with the file and the entry.
            OptionError: it was not written by everstep, or ``map_location`` is no device.
        """
        return read_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, if it is there.

        Args:
            path: folder of the checkpoint.

        Raises:
            OptionError: there is something else under the name.
        """
        remove_checkpoint(path)
