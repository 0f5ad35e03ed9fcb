"""Files of other libraries: a new name for each save, synced if they do not, removed afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from everstep_bench.persist.machine import sync_folder
from everstep_bench.stall.arms import Arm, Cause, Pending
from everstep_bench.stall.loop import Loop

__all__ = ["Saves", "SavingArm", "sync_all"]

_PATIENCE_S = 30.0


class Saves:
    """Names in a folder of its own, each used once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
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


def sync_all(path: Path) -> None:
    """Syncs a file, or all files and folders below a folder, and the name itself."""
    folders = [path.parent]
    files = [path]
    if path.is_dir():
        below = sorted(path.rglob("*"))
        files = [found for found in below if found.is_file()]
        folders += [path, *(found for found in below if found.is_dir())]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for folder in folders:
        sync_folder(folder)
