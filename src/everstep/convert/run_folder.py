"""Run folders with one base, which are there completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePath

from everstep.capture.lane import LiveBody
from everstep.commit import BaseId
from everstep.errors import OptionError, StorageError
from everstep.format.header import BasePlan, ShardIdentity, plan_files
from everstep.format.names import RUN_RECORD, SLOTS_DIR, timeline_dir
from everstep.format.writer import ChunkRing
from everstep.keeper.persist.committer import OneRankCommit
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.restore.load.load import check_contents
from everstep.restore.offline.rebuild import Rebuilt
from everstep.run.fence import Fence
from everstep.run.folder import open_run_folder, open_timeline
from everstep.run.scan import scan_base
from everstep.run.verify import verify_base
from everstep.seams import Seams
from everstep.seams.filesystem import FileSystem
from everstep.seams.locks import try_lock
from everstep.seams.posix import exchange
from everstep.seams.progress import progress
from everstep.tiers.durable_files import SlotStore, ensure_dirs, storage_errors

MARK = "replaceable"
"""Empty file in a folder that the next one under its name replaces."""

_PARTIAL = ".everstep-partial-"
_TIMEOUT_S = 120.0
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


def write_run(filesystem: FileSystem, out: PurePath, rebuilt: Rebuilt, ring: ChunkRing) -> str:
    """Write a run whose only base is ``rebuilt``; return its id.

    It is made beside ``out`` and renamed at the end: resume() would take an incomplete run for one
    without a base, and start afresh.

    Raises:
        StorageError: the error of the file system; no files remain.
    """
    staged = out.with_name(f"{out.name}.partial-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with storage_errors("write the restored run", out, step=rebuilt.step):
            ensure_dirs(filesystem, staged.parent)
            run = _write(filesystem, staged, rebuilt, ring)
            filesystem.rename(staged, out)
            filesystem.sync_dir(out.parent)
        return run
    finally:
        shutil.rmtree(Path(staged), ignore_errors=True)


def replace_run(filesystem: FileSystem, out: PurePath, rebuilt: Rebuilt, ring: ChunkRing) -> None:
    """Write a run whose only base is ``rebuilt``, in place of the one that an earlier call has
    written there.

    Whenever the process dies, ``out`` is the earlier run or the new one; what it leaves beside them
    is removed by a later call for the same directory. On a file system that cannot exchange two
    names, the earlier run may be left under the name of :func:`earlier`.

    Raises:
        OptionError: there is something else under the name.
        StorageError: the error of the file system; no files remain.
    """
    refuse_others(out)
    parent = Path(out.parent)
    staged = parent / f"{_PARTIAL}{uuid.uuid4().hex[:12]}"
    with storage_errors("write the checkpoint", out, step=rebuilt.step):
        ensure_dirs(filesystem, out.parent)
        _sweep(parent)
        filesystem.make_dir(staged)
        try:
            with _held(staged):
                _write(filesystem, staged, rebuilt, ring)
                filesystem.create(staged / MARK).close()
                filesystem.sync_dir(staged)
                _put(filesystem, staged, Path(out))
                filesystem.sync_dir(out.parent)
        finally:
            # The earlier run, or what an error has left.
            _delete(staged)
        _delete(Path(earlier(out)))


def remove_run(filesystem: FileSystem, out: PurePath) -> None:
    """Remove a run that :func:`replace_run` has written, if it is there.

    Raises:
        OptionError: there is something else under the name.
        StorageError: the error of the file system.
    """
    refuse_others(out)
    with storage_errors("remove the checkpoint", out):
        for there in (out, earlier(out)):
            # Renamed first: a folder of which some files are gone is not one that is damaged.
            hidden = out.with_name(f"{_PARTIAL}{uuid.uuid4().hex[:12]}")
            with contextlib.suppress(FileNotFoundError):
                filesystem.rename(there, hidden)
                filesystem.sync_dir(out.parent)
                _delete(Path(hidden))


def earlier(out: PurePath) -> PurePath:
    """Return the name under which a replaced run may be left: one that programs find that look for
    the newest run by its name."""
    return out.with_name(f"{out.stem}.everstep-earlier{out.suffix}")


def put_earlier_back(filesystem: FileSystem, out: PurePath) -> None:
    """Complete or undo a replacement during which the process has died."""
    if not os.path.lexists(out):
        with contextlib.suppress(FileNotFoundError):
            filesystem.rename(earlier(out), out)


def refuse_others(out: PurePath) -> None:
    """Check that a name is free, or that of a run that may be replaced.

    Raises:
        OptionError: it is neither.
    """
    path = Path(out)
    if not os.path.lexists(path) or path.is_symlink():
        return
    if not path.is_dir():
        raise OptionError(
            f"{path} is a file, which everstep has not written",
            path=path,
            hint="choose another name, or remove it",
        )
    if not (path / MARK).is_file():
        kind = "a run of everstep" if (path / RUN_RECORD).is_file() else "another folder"
        raise OptionError(
            f"{path} is {kind}, and no checkpoint: it is not replaced or removed",
            path=path,
            hint="choose another name",
        )


def _put(filesystem: FileSystem, staged: Path, out: Path) -> None:
    """Give a new run its name; the earlier one gets that of the new."""
    if not os.path.lexists(out):
        filesystem.rename(staged, out)
        return
    code = exchange(staged, out)
    if code in _NO_EXCHANGE:
        _delete(Path(earlier(out)))
        filesystem.rename(out, earlier(out))
        filesystem.rename(staged, out)
    elif code:
        raise OSError(code, os.strerror(code), str(out))


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock a folder, so that other processes do not take it for one that a dead process left."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try_lock(fd)
        yield
    finally:
        os.close(fd)


def _sweep(parent: Path) -> None:
    """Delete folders that dead processes have left."""
    for path in parent.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if try_lock(fd):
                    _delete(path)
            finally:
                os.close(fd)


def _delete(path: Path) -> None:
    """Delete a folder or a link, if it is there."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _write(filesystem: FileSystem, run: PurePath, rebuilt: Rebuilt, ring: ChunkRing) -> str:
    state = rebuilt.state
    inventory = open_run_folder(filesystem, run)
    assert inventory.run is not None
    number = open_timeline(
        Seams(filesystem=filesystem), run, inventory, parent=None, exact=rebuilt.exact
    )
    identity = ShardIdentity(inventory.run, number, state.step, state.lsn, 0, 1, rebuilt.exact)
    sizes = {name: len(data) for name, data in state.objects.items()}
    shards = plan_files(identity, list(state.entries.values()), state.aliases, sizes)
    plan = BasePlan(identity, shards)
    slots = SlotStore(filesystem, timeline_dir(run, number) / SLOTS_DIR)
    bodies = [
        LiveBody(shard.layout, state.tensors, state.objects if shard is shards[-1] else {})
        for shard in shards
    ]
    with progress("write", plan.size_bytes) as bar:
        writer = ShardWriter(filesystem, run, ring, slots, timeout_s=_TIMEOUT_S)
        OneRankCommit(writer, plan, Fence(filesystem, run, number)).run(bodies, bar)
    base = scan_base(filesystem, run, BaseId(number, state.step))
    with progress("verify", plan.size_bytes) as bar:
        verdict = verify_base(
            filesystem, base, ring, timeout_s=_TIMEOUT_S, progress=bar, contents=check_contents
        )
    if verdict.damages:
        raise StorageError(
            f"what was written reads back damaged: {verdict.damages[0].problem}",
            path=run,
            hint="the disk or memory of this machine may be failing",
        )
    return inventory.run
