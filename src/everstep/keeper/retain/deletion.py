"""Delete bases and log segments so that a crash at any point leaves nothing half-usable.

:mod:`.retention` describes the two steps of the deletion of a base, and why they are safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import PurePath

from everstep.commit import CheckFence, FenceSeen
from everstep.commit.deletion import (
    AlreadyDeleted,
    BaseDeletion,
    Condemn,
    Condemned,
    DeletionAction,
    DeletionEvent,
    FilesDeleted,
    Lift,
    Lifted,
)
from everstep.format import MANIFEST, timeline_dir
from everstep.format.names import (
    AUDIT_RECORD,
    CONDEMNED,
    DELETING,
    LOG_DIR,
    TEMPORARY_SUFFIX,
    parse_marker,
    parse_rank,
    parse_segment,
    parse_shard,
)
from everstep.run import BaseFound, newest_timeline
from everstep.run.folder import uncondemn
from everstep.seams import FileSystem, failpoint
from everstep.tiers import SlotStore, remove_if_there


def delete_base(
    filesystem: FileSystem,
    run: PurePath,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    timeline: int | None,
    newest: Callable[[], int] | None = None,
) -> None:
    """Delete a committed base: condemn it, check the fence again, delete its files.

    Args:
        slots: parks the data files instead of deleting them; None deletes them.
        timeline: timeline of the deleting process; None for a person at the command line, whom no
            timeline fences off.
        newest: returns the number of the newest timeline; None reads it from the folder.

    Raises:
        FencedError: a newer timeline has begun. The base is unchanged, or the process of that
            timeline saw the mark and has deleted it.
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
    """Carry out one action of the deletion of the base at ``path``.

    Args:
        newest: returns the number of the newest timeline.
    """
    if isinstance(action, CheckFence):
        return FenceSeen(newest())
    try:
        if isinstance(action, Condemn):
            _condemn(filesystem, path)
            failpoint("retain.after_condemn")
            return Condemned()
        if isinstance(action, Lift):
            lifted = uncondemn(filesystem, path)
            return Lifted() if lifted else AlreadyDeleted(newest())
        # Fails if a resuming process has lifted the mark first: of two renames one succeeds.
        filesystem.rename(path / CONDEMNED, path / DELETING)
        _delete_files(filesystem, path, slots)
        return FilesDeleted()
    except FileNotFoundError:
        # Another process deletes the base, too, or has lifted the mark.
        return AlreadyDeleted(newest())


def _condemn(filesystem: FileSystem, path: PurePath) -> None:
    """Replace the manifest of a base with the condemned mark, durably."""
    try:
        filesystem.rename(path / MANIFEST, path / CONDEMNED)
    except FileNotFoundError:
        # A process that died may have condemned the base: continue its deletion.
        if all(entry.name != CONDEMNED for entry in filesystem.scan(path)):
            raise
    # Durable before the next look at the fence: a process that opens its timeline after that look
    # must find the mark, even after a crash of the machine.
    filesystem.sync_dir(path)


def delete_files(
    filesystem: FileSystem,
    base: BaseFound,
    slots: SlotStore | None,
    *,
    check_fence: Callable[[], None] = lambda: None,
) -> None:
    """Delete the files of a base that is unfinished or half-deleted, unless it has been completed
    since.

    Markers go first: without them the remaining files cannot become a base again.

    Args:
        check_fence: called again before data is deleted. While a folder is being put back to an
            older state, a scan may have seen only half of a base.

    Raises:
        FencedError: raised by ``check_fence``; no data was deleted.
    """
    if base.status == "condemned":
        # The mark may have this name already, or may have been lifted; the scan below tells.
        with contextlib.suppress(FileNotFoundError):
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
    """Delete the files of a base in an order that is safe against crashes."""
    entries = sorted(filesystem.scan(base), key=lambda entry: entry.name)
    # The mark must be durable before the first file is deleted: after a crash it is the only sign
    # that the base is incomplete on purpose.
    filesystem.sync_dir(base)
    for entry in entries:
        if parse_marker(entry.name) is not None:
            remove_if_there(filesystem, base / entry.name)
    # Markers before data: a marker without its files would count as a complete share.
    filesystem.sync_dir(base)
    check_fence()
    # The folder was put back meanwhile, and the base is complete: it needs no markers then.
    if any(entry.name == MANIFEST for entry in filesystem.scan(base)):
        return
    for entry in entries:
        path = base / entry.name
        if parse_shard(entry.name) is not None and entry.kind == "file":
            failpoint("retain.before_unlink")
            # Never recycle a file with two names: another base links to the same bytes.
            if slots is not None and entry.links == 1:
                slots.park(path, entry.size_bytes)
            else:
                remove_if_there(filesystem, path)
        elif entry.name.endswith(TEMPORARY_SUFFIX) and entry.kind == "file":
            remove_if_there(filesystem, path)
    filesystem.sync_dir(base)
    # The mark goes last, after the removal of the data is durable: a crash before that point
    # leaves a directory that the next sweep recognizes as half-deleted.
    for name in (AUDIT_RECORD, MANIFEST, CONDEMNED, DELETING):
        remove_if_there(filesystem, base / name)
    # A directory with files of the user stays.
    with contextlib.suppress(OSError):
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
    """Delete log segments, each with its marker first: nobody reads a segment without one.

    Args:
        timelines: timelines whose segments are considered.
        unneeded: returns True for a segment ``(timeline, first, last)`` to delete.
        check_fence: raises if a newer timeline has begun.
        own: timeline of this process. A segment of it without a marker may be being written, unless
            a later one has a marker: segments are written one after the other.
        rank: deletes only the files of this rank; None deletes those of all ranks.

    Returns:
        The number of segments deleted.

    Raises:
        FencedError: a newer timeline has begun; no further segment is deleted.
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
            # Determined before the first deletion, which would remove the markers it looks for.
            if timeline == own and written is None:
                written = _last_written(filesystem, directory, names, rank)
            complete_only = timeline == own and steps[1] >= (written or 0)
            # Another process may be deleting the same segment.
            with contextlib.suppress(FileNotFoundError):
                deleted += _delete_segment(
                    filesystem, directory / name, complete_only=complete_only, rank=rank
                )
    return deleted


def _last_written(
    filesystem: FileSystem, directory: PurePath, names: Sequence[str], rank: int | None
) -> int:
    """Return the last step of the newest segment that has a marker (of ``rank``); 0 without one."""
    for name in reversed(names):
        steps = parse_segment(name)
        if steps is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            ranks = {parse_marker(entry.name) for entry in filesystem.scan(directory / name)}
            if ranks - {None} if rank is None else rank in ranks:
                return steps[1]
    return 0


def _delete_segment(
    filesystem: FileSystem, path: PurePath, *, complete_only: bool, rank: int | None
) -> bool:
    """Delete one segment; return True if it was deleted.

    Args:
        complete_only: leaves a segment without a marker, which is being written.
    """
    names = sorted(entry.name for entry in filesystem.scan(path) if entry.kind == "file")
    if rank is not None:
        names = [name for name in names if parse_rank(name.removesuffix(TEMPORARY_SUFFIX)) == rank]
    if complete_only and not any(parse_marker(name) is not None for name in names):
        return False
    # Nothing of this rank is left; the last rank also removes the directory.
    if not names:
        with contextlib.suppress(OSError):
            filesystem.remove_dir(path)
        return False
    for name in names:
        if parse_marker(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
            remove_if_there(filesystem, path / name)
    # Durable before the data goes: after a crash a marker would vouch for missing records.
    filesystem.sync_dir(path)
    # Not synced after it: data that a crash brings back has no marker, and is deleted again.
    for name in names:
        if parse_shard(name.removesuffix(TEMPORARY_SUFFIX)) is not None:
            remove_if_there(filesystem, path / name)
    # A directory with files of the user, or of other ranks, stays.
    with contextlib.suppress(OSError):
        filesystem.remove_dir(path)
    return True
