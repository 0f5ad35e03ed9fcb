"""Recycled files: as good as fresh ones, and never changed under anybody's eyes."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path, PurePath
from typing import Any

import pytest
import safetensors
import torch

from everstep.errors import StorageError
from everstep.format.names import SLOTS_DIR
from everstep.seams import PosixFileSystem
from everstep.tiers.durable_files import SlotStore
from tests.support.world import (
    TIMEOUT_S,
    HookedFileSystem,
    base_folder,
    has_leases,
    inventory_of,
    opened,
    raising,
    verdict_of,
)

MIB = 1 << 20
ELEMENTS = 600_000  # 2.4 MB: worth recycling


@pytest.fixture(autouse=True)
def recycling(tmp_path: Path) -> None:
    if not has_leases(tmp_path):
        pytest.skip("this file system has no leases")


class Run:
    """Keeps one base, so that each new one may be written over the last but one."""

    def __init__(self, path: Path, fs: Any = None) -> None:
        self.path = path
        self.state = {"t": torch.zeros(ELEMENTS)}
        self._opened = opened(path, self.state, keep=1, fs=fs or PosixFileSystem())
        self.ckpt = self._opened.__enter__()
        self.step = 0

    def save(self, elements: int = ELEMENTS) -> Path:
        """Takes a base full of its step; returns its shard."""
        self.step += 1
        if self.state["t"].numel() != elements:
            self.state["t"] = torch.zeros(elements)
        self.state["t"].fill_(self.step)
        self.ckpt.step()
        self.ckpt.save()
        return base_folder(self.path, self.step) / "rank-00000.safetensors"

    def close(self) -> None:
        self._opened.__exit__(None, None, None)


def inode(path: Path) -> int:
    return path.stat().st_ino


def slots(run: Path) -> list[Path]:
    return sorted((run / "timeline-00001" / SLOTS_DIR).glob("*"))


def check_newest(run: Path, value: int, elements: int = ELEMENTS) -> None:
    (base,) = inventory_of(run).bases
    assert not verdict_of(base).damages
    live = {"t": torch.zeros(elements)}
    with opened(run, live) as ckpt:
        assert ckpt.resume().step == value
    assert (live["t"] == value).all()


def test_files_go_round(run_folder: Path) -> None:
    run = Run(run_folder)
    inodes = [inode(run.save()) for _ in range(6)]
    assert len(set(inodes)) == 2
    run.close()
    check_newest(run_folder, 6)
    assert slots(run_folder) == []


@pytest.mark.parametrize("sizes", [(900_000, 600_000), (600_000, 900_000)])
def test_a_recycled_file_is_like_a_fresh_one(sizes: tuple[int, int], run_folder: Path) -> None:
    """Also when the old file was longer or shorter: not a byte of it is left."""
    before, after = sizes
    run = Run(run_folder)
    parked = inode(run.save(before))
    run.save(before)
    recycled = run.save(after)
    assert inode(recycled) == parked
    run.close()
    fresh_run = Run(run_folder.with_name("fresh"))
    fresh_run.step = 2
    fresh_run.ckpt.resume()
    fresh_run.ckpt.step()
    fresh_run.ckpt.step()
    fresh = fresh_run.save(after)
    fresh_run.close()
    assert recycled.stat().st_size == fresh.stat().st_size
    with safetensors.safe_open(recycled, "pt") as one, safetensors.safe_open(fresh, "pt") as two:
        assert list(one.keys()) == list(two.keys())
        assert torch.equal(one.get_tensor("t"), two.get_tensor("t"))
    check_newest(run_folder, 3, after)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("reader", ["mmap", "open", "safetensors", "another process"])
def test_who_looks_at_a_file_never_sees_it_change(reader: str, run_folder: Path) -> None:
    """A base that is deleted while somebody has its file mapped or open is not recycled."""
    run = Run(run_folder)
    path = run.save()
    seen = path.read_bytes()
    number = inode(path)
    process: subprocess.Popen[str] | None = None
    held: Any = None
    if reader == "another process":
        script = (
            "import mmap, sys, hashlib\n"
            "file = open(sys.argv[1], 'rb')\n"
            "view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
            "file.close()\n"
            "print('mapped', flush=True)\n"
            "sys.stdin.readline()\n"
            "print(hashlib.sha256(view).hexdigest(), flush=True)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
    elif reader == "safetensors":
        held = safetensors.safe_open(path, "pt").__enter__()
    else:
        held = path.open("rb")
        if reader == "mmap":
            file, held = held, mmap.mmap(held.fileno(), 0, access=mmap.ACCESS_READ)
            file.close()
    inodes = [inode(run.save()) for _ in range(4)]
    assert number not in inodes
    if process is not None:
        out, _ = process.communicate("\n", timeout=TIMEOUT_S)
        assert out.strip() == hashlib.sha256(seen).hexdigest()
    elif reader == "safetensors":
        assert (held.get_tensor("t") == 1).all()
        held.__exit__(None, None, None)
    else:
        assert held.read(len(seen)) == seen
        held.close()
    run.close()
    check_newest(run_folder, 5)


def test_a_hard_link_is_not_written_over(run_folder: Path) -> None:
    """Somebody keeps a base by linking its files: theirs for ever."""
    run = Run(run_folder)
    path = run.save()
    kept, seen = run_folder.with_name("kept"), path.read_bytes()
    os.link(path, kept)
    inodes = [inode(run.save()) for _ in range(4)]
    assert inode(kept) not in inodes
    assert kept.read_bytes() == seen
    run.close()


def test_a_slot_is_invalid_before_it_is_written(run_folder: Path) -> None:
    """Its header is gone, durably, before it gets a new name or new bytes."""
    fs, events = HookedFileSystem(), list[tuple[str, bool]]()
    run = Run(run_folder, fs)
    for _ in range(2):
        run.save()
    (slot,) = slots(run_folder)

    def watch(op: str, path: PurePath) -> None:
        """Notes whether the file is invalid just before each operation that concerns it."""
        if slot.exists() and (path.name == slot.name or path.name.endswith(".safetensors.tmp")):
            with slot.open("rb") as file:
                events.append((op, file.read(4096) == bytes(4096)))

    fs.hook = watch
    run.save()
    run.close()
    assert events[:5] == [
        ("reuse", False),
        ("write", False),
        ("sync", True),
        ("unlink", True),
        ("rename", True),
    ]


def test_a_reader_that_comes_between_is_refused(run_folder: Path) -> None:
    """Whoever opens the file while it is being written gets an error, not half of each."""
    fs = HookedFileSystem()
    run = Run(run_folder, fs)
    for _ in range(2):
        run.save()
    looked = []

    def look(op: str, path: PurePath) -> None:
        if op == "truncate":
            (staged,) = run_folder.rglob("*.safetensors.tmp")
            with pytest.raises(safetensors.SafetensorError):
                safetensors.safe_open(staged, "pt").__enter__()
            looked.append(path)

    fs.hook = look
    run.save()
    assert looked
    run.close()
    check_newest(run_folder, 3)


@pytest.mark.parametrize("op", ["write", "sync"])
def test_a_slot_that_fails_is_not_tried_again(op: str, run_folder: Path) -> None:
    """A bad block in a parked file must not fail every base from then on."""
    fs = HookedFileSystem()
    run = Run(run_folder, fs)
    for _ in range(2):
        run.save()

    def broken(seen_op: str, path: PurePath) -> None:
        if seen_op == op and path.parent.name == SLOTS_DIR:
            raise OSError(5, "Input/output error")

    fs.hook = broken
    with pytest.raises(StorageError):
        run.save()
    assert slots(run_folder) == []
    run.save()
    run.close()
    check_newest(run_folder, 4)


@pytest.mark.parametrize("op", ["unlink", "rename"])
def test_an_error_while_claiming_leaves_nothing(op: str, run_folder: Path) -> None:
    fs = HookedFileSystem()
    run = Run(run_folder, fs)
    for _ in range(2):
        run.save()
    fs.hook = raising(OSError(5, "Input/output error"), op, "*.safetensors.tmp")
    with pytest.raises(StorageError):
        run.save()
    assert not list(run_folder.rglob("*.tmp"))
    run.save()
    run.close()
    check_newest(run_folder, 4)


# The store itself.


class Store:
    def __init__(self, folder: Path) -> None:
        self.fs = HookedFileSystem()
        self.folder = folder / SLOTS_DIR
        self.slots = SlotStore(self.fs, PurePath(self.folder))

    def file(self, name: str, size: int) -> PurePath:
        path = self.folder.parent / name
        path.write_bytes(b"x" * size)
        return PurePath(path)


def test_small_files_are_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.file("a", MIB - 1)
    store.slots.park(path, MIB - 1)
    assert not Path(path).exists()
    assert not store.folder.exists()


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_what_may_have_its_old_name_again_is_not_written_over(
    tmp_path: Path, stays: bool, new: bool
) -> None:
    """The renaming is not known to be durable: a power loss would show the new bytes there."""
    store = Store(tmp_path)
    filesystem = HookedFileSystem()
    slots = SlotStore(filesystem, PurePath(store.folder))

    def fail(op: str, path: PurePath) -> None:
        unsynced = op == "sync_dir" and path.name == (SLOTS_DIR if new else "base")
        if unsynced or (stays and op == "unlink"):
            raise OSError(28, "No space left on device")

    (tmp_path / "base").mkdir()
    path = store.file("base/a", MIB)
    filesystem.hook = fail
    with pytest.raises((OSError, StorageError)):
        slots.park(path, MIB)
    filesystem.hook = lambda op, path: None
    assert len(list(store.folder.iterdir())) == int(stays)
    assert slots.claim(PurePath(tmp_path / "target"), MIB) is None


def test_no_more_than_so_many(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.slots.count_max = 2
    for number in range(5):
        store.slots.park(store.file(str(number), MIB + number), MIB + number)
    assert sorted(path.stat().st_size - MIB for path in store.folder.iterdir()) == [3, 4]
    assert store.slots.parked_bytes() == 2 * MIB + 7


def test_only_files_of_about_the_size_are_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.slots.park(store.file("a", 4 * MIB), 4 * MIB)
    target = PurePath(tmp_path / "target")
    for size in (9 * MIB, MIB):
        assert store.slots.claim(target, size) is None
    store.slots.drop_unfit([5 * MIB])
    assert store.slots.parked_bytes() == 4 * MIB
    file = store.slots.claim(target, 5 * MIB)
    assert file is not None
    file.close()
    assert Path(target).stat().st_size == 4 * MIB
    store.slots.park(target, 4 * MIB)
    store.slots.drop_unfit([MIB])
    assert store.slots.parked_bytes() == 0


def test_claiming_replaces_what_has_the_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.slots.park(store.file("a", MIB), MIB)
    target = store.file("target", 5)
    file = store.slots.claim(target, MIB)
    assert file is not None
    file.close()
    assert Path(target).read_bytes()[:4096] == bytes(4096)
    assert store.slots.claim(target, MIB) is None


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Neither other names, nor folders, nor anything behind a link."""
    store = Store(tmp_path)
    store.folder.mkdir()
    for name in ("notes.txt", "slot-1", "slot-00000x"):
        (store.folder / name).write_text("mine")
    (store.folder / "slot-00007").mkdir()
    assert store.slots.claim(PurePath(tmp_path / "t"), 4) is None
    store.slots.clear()
    assert len(list(store.folder.iterdir())) == 4
    elsewhere = tmp_path / "elsewhere"
    store.folder.rename(elsewhere)
    (elsewhere / "slot-00000").write_bytes(b"x" * MIB)
    store.folder.symlink_to(elsewhere)
    assert store.slots.parked_bytes() == 0
    assert store.slots.claim(PurePath(tmp_path / "t"), MIB) is None
    store.slots.clear()
    assert (elsewhere / "slot-00000").exists()


def test_clearing_removes_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.slots.clear()
    store.slots.park(store.file("a", MIB), MIB)
    store.slots.clear()
    assert not store.folder.exists()
