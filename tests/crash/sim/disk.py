"""Contents of a simulated disk: durable state, pending effects, outcomes of a power loss.

A disk is a table of nodes (files and directories) and a list of pending effects:

- a *data effect* is one write to a file, or one truncation, that no sync has covered;
- a *name effect* is one directory operation (create, rename, link, unlink, mkdir, rmdir).
  A rename between two directories is one effect until one of the two is synced; then that
  directory's half is certain and the other half stays open, as the contract in
  :mod:`everstep.seams.filesystem` says of every name.

After a power loss any subset of the pending effects is there, applied in their order;
writes may also be torn between sectors.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

__all__ = [
    "BLOCK_BYTES",
    "ROOT",
    "SECTOR_BYTES",
    "DataEffect",
    "DirNode",
    "Disk",
    "Fate",
    "FileNode",
    "NameEffect",
]

SECTOR_BYTES = 512
"""The unit that a disk writes whole or not at all; torn writes tear between these."""

BLOCK_BYTES = 4096
"""The unit in which files take room."""

ROOT = 0
"""Number of the root directory."""

_COLLECT_ABOVE = 64
_D = TypeVar("_D", bound="Disk")


class Fate(enum.Enum):
    """Outcome of one pending effect at a power loss."""

    LOST = "lost"
    KEPT = "kept"
    TORN = "torn"
    """For writes: some of its sectors (perhaps none), and perhaps its effect on the size."""


@dataclass(frozen=True, slots=True)
class DataEffect:
    """One write (or truncation) that is not certain to survive.

    Attributes:
        offset: where the write begins; for a truncation the new size in bytes.
        data: the bytes written; None for a truncation.
        certain: a sync has covered it; it is kept here only because an earlier one is open.
        poisoned: a sync of it failed. No later sync makes it certain: the kernel has marked
            its pages clean and forgotten them.
    """

    offset: int
    data: bytes | None
    certain: bool = False
    poisoned: bool = False

    def apply(self, content: bytearray) -> None:
        """Does to ``content`` what the call did."""
        if self.data is None:
            _resize(content, self.offset)
        elif self.data:
            end = self.offset + len(self.data)
            _resize(content, max(len(content), end))
            content[self.offset : end] = self.data

    def tear(self, content: bytearray, rng: random.Random) -> None:
        """Does a random part of it: each sector, and the growth of the file, on its own."""
        if self.data is None:
            return
        end = self.offset + len(self.data)
        if rng.random() < 0.5:
            _resize(content, max(len(content), end))
        start = self.offset
        while start < end:
            stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
            if rng.random() < 0.5:
                piece = self.data[start - self.offset : stop - self.offset]
                DataEffect(start, piece).apply(content)
            start = stop

    def __str__(self) -> str:
        if self.data is None:
            return f"truncate to {self.offset}"
        return f"write [{self.offset}, {self.offset + len(self.data)})"


@dataclass(frozen=True, slots=True)
class NameEffect:
    """One directory operation that is not certain to survive.

    Attributes:
        text: for people, e.g. ``"rename /a -> /b"``.
        changes: ``(directory, name, node or None)``; applied together.
    """

    text: str
    changes: tuple[tuple[int, str, int | None], ...]

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class FileNode:
    """A file: its bytes as everyone sees them, as they are durable, and what lies between."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[DataEffect] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)
    links: int = 0
    handles: int = 0
    mappings: int = 0
    mtime_s: float = 0.0
    shared: bool = False

    def change(self, effect: DataEffect) -> None:
        """Applies a write or truncation, which is from now on pending."""
        if self.shared:  # with a clone, since the last change
            self.content = bytearray(self.content)
            self.shared = False
        effect.apply(self.content)
        self.pending.append(effect)
        if effect.data is None:
            self.blocks = {block for block in self.blocks if block * BLOCK_BYTES < effect.offset}
        else:
            self.blocks |= _blocks(effect.offset, len(effect.data))

    def blocks_wanted(self, offset: int, size_bytes: int) -> list[int]:
        """The blocks that a write would have to take, in order."""
        return sorted(_blocks(offset, size_bytes) - self.blocks)

    def sync(self) -> None:
        """Makes every pending effect certain, but for those that an earlier sync lost."""
        self.pending = [e if e.poisoned else replace(e, certain=True) for e in self.pending]
        if all(effect.certain for effect in self.pending):
            self.durable = bytes(self.content)
            self.pending = []

    def poison(self) -> None:
        """A sync has failed: what was pending will never be certain."""
        self.pending = [e if e.certain else replace(e, poisoned=True) for e in self.pending]

    def clone(self) -> FileNode:
        self.shared = True
        return replace(self, pending=list(self.pending), blocks=set(self.blocks), shared=True)


@dataclass(slots=True)
class DirNode:
    """A directory: its names as everyone sees them, and those that are durable."""

    entries: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    mtime_s: float = 0.0

    def clone(self) -> DirNode:
        return DirNode(dict(self.entries), dict(self.durable), self.mtime_s)


class Disk:
    """Nodes, names and pending effects; no paths, no faults, no handles (see ``filesystem``)."""

    def __init__(self) -> None:
        self.nodes: dict[int, FileNode | DirNode] = {ROOT: DirNode()}
        self.names: list[NameEffect] = []
        self.next_number = ROOT + 1
        self._collect_above = _COLLECT_ABOVE

    def file(self, number: int) -> FileNode:
        node = self.nodes[number]
        assert isinstance(node, FileNode)
        return node

    def dir(self, number: int) -> DirNode:
        node = self.nodes[number]
        assert isinstance(node, DirNode)
        return node

    def add(self, node: FileNode | DirNode) -> int:
        number = self.next_number
        self.next_number = self.next_number + 1
        self.nodes[number] = node
        return number

    def change_names(self, text: str, *changes: tuple[int, str, int | None]) -> None:
        """One directory operation: applied now, pending until its directories are synced."""
        for directory, name, number in changes:
            _set_name(self.dir(directory).entries, name, number)
        self.names.append(NameEffect(text, changes))

    def sync_names(self, directory: int) -> None:
        """Makes the names in ``directory`` certain."""
        node = self.dir(directory)
        node.durable = dict(node.entries)
        rest = (
            replace(effect, changes=tuple(c for c in effect.changes if c[0] != directory))
            for effect in self.names
        )
        self.names = [effect for effect in rest if effect.changes]
        if len(self.nodes) > self._collect_above:  # seldom: what is cloned is collected anyway
            self.collect()
            self._collect_above = 2 * len(self.nodes) + _COLLECT_ABOVE

    def clone(self: _D) -> _D:
        """The same disk and page cache; nothing is open in the copy."""
        copy = type(self)()
        copy.names = list(self.names)
        copy.next_number = self.next_number
        for number, node in self.nodes.items():
            copied = copy.nodes[number] = node.clone()
            if isinstance(copied, FileNode):
                copied.handles = copied.mappings = 0
        copy.collect()
        return copy

    def uncertain(self) -> list[NameEffect | DataEffect]:
        """Every effect that a power loss may undo: names first, then data, file by file."""
        effects: list[NameEffect | DataEffect] = list(self.names)
        for node in self.nodes.values():
            if isinstance(node, FileNode):
                effects += (effect for effect in node.pending if not effect.certain)
        return effects

    def after_power_loss(self: _D, fates: Sequence[Fate], rng: random.Random) -> _D:
        """The disk after a power loss, everything on it durable.

        Args:
            fates: one for each of :meth:`uncertain`, in that order.
            rng: decides which sectors of a torn write survive.
        """
        decided = iter(fates)
        dirs = {n: dict(d.durable) for n, d in self.nodes.items() if isinstance(d, DirNode)}
        for effect in self.names:
            if next(decided) is not Fate.LOST:
                for directory, name, number in effect.changes:
                    _set_name(dirs[directory], name, number)
        files = {
            number: _surviving_content(node, decided, rng)
            for number, node in self.nodes.items()
            if isinstance(node, FileNode)
        }
        image = type(self)()
        image.next_number = self.next_number
        image.rebuild(ROOT, dirs, files)
        return image

    def rebuild(
        self, number: int, dirs: dict[int, dict[str, int]], files: dict[int, bytes]
    ) -> None:
        """Fills directory ``number`` from what survived, and all that is reached from it."""
        node = self.dir(number)
        for name, child in sorted(dirs[number].items()):
            if child in dirs:
                if child in self.nodes:  # a directory with two names; fsck drops one
                    continue
                self.nodes[child] = DirNode()
                self.rebuild(child, dirs, files)
            else:
                known = self.nodes.get(child)
                if known is None:
                    data = files[child]
                    known = self.nodes[child] = FileNode(bytearray(data), data)
                    known.blocks = _blocks(0, len(data))
                assert isinstance(known, FileNode)
                known.links += 1
            node.entries[name] = node.durable[name] = child

    def fingerprint(self) -> str:
        """A digest of everything but times: two disks with the same one behave the same."""
        digest = hashlib.blake2b(digest_size=16)
        order: dict[int, int] = {}  # node numbers say nothing; which names share a node does
        for path, number, node in self.walk():
            known = number in order
            order.setdefault(number, len(order))
            digest.update(f"{path}\0{order[number]}\0{type(node).__name__}\0".encode())
            if isinstance(node, FileNode) and not known:
                digest.update(repr((len(node.content), node.pending)).encode())
                digest.update(node.content)
                digest.update(node.durable if node.pending else b"")
            elif isinstance(node, DirNode):
                digest.update(repr(sorted(node.durable)).encode())
        digest.update(repr([effect.text for effect in self.names]).encode())
        return digest.hexdigest()

    def walk(
        self, path: str = "", number: int = ROOT
    ) -> Iterator[tuple[str, int, FileNode | DirNode]]:
        """Every ``(path, number, node)`` that names lead to, in order."""
        node = self.nodes[number]
        yield path or "/", number, node
        if isinstance(node, DirNode):
            for name, child in sorted(node.entries.items()):
                yield from self.walk(f"{path}/{name}", child)

    def collect(self) -> None:
        """Forgets the nodes that neither a name, an open file nor any crash can bring back."""
        todo = [ROOT]
        for effect in self.names:
            for directory, _, number in effect.changes:
                todo += [directory] if number is None else [directory, number]
        for number, node in self.nodes.items():
            if isinstance(node, FileNode) and node.handles + node.mappings:
                todo.append(number)
        alive: set[int] = set()
        while todo:
            number = todo.pop()
            if number not in alive:
                alive.add(number)
                node = self.nodes[number]
                if isinstance(node, DirNode):
                    todo += [*node.entries.values(), *node.durable.values()]
        self.nodes = {number: node for number, node in self.nodes.items() if number in alive}


def _surviving_content(node: FileNode, decided: Iterator[Fate], rng: random.Random) -> bytes:
    if not node.pending:
        return node.durable
    content = bytearray(node.durable)
    for effect in node.pending:
        fate = Fate.KEPT if effect.certain else next(decided)
        if fate is Fate.KEPT:
            effect.apply(content)
        elif fate is Fate.TORN:
            effect.tear(content, rng)
    return bytes(content)


def _set_name(entries: dict[str, int], name: str, number: int | None) -> None:
    if number is None:
        entries.pop(name, None)
    else:
        entries[name] = number


def _resize(content: bytearray, size_bytes: int) -> None:
    if size_bytes < len(content):
        del content[size_bytes:]
    else:
        content.extend(bytes(size_bytes - len(content)))


def _blocks(offset: int, size_bytes: int) -> set[int]:
    if size_bytes == 0:
        return set()
    return set(range(offset // BLOCK_BYTES, (offset + size_bytes - 1) // BLOCK_BYTES + 1))
