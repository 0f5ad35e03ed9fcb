"""The file-system contract on the real thing: direct I/O and its fallbacks, links, leases."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.arena import Block
from everstep.seams import PosixFileSystem, posix
from everstep.seams.filesystem import DIRECT_ALIGNMENT_BYTES
from tests.support.world import has_leases

PAGE = DIRECT_ALIGNMENT_BYTES
FS = PosixFileSystem()


def aligned(data: bytes) -> memoryview:
    """The same bytes at an address that direct I/O accepts."""
    block = Block(len(data))
    block.view[: len(data)] = data
    return block.view[: len(data)]


def pattern(size: int) -> bytes:
    return bytes((7 * number + number // 251) % 256 for number in range(size))


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest) -> Path:
    """On a disk, and on a file system that knows no direct I/O (or pretends to)."""
    name = "tmp_path" if request.param == "disk" else "tmpfs_folder"
    path: Path = request.getfixturevalue(name)
    return path


@pytest.mark.parametrize("direct", [True, False])
def test_written_and_read_back(direct: bool, folder: Path) -> None:
    """Aligned and not: offsets, lengths, addresses, in any mixture."""
    path, expected = folder / "f", bytearray(6 * PAGE)
    file = FS.create(path, direct=direct)
    pieces: list[tuple[int, Any]] = [
        (0, aligned(pattern(2 * PAGE))),
        (2 * PAGE, memoryview(pattern(PAGE + 1))[1:]),  # an address that is not aligned
        (3 * PAGE + 5, memoryview(pattern(100))),
        (4 * PAGE, aligned(pattern(PAGE + 17))),
        (5 * PAGE + 100, memoryview(bytearray(pattern(8))).cast("I")),
        (10, memoryview(b"")),
    ]
    for offset, data in pieces:
        file.write(data, offset)
        flat = data.cast("B")
        expected[offset : offset + flat.nbytes] = flat
    file.truncate(5 * PAGE + 108)
    file.sync()
    file.close()
    expected = expected[: 5 * PAGE + 108]
    assert path.read_bytes() == expected
    for whole in (direct, not direct):
        opened = FS.open(path, direct=whole)
        assert opened.size_bytes == len(expected)
        for offset, size in [(0, 2 * PAGE), (PAGE, 5 * PAGE), (3, 50), (5 * PAGE, PAGE), (PAGE, 1)]:
            for buffer in (Block(size).view[:size], memoryview(bytearray(size))):
                got = opened.read_into(buffer, offset)
                wanted = expected[offset : offset + size]
                assert got == len(wanted)
                assert buffer[:got] == wanted
        assert opened.read_into(memoryview(bytearray(5)), len(expected)) == 0
        assert opened.read_into(memoryview(bytearray(5)), len(expected) + PAGE) == 0
        opened.close()


@given(
    writes=st.lists(
        st.tuples(st.integers(0, 3 * PAGE), st.integers(0, 2 * PAGE), st.booleans()), max_size=6
    )
)
def test_any_sequence_of_writes(
    writes: list[tuple[int, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Direct and buffered writes to one file never lose each other's bytes."""
    path, expected = tmp_path_factory.mktemp("writes") / "f", bytearray()
    file = FS.create(path, direct=True)
    for number, (offset, size, whole_pages) in enumerate(writes):
        if whole_pages:
            offset, size = offset // PAGE * PAGE, -(-size // PAGE) * PAGE
        data = bytes([number + 1]) * size
        file.write(aligned(data) if size else memoryview(b""), offset)
        if size:
            expected.extend(bytes(max(0, offset + size - len(expected))))
            expected[offset : offset + size] = data
    file.close()
    assert path.read_bytes() == expected


def test_where_direct_io_is_refused_it_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    file = FS.create(tmp_path / "f", direct=True)
    file.write(aligned(pattern(PAGE)), 0)
    file.close()
    opened = FS.open(tmp_path / "f", direct=True)
    buffer = Block(PAGE).view
    assert opened.read_into(buffer, 0) == PAGE
    assert buffer == pattern(PAGE)
    opened.close()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_transfer_that_is_refused_goes_through_the_cache(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems open with O_DIRECT and want more than 4096: EINVAL at the transfer."""
    (tmp_path / "f").write_bytes(pattern(PAGE))
    real = getattr(os, call)
    direct: set[int] = set()
    real_open = os.open

    def noting(path: Any, flags: int, *rest: Any) -> int:
        descriptor = real_open(path, flags, *rest)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def refusing(descriptor: int, *rest: Any) -> Any:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, *rest)

    monkeypatch.setattr(os, "open", noting)
    monkeypatch.setattr(os, call, refusing)
    if call == "pwrite":
        file = FS.create(tmp_path / "g", direct=True)
        file.write(aligned(pattern(PAGE)), 0)
        file.close()
        assert (tmp_path / "g").read_bytes() == pattern(PAGE)
    else:
        opened = FS.open(tmp_path / "f", direct=True)
        buffer = Block(PAGE).view
        assert opened.read_into(buffer, 0) == PAGE
        assert buffer == pattern(PAGE)
        opened.close()


def test_other_errors_of_a_transfer_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FS.create(tmp_path / "f", direct=True)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        file.write(aligned(pattern(PAGE)), 0)
    file.close()


def test_short_transfers_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may write or read less than was asked for; a disk that fills up does."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:1000], at))
    file = FS.create(tmp_path / "f", direct=True)
    file.write(aligned(pattern(2 * PAGE)), 0)
    file.close()
    assert (tmp_path / "f").read_bytes() == pattern(2 * PAGE)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:1000]], at))
    opened = FS.open(tmp_path / "f", direct=True)
    buffer = Block(2 * PAGE).view
    assert opened.read_into(buffer, 0) == 2 * PAGE
    assert buffer == pattern(2 * PAGE)
    opened.close()


def test_a_write_of_nothing_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FS.create(tmp_path / "f")
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        file.write(memoryview(b"abc"), 0)
    file.close()


def test_private_by_default(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        FS.create(tmp_path / "f").close()
        FS.make_dir(tmp_path / "d")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


@pytest.mark.usefixtures("no_garbage")
def test_descriptors_are_closed_and_not_inherited(tmp_path: Path) -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    (tmp_path / "f").write_bytes(pattern(PAGE))
    before = descriptors()
    file, opened = FS.create(tmp_path / "g", direct=True), FS.open(tmp_path / "f", direct=True)
    reused = FS.reuse(tmp_path / "f", direct=True)
    held = descriptors() - before
    assert held
    assert not any(
        os.get_inheritable(int(number))
        for number in held
        if number.isdigit() and _is_open(int(number))
    )
    for handle in (file, opened, reused):
        if handle is not None:
            handle.close()
            handle.close()
    with pytest.raises(OSError, match="not a regular file"):
        FS.open(tmp_path)
    assert descriptors() == before


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_closed_file_takes_no_more_bytes(tmp_path: Path) -> None:
    """A transfer that comes too late must not land in whatever has the number by then."""
    file = FS.create(tmp_path / "f", direct=True)
    file.close()
    other = (tmp_path / "other").open("wb")
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write(aligned(pattern(PAGE)), 0)
    other.close()
    assert (tmp_path / "other").read_bytes() == b""


def test_create_is_exclusive(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("f", "dangling"):
        with pytest.raises(FileExistsError):
            FS.create(tmp_path / name)
    assert (tmp_path / "f").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pattern(PAGE))
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(OSError, match="symbolic link") as error:
        FS.open(tmp_path / "link")
    assert error.value.errno == errno.ELOOP
    assert FS.reuse(tmp_path / "link") is None


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            FS.open(path)


def test_a_name_that_is_removed_after_the_listing_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at work deletes a base while another one looks: that is no damage."""
    (tmp_path / "a").write_text("")
    (tmp_path / "b").mkdir()
    listed = os.scandir

    @contextlib.contextmanager
    def scandir(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with listed(path) as found:
            entries = [*found]
        (tmp_path / "b").rmdir()
        yield iter(entries)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [entry.name for entry in FS.scan(tmp_path)] == ["a"]


def test_what_a_scan_says(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "a").mkdir()
    (tmp_path / "c").symlink_to("a")
    os.mkfifo(tmp_path / "d")
    with (tmp_path / "e").open("wb") as file:
        file.truncate(1 << 40)
    found = FS.scan(tmp_path)
    assert [(e.name, e.kind) for e in found] == [
        ("a", "dir"),
        ("b", "file"),
        ("c", "link"),
        ("d", "other"),
        ("e", "file"),
    ]
    assert found[1].size_bytes == 5
    assert found[4].size_bytes == 1 << 40
    assert found[4].allocated_bytes < 1 << 20
    with pytest.raises(FileNotFoundError):
        FS.scan(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError):
        FS.scan(tmp_path / "b")


def test_renaming_replaces_and_linking_does_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        FS.link(tmp_path / "a", tmp_path / "b")
    FS.rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a"
    FS.link(tmp_path / "b", tmp_path / "c")
    FS.unlink(tmp_path / "b")
    assert (tmp_path / "c").read_text() == "a"
    with pytest.raises(FileNotFoundError):
        FS.unlink(tmp_path / "b")


@pytest.mark.parametrize("direct", [True, False])
def test_syncing_reaches_the_kernel(
    direct: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated disks show where a sync is missing, not whether this one is one."""
    synced: list[int] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    file = FS.create(folder / "f", direct=direct)
    file.write(aligned(pattern(PAGE)), 0)
    assert synced == []
    file.sync()
    file.close()
    FS.sync_dir(folder)
    assert synced == [(folder / "f").stat().st_ino, folder.stat().st_ino]


def test_a_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no such call; a disk that fails is another matter."""
    for code, tolerated in ((errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)):

        def refusing(_: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", refusing)
        if tolerated:
            FS.sync_dir(tmp_path)
        else:
            with pytest.raises(OSError, match="Input/output"):
                FS.sync_dir(tmp_path)


# Reusing files.


@pytest.fixture
def leases(tmp_path: Path) -> None:
    if not has_leases(tmp_path):
        pytest.skip("this file system has no leases")


def test_a_file_that_nobody_has_is_reused(leases: None, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pattern(3 * PAGE))
    file = FS.reuse(tmp_path / "f", direct=True)
    assert file is not None
    file.write(aligned(bytes(PAGE)), 0)
    file.truncate(2 * PAGE)
    file.sync()
    file.close()
    assert (tmp_path / "f").read_bytes() == bytes(PAGE) + pattern(2 * PAGE)[PAGE:]


@pytest.mark.parametrize("how", ["reading", "writing", "mapped", "linked"])
def test_a_file_that_somebody_has_is_not(how: str, leases: None, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(pattern(PAGE))
    close = []
    if how == "linked":
        os.link(path, tmp_path / "other")
    elif how == "mapped":
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        close.append(view.close)
    else:
        flags = {"reading": os.O_RDONLY, "writing": os.O_WRONLY}[how]
        descriptor = os.open(path, flags)
        close.append(lambda: os.close(descriptor))
    assert FS.reuse(path) is None
    for call in close:
        call()
    if how != "linked":
        again = FS.reuse(path)
        assert again is not None
        again.close()
    assert path.read_bytes() == pattern(PAGE)


def test_a_file_that_another_process_has_is_not(leases: None, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(pattern(PAGE))
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.readline()",
            str(path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    assert FS.reuse(path) is None
    process.communicate("\n", timeout=20)
    again = FS.reuse(path)
    assert again is not None
    again.close()


@pytest.mark.parametrize("what", ["nothing", "a folder", "a pipe"])
def test_what_is_no_file_is_not_reused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    if what == "a folder":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    assert FS.reuse(path) is None


def test_without_leases_nothing_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x")
    monkeypatch.setattr(posix, "fcntl", None)
    assert FS.reuse(tmp_path / "f") is None


def test_free_bytes(tmp_path: Path) -> None:
    assert FS.free_bytes(tmp_path) > 0


def test_what_was_reserved_in_vain_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 keeps what it found before the disk was full."""

    def half(fd: int, size_bytes: int) -> int:
        os.posix_fallocate(fd, 0, size_bytes // 2)
        return errno.ENOSPC

    file = FS.create(tmp_path / "a")
    file.write(memoryview(b"there"), 0)
    monkeypatch.setattr("everstep.seams.posix.allocate", half)
    with pytest.raises(OSError, match="No space left") as caught:
        file.reserve(1 << 20)
    file.close()
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "a").read_bytes() == b"there"
    (entry,) = FS.scan(tmp_path)
    assert entry.allocated_bytes <= 64 << 10
