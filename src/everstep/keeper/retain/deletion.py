"""Retention of the log on disk: segments that no base needs any more go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath

from everstep.format.names import (
    LOG_DIR,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_rank,
    parse_segment,
    parse_shard,
    timeline_dir,
)
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem
from everstep.tiers.disk import remove_if_there

__all__ = ["delete_segments"]


def delete_segments(
    filesystem: FileSystem,
    run: PurePath,
    timelines: Collection[int],
    unneeded: Callable[[tuple[int, int, int]], bool],
    check_fence: Callable[[], None],
    *,
    own: int,
    rank: int | None = None,
) -> int:
    """Deletes segments, each with its marker first: without it nobody reads the rest.

    Args:
        timelines: whose segments are looked at.
        unneeded: which of them go.
        own: timeline of this process: there, what has no marker may be being written, unless
            there is a later one that has: they are written one after the other.
        rank: only the files of this one; the others' are theirs.

    Returns:
        How many went.

    Raises:
        FencedError: a newer timeline has begun; nothing more is deleted.
    """
    deleted = 0
    for timeline in sorted(timelines):
        directory = timeline_dir(run, timeline) / LOG_DIR
        try:
            entries = filesystem.scan(directory)
        except FileNotFoundError:
            continue
        names = sorted(entry.name for entry in entries if entry.kind == "dir")
        written: int | None = None
        for name in names:
            steps = parse_segment(name)
            if steps is None or not unneeded((timeline, *steps)):
                continue
            check_fence()
            failpoint("retain.before_segment")
            if timeline == own and written is None:  # before it is seen what the first one lacks
                written = _last_written(filesystem, directory, names, rank)
            whole = timeline == own and steps[1] >= (written or 0)
            with contextlib.suppress(FileNotFoundError):  # somebody else does the same
                deleted += _delete(filesystem, directory / name, whole=whole, rank=rank)
    return deleted


def _last_written(
    filesystem: FileSystem, directory: PurePath, names: Sequence[str], rank: int | None
) -> int:
    """The last step of the newest segment that has its marker, of this rank; 0: there is none."""
    for name in reversed(names):
        steps = parse_segment(name)
        if steps is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            ranks = {parse_marker(entry.name) for entry in filesystem.scan(directory / name)}
            if ranks - {None} if rank is None else rank in ranks:
                return steps[1]
    return 0


def _delete(filesystem: FileSystem, path: PurePath, *, whole: bool, rank: int | None) -> bool:
    names = sorted(entry.name for entry in filesystem.scan(path) if entry.kind == "file")
    if rank is not None:
        names = [name for name in names if parse_rank(name.removesuffix(TEMPORARY_SUFFIX)) == rank]
    if whole and not any(parse_marker(name) is not None for name in names):
        return False
    if not names:  # of this rank
        with contextlib.suppress(OSError):
            filesystem.remove_dir(path)
        return False
    for name in names:
        if parse_marker(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
            remove_if_there(filesystem, path / name)
    filesystem.sync_dir(path)
    for name in names:
        if parse_shard(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
            remove_if_there(filesystem, path / name)
    with contextlib.suppress(OSError):  # somebody put a file of their own there: it stays
        filesystem.remove_dir(path)
    return True
