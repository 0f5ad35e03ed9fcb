"""The limit: page-aligned memory that is there already, transferred past the page cache.

No format, no copy, no digest: what the disk gives to a program that does nothing else.
Where the file system refuses O_DIRECT the limit is buffered.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from pathlib import Path

from everstep.arena import Block
from everstep.errors import StorageError
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from everstep.seams.processes.threads import IoThreads
from everstep_bench.harness.figures import Role
from everstep_bench.harness.machine import Sample, drop_cache, now
from everstep_bench.persist.arms import Arm, Column

THREADS = (1, 2, 4, 8)
BLOCKS_BYTES = (4 << 20, 8 << 20, 16 << 20, 32 << 20)
RING_BYTES = max(THREADS) * max(BLOCKS_BYTES)
_TIMEOUT_S = 600.0
_NOISE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a raw transfer: block size and threads.

    Attributes:
        allocate: a fresh file gets its blocks (fallocate) before the first write.
    """

    threads: int
    block_bytes: int
    allocate: bool = False

    def __str__(self) -> str:
        allocated = ", fallocate" if self.allocate else ""
        return f"{self.threads} x {self.block_bytes >> 20} MiB{allocated}"


def settings(column: Column) -> list[Setting]:
    """All settings that are tried for one column."""
    pairs = list(itertools.product(THREADS, BLOCKS_BYTES))
    found = [Setting(threads, block) for threads, block in pairs]
    if column == "fresh":
        found += [Setting(threads, block, allocate=True) for threads, block in pairs]
    return found


def make_ring() -> Block:
    """Page-aligned, touched, and full of numbers that no storage can compress away."""
    ring = Block(RING_BYTES)
    for begin in range(0, RING_BYTES, _NOISE_BYTES):
        ring.view[begin : begin + _NOISE_BYTES] = os.urandom(_NOISE_BYTES)
    return ring


class RawArm(Arm):
    """Writes or reads as many bytes as the state has.

    Args:
        path: the file. ``fresh`` makes it anew each time, the others keep it. ``recycled`` has a
            second one, and they take turns, as the files of whoever keeps the last base until the
            new one is durable: a disk that remembers what was just written takes one file that is
            rewritten again and again faster.
        size_bytes: rounded up to whole pages.
        ring: memory to write from or read into.
        direct: with O_DIRECT.
    """

    role: Role = "limit"

    def __init__(
        self,
        column: Column,
        setting: Setting,
        path: Path,
        size_bytes: int,
        ring: Block,
        *,
        direct: bool,
    ) -> None:
        self.column: Column = column
        self.setting = setting
        self.name = f"raw, {setting}"
        way = {"fresh": "pwrite + fsync", "recycled": "pwrite + fsync", "read": "pread"}[column]
        self.detail = ("O_DIRECT " if direct else "buffered ") + way
        self._path = path
        self._other = path.with_name(f"{path.name}-other")
        self._size_bytes = -(-size_bytes // DIRECT_ALIGNMENT_BYTES) * DIRECT_ALIGNMENT_BYTES
        self._ring = ring
        self._direct = os.O_DIRECT if direct else 0
        self._threads = IoThreads(setting.threads, "everstep-bench-raw")

    def open(self) -> None:
        """Makes what is going to be rewritten or read, if it is not there."""
        for _ in range(2 if self.column == "recycled" else 1):
            if self.column != "fresh" and not self._path.exists():
                self._write(os.O_CREAT | os.O_EXCL)
            self._take_turns()

    def prepare(self) -> None:
        """Makes sure that the name of a fresh file is free; takes the other rewritten one."""
        self._take_turns()
        if self.column == "fresh":
            self._path.unlink(missing_ok=True)
        elif not self._direct:
            drop_cache(self._path)

    def run(self) -> Sample:
        """One transfer of the whole file, made durable if it is a write."""
        begin = now()
        if self.column == "read":
            self._read()
        else:
            self._write(os.O_CREAT | os.O_EXCL if self.column == "fresh" else 0)
        return Sample.between(begin, now())

    def clean(self) -> None:
        """Removes a fresh file."""
        if self.column == "fresh":
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.close()

    def _take_turns(self) -> None:
        if self.column == "recycled":
            self._path, self._other = self._other, self._path

    def _write(self, flags: int) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | self._direct | flags, 0o600)
        try:
            if self.setting.allocate and flags:
                os.posix_fallocate(descriptor, 0, self._size_bytes)
            self._transfer(lambda data, offset: os.pwrite(descriptor, data, offset))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | self._direct)
        try:
            self._transfer(lambda data, offset: os.preadv(descriptor, [data], offset))
        finally:
            os.close(descriptor)

    def _transfer(self, call: Callable[[memoryview, int], int]) -> None:
        block_bytes = self.setting.block_bytes
        blocks = itertools.count(0, block_bytes)  # next() is one step of the interpreter

        stop = threading.Event()

        def work(thread: int) -> None:
            memory = self._ring.view[thread * block_bytes : (thread + 1) * block_bytes]
            while not stop.is_set() and (begin := next(blocks)) < self._size_bytes:
                want = min(block_bytes, self._size_bytes - begin)
                got = call(memory[:want], begin)
                if got != want:
                    raise StorageError(f"{got} of {want} bytes were transferred", path=self._path)

        if self.setting.threads == 1:
            work(0)
            return
        jobs = [self._threads.submit(work, thread) for thread in range(self.setting.threads)]
        try:
            for job in jobs:
                job.result(timeout=_TIMEOUT_S)
        finally:
            # Whatever happened, no thread may go on with a descriptor that is about to close.
            stop.set()
            wait_futures(jobs, timeout=_TIMEOUT_S)
