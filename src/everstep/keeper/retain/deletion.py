"""Retention of the log on disk: segments that no base needs any more go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath

from everstep.commit.deletion import (
    BaseDeletion,
    BaseGone,
    Condemn,
    Condemned,
    DeletionAction,
    DeletionEvent,
    FilesDeleted,
    Lift,
    Lifted,
)
from everstep.commit.machine import CheckFence, FenceSeen
from everstep.format.names import (
    AUDIT_RECORD,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    MANIFEST,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_rank,
    parse_segment,
    parse_shard,
    timeline_dir,
)
from everstep.run.lift import lift_mark
from everstep.run.scan import BaseFound, newest_timeline
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem
from everstep.tiers.disk import remove_if_there
from everstep.tiers.slots import SlotStore

__all__ = ["delete_base", "delete_files", "delete_segments", "perform_deletion"]


def delete_base(
    filesystem: FileSystem,
    run: PurePath,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    timeline: int | None,
    newest: Callable[[], int] | None = None,
) -> None:
    """Deletes a committed base: condemns it, looks at the fence once more, removes its files.

    Args:
        slots: parks the data files instead of deleting them, if given.
        timeline: of the process that deletes; None for a person at the command line, whom no
            timeline fences off.
        newest: the number of the newest timeline; None: looks into the folder.

    Raises:
        FencedError: a newer timeline has begun; the base is whole and there as before, or the
            process of that timeline, which saw the mark, has deleted it itself.
    """
    look = newest or (lambda: newest_timeline(filesystem, run))
    deletion = BaseDeletion(base.id, timeline)
    action: DeletionAction | None = deletion.start()
    while action is not None:
        action = deletion.on(perform_deletion(filesystem, base.path, action, slots, look))


def perform_deletion(
    filesystem: FileSystem,
    path: PurePath,
    action: DeletionAction,
    slots: SlotStore | None,
    newest: Callable[[], int],
) -> DeletionEvent:
    """Does what the deletion of the base at ``path`` asks for; ``newest`` is the number of the
    newest timeline, when it is asked."""
    if isinstance(action, CheckFence):
        return FenceSeen(newest())
    try:
        if isinstance(action, Condemn):
            _condemn(filesystem, path)
            failpoint("retain.after_condemn")
            return Condemned()
        if isinstance(action, Lift):
            lifted = lift_mark(filesystem, path)
            return Lifted() if lifted else BaseGone(newest())
        filesystem.rename(path / CONDEMNED, path / DELETING)  # or somebody lifts the mark first
        _delete_files(filesystem, path, slots)
        return FilesDeleted()
    except FileNotFoundError:  # somebody else was deleting it, too, or has lifted the mark
        return BaseGone(newest())


def _condemn(filesystem: FileSystem, path: PurePath) -> None:
    try:
        filesystem.rename(path / MANIFEST, path / CONDEMNED)
    except FileNotFoundError:  # it has the mark of a deleter that died
        if all(entry.name != CONDEMNED for entry in filesystem.scan(path)):
            raise
    filesystem.sync_dir(path)


def delete_files(
    filesystem: FileSystem,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    check_fence: Callable[[], None] = lambda: None,
) -> None:
    """Removes the files of a base that was never finished or is half deleted; not of one that has
    become whole since it was looked at.

    Markers first: with them gone nothing can be made of the files that are left.

    Args:
        check_fence: asked once more before data goes. Where a folder is put back as it was once,
            a base may have been looked at while half of it was there.

    Raises:
        FencedError: of ``check_fence``; no data is gone.
    """
    if base.status == "condemned":
        with contextlib.suppress(FileNotFoundError):  # the mark says so already, or was lifted
            filesystem.rename(base.path / CONDEMNED, base.path / DELETING)
        if all(entry.name != DELETING for entry in filesystem.scan(base.path)):
            return
    _delete_files(filesystem, base.path, slots, check_fence)


def _delete_files(
    filesystem: FileSystem,
    base: PurePath,
    slots: SlotStore | None,
    check_fence: Callable[[], None] = lambda: None,
) -> None:
    entries = sorted(filesystem.scan(base), key=lambda entry: entry.name)
    filesystem.sync_dir(base)  # the mark, before anything that it speaks of is gone
    for entry in entries:
        if parse_marker(entry.name) is not None:
            remove_if_there(filesystem, base / entry.name)
    filesystem.sync_dir(base)
    check_fence()
    if any(entry.name == MANIFEST for entry in filesystem.scan(base)):
        return  # it was put back meanwhile, and is whole: a manifest needs no markers
    for entry in entries:
        path = base / entry.name
        if parse_shard(entry.name) is not None and entry.kind == "file":
            failpoint("retain.before_unlink")
            if slots is not None and entry.links == 1:  # else other bases need its bytes
                slots.park(path, entry.size_bytes)
            else:
                remove_if_there(filesystem, path)
        elif entry.name.endswith(TEMPORARY_SUFFIX) and entry.kind == "file":
            remove_if_there(filesystem, path)
    filesystem.sync_dir(base)
    # Last: until then the directory says what it was.
    for name in (AUDIT_RECORD, MANIFEST, CONDEMNED, DELETING):
        remove_if_there(filesystem, base / name)
    with contextlib.suppress(OSError):  # somebody put a file of their own there: it stays
        filesystem.remove_dir(base)
    filesystem.sync_dir(base.parent)


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
