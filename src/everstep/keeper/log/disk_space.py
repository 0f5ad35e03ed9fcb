"""Room on disk for a rank's log: what ``Budget(disk_bytes=)`` leaves beside its bases (I10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from everstep.errors import OutOfSpaceError
from everstep.format.names import LOG_DIR, TEMPORARY_SUFFIX, parse_rank
from everstep.seams.files.filesystem import FileSystem

__all__ = ["LogRoom", "NoRoomError", "folder_bytes"]


class NoRoomError(OutOfSpaceError):
    """The log has its part of the budget; a base, and retention behind it, may make room."""


class LogRoom:
    """Says whether a segment fits. The folder is looked at only where what was seen last, and was
    written since, leaves no room.

    Args:
        rank, world: whose files count: of several ranks its own, and on rank 0 those of ranks that
            there are no longer.
        budget_bytes: of the run folder.
        bases_bytes: of these, for bases, whether they are there yet or not.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        world: int,
        *,
        budget_bytes: int,
        bases_bytes: int,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._whose = (rank, world)
        self._budget_bytes = budget_bytes
        self._bases_bytes = bases_bytes
        self._taken_bytes: int | None = None

    @classmethod
    def of(
        cls, filesystem: FileSystem, run: PurePath, rank: int, world: int, told: Mapping[str, Any]
    ) -> LogRoom | None:
        """Return the bounds of the log on disk (``LogLimits.batch_to_wire``); None: unbounded."""
        if told.get("disk_bytes") is None:
            return None
        bounds = {"budget_bytes": told["disk_bytes"], "bases_bytes": told["bases_bytes"]}
        return cls(filesystem, run, rank, world, **bounds)

    def take(self, size_bytes: int, *, step: int) -> None:
        """Counts a segment that is going to be written.

        Raises:
            NoRoomError: it does not fit; nothing is counted.
        """
        taken_bytes = self._taken_bytes
        if taken_bytes is None or taken_bytes + size_bytes > self._budget_bytes:
            others_bytes, log_bytes = folder_bytes(self._filesystem, self._run, *self._whose)
            self._taken_bytes = taken_bytes = max(others_bytes, self._bases_bytes) + log_bytes
            if taken_bytes + size_bytes > self._budget_bytes:
                raise NoRoomError(
                    f"a segment of the log takes {size_bytes} bytes; bases and what of the log "
                    f"they need have {taken_bytes} of Budget(disk_bytes={self._budget_bytes})",
                    step=step,
                    rank=self._whose[0],
                    tier="disk",
                    path=self._run,
                    hint="a larger budget, fewer bases (keep=), or a shorter interval (every=)",
                )
        self._taken_bytes = taken_bytes + size_bytes


def folder_bytes(
    filesystem: FileSystem, run: PurePath, rank: int = 0, world: int = 1
) -> tuple[int, int]:
    """Bytes of a rank's files in a run folder: of the log, and before that of all else."""
    sizes = [0, 0]
    for path, size_bytes in _files(filesystem, run):
        whose = parse_rank(path.name.removesuffix(TEMPORARY_SUFFIX))
        mine = world == 1 or whose == rank or (rank == 0 and (whose is None or whose >= world))
        if mine:
            sizes[LOG_DIR in path.relative_to(run).parts[:-1]] += size_bytes
    return sizes[0], sizes[1]


def _files(filesystem: FileSystem, directory: PurePath) -> Iterator[tuple[PurePath, int]]:
    try:
        entries = filesystem.scan(directory)
    except FileNotFoundError:  # removed meanwhile
        return
    for entry in entries:
        if entry.kind == "dir":
            yield from _files(filesystem, directory / entry.name)
        elif entry.kind == "file":
            yield directory / entry.name, entry.size_bytes
