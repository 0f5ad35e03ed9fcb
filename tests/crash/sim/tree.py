"""A simulated disk with paths: finding, and what stands in the way, as on Linux."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import PurePath

from tests.crash.sim.disk import ROOT, DirNode, Disk, FileNode
from tests.crash.sim.faults import os_error

__all__ = ["Tree"]

_NAME_BYTES_MAX = 255


class Tree(Disk):
    """A :class:`Disk` that is addressed by paths; raises the errno that Linux would."""

    def find(self, path: PurePath) -> int:
        """Number of what ``path`` names."""
        number = ROOT
        for part in _parts(path):  # as in _way, which takes longer: most of all calls are this one
            node = self.nodes[number]
            if not isinstance(node, DirNode):
                raise os_error(errno.ENOTDIR, path)
            found = node.entries.get(part)
            number = self.entry(number, part, path) if found is None else found
        return number

    def find_dir(self, path: PurePath) -> int:
        """Number of the directory that ``path`` names."""
        return self._check_dir(self.find(path), path)

    def regular(self, path: PurePath) -> FileNode:
        """The file of that name.

        Raises:
            OSError: EINVAL when it is not a regular file.
        """
        node = self.nodes[self.find(path)]
        if not isinstance(node, FileNode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return node

    def _way(self, path: PurePath, *, without_last: bool = False) -> list[int]:
        """The root, and every node on the way to ``path``."""
        way = [ROOT]
        for part in _parts(path)[: -1 if without_last else None]:
            self._check_dir(way[-1], path)
            way.append(self.entry(way[-1], part, path))
        return way

    def _check_dir(self, number: int, path: PurePath) -> int:
        if not isinstance(self.nodes[number], DirNode):
            raise os_error(errno.ENOTDIR, path)
        return number

    def entry(self, directory: int, name: str, path: PurePath) -> int:
        """Number of ``name`` in ``directory``; ``path`` is for the error."""
        number = self.dir(directory).entries.get(name)
        if number is None:
            raise os_error(errno.ENAMETOOLONG if _too_long(name) else errno.ENOENT, path)
        return number

    def place(self, path: PurePath) -> tuple[int, str]:
        """The directory of ``path``, which must exist, and the last name."""
        parts = _parts(path)
        if not parts:
            raise os_error(errno.EBUSY, path)
        return self._check_dir(self._way(path, without_last=True)[-1], path), parts[-1]

    def vacancy(self, path: PurePath) -> tuple[int, str]:
        """Like :meth:`place`, for a name that must be free."""
        if not _parts(path):
            raise os_error(errno.EEXIST, path)
        directory, name = self.place(path)
        if name in self.dir(directory).entries:
            raise os_error(errno.EEXIST, path)
        if _too_long(name):
            raise os_error(errno.ENAMETOOLONG, path)
        return directory, name

    def ancestors(self, path: PurePath) -> list[int]:
        """The root and every directory above ``path``."""
        return self._way(path, without_last=True)

    def check_replaceable(self, number: int, replaced: int, target: PurePath) -> None:
        """Check that a rename may replace ``replaced`` by ``number``."""
        new = self.nodes[number]
        old = self.nodes[replaced]
        if isinstance(new, DirNode) and not isinstance(old, DirNode):
            raise os_error(errno.ENOTDIR, target)
        if isinstance(old, DirNode) and not isinstance(new, DirNode):
            raise os_error(errno.EISDIR, target)
        if isinstance(old, DirNode) and old.entries:
            raise os_error(errno.ENOTEMPTY, target)

    def unlinked(self, number: int) -> None:
        """One name of ``number`` is about to go."""
        node = self.nodes[number]
        if isinstance(node, FileNode):
            node.links -= 1


def _parts(path: PurePath) -> tuple[str, ...]:
    """The names on the way from the root; ``..`` taken literally, as there are no links."""
    return _split(str(path))


@functools.lru_cache(maxsize=4096)
def _split(text: str) -> tuple[str, ...]:
    parts: list[str] = []
    for part in text.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return tuple(parts)


def _too_long(name: str) -> bool:
    return len(os.fsencode(name)) > _NAME_BYTES_MAX
