"""torch.save, torchsnapshot and torch_checkpointing, as their documentation says."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from everstep_bench.harness.loop import Loop
from everstep_bench.harness.machine import direct_takes, sync_all
from everstep_bench.stall.arms import Arm, Cause, Pending

_PACKAGES = {"torchsnapshot": "torchsnapshot", "torch_checkpointing": "torch_checkpointing"}
"""Packages that arms need and that may be missing, by the name of the arm."""

_PATIENCE_S = 30.0


def installed(name: str) -> bool:
    """Return True if the libraries of the arm are installed."""
    return name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name]) is not None


class Saves:
    """Names in a folder of its own, each used once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)  # several ranks write to it
        self.folder = folder
        self._count = 0

    @property
    def newest(self) -> Path:
        """The name in use."""
        return self.folder / f"{self._count}"

    def next(self) -> Path:
        """A new name."""
        self._count += 1
        return self.newest

    def remove(self) -> None:
        """Removes what was saved last."""
        if self.newest.is_dir():
            shutil.rmtree(self.newest, ignore_errors=True)  # the whole folder goes at the end
        else:
            self.newest.unlink(missing_ok=True)


class SavingArm(Arm):
    """A peer that writes each save under a new name.

    Attributes:
        blocks_as: what holds training up while its call runs.
    """

    blocks_as: Cause = "capture"

    def __init__(self, name: str, detail: str, loop: Loop, saves: Saves) -> None:
        super().__init__(name, detail)
        self._loop = loop
        self._saves = saves
        self._path: Path | None = None
        self._pending: Pending | None = None

    def prepare(self) -> None:
        """Chooses a name."""
        self._path = self._saves.next()

    def save(self) -> Pending:
        """Calls the library."""
        assert self._path is not None
        begin_s = time.monotonic()
        pending = self.begin(self._path)
        self._stalls[self.blocks_as] += time.monotonic() - begin_s
        self._pending = pending
        self.watch(pending)
        return pending

    def begin(self, path: Path) -> Pending:
        """The call that users make."""
        raise NotImplementedError

    def watch(self, pending: Pending) -> None:
        """Sees to it that ``pending`` ends; not the library's time."""

    def sync(self, path: Path) -> None:
        """Makes durable what the library has left unsynced."""
        sync_all(path)

    def settle(self, pending: Pending) -> float:
        """Waits, then syncs."""
        assert self._path is not None
        pending.wait()
        begin_s = time.monotonic()
        self.sync(self._path)
        return time.monotonic() - begin_s

    def clean(self) -> None:
        """Removes what was saved; a save that goes on, after an interruption, is awaited."""
        pending = self._pending
        self._pending = None
        if pending is not None and not pending.over:
            with contextlib.suppress(BaseException):  # what it says no longer matters
                pending.wait(_PATIENCE_S)
        self._saves.remove()


class TorchSave(SavingArm):
    """``torch.save`` of a path, then fsync of file and directory, all in training's thread."""

    blocks_as: Cause = "persist"

    def __init__(self, loop: Loop, folder: Path) -> None:
        detail = "of a path; + fsync of file and directory, in the call"
        super().__init__("torch.save", detail, loop, Saves(folder / "torch.save"))

    def begin(self, path: Path) -> Pending:
        """Saves and syncs."""
        torch.save(self._loop.nested(), path)
        sync_all(path)
        return Pending.finished()

    def sync(self, path: Path) -> None:
        """All is synced already."""


class TorchSnapshot(SavingArm):
    """``Snapshot.async_take``, which returns when the state is in host memory; never syncs.

    Args:
        replicated: all ranks hold the same tensors, and write a part of them each.
    """

    def __init__(self, loop: Loop, folder: Path, *, replicated: bool = False) -> None:
        detail = "Snapshot.async_take; syncs nothing: + fsync of files and directories, afterwards"
        super().__init__("torchsnapshot", detail, loop, Saves(folder / "torchsnapshot"))
        self._replicated = ["**"] if replicated else None
        self._module: Any = None
        self._snapshot: Any = None

    def open(self) -> None:
        """Imports it."""
        self._module = importlib.import_module("torchsnapshot")

    def begin(self, path: Path) -> Pending:
        """Takes a snapshot."""
        make = self._module.StateDict
        state = {name: make(**_named(part)) for name, part in self._loop.nested().items()}
        self._snapshot = self._module.Snapshot.async_take(
            path=str(path), app_state=state, replicated=self._replicated
        )
        pending = Pending()
        pending.on_staged()
        return pending

    def watch(self, pending: Pending) -> None:
        """It has no future: a thread waits."""
        pending.finish_after(self._snapshot.wait, "bench-torchsnapshot")


class TorchCheckpointing(SavingArm):
    """``CheckpointManager.save``: a copy in a thread, written by a process; never syncs.

    ``lock()`` is held around the optimizer's step, as its documentation asks; outside of the
    blocks of this arm, where nothing is being copied, it is left out.
    """

    def __init__(self, loop: Loop, folder: Path) -> None:
        detail = (
            "CheckpointManager.save, lock() around the update; syncs nothing: + fsync of files "
            "and directories, afterwards"
        )
        name = "torch_checkpointing"
        super().__init__(name, detail, loop, Saves(folder / name))
        self._manager: Any = None
        self._held: contextlib.ExitStack | None = None
        self._guarded = False
        self._hooks: list[Any] = []

    def open(self) -> None:
        """Starts its process, and reserves its memory."""
        module = importlib.import_module("torch_checkpointing")
        options: dict[str, Any] = {}
        if not direct_takes(self._saves.folder, b"some bytes"):
            # Its own stream writes pieces of any length, and fails where that is refused.
            files = importlib.import_module("torch_checkpointing.storage.filesystem")
            storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
            options["storage_config"] = storage
            self.detail += "; use_direct_io=False, since this file system wants aligned writes"
        self._manager = module.CheckpointManager(module.CheckpointManager.Config(**options))
        self._manager.prewarm_staging(self._loop.nested())
        optimizer = self._loop.training.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._lock),
            optimizer.register_step_post_hook(self._unlock),
        ]

    def begin(self, path: Path) -> Pending:
        """Saves."""
        self._guarded = True
        future = self._manager.save(str(path), self._loop.nested())
        pending = Pending()
        future.add_done_callback(pending.on_done)
        return pending

    def clean(self) -> None:
        """Removes what was saved; other arms need no lock."""
        self._guarded = False
        super().clean()

    def close(self) -> None:
        """Ends its process."""
        super().close()
        for hook in self._hooks:
            hook.remove()
        if self._manager is not None:
            self._manager.close()

    def _lock(self, *_: Any) -> None:
        if not self._guarded:
            return
        begin_s = time.monotonic()
        self._held = contextlib.ExitStack()
        self._held.enter_context(self._manager.lock())
        self._stalls["gate"] += time.monotonic() - begin_s

    def _unlock(self, *_: Any) -> None:
        held = self._held
        self._held = None
        if held is not None:
            held.close()


def _named(part: Any) -> dict[str, Any]:
    """State dicts of optimizers have keys that are no words."""
    return {str(key): value for key, value in part.items()}
