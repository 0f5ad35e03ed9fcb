"""A file system in memory on which every operation can fail, tear or be lost.

:class:`SimFileSystem` implements the contract of :mod:`everstep.seams.filesystem` with its
durability rules and nothing more generous: file bytes are durable after ``sync``, names
after ``sync_dir`` of their directory, and until then any subset of what is pending may
survive a crash (:meth:`SimFileSystem.crash_images`). It is deterministic: the same calls
give the same operation numbers, and the same seed the same crash images.

Mutating operations are numbered from 1 and logged; a :class:`Fault` acts at a number, or on
every operation that matches it.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import PurePath
from typing import Literal

from everstep.seams.filesystem import DirEntry, FileSystem, ReadFile, WriteFile
from tests.crash.sim.disk import (
    BLOCK_BYTES,
    SECTOR_BYTES,
    DataEffect,
    DirNode,
    Fate,
    FileNode,
)
from tests.crash.sim.faults import Fault, Journal, Moment, Operation, SimulatedCrash, os_error
from tests.crash.sim.tree import Tree

__all__ = ["Fault", "MappedFile", "Operation", "SimFileSystem", "SimulatedCrash"]


class SimFileSystem:
    """Implements :class:`everstep.seams.filesystem.FileSystem` in memory, with crashes.

    Args:
        capacity_bytes: room for file contents, taken in blocks of 4096 bytes; None: no limit.
        read_only: every mutating operation raises EROFS.

    Attributes:
        origin: for a crash image, what survived to make it.
    """

    def __init__(self, *, capacity_bytes: int | None = None, read_only: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.origin = ""
        self.tree = Tree()
        self.journal = Journal(read_only=read_only)

    # The contract.

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        with self.journal.operation("create", path):
            directory, name = self.tree.vacancy(path)
            node = FileNode(links=1, mtime_s=self._now_s())
            number = self.tree.add(node)
            self._change_names(f"create {path}", (directory, name, number))
            return _SimWriteFile(self, path, node)

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        try:
            with self.journal.operation("reuse", path):
                node = self.tree.regular(path)
                alone = node.links == 1 and node.handles == node.mappings == 0
                return _SimWriteFile(self, path, node) if alone else None
        except OSError:  # as the contract has it: None when it cannot be determined
            return None

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        with self.journal.reading("open", path):
            return _SimReadFile(self, path, self.tree.regular(path))

    def rename(self, source: PurePath, target: PurePath) -> None:
        with self.journal.operation("rename", source, f"-> {target}"):
            old_dir, old_name = self.tree.place(source)
            new_dir, new_name = self.tree.place(target)
            number = self.tree.entry(old_dir, old_name, source)
            replaced = self.tree.dir(new_dir).entries.get(new_name)
            if number in self.tree.ancestors(target):
                raise os_error(errno.EINVAL, target)
            if replaced is not None and replaced in self.tree.ancestors(source):
                raise os_error(errno.ENOTEMPTY, target)
            if replaced == number:  # the same file: nothing happens, both names stay
                return
            if replaced is not None:
                self.tree.check_replaceable(number, replaced, target)
                self.tree.unlinked(replaced)
            self._change_names(
                f"rename {source} -> {target}",
                (old_dir, old_name, None),
                (new_dir, new_name, number),
            )

    def link(self, source: PurePath, target: PurePath) -> None:
        with self.journal.operation("link", source, f"-> {target}"):
            number = self.tree.find(source)
            directory, name = self.tree.vacancy(target)
            node = self.tree.nodes[number]
            if not isinstance(node, FileNode):
                raise os_error(errno.EPERM, source)
            node.links += 1
            self._change_names(f"link {source} -> {target}", (directory, name, number))

    def unlink(self, path: PurePath) -> None:
        with self.journal.operation("unlink", path):
            directory, name = self.tree.place(path)
            number = self.tree.entry(directory, name, path)
            if isinstance(self.tree.nodes[number], DirNode):
                raise os_error(errno.EISDIR, path)
            self.tree.unlinked(number)
            self._change_names(f"unlink {path}", (directory, name, None))

    def make_dir(self, path: PurePath) -> None:
        with self.journal.operation("make_dir", path):
            directory, name = self.tree.vacancy(path)
            number = self.tree.add(DirNode(mtime_s=self._now_s()))
            self._change_names(f"make_dir {path}", (directory, name, number))

    def remove_dir(self, path: PurePath) -> None:
        with self.journal.operation("remove_dir", path):
            directory, name = self.tree.place(path)
            node = self.tree.nodes[self.tree.entry(directory, name, path)]
            if not isinstance(node, DirNode):
                raise os_error(errno.ENOTDIR, path)
            if node.entries:
                raise os_error(errno.ENOTEMPTY, path)
            self._change_names(f"remove_dir {path}", (directory, name, None))

    def sync_dir(self, path: PurePath) -> None:
        with self.journal.operation("sync_dir", path) as act:
            number = self.tree.find_dir(path)
            if act == "do":
                self.tree.sync_names(number)

    def scan(self, path: PurePath) -> list[DirEntry]:
        with self.journal.reading("scan", path):
            found = self.tree.dir(self.tree.find_dir(path)).entries
            nodes = self.tree.nodes
            return [_dir_entry(name, nodes[n], n) for name, n in sorted(found.items())]

    def free_bytes(self, path: PurePath) -> int:
        with self.journal.reading("free_bytes", path):
            self.tree.find(path)
            return self._free_blocks() * BLOCK_BYTES

    # What tests ask and do.

    @property
    def log(self) -> list[Operation]:
        """Every mutating operation so far, numbered from 1; empty on a fresh clone."""
        return self.journal.writes

    @property
    def reads(self) -> list[Operation]:
        """Every other operation so far, numbered apart."""
        return self.journal.reads

    @property
    def crashed(self) -> bool:
        """True if an injected crash has happened."""
        return self.journal.crashed

    @property
    def read_only(self) -> bool:
        """True if every mutating operation raises EROFS; may be set at any time."""
        return self.journal.read_only

    @read_only.setter
    def read_only(self, value: bool) -> None:
        self.journal.read_only = value

    def inject(self, fault: Fault) -> None:
        """Lets ``fault`` happen."""
        self.journal.inject(fault)

    def watch(self, watcher: Callable[[Operation, Moment], None]) -> None:
        """Calls ``watcher`` before and after each mutating operation, in its thread; nobody
        else gets at the file system meanwhile."""
        self.journal.watcher = watcher

    def map(self, path: PurePath) -> MappedFile:
        """Maps a file, as a reader in some other process would: a live view of its bytes."""
        with self.journal.lock:
            return MappedFile(self, self.tree.regular(path))

    def read_bytes(self, path: PurePath) -> bytes:
        """The bytes of a file as everyone sees them now; not logged."""
        with self.journal.lock:
            return bytes(self.tree.regular(path).content)

    def corrupt(self, path: PurePath, offset: int, mask: int = 0xFF) -> None:
        """Flips the bits of ``mask`` in one byte, without a trace and durably."""
        with self.journal.lock:
            node = self.tree.regular(path)
            damaged = bytearray(node.content)
            damaged[offset] ^= mask
            node.content = damaged
            node.shared = False
            node.pending = []
            node.durable = bytes(damaged)

    def paths(self) -> dict[str, Literal["file", "dir"]]:
        """Every path below the root and what it is; not logged."""
        with self.journal.lock:
            walk = islice(self.tree.walk(), 1, None)
            return {p: "file" if isinstance(node, FileNode) else "dir" for p, _, node in walk}

    def clone(self) -> SimFileSystem:
        """The same disk and page cache for another process: no faults, nothing open, no log."""
        with self.journal.lock:
            return self._successor(self.tree.clone(), "clone")

    def survive_all(self) -> SimFileSystem:
        """Return the file system after SIGKILL: all issued effects are there, still unsynced."""
        with self.journal.lock:
            return self._successor(self.tree.clone(), "process killed; the page cache survives")

    def crash_images(self, seed: int, count: int) -> Iterator[SimFileSystem]:
        """Durable states that a power loss now may leave.

        Always "nothing unsynced survives" and "everything survives", then ``count`` more:
        every name but no data, all data but no name, one effect lost alone, one kept alone
        (which, goes round with the seed), and after those random subsets with torn writes.
        Everything on an image is durable.
        """
        with self.journal.lock:
            disk = self.tree.clone()
        effects = disk.uncertain()
        is_data = [isinstance(effect, DataEffect) for effect in effects]
        for index in range(count + 2):
            rng = random.Random(f"{seed}/{index}")
            kind, fates = _fates(index, seed, is_data, rng)
            image = self._successor(disk.after_power_loss(fates, rng), "")
            kept = ", ".join(f"{f.value}: {e}" for f, e in zip(fates, effects, strict=True))
            image.origin = f"power loss, image {index} of seed {seed} ({kind}): {kept or '-'}"
            yield image

    def fingerprint(self) -> str:
        """A digest of contents, names and what of them is durable; times do not count."""
        with self.journal.lock:
            return self.tree.fingerprint()

    def _successor(self, disk: Tree, origin: str) -> SimFileSystem:
        fs = SimFileSystem(capacity_bytes=self.capacity_bytes, read_only=self.read_only)
        fs.tree = disk
        fs.origin = origin
        return fs

    def _now_s(self) -> float:
        return 1e9 + len(self.journal.writes)

    def _change_names(self, text: str, *changes: tuple[int, str, int | None]) -> None:
        self.tree.change_names(text, *changes)
        for directory, _, _ in changes:
            self.tree.dir(directory).mtime_s = self._now_s()

    # File contents, for the handles below.

    def write(self, handle: _SimWriteFile, data: memoryview, offset: int) -> None:
        size = data.nbytes
        with self.journal.operation("write", handle.path, f"[{offset}, {offset + size})") as act:
            node = handle.node()
            if offset < 0:
                raise os_error(errno.EINVAL, handle.path)
            room = size
            if act == "part":
                room = size // 2 // SECTOR_BYTES * SECTOR_BYTES or size // 2
            wanted = node.blocks_wanted(offset, room)
            full = self.capacity_bytes is not None and len(wanted) > self._free_blocks()
            if full:
                room = max(0, wanted[self._free_blocks()] * BLOCK_BYTES - offset)
            if room:
                node.change(DataEffect(offset, bytes(data[:room])))
                node.mtime_s = self._now_s()
            if full:
                raise os_error(errno.ENOSPC, handle.path)

    def truncate(self, handle: _SimWriteFile, size_bytes: int) -> None:
        with self.journal.operation("truncate", handle.path, str(size_bytes)):
            node = handle.node()
            if size_bytes < 0:
                raise os_error(errno.EINVAL, handle.path)
            node.change(DataEffect(size_bytes, None))
            node.mtime_s = self._now_s()

    def sync(self, handle: _SimWriteFile) -> None:
        with self.journal.operation("sync", handle.path) as act:
            node = handle.node()
            if act == "do":
                node.sync()
            elif act == "part":
                node.poison()

    def read(self, handle: _SimReadFile, buffer: memoryview, offset: int) -> int:
        with self.journal.reading("read", handle.path, f"[{offset}, {offset + buffer.nbytes})"):
            if offset < 0:
                raise os_error(errno.EINVAL, handle.path)
            data = handle.node().content[offset : offset + buffer.nbytes]
            buffer[: len(data)] = data
            return len(data)

    def _free_blocks(self) -> int:
        if self.capacity_bytes is None:
            return (1 << 62) // BLOCK_BYTES
        nodes = (node for node in self.tree.nodes.values() if isinstance(node, FileNode))
        used = sum(len(n.blocks) for n in nodes if n.links + n.handles + n.mappings)
        return max(0, self.capacity_bytes // BLOCK_BYTES - used)


class _Handle:
    """An open file; keeps its node alive, whatever becomes of the name."""

    def __init__(self, fs: SimFileSystem, path: PurePath, node: FileNode) -> None:
        self.fs = fs
        self.path = path
        self._node: FileNode | None = node
        node.handles += 1

    def node(self) -> FileNode:
        if self._node is None:
            raise os_error(errno.EBADF, self.path)
        return self._node

    def close(self) -> None:
        with self.fs.journal.lock:
            if self._node is not None:
                self._node.handles -= 1
                self._node = None


class _SimWriteFile(_Handle):
    def write(self, data: memoryview, offset: int) -> None:
        self.fs.write(self, data.cast("B"), offset)

    def reserve(self, size_bytes: int) -> None:
        """Takes no room: a full disk shows when it is written to."""

    def truncate(self, size_bytes: int) -> None:
        self.fs.truncate(self, size_bytes)

    def sync(self) -> None:
        self.fs.sync(self)


class _SimReadFile(_Handle):
    def __init__(self, fs: SimFileSystem, path: PurePath, node: FileNode) -> None:
        super().__init__(fs, path, node)
        self._size_bytes = len(node.content)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return self.fs.read(self, buffer.cast("B"), offset)


class MappedFile:
    """A mapping of a file: sees every change; keeps the file from being reused until closed."""

    def __init__(self, fs: SimFileSystem, node: FileNode) -> None:
        self._fs = fs
        self._node = node
        self._open = True
        node.mappings += 1

    def read(self) -> bytes:
        """The bytes that the mapping shows now."""
        with self._fs.journal.lock:
            return bytes(self._node.content)

    def close(self) -> None:
        """Ends the mapping."""
        with self._fs.journal.lock:
            self._node.mappings -= self._open
            self._open = False


_FIXED: tuple[tuple[str, Fate, Fate], ...] = (
    # What it is, and the fate of names and of data.
    ("nothing survives", Fate.LOST, Fate.LOST),
    ("everything survives", Fate.KEPT, Fate.KEPT),
    ("names without data", Fate.KEPT, Fate.LOST),
    ("data without names", Fate.LOST, Fate.KEPT),
)


def _fates(
    index: int, seed: int, is_data: list[bool], rng: random.Random
) -> tuple[str, list[Fate]]:
    """The fate of each effect on image ``index``: six patterns, then chance."""
    count = len(is_data)
    if index < len(_FIXED):
        kind, names, data = _FIXED[index]
        return kind, [data if is_it else names for is_it in is_data]
    if index < len(_FIXED) + 2:  # which one, goes round with the seed
        most, one = (Fate.KEPT, Fate.LOST) if index == len(_FIXED) else (Fate.LOST, Fate.KEPT)
        kind = f"one {one.value}, the others {most.value}"
        return kind, [one if i == seed % count else most for i in range(count)]
    odds_kept = rng.choice((0.1, 0.5, 0.9))
    odds_torn = rng.choice((0.0, 0.3, 1.0))
    fates = [Fate.KEPT if rng.random() < odds_kept else Fate.LOST for _ in is_data]
    for position, is_it in enumerate(is_data):
        if is_it and rng.random() < odds_torn:
            fates[position] = Fate.TORN
    return f"by chance, {odds_kept} kept, {odds_torn} of the writes torn", fates


def _dir_entry(name: str, node: FileNode | DirNode, number: int) -> DirEntry:
    if isinstance(node, DirNode):
        return DirEntry(name, "dir", 0, 0, node.mtime_s)
    allocated = len(node.blocks) * BLOCK_BYTES
    several = node.links > 1
    return DirEntry(
        name=name,
        kind="file",
        size_bytes=len(node.content),
        allocated_bytes=allocated,
        mtime_s=node.mtime_s,
        links=node.links,
        file=number if several else 0,
    )


def _conforms(fs: SimFileSystem) -> FileSystem:
    """Lets the type checker prove that the contract is met."""
    return fs
