"""Memory that the ranks of a node share while they load: each cell is read once, whoever lags,
dies, hangs or reads something else, and nobody waits for long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from everstep.arena import Arena
from everstep.errors import EverstepError
from everstep.restore.fetch import node_reads
from everstep.restore.fetch.node_reads import NodeWindow
from everstep.seams import Clock, SystemClock
from tests.support.ranks.together import on_all
from tests.support.world import TIMEOUT_S

PART = 4096
SOURCE, OTHER = b"s" * 16, b"o" * 16
LONG_S, SHORT_S = TIMEOUT_S, 0.05


@contextlib.contextmanager
def windows(
    count: int, *, wait_s: float = LONG_S, slots: int = 8, clock: Clock | None = None
) -> Iterator[list[NodeWindow]]:
    """Reads of each rank of a node, all in this process; ``clock`` is that of the first."""
    first = NodeWindow.create("start", count, clock or SystemClock(), wait_s, slots)
    about = "start", os.getpid(), first.fd
    made = [first]
    made += [
        NodeWindow.join(*about, place, count, SystemClock(), wait_s) for place in range(1, count)
    ]
    try:
        for one in made:
            one.begin()
        yield made
    finally:
        for one in made:
            one.close()


class Store:
    """Bytes that tell which cell they are of.

    Attributes:
        reads: cells in the order in which they were read.
    """

    def __init__(self) -> None:
        self.reads: list[int] = []

    def reader(self, cell: int) -> Callable[[memoryview], int]:
        def read(buffer: memoryview) -> int:
            self.reads.append(cell)
            buffer[:] = bytes([cell]) * buffer.nbytes
            return buffer.nbytes

        return read

    def take(self, window: NodeWindow, cell: int, source: bytes = SOURCE, begin: int = 0) -> None:
        """As a rank does; what has come is right."""
        buffer = memoryview(bytearray(PART))
        got = window.take(cell, source, begin, buffer, PART, self.reader(cell))
        assert (got, bytes(buffer)) == (PART, bytes([cell]) * PART)


def kill(window: NodeWindow) -> None:
    """What the kernel does for a process that has ended."""
    window.claims.close()


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Nothing waits until it gives up waiting."""
    start_s = SystemClock().monotonic_s()
    yield
    assert SystemClock().monotonic_s() - start_s < LONG_S / 2


def no_reads(buffer: memoryview) -> int:
    raise AssertionError("read what another rank has")


def test_each_cell_is_read_once_and_the_ranks_keep_together() -> None:
    store, cells = Store(), 60

    def load(window: NodeWindow) -> None:
        for cell in range(cells):
            store.take(window, cell)
        window.end()

    with windows(3) as ranks:
        on_all(*(lambda one=one: load(one) for one in ranks))  # type: ignore[misc]
        assert sorted(store.reads) == list(range(cells))


def test_the_memory_is_bounded_whatever_is_read() -> None:
    with windows(2, slots=4) as ranks:
        assert ranks[0].arena.size_bytes == 4 * node_reads.CELL_BYTES + 2 * 4096


def test_a_rank_that_is_not_done_with_a_cell_still_finds_it() -> None:
    """The first goes as far as it can, and no further: then the second takes all of it."""
    store, waits = Store(), threading.Event()

    class Looks(SystemClock):
        """Looked at once for each cell, and each time that somebody has been waited for."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def monotonic_s(self) -> float:
            self.seen.append(len(store.reads))
            if self.seen.count(self.seen[-1]) > 8:
                waits.set()
            return super().monotonic_s()

    def goes_ahead() -> None:
        try:
            for cell in range(12):
                store.take(ranks[0], cell)
        finally:
            waits.set()

    with windows(2, slots=8, clock=Looks()) as ranks:
        with on_thread(goes_ahead):
            assert waits.wait(TIMEOUT_S)
            assert store.reads == list(range(8))
            for cell in range(12):
                store.take(ranks[1], cell)
        assert sorted(store.reads) == list(range(12))


@contextlib.contextmanager
def on_thread(do: Callable[[], object]) -> Iterator[threading.Thread]:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            do()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert not failed, failed


def test_a_rank_that_does_not_get_on_is_left_behind() -> None:
    store = Store()
    with windows(2, wait_s=SHORT_S) as ranks:
        for cell in range(40):
            store.take(ranks[0], cell)
        assert store.reads == list(range(40))
        store.take(ranks[1], 0)  # has gone from the memory
        store.take(ranks[1], 39)
        assert store.reads[40:] == [0]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    store = Store()
    with windows(2) as ranks, at_once():
        kill(ranks[1])
        for cell in range(40):
            store.take(ranks[0], cell)
        assert store.reads == list(range(40))


def test_one_that_needs_nothing_is_not_waited_for() -> None:
    store = Store()
    with windows(2) as ranks, at_once():
        ranks[1].end()
        for cell in range(40):
            store.take(ranks[0], cell)
        assert store.reads == list(range(40))


def test_a_reader_that_hangs_is_waited_for_once() -> None:
    store, reading, goes_on = Store(), threading.Event(), threading.Event()

    def hangs(buffer: memoryview) -> int:
        reading.set()
        assert goes_on.wait(TIMEOUT_S)
        return store.reader(0)(buffer)

    def first() -> None:
        ranks[0].take(0, SOURCE, 0, memoryview(bytearray(PART)), PART, hangs)

    with windows(2, wait_s=SHORT_S) as ranks, on_thread(first):
        assert reading.wait(TIMEOUT_S)
        store.take(ranks[1], 0)
        assert store.reads == [0]
        ranks[1].wait_s = LONG_S
        with at_once():
            store.take(ranks[1], 8)  # of the same slot
        goes_on.set()


def test_what_a_reader_could_not_read_another_one_tries() -> None:
    store = Store()

    def fails(buffer: memoryview) -> int:
        raise OSError(5, "the disk says no")

    with windows(2) as ranks:
        with pytest.raises(OSError, match="says no"):
            ranks[0].take(0, SOURCE, 0, memoryview(bytearray(PART)), PART, fails)
        store.take(ranks[1], 0)
        ranks[0].take(0, SOURCE, 0, memoryview(bytearray(PART)), PART, no_reads)


def test_a_short_read_is_nobody_elses() -> None:
    store = Store()
    with windows(2) as ranks:
        got = ranks[0].take(0, SOURCE, 0, memoryview(bytearray(PART)), PART, lambda buffer: 10)
        assert got == 10
        store.take(ranks[1], 0)
        assert store.reads == [0]


def test_only_the_same_bytes_are_taken() -> None:
    """Of another file or place, of another part of a cell, of an attempt that has failed."""
    store = Store()
    with windows(2) as ranks:
        store.take(ranks[0], 0)
        store.take(ranks[1], 0, OTHER)
        store.take(ranks[1], 0, begin=PART)
        for one in ranks:
            one.begin()
        store.take(ranks[1], 0)
        assert store.reads == [0] * 4
        ranks[0].take(0, SOURCE, 0, memoryview(bytearray(PART)), PART, no_reads)


@pytest.mark.parametrize("moment", ["after the look", "before the copy"])
def test_what_changes_while_it_is_taken_is_read_anew(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank that has given up waiting for this one uses the slot for the next cell."""
    store = Store()
    copyto = np.copyto
    progress = Arena.progress
    with windows(2, wait_s=SHORT_S) as ranks:
        store.take(ranks[0], 0)

        def reuse() -> None:
            monkeypatch.undo()
            for cell in range(1, 17):
                store.take(ranks[0], cell)

        def slowly(target: np.ndarray, source: np.ndarray) -> None:
            reuse()
            copyto(target, source)

        def look(arena: Arena, word: int) -> int:
            found = progress(arena, word)
            if word == node_reads.RANKS_MAX:  # that of the first slot
                reuse()
            return found

        if moment == "before the copy":
            monkeypatch.setattr(node_reads.np, "copyto", slowly)
        else:
            monkeypatch.setattr(Arena, "progress", look)
        store.take(ranks[1], 0)
        assert store.reads == [*range(17), 0]


def test_a_window_that_is_closed_meanwhile_reads_for_itself() -> None:
    store = Store()
    with windows(2) as ranks:
        ranks[0].close()
        store.take(ranks[0], 0)
        store.take(ranks[1], 0)
        assert store.reads == [0, 0]


def test_the_memory_of_another_start_is_refused() -> None:
    with windows(2) as ranks:
        about = SystemClock(), LONG_S
        with pytest.raises(EverstepError, match="another start"):
            NodeWindow.join("other", os.getpid(), ranks[0].fd, 1, 2, *about)
        with pytest.raises(EverstepError, match="no memory is shared"):
            NodeWindow.join("start", os.getpid(), 10**6, 1, 2, *about)
        with open(os.devnull, "rb") as file, pytest.raises(EverstepError):
            NodeWindow.join("start", os.getpid(), file.fileno(), 1, 2, *about)


READER = """
import sys
from everstep.restore.fetch.node_reads import NodeWindow
from everstep.seams import SystemClock

def hangs(buffer):
    print("reading", flush=True)
    sys.stdin.read()

window = NodeWindow.join("start", int(sys.argv[1]), int(sys.argv[2]), 1, 2, SystemClock(), 60.0)
window.begin()
window.take(1, b"s" * 16, 0, memoryview(bytearray(4096)), 4096, hangs)
"""


def test_a_reader_that_is_killed_is_replaced_at_once() -> None:
    store = Store()
    first = NodeWindow.create("start", 2, SystemClock(), LONG_S, 8)
    first.begin()
    command = [sys.executable, "-c", READER, str(os.getpid()), str(first.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"reading\n"
            with at_once(), on_thread(lambda: store.take(first, 1)) as waiting:
                assert waiting.is_alive()
                assert store.reads == []
                reader.kill()
            with at_once():
                for cell in range(2, 20):
                    store.take(first, cell)
        finally:
            reader.kill()
            first.close()
    assert store.reads == list(range(1, 20))
