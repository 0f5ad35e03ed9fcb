"""Files of reclaimed bases, kept to be overwritten.

Overwriting allocated blocks is 1.7 times faster than writing fresh ones (on a Zen 4 machine: 6.4
against 3.8 GB/s). A parked file is reused only when nobody else can be looking at it, and
only after its header has been invalidated and that is durable: whoever still finds it
under any name sees a file that every reader refuses, never one that changes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import PurePath

from everstep.errors import StorageError
from everstep.format.names import SLOTS_DIR
from everstep.seams.files.filesystem import DIRECT_ALIGNMENT_BYTES, FileSystem, WriteFile
from everstep.tiers.durable_files import ensure_dir, remove_if_there

__all__ = ["SlotStore"]

_SLOT = re.compile(r"slot-\d{5,9}", re.ASCII)
_WORTH_BYTES = 1 << 20  # below this a fresh file costs as little


class SlotStore:
    """Parked files of one timeline.

    Args:
        directory: where they are parked; made when it is first needed.
    """

    def __init__(self, filesystem: FileSystem, directory: PurePath) -> None:
        assert directory.name == SLOTS_DIR
        self._filesystem = filesystem
        self._directory = directory
        self.count_max = 1  # files kept: as many as a base has
        self._next = 0
        self._doubtful: set[str] = set()

    def park(self, path: PurePath, size_bytes: int) -> None:
        """Takes a data file away from its base: parks it, or deletes it."""
        if size_bytes < _WORTH_BYTES:
            remove_if_there(self._filesystem, path)
            return
        ensure_dir(self._filesystem, self._directory)
        parked = self._parked()
        for slot, _ in parked[: max(0, len(parked) + 1 - self.count_max)]:
            remove_if_there(self._filesystem, slot)  # the newest is the likeliest to fit
        taken = {slot.name for slot, _ in parked}
        while f"slot-{self._next:05d}" in taken:
            self._next += 1
        slot = self._directory / f"slot-{self._next:05d}"
        self._filesystem.rename(path, slot)
        try:
            self._filesystem.sync_dir(self._directory)
            self._filesystem.sync_dir(path.parent)
        except BaseException:
            # After a power loss it may have its old name again, so nobody may write into it.
            self._doubtful.add(slot.name)
            with contextlib.suppress(OSError, StorageError):
                remove_if_there(self._filesystem, slot)
            raise

    def claim(self, target: PurePath, size_bytes: int) -> WriteFile | None:
        """A parked file of about ``size_bytes``, renamed to ``target`` and invalidated.

        Returns:
            None when there is none that may be overwritten; those that may not are deleted.
        """
        for slot, slot_bytes in self._parked():
            if not _fits(slot_bytes, size_bytes) or slot.name in self._doubtful:
                continue
            file = self._filesystem.reuse(slot, direct=True)
            if file is None:
                remove_if_there(self._filesystem, slot)  # whoever has it open keeps the bytes
                continue
            try:
                file.write(memoryview(bytes(DIRECT_ALIGNMENT_BYTES)), 0)
                file.sync()
                remove_if_there(self._filesystem, target)
                self._filesystem.rename(slot, target)
            except FileNotFoundError:
                file.close()
                continue
            except BaseException:
                file.close()
                with contextlib.suppress(OSError):  # or it would fail every base from now on
                    remove_if_there(self._filesystem, slot)
                raise
            return file
        return None

    def drop_unfit(self, sizes_bytes: Iterable[int]) -> None:
        """Deletes parked files that none of the coming files could overwrite."""
        wanted = list(sizes_bytes)
        for slot, slot_bytes in self._parked():
            if not any(_fits(slot_bytes, size_bytes) for size_bytes in wanted):
                remove_if_there(self._filesystem, slot)

    def parked_bytes(self) -> int:
        """Bytes of all parked files."""
        return sum(size_bytes for _, size_bytes in self._parked())

    def clear(self) -> None:
        """Deletes all parked files."""
        for slot, _ in self._parked():
            remove_if_there(self._filesystem, slot)
        with contextlib.suppress(OSError, StorageError):
            self._filesystem.remove_dir(self._directory)

    def _parked(self) -> list[tuple[PurePath, int]]:
        """Our own files in a directory of our own: what a link leads to is somebody else's."""
        try:
            beside = self._filesystem.scan(self._directory.parent)
            if not any(e.name == SLOTS_DIR and e.kind == "dir" for e in beside):
                return []
            found = self._filesystem.scan(self._directory)
        except FileNotFoundError:
            return []
        return [
            (self._directory / entry.name, entry.size_bytes)
            for entry in found
            if entry.kind == "file" and _SLOT.fullmatch(entry.name)
        ]


def _fits(slot_bytes: int, size_bytes: int) -> bool:
    return size_bytes // 2 <= slot_bytes <= 2 * size_bytes
