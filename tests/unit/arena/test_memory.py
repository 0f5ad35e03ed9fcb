"""Memory shared by processes: who sees what, who may do what, and what is given back."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import resource
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep import arena as arena_memory
from everstep.arena import CONTROL_BYTES, PROGRESS_WORDS, Arena
from everstep.errors import OptionError, OutOfSpaceError, StateError
from everstep.errors import UnavailableError as Unavailable
from everstep.seams import memory as seam
from everstep.seams.memory import PAGE_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

TIMEOUT_S = 60.0
MIB = 1 << 20
HUGE_BYTES = 2 * MIB  # what is taken or given back may be off by a huge page at either end
ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HEADER = struct.Struct("=8sIIQQ")

makers = pytest.mark.parametrize("make", [Arena.create, Arena.anonymous])
Make = Callable[[int], Arena]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    gc.collect()  # or garbage of others would make room for what leaks here
    before = set(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    left = set(os.listdir("/proc/self/fd")) - before
    assert not left


def mapping_at(address: int) -> dict[str, str] | None:
    """What the kernel says of the mapping that holds ``address``."""
    found: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            if found is not None:
                return found
            start, _, end = first.partition("-")
            if int(start, 16) <= address < int(end, 16):
                found = {}
        elif found is not None:
            found[first[:-1]] = rest.strip()
    return found


def resident_bytes(arena: Arena) -> int:
    """Memory that the arena takes: of the file, or of the mapping if there is none."""
    if arena.fd is not None:
        return os.fstat(arena.fd).st_blocks * 512
    mapping = mapping_at(arena.address)
    assert mapping is not None
    return int(mapping["Rss"].split()[0]) * 1024


def pattern(size_bytes: int) -> bytes:
    return np.random.default_rng(size_bytes).bytes(size_bytes)


# --- The memory -------------------------------------------------------------------------


@makers
def test_what_an_arena_is(make: Make) -> None:
    with make(3 * PAGE_BYTES + 1) as arena:
        assert arena.size_bytes == 4 * PAGE_BYTES
        view = arena.view
        assert (view.nbytes, view.format, view.readonly) == (4 * PAGE_BYTES, "B", False)
        assert arena.address % PAGE_BYTES == 0
        assert bytes(view) == bytes(4 * PAGE_BYTES)
        view[7] = 42
        assert ctypes.string_at(arena.address + 7, 1) == b"\x2a"
        assert (arena.fd is None) == (make == Arena.anonymous)


def test_two_mappings_see_each_others_bytes() -> None:
    with no_descriptor_left():
        first = Arena.create(8 * PAGE_BYTES)
        assert first.fd is not None
        handed_over = os.dup(first.fd)
        second = Arena.attach(handed_over)
        os.close(handed_over)  # stays the caller's: the arena has one of its own
        assert second.address != first.address
        assert second.size_bytes == first.size_bytes
        data = pattern(first.size_bytes)
        first.view[:] = data
        assert bytes(second.view) == data
        second.view[-1] ^= 0xFF
        assert first.view[-1] == data[-1] ^ 0xFF
        second.set_progress(5, 77)
        assert first.progress(5) == 77
        first.close()
        assert second.view[0] == data[0], "whoever made it may go"
        assert second.progress(5) == 77
        second.close()


OTHER = """
import sys
from everstep.arena import Arena
assert "torch" not in sys.modules, "a process without torch can attach"
arena = Arena.attach(int(sys.argv[1]))
print(arena.size_bytes, arena.progress(1), bytes(arena.view[:5]).decode(), flush=True)
assert sys.stdin.readline() == "go\\n"
print(arena.progress(1), bytes(arena.view[-5:]).decode(), flush=True)
arena.view[10:15] = b"there"
arena.set_progress(511, 2**64 - 1)
"""


def test_another_process_sees_them_too() -> None:
    with Arena.create(16 * PAGE_BYTES) as arena:
        assert arena.fd is not None
        arena.view[:5] = b"hello"
        arena.set_progress(1, 1)
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(arena.fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[arena.fd],
        )
        try:
            assert process.stdout.readline().split() == [str(arena.size_bytes), "1", "hello"]
            arena.view[-5:] = b"again"
            arena.set_progress(1, 2)
            out, err = process.communicate("go\n", timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.communicate()
        assert (process.returncode, err) == (0, "")
        assert out.split() == ["2", "again"]
        assert bytes(arena.view[10:15]) == b"there"
        assert arena.progress(511) == 2**64 - 1


def test_it_is_sparse_and_lies_outside_dev_shm() -> None:
    size_bytes = 1 << 36
    with Arena.create(size_bytes) as arena:
        assert arena.fd is not None
        info = os.fstat(arena.fd)
        assert info.st_size == CONTROL_BYTES + size_bytes
        assert resident_bytes(arena) <= CONTROL_BYTES + 2 * HUGE_BYTES
        arena.view[-1] = 1
        assert os.readlink(f"/proc/self/fd/{arena.fd}") == "/memfd:everstep-arena (deleted)"
        assert info.st_nlink == 0, "no name anywhere, so nothing outlives a crash"
        shm = Path("/dev/shm")
        if os.path.ismount(shm):
            assert info.st_dev != shm.stat().st_dev


@makers
def test_advice(make: Make) -> None:
    """Not copied to forked children, not in core dumps, in huge pages where they are."""
    with make(PAGE_BYTES) as arena:
        mapping = mapping_at(arena.address)
        assert mapping is not None
        flags = mapping["VmFlags"].split()
        assert {"sh", "dc", "dd"} <= set(flags)
        if os.path.exists("/sys/kernel/mm/transparent_hugepage"):
            assert "hg" in flags


# --- Sizes that cannot change, and what is no arena --------------------------------------


def test_nobody_can_change_the_size() -> None:
    with Arena.create(4 * PAGE_BYTES) as arena:
        assert arena.fd is not None
        size_bytes = os.fstat(arena.fd).st_size
        for other in (0, size_bytes - PAGE_BYTES, size_bytes + PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, other)
        with pytest.raises(PermissionError):  # nor make it read-only for who comes later
            fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.get_inheritable(arena.fd) is False


def foreign(size_bytes: int, seals: int, header: bytes = b"") -> int:
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    os.pwrite(fd, header[:size_bytes], 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def header(
    magic: bytes = b"EVSARENA",
    version: int = 1,
    words: int = PROGRESS_WORDS,
    offset: int = CONTROL_BYTES,
    data_bytes: int = PAGE_BYTES,
) -> bytes:
    return HEADER.pack(magic, version, words, offset, data_bytes)


WHOLE = CONTROL_BYTES + PAGE_BYTES
PIPE, REGULAR_FILE, READ_ONLY, CLOSED = "pipe", "file", "read-only", "closed"

NOT_ARENAS: dict[str, tuple[Any, str]] = {
    "a pipe": (PIPE, "it is no memfd"),
    "a file": (REGULAR_FILE, "it is no memfd"),
    "a closed descriptor": (CLOSED, "it is no memfd"),
    "read-only": (READ_ONLY, "it cannot be mapped"),
    "not sealed": ((WHOLE, 0, header()), "its size is not sealed"),
    "can shrink": ((WHOLE, ALL_SEALS & ~fcntl.F_SEAL_SHRINK, header()), "its size is not sealed"),
    "can grow": ((WHOLE, ALL_SEALS & ~fcntl.F_SEAL_GROW, header()), "its size is not sealed"),
    "can be sealed": ((WHOLE, ALL_SEALS & ~fcntl.F_SEAL_SEAL, header()), "its size is not sealed"),
    "cannot be written": ((WHOLE, ALL_SEALS | fcntl.F_SEAL_WRITE, header()), "cannot be mapped"),
    "empty": ((0, ALL_SEALS), "it has 0 bytes"),
    "one byte": ((1, ALL_SEALS), "it has 1 bytes"),
    "no data": ((CONTROL_BYTES, ALL_SEALS, header(data_bytes=0)), "it has 65536 bytes"),
    "half a page": ((WHOLE + 1, ALL_SEALS, header(data_bytes=PAGE_BYTES + 1)), "it has 69633 b"),
    "somebody else's": ((WHOLE, ALL_SEALS), "its header is of another"),
    "another magic": (
        (WHOLE, ALL_SEALS, header(magic=b"EVSARENB")),
        "its header is of another",
    ),
    "newer": ((WHOLE, ALL_SEALS, header(version=2)), "its header is of another"),
    "fewer words": ((WHOLE, ALL_SEALS, header(words=511)), "its header is of another"),
    "data elsewhere": ((WHOLE, ALL_SEALS, header(offset=4096)), "its header is of another"),
    "claims more": (
        (WHOLE, ALL_SEALS, header(data_bytes=2 * PAGE_BYTES)),
        "its header is of another",
    ),
    "claims less": ((WHOLE + PAGE_BYTES, ALL_SEALS, header()), "its header is of another"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", NOT_ARENAS)
def test_what_is_no_arena_is_refused(name: str, tmp_path: Path) -> None:
    kind, why = NOT_ARENAS[name]
    others: list[int] = []
    with no_descriptor_left():
        if kind == PIPE:
            fd, other = os.pipe()
            others.append(other)
        elif kind == REGULAR_FILE:
            (tmp_path / "file").write_bytes(header() + bytes(WHOLE - HEADER.size))
            fd = os.open(tmp_path / "file", os.O_RDWR)
        elif kind == READ_ONLY:
            others.append(foreign(WHOLE, ALL_SEALS, header()))
            fd = os.open(f"/proc/self/fd/{others[0]}", os.O_RDONLY)
        elif kind == CLOSED:
            fd, other = os.pipe()
            others.append(other)
            os.close(fd)
        else:
            fd = foreign(*kind)
        with pytest.raises(StateError, match=rf"descriptor {fd} is not an arena: .*{why}"):
            Arena.attach(fd)
        if kind != CLOSED:
            os.close(fd)  # still open: a refused descriptor stays the caller's
        for other in others:
            os.close(other)
    assert "foreign" not in Path("/proc/self/maps").read_text(), "nothing stays mapped"


def test_what_looks_right_is_attached_to() -> None:
    """The counterpart of the refusals: each differs from this in one thing."""
    fd = foreign(WHOLE, ALL_SEALS, header())
    with Arena.attach(fd) as arena:
        assert arena.size_bytes == PAGE_BYTES
    os.close(fd)


@pytest.mark.parametrize("fd", [-1, 1 << 20, 1 << 40, -(1 << 40)])
def test_numbers_that_are_no_descriptor(fd: int) -> None:
    with pytest.raises(StateError, match="is not an arena: it is no memfd"):
        Arena.attach(fd)


def test_an_arena_too_large_to_map_is_refused() -> None:
    fd = foreign(1 << 60, ALL_SEALS)
    with pytest.raises(OutOfSpaceError, match=f"{1 << 60} bytes"):
        Arena.attach(fd)
    os.close(fd)


# --- Progress words ----------------------------------------------------------------------


@makers
def test_progress_words_disturb_nothing(make: Make) -> None:
    with make(4 * PAGE_BYTES) as arena:
        data = pattern(arena.size_bytes)
        arena.view[:] = data
        assert all(arena.progress(index) == 0 for index in range(PROGRESS_WORDS))
        values = [(index * 0x9E3779B97F4A7C15) % 2**64 for index in range(PROGRESS_WORDS)]
        for index, value in enumerate(values):
            arena.set_progress(index, value)
        assert [arena.progress(index) for index in range(PROGRESS_WORDS)] == values
        arena.set_progress(100, 2**64 - 1)
        values[100] = 2**64 - 1
        assert [arena.progress(index) for index in range(PROGRESS_WORDS)] == values
        assert bytes(arena.view) == data
        arena.view[:] = bytes(arena.size_bytes)
        assert [arena.progress(index) for index in range(PROGRESS_WORDS)] == values
        if arena.fd is not None:
            Arena.attach(arena.fd).close()  # the header is whole


def test_words_and_values_that_cannot_be() -> None:
    with Arena.anonymous(PAGE_BYTES) as arena:
        for index in (-1, PROGRESS_WORDS):
            with pytest.raises(OptionError, match=f"no progress word {index}"):
                arena.progress(index)
            with pytest.raises(OptionError, match=f"no progress word {index}"):
                arena.set_progress(index, 0)
        for value in (-1, 1 << 64):
            with pytest.raises(OptionError, match=f"cannot hold {value}"):
                arena.set_progress(0, value)


def test_barriers_where_the_machine_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a store, after a load; the barrier itself is run here, though not needed: a release
    and an acquire of a lock."""
    did: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            did.append("acquire")

        def __exit__(self, *_: object) -> None:
            did.append("release")

    class Words:
        def item(self, index: int) -> int:
            did.append("load")
            return index

        def __setitem__(self, index: int, value: Any) -> None:
            did.append("store")

    barrier = ["acquire", "release"] * 2
    with Arena.anonymous(PAGE_BYTES) as arena:
        monkeypatch.setattr(arena_memory, "_IN_ORDER", False)
        monkeypatch.setattr(arena_memory, "_fence", Lock())
        monkeypatch.setattr(arena, "_words_with", lambda index: Words())
        arena.set_progress(0, 5)
        assert did == [*barrier, "store"], "what was written before comes first"
        did.clear()
        assert arena.progress(7) == 7
        assert did == ["load", *barrier]


# --- Pages taken -------------------------------------------------------------------------


@makers
def test_touch_takes_pages(make: Make) -> None:
    with make(64 * MIB) as arena:
        before = resident_bytes(arena)
        arena.populate(16 * MIB, 32 * MIB)
        taken = resident_bytes(arena)
        assert 0 <= taken - before - 32 * MIB <= 2 * HUGE_BYTES
        arena.view[16 * MIB] = arena.view[48 * MIB - 1] = 7
        assert resident_bytes(arena) == taken, "writing takes no more"


def refusing(*advice: int, number: int = errno.EINVAL) -> Callable[[int, int, int], None]:
    real = seam.madvise

    def madvise(address: int, size_bytes: int, wanted: int) -> None:
        if wanted in advice:
            raise OSError(number, os.strerror(number))
        real(address, size_bytes, wanted)

    return madvise


@makers
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_touching_leaves_contents(make: Make, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel is too old to take pages on advice."""
    if not known:
        monkeypatch.setattr(seam, "madvise", refusing(seam.MADV_POPULATE_WRITE))
    with make(16 * MIB) as arena:
        arena.view[:MIB] = data = pattern(MIB)
        arena.set_progress(511, 3)
        for offset, size_bytes in ((0, MIB), (5, 1), (100, 2 * PAGE_BYTES), (PAGE_BYTES - 1, 2)):
            arena.populate(offset, size_bytes)
        assert bytes(arena.view[:MIB]) == data
        before = resident_bytes(arena)
        arena.populate(8 * MIB, 8 * MIB)
        assert 0 <= resident_bytes(arena) - before - 8 * MIB <= 2 * HUGE_BYTES
        arena.populate(arena.size_bytes, 0)
        arena.populate(3, 0)
        assert bytes(arena.view[:MIB]) == data
        assert arena.progress(511) == 3


@makers
def test_touching_writes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what is there: a device may be copying there, and would lose a byte of it."""
    monkeypatch.setattr(seam, "madvise", refusing(seam.MADV_POPULATE_WRITE))
    array = seam.SharedMemory.array

    def read_only(memory: seam.SharedMemory) -> Any:
        found = array(memory)
        found.flags.writeable = False
        return found

    with make(MIB) as arena:
        monkeypatch.setattr(seam.SharedMemory, "array", read_only)
        for offset, size_bytes in ((0, MIB), (5, 1), (PAGE_BYTES - 1, 2)):
            arena.populate(offset, size_bytes)


def test_touch_goes_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(seam, "madvise", lambda *arguments: asked.append(arguments))
    with Arena.anonymous(1 << 30) as arena:
        start = arena.address
        advice = seam.MADV_POPULATE_WRITE
        asked.clear()
        arena.populate(PAGE_BYTES, 600 * MIB)
        assert asked == [
            (start + PAGE_BYTES, 256 * MIB, advice),
            (start + PAGE_BYTES + 256 * MIB, 256 * MIB, advice),
            (start + PAGE_BYTES + 512 * MIB, 88 * MIB, advice),
        ]


def test_system_calls_release_the_interpreter_lock() -> None:
    """So does every function of a CDLL, and none of a PyDLL."""
    libc = seam.c_library()
    assert isinstance(libc, ctypes.CDLL)
    assert not isinstance(libc, ctypes.PyDLL)


@pytest.mark.parametrize(
    ("offset", "size_bytes"), [(-1, 1), (0, -1), (0, PAGE_BYTES + 1), (PAGE_BYTES, 1), (1 << 70, 1)]
)
def test_ranges_outside_are_refused(offset: int, size_bytes: int) -> None:
    with (
        Arena.anonymous(PAGE_BYTES) as arena,
        pytest.raises(OptionError, match="are not in an arena of 4096 bytes"),
    ):
        arena.populate(offset, size_bytes)


# --- Forked children ---------------------------------------------------------------------

FORK = """
import gc, os, sys
from everstep.arena import Arena
from everstep.errors import StateError

with open("/proc/self/maps") as maps:
    assert "everstep-arena" not in maps.read()
arena, other, closed = Arena.create(1 << 20), Arena.anonymous(1 << 20), Arena.create(1 << 20)
arena.view[0] = other.view[0] = 1
view, kept = arena.view, closed.view
closed.close()
starts = [arena.address, other.address]
pid = os.fork()
if pid == 0:
    status = 1
    try:
        def permissions(address):
            with open("/proc/self/maps") as maps:
                for line in maps:
                    start, end = (int(text, 16) for text in line.split()[0].split("-"))
                    if start <= address < end:
                        return line.split()[1]
        with open("/proc/self/maps") as maps:
            assert "memfd" not in maps.read(), "no mapping"
        for name in os.listdir("/proc/self/fd"):
            try:
                assert "memfd" not in os.readlink("/proc/self/fd/" + name), "no descriptor"
            except FileNotFoundError:
                pass
        assert [permissions(start) for start in starts] == ["---p", "---p"], "fenced off"
        for use in (
            lambda: arena.view, lambda: arena.fd, lambda: arena.address,
            lambda: arena.progress(0), lambda: arena.set_progress(0, 1),
            lambda: arena.populate(0, 1), lambda: other.view,
        ):
            try:
                use()
            except StateError as error:
                assert "forked" in str(error)
            else:
                raise AssertionError("a forked child used the arena")
        arena.close()
        del arena, other, closed, view, kept
        gc.collect()
        assert [permissions(start) for start in starts] == ["---p", "---p"], "nothing unmapped"
        mine = Arena.create(1 << 20)  # a child may have arenas of its own
        mine.view[0] = 3
        mine.close()
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(pid, 0)[1] == 0
assert arena.view[0] == other.view[0] == 1 and arena.fd is not None
print("fine")
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_a_forked_child_has_no_part_in_it() -> None:
    assert run(FORK) == "fine\n"


def test_a_view_in_a_forked_child_ends_it() -> None:
    """Rather than read and write what the child has put there since."""
    script = """
    import faulthandler, os, resource, signal
    from everstep.arena import Arena
    arena = Arena.create(1 << 20)
    view = arena.view
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        view[0] = 1
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV)
    """
    assert run(script) == "True\n"


def test_where_mappings_cannot_be_kept_from_children() -> None:
    """As on macOS: then the child replaces what it inherited."""
    script = FORK.replace(
        "import gc,",
        "import everstep.seams.memory as seam, errno\n"
        "real = seam.madvise\n"
        "def madvise(address, size_bytes, advice):\n"
        "    if advice == seam.MADV_DONTFORK:\n"
        "        raise OSError(errno.ENOSYS, 'no')\n"
        "    real(address, size_bytes, advice)\n"
        "seam.madvise = madvise\n"
        "import gc,",
    )
    assert run(script) == "fine\n"


def test_a_fork_waits_for_an_arena_in_the_making() -> None:
    """Or the child would have it: mapped, and not yet kept from children."""
    script = """
    import os, threading
    from everstep.arena import Arena
    from everstep.seams import memory as seam

    real, mapped, forking = seam.madvise, threading.Event(), threading.Event()
    def madvise(address, size_bytes, advice):
        if advice == seam.MADV_DONTFORK:
            mapped.set()
            assert forking.wait(30)
        real(address, size_bytes, advice)
    seam.madvise = madvise
    os.register_at_fork(before=forking.set)  # the last one registered runs first
    arenas = []
    maker = threading.Thread(target=lambda: arenas.append(Arena.create(1 << 20)))
    maker.start()
    assert mapped.wait(30)
    pid = os.fork()
    if pid == 0:
        with open("/proc/self/maps") as maps:
            inherited = "memfd" in maps.read()
        os._exit(inherited)
    print(os.waitpid(pid, 0)[1])
    maker.join(30)
    arenas[0].view[0] = 1
    """
    assert run(script) == "0\n"


# --- The end -----------------------------------------------------------------------------


def mapped(address: int) -> bool:
    """Whether shared memory is at ``address``; private memory may come to lie there later."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(text, 16) for text in span.split("-"))
        if start <= address < end:
            return permissions == "rw-s"
    return False


@makers
def test_close_twice(make: Make) -> None:
    with no_descriptor_left():
        arena = make(64 * MIB)
        address = arena.address
        assert mapped(address)
        arena.close()
        arena.close()
        assert not mapped(address)
        for use in (
            lambda: arena.view,
            lambda: arena.fd,
            lambda: arena.address,
            lambda: arena.progress(0),
            lambda: arena.set_progress(0, 1),
            lambda: arena.populate(0, 1),
        ):
            with pytest.raises(StateError, match="the arena is closed"):
                use()


@makers
def test_views_outlive_the_arena(make: Make) -> None:
    with no_descriptor_left():
        arena = make(64 * MIB)
        address = arena.address
        part = arena.view[MIB : 2 * MIB]
        array = np.frombuffer(arena.view, np.float32, count=16)
        array[3] = 1.5
        fd = arena.fd
        arena.close()
        if fd is not None:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        part[0] = 9
        assert mapped(address)
        assert (part[0], array[3]) == (9, 1.5)
        del part
        assert mapped(address)
        del array
        gc.collect()
        assert not mapped(address), "the last view is gone"


@makers
def test_an_arena_that_nobody_closed(make: Make) -> None:
    with no_descriptor_left():
        arena = make(64 * MIB)
        address = arena.address
        del arena
        gc.collect()
        assert not mapped(address)


def test_no_descriptor_leaks() -> None:
    before = seam.mappings()
    with no_descriptor_left():
        for _ in range(50):
            arena = Arena.create(PAGE_BYTES)
            other = Arena.attach(arena.fd)
            other.view[0] = 1
            other.close()
            arena.close()
    assert seam.mappings() <= before


# --- What the system refuses -------------------------------------------------------------


@makers
@pytest.mark.parametrize("size_bytes", [0, -1])
def test_no_bytes_at_all(make: Make, size_bytes: int) -> None:
    with pytest.raises(OptionError, match=f"cannot have {size_bytes} bytes"):
        make(size_bytes)


@pytest.mark.thinned(3)
@makers
@pytest.mark.parametrize("size_bytes", [1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 100])
def test_more_than_there_can_be(make: Make, size_bytes: int) -> None:
    with (
        no_descriptor_left(),
        pytest.raises(OutOfSpaceError, match=f"no memory for an arena of {size_bytes} bytes"),
    ):
        make(size_bytes)


@contextmanager
def limited(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


def test_limits_of_the_process() -> None:
    with no_descriptor_left():
        fd = foreign(CONTROL_BYTES + (1 << 30), ALL_SEALS, header(data_bytes=1 << 30))
        create, anonymous = (lambda: Arena.create(1 << 30)), (lambda: Arena.anonymous(1 << 30))
        attach = lambda: Arena.attach(fd)  # noqa: E731
        attach().close()
        file_size = (resource.RLIMIT_FSIZE, 1 << 29)
        with limited(*file_size), pytest.raises(OutOfSpaceError) as caught:
            create()
        assert "arena of 1073741824 bytes: File too large" in str(caught.value)
        assert "ulimit -f" in (caught.value.hint or "")
        for make in (create, attach):
            with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(Unavailable) as refused:
                make()
            assert refused.value.hint == "raise ulimit -n"
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        for make in (create, attach, anonymous):
            address_space = (resource.RLIMIT_AS, pages * PAGE_BYTES + (1 << 29))
            with limited(*address_space), pytest.raises(OutOfSpaceError, match="no memory for"):
                make()
        os.close(fd)


class OtherLibc:
    """The C library of another machine."""

    def __init__(self, memfd_create: Callable[[bytes, int], int] | None) -> None:
        self._real = seam.c_library()
        self._memfd_create = memfd_create

    def __getattr__(self, name: str) -> Any:
        if name != "memfd_create":
            return getattr(self._real, name)
        if self._memfd_create is None:
            raise AttributeError(name)
        return self._memfd_create


def test_without_memfd_create(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = OtherLibc(None)
    monkeypatch.setattr(seam, "c_library", lambda: libc)
    with pytest.raises(Unavailable, match=r"an arena of 4096 bytes.*not implemented") as caught:
        Arena.create(4096)
    assert "memfd_create" in (caught.value.hint or "")
    with Arena.anonymous(4096) as arena:
        arena.view[0] = 1


def test_kernels_that_do_not_know_every_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = seam.c_library().memfd_create

    def before_linux_6_3(name: bytes, flags: int) -> int:
        asked.append(flags)
        if flags & ~3:
            ctypes.set_errno(errno.EINVAL)
            return -1
        return int(real(name, flags))

    libc = OtherLibc(before_linux_6_3)
    monkeypatch.setattr(seam, "c_library", lambda: libc)
    with Arena.create(4096) as arena, Arena.attach(arena.fd):
        assert asked == [11, 3]


def test_a_sandbox_that_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: bytes, flags: int) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    libc = OtherLibc(forbidden)
    monkeypatch.setattr(seam, "c_library", lambda: libc)
    with pytest.raises(Unavailable, match="Operation not permitted"):
        Arena.create(4096)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_runs_out(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    madvise = refusing(seam.MADV_POPULATE_WRITE, number=number)
    with Arena.create(MIB) as arena:
        monkeypatch.setattr(seam, "madvise", madvise)
        with pytest.raises(OutOfSpaceError, match="no memory for 8192 bytes of the arena"):
            arena.populate(0, 8192)


def test_advice_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages and core dumps are wishes."""
    monkeypatch.setattr(seam, "madvise", refusing(seam.MADV_HUGEPAGE, seam.MADV_DONTDUMP))
    with Arena.create(MIB) as arena:
        arena.view[0] = 1
