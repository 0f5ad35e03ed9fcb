"""Simulated nodes, and the file system as one process on a node sees it.

A process dies at any operation of its own (:attr:`ProcessDisk.crash_at`), and between any two of
them others may run (:attr:`ProcessDisk.between`). When a node loses power, what it has not synced
is lost: on a disk of its own any subset (a crash image), on a folder that all nodes share the bytes
that it had not synced, while names are the server's.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

from everstep.seams.filesystem import DirEntry, FileSystem, ReadFile, WriteFile
from tests.crash.sim.disk import FileNode
from tests.crash.sim.faults import SimulatedCrash, os_error
from tests.crash.sim.filesystem import SimFileSystem, _SimWriteFile

__all__ = ["Disk", "ProcessDisk"]

_T = TypeVar("_T")


@dataclass(slots=True)
class Disk:
    """A disk (or a folder that nodes share): its contents are replaced by crash images.

    Attributes:
        name: of this very disk; an exchanged one has another.
        unsynced: files with bytes that some node has not synced, by node.
    """

    name: str
    fs: SimFileSystem = field(default_factory=SimFileSystem)
    unsynced: dict[int, dict[int, FileNode]] = field(default_factory=dict)

    def lose_power(self, seed: int, choice: int) -> None:
        """Goes on as one of the states that a power loss may leave."""
        images = list(self.fs.crash_images(seed, 6))
        self.fs = images[choice % len(images)]
        self.unsynced.clear()

    def lose_client(self, node: int) -> None:
        """One node that wrote here lost power: its bytes that were not synced never came."""
        for file in self.unsynced.pop(node, {}).values():
            file.content = bytearray(file.durable)
            file.shared = False
            file.pending = []


class ProcessDisk:
    """Implements :class:`everstep.seams.filesystem.FileSystem` for one process.

    Args:
        disk: asked anew at each operation.
        between: called before each operation that changes something.

    Attributes:
        crash_at: the process dies at the operation of this number, or never.
        after: it dies when that operation is done, instead of before.
        failing: how many of the next writes fail for want of space.
    """

    def __init__(self, disk: Disk, node: int, between: Callable[[], None]) -> None:
        self.disk = disk
        self.node = node
        self.between = between
        self.dead = False
        self.operations = 0
        self.crash_at: int | None = None
        self.after = False
        self.failing = 0

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        return _ProcessFile(self, self.perform(lambda fs: fs.create(path)))

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        return None

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        return self._look().open(path)

    def rename(self, source: PurePath, target: PurePath) -> None:
        self.perform(lambda fs: fs.rename(source, target))

    def link(self, source: PurePath, target: PurePath) -> None:
        self.perform(lambda fs: fs.link(source, target))

    def unlink(self, path: PurePath) -> None:
        self.perform(lambda fs: fs.unlink(path))

    def make_dir(self, path: PurePath) -> None:
        self.perform(lambda fs: fs.make_dir(path))

    def remove_dir(self, path: PurePath) -> None:
        self.perform(lambda fs: fs.remove_dir(path))

    def sync_dir(self, path: PurePath) -> None:
        self.perform(lambda fs: fs.sync_dir(path))

    def scan(self, path: PurePath) -> list[DirEntry]:
        return self._look().scan(path)

    def free_bytes(self, path: PurePath) -> int:
        return self._look().free_bytes(path)

    def _look(self) -> SimFileSystem:
        if self.dead:
            raise SimulatedCrash("the process has died")
        return self.disk.fs

    def perform(self, act: Callable[[SimFileSystem], _T]) -> _T:
        self._look()
        self.between()
        fs = self._look()  # whoever ran in between may have killed this one
        self.operations += 1
        if self.crash_at is None or self.operations < self.crash_at:
            return act(fs)
        self.dead = True
        if self.after:
            act(fs)
        raise SimulatedCrash(f"at its operation {self.operations}")

    def write(self, file: WriteFile, data: memoryview, offset: int) -> None:
        """One write of this process; what of it is not synced is noted."""
        if self.failing:
            self.failing -= 1
            raise os_error(errno.ENOSPC, PurePath("disk"))
        assert isinstance(file, _SimWriteFile)
        node = file.node()
        self.perform(lambda fs: file.write(data, offset))
        self.disk.unsynced.setdefault(self.node, {})[id(node)] = node

    def sync(self, file: WriteFile) -> None:
        """Syncs a file for this process."""
        assert isinstance(file, _SimWriteFile)
        node = file.node()
        self.perform(lambda fs: file.sync())
        self.disk.unsynced.get(self.node, {}).pop(id(node), None)


class _ProcessFile:
    def __init__(self, disk: ProcessDisk, file: WriteFile) -> None:
        self._disk = disk
        self._file = file

    def write(self, data: memoryview, offset: int) -> None:
        self._disk.write(self._file, data, offset)

    def reserve(self, size_bytes: int) -> None:
        """Takes no room."""

    def truncate(self, size_bytes: int) -> None:
        self._disk.perform(lambda fs: self._file.truncate(size_bytes))

    def sync(self) -> None:
        self._disk.sync(self._file)

    def close(self) -> None:
        self._file.close()


def _conforms(disk: ProcessDisk) -> FileSystem:
    """Lets the type checker prove that the contract is met."""
    return disk
