"""Disk space for a benchmark, and a folder that is removed afterwards."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from everstep.errors import OptionError, OutOfSpaceError, PermissionDeniedError
from everstep_bench.persist.machine import Machine
from everstep_bench.persist.raw import RING_BYTES

__all__ = ["check_room", "refuse_without_room", "workspace"]

_COPIES_ON_DISK = 12  # the most that lie there at once: four bases, six files of raw, one of a peer
_COPIES_IN_MEMORY = 2.5  # the state, what a peer loads, buffers of peers
_MEMORY_BESIDES = RING_BYTES + (512 << 20)


def check_room(machine: Machine, size_bytes: int, folder: Path) -> None:
    """Looks before anything is written.

    Raises:
        OutOfSpaceError: when disk or memory would not do.
    """
    refuse_without_room(
        machine,
        folder,
        disk_bytes=_COPIES_ON_DISK * size_bytes,
        memory_bytes=int(_COPIES_IN_MEMORY * size_bytes) + _MEMORY_BESIDES,
        hint="a smaller --size",
    )


def refuse_without_room(
    machine: Machine, folder: Path, *, disk_bytes: int, memory_bytes: int, hint: str
) -> None:
    """Looks whether so much is free.

    Args:
        folder: of the benchmark, on the file system that it writes to.
        hint: what takes less.

    Raises:
        OutOfSpaceError: when disk or memory would not do.
    """
    if machine.free_bytes < disk_bytes:
        raise OutOfSpaceError(
            f"the benchmark writes up to {disk_bytes / 2**30:.1f} GiB at a time, "
            f"{machine.free_bytes / 2**30:.1f} GiB are free",
            tier="disk",
            path=folder.parent,
            hint=f"{hint}, or --dir on another file system",
        )
    if machine.memory_available_bytes < memory_bytes:
        raise OutOfSpaceError(
            f"the benchmark takes up to {memory_bytes / 2**30:.1f} GiB of memory, "
            f"{machine.memory_available_bytes / 2**30:.1f} GiB are available",
            tier="memory",
            hint=hint,
        )


@contextlib.contextmanager
def workspace(where: Path | None) -> Iterator[Path]:
    """A folder of its own, gone afterwards.

    Raises:
        OptionError: there is no such folder to make it in.
        PermissionDeniedError: it may not be written.
    """
    parent = Path.cwd() if where is None else where.absolute()
    if not parent.is_dir():
        raise OptionError(f"there is no folder {parent}", hint="make it first, or name another")
    try:
        folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=parent))
    except OSError as error:
        raise PermissionDeniedError(
            f"cannot write into {parent}: {error.strerror}",
            path=parent,
            hint="--dir: a folder that this user may write, on the file system to be measured",
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
