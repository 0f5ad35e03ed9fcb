"""Retention of the log on disk: segments that no base needs any more go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
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
from everstep.seams.filesystem import FileSystem
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
        own: timeline of this process: there, what has no marker is being written.
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
        for entry in sorted(entries, key=lambda entry: entry.name):
            steps = parse_segment(entry.name)
            if steps is None or entry.kind != "dir" or not unneeded((timeline, *steps)):
                continue
            check_fence()
            failpoint("retain.before_segment")
            with contextlib.suppress(FileNotFoundError):  # somebody else does the same
                path = directory / entry.name
                deleted += _delete(filesystem, path, whole=timeline == own, rank=rank)
    return deleted


def _delete(filesystem: FileSystem, path: PurePath, *, whole: bool, rank: int | None) -> bool:
    names = sorted(entry.name for entry in filesystem.scan(path) if entry.kind == "file")
    if rank is not None:
        names = [name for name in names if parse_rank(name.removesuffix(TEMPORARY_SUFFIX)) == rank]
    if whole and not any(parse_marker(name) is not None for name in names):
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
