"""Disk space for one rank's log: the share of ``Budget(disk_bytes=)`` not taken by bases (I10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from everstep.errors import OutOfSpaceError
from everstep.format.names import LOG_DIR, TEMPORARY_SUFFIX, parse_rank
from everstep.seams import FileSystem


class NoLogSpaceError(OutOfSpaceError):
    """The log has used up its share of the budget; retention after the next base may free space."""


class LogSpace:
    """Counts log segments against the disk budget.

    The folder is scanned only when the last scan, plus all segments written since, leaves no space.

    Args:
        rank: rank whose files count. With several ranks, rank 0 also counts files of ranks that no
            longer exist.
        world: number of ranks.
        budget_bytes: budget of the run folder.
        bases_bytes: bytes of the budget reserved for bases, written or not.
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
        self._rank = rank
        self._world = world
        self._budget_bytes = budget_bytes
        self._bases_bytes = bases_bytes
        self._taken_bytes: int | None = None

    @classmethod
    def from_wire(
        cls,
        filesystem: FileSystem,
        run: PurePath,
        rank: int,
        world: int,
        bounds: Mapping[str, Any],
    ) -> LogSpace | None:
        """Return the limits of the log on disk (``LogLimits.batch_to_wire``); None: no limit."""
        if bounds.get("disk_bytes") is None:
            return None
        return cls(
            filesystem,
            run,
            rank,
            world,
            budget_bytes=bounds["disk_bytes"],
            bases_bytes=bounds["bases_bytes"],
        )

    def reserve(self, size_bytes: int, *, step: int) -> None:
        """Reserve space for a segment that is about to be written.

        Raises:
            NoLogSpaceError: it does not fit; nothing was reserved.
        """
        taken_bytes = self._taken_bytes
        if taken_bytes is None or taken_bytes + size_bytes > self._budget_bytes:
            # Retention may have deleted bases or segments since the last scan.
            others_bytes, log_bytes = folder_bytes(
                self._filesystem, self._run, self._rank, self._world
            )
            # Bases keep their reserved share even before they are written: a log that used it
            # would make the next base fail.
            self._taken_bytes = taken_bytes = max(others_bytes, self._bases_bytes) + log_bytes
            if taken_bytes + size_bytes > self._budget_bytes:
                raise NoLogSpaceError(
                    f"a log segment takes {size_bytes} bytes; bases and the segments that they "
                    f"need take {taken_bytes} of Budget(disk_bytes={self._budget_bytes})",
                    step=step,
                    rank=self._rank,
                    tier="disk",
                    path=self._run,
                    hint="raise the budget, keep fewer bases (keep=), or shorten every=",
                )
        self._taken_bytes = taken_bytes + size_bytes


def folder_bytes(
    filesystem: FileSystem, run: PurePath, rank: int = 0, world: int = 1
) -> tuple[int, int]:
    """Return the bytes of a rank's files in a run folder: ``(all but the log, the log)``."""
    sizes = [0, 0]
    for path, size_bytes in _files(filesystem, run):
        owner = parse_rank(path.name.removesuffix(TEMPORARY_SUFFIX))
        # Rank 0 counts files without a rank, and files of ranks that no longer exist.
        counts = world == 1 or owner == rank or (rank == 0 and (owner is None or owner >= world))
        if counts:
            # A bool as the index: 1 for files below a log directory.
            sizes[LOG_DIR in path.relative_to(run).parts[:-1]] += size_bytes
    return sizes[0], sizes[1]


def _files(filesystem: FileSystem, directory: PurePath) -> Iterator[tuple[PurePath, int]]:
    try:
        entries = filesystem.scan(directory)
    except FileNotFoundError:
        # Retention removed it during the scan.
        return
    for entry in entries:
        if entry.kind == "dir":
            yield from _files(filesystem, directory / entry.name)
        elif entry.kind == "file":
            yield directory / entry.name, entry.size_bytes
