"""What the tests of the library share: a file system that can be held, watched and broken."""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os
import random
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

import everstep
from everstep import checkpointer as checkpointer_module
from everstep.restore.load.load import check_contents
from everstep.run.scan import BaseFound, Inventory, scan_run
from everstep.run.verify import Verdict, verify_base
from everstep.seams import (
    Clock,
    DirEntry,
    FileSystem,
    ManualClock,
    PosixFileSystem,
    ReadFile,
    Seams,
    WriteFile,
)
from everstep.seams.progress import silent
from everstep.testing import inspect
from tests.crash.sim.training import freeze

__all__ = [
    "TIMEOUT_S",
    "Gate",
    "HookedFileSystem",
    "acquiring",
    "assert_same",
    "base_folder",
    "files_below",
    "flip",
    "forget",
    "inventory_of",
    "opened",
    "raising",
    "seed_everything",
    "size_below",
    "verdict_of",
]

TIMEOUT_S = 20.0
"""Nothing that a test waits for takes longer, or the test has failed."""

Hook = Callable[[str, PurePath], None]


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    """Files whose name matches; others may come and go meanwhile, and folders too, which
    ``rglob`` fails over."""
    found = [Path(above, name) for above, _, names in os.walk(folder) for name in names]
    return [path for path in found if fnmatch.fnmatch(path.name, pattern)]


def size_below(folder: Path) -> int:
    """Bytes of all files, of which some may go meanwhile."""
    found = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


class Gate:
    """Holds every thread that comes to it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def wait_at(self) -> None:
        self.reached.set()
        assert self._opened.wait(TIMEOUT_S), "nobody opened the gate"

    def open(self) -> None:
        self._opened.set()


class HookedFileSystem:
    """The real file system, with a function that is called before every operation.

    Attributes:
        hook: gets the operation's name and path; may wait, raise, or do something in between.
        seen: every operation so far.
    """

    def __init__(self, hook: Hook = lambda op, path: None) -> None:
        self._inner = PosixFileSystem()
        self.hook = hook
        self.seen: list[tuple[str, PurePath]] = []

    def at(self, op: str, path: PurePath) -> None:
        self.seen.append((op, path))
        self.hook(op, path)

    def create(self, path: PurePath, *, direct: bool = False) -> WriteFile:
        self.at("create", path)
        return _Written(self, path, self._inner.create(path, direct=direct))

    def reuse(self, path: PurePath, *, direct: bool = False) -> WriteFile | None:
        self.at("reuse", path)
        file = self._inner.reuse(path, direct=direct)
        return None if file is None else _Written(self, path, file)

    def open(self, path: PurePath, *, direct: bool = False) -> ReadFile:
        self.at("open", path)
        return self._inner.open(path, direct=direct)

    def rename(self, source: PurePath, target: PurePath) -> None:
        self.at("rename", target)
        self._inner.rename(source, target)

    def link(self, source: PurePath, target: PurePath) -> None:
        self.at("link", target)
        self._inner.link(source, target)

    def unlink(self, path: PurePath) -> None:
        self.at("unlink", path)
        self._inner.unlink(path)

    def make_dir(self, path: PurePath) -> None:
        self.at("make_dir", path)
        self._inner.make_dir(path)

    def remove_dir(self, path: PurePath) -> None:
        self.at("remove_dir", path)
        self._inner.remove_dir(path)

    def sync_dir(self, path: PurePath) -> None:
        self.at("sync_dir", path)
        self._inner.sync_dir(path)

    def scan(self, path: PurePath) -> list[DirEntry]:
        self.at("scan", path)
        return self._inner.scan(path)

    def free_bytes(self, path: PurePath) -> int:
        self.at("free_bytes", path)
        return self._inner.free_bytes(path)


class _Written:
    def __init__(self, fs: HookedFileSystem, path: PurePath, inner: WriteFile) -> None:
        self._fs, self._path, self._inner = fs, path, inner

    def write(self, data: memoryview, offset: int) -> None:
        self._fs.at("write", self._path)
        self._inner.write(data, offset)

    def reserve(self, size_bytes: int) -> None:
        self._fs.at("reserve", self._path)
        self._inner.reserve(size_bytes)

    def truncate(self, size_bytes: int) -> None:
        self._fs.at("truncate", self._path)
        self._inner.truncate(size_bytes)

    def sync(self) -> None:
        self._fs.at("sync", self._path)
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def raising(
    error: BaseException | Callable[[], None], op: str, path: str = "*", *, nth: int = 1
) -> Hook:
    """A hook that raises (or calls) ``error`` at the ``nth`` matching operation, once.

    Args:
        op, path: shell patterns.
    """
    count = 0

    def hook(seen_op: str, seen_path: PurePath) -> None:
        nonlocal count
        if not fnmatch.fnmatchcase(seen_op, op) or not fnmatch.fnmatchcase(str(seen_path), path):
            return
        count += 1
        if count == nth:
            if isinstance(error, BaseException):
                raise error
            error()

    return hook


@contextmanager
def opened(
    path: Path,
    state: MutableMapping[str, Any],
    *,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    **options: Any,
) -> Iterator[everstep.Checkpointer]:
    """A Checkpointer that takes bases only on demand; closed at the end, whatever happens."""
    options = {"every": None, "method": "sync"} | options
    seams = Seams(filesystem=fs or PosixFileSystem(), clock=clock or ManualClock())
    with everstep.Checkpointer(path, state, seams=seams, **options) as ckpt:
        yield ckpt


@contextmanager
def acquiring(
    ckpt: everstep.Checkpointer,
    *,
    first: Callable[[], object] = lambda: None,
    timeout_s: float | None = None,
) -> Iterator[None]:
    """Whoever takes memory for a capture in the block does ``first`` before.

    Args:
        timeout_s: it waits no longer than that for memory, whatever it is told; nothing else has
            so little time, as on a busy machine that may not be enough.
    """
    pool = inspect(ckpt).keepers.pool
    assert pool is not None
    acquire = pool.acquire

    def late(size_bytes: int, **options: Any) -> Any:
        first()
        if timeout_s is not None:
            assert options["timeout_s"] == inspect(ckpt).options.progress_timeout_s
            options["timeout_s"] = timeout_s
        return acquire(size_bytes, **options)

    pool.acquire = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pool.acquire


_OPEN = checkpointer_module._live


def forget(path: Path) -> None:
    """Lets the next Checkpointer of ``path`` be one of another process, as far as it knows."""
    _OPEN.pop((PurePath(path), 0), None)


def forget_open_runs() -> None:
    """Lets the next Checkpointers of all runs and ranks be those of another process."""
    _OPEN.clear()


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def assert_same(found: Any, wanted: Any) -> None:
    """Equal in every bit, type and order of keys."""
    found, wanted = freeze(_resolved(found)), freeze(_resolved(wanted))
    if isinstance(wanted, dict) and isinstance(found, dict):
        different = [key for key in wanted if key not in found or found[key] != wanted[key]]
        assert not different, f"these parts differ: {different}"
    assert found == wanted


def _resolved(value: Any) -> Any:
    """Without conjugate and negative bits, which cannot be looked at as bytes."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_resolved(item) for item in value)
    return value


def base_folder(run: Path, step: int, timeline: int = 1) -> Path:
    return run / f"timeline-{timeline:05d}" / "base" / f"{step:012d}"


def inventory_of(run: Path) -> Inventory:
    return scan_run(PosixFileSystem(), run)


def verdict_of(base: BaseFound) -> Verdict:
    """What reading the base back shows."""
    from everstep.format.writer import ChunkRing

    ring = ChunkRing(2, 1)
    try:
        return verify_base(
            PosixFileSystem(),
            base,
            ring,
            timeout_s=TIMEOUT_S,
            progress=silent,
            contents=check_contents,
        )
    finally:
        ring.close()


def has_leases(folder: Path) -> bool:
    """Whether this file system can tell that nobody else has a file open; asked of the kernel, so
    that tests are not skipped because everstep does not ask it any more."""
    path = folder / "probe"
    path.write_bytes(b"x")
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
    return True


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
