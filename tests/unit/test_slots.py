"""Recycling: files of deleted bases are overwritten only when nobody can be looking at them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from everstep import Checkpointer
from everstep.format.names import SLOTS_DIR
from everstep.seams import PosixFileSystem
from everstep.tiers.slots import SlotStore

ELEMENTS = 1 << 19  # 2 MiB: worth recycling
TIMEOUT_S = 60


def shard(run: Path, step: int) -> Path:
    return run / f"timeline-00001/base/{step:012d}/rank-00000.safetensors"


class Run:
    """A run of one tensor that keeps one base, so every save recycles the one before last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = {"x": torch.zeros(ELEMENTS)}
        self.ckpt = Checkpointer(folder, self.state, method="sync", every=1, keep=1)

    def save(self, value: float) -> int:
        """Saves a base full of ``value``; returns the inode of its file."""
        self.state["x"].fill_(value)
        self.ckpt.step()
        return os.stat(self.path).st_ino

    @property
    def path(self) -> Path:
        return shard(self.folder, self.ckpt.stats().step)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_slot_is_overwritten_and_reads_like_a_fresh_file(run: Run) -> None:
    first = run.save(1.0)
    run.save(2.0)
    assert run.save(3.0) == first, "the file of the first base is used again"
    found = safetensors.torch.load_file(run.path)
    assert torch.equal(found["x"], torch.full((ELEMENTS,), 3.0))


def test_a_longer_slot_is_cut(tmp_path: Path) -> None:
    filesystem = PosixFileSystem()
    store = SlotStore(filesystem, tmp_path / SLOTS_DIR)
    old = tmp_path / "old"
    old.write_bytes(b"x" * (3 << 20))
    store.park(old, 3 << 20)
    file = store.claim(tmp_path / "new", 2 << 20)
    assert file is not None
    file.truncate(5000)
    file.close()
    assert (tmp_path / "new").read_bytes() == bytes(4096) + b"x" * 904


def test_a_claimed_slot_is_refused_by_every_reader_before_it_is_written(tmp_path: Path) -> None:
    parked = tmp_path / "old"
    safetensors.torch.save_file({"x": torch.ones(ELEMENTS)}, parked)
    store = SlotStore(PosixFileSystem(), tmp_path / SLOTS_DIR)
    store.park(parked, parked.stat().st_size)
    file = store.claim(tmp_path / "new", 2 << 20)
    assert file is not None
    file.close()
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load_file(tmp_path / "new")


def test_a_file_mapped_in_this_process_never_changes(run: Run) -> None:
    first = run.save(1.0)
    with open(run.path, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    before = bytes(mapped)
    inodes = [run.save(float(value)) for value in (2, 3, 4, 5)]
    assert bytes(mapped) == before
    assert first not in inodes
    assert inodes[-1] in inodes[:-1], "the others go on being recycled"
    mapped.close()


def test_a_tensor_read_by_safetensors_never_changes(run: Run) -> None:
    run.save(1.0)
    with safetensors.safe_open(run.path, framework="pt") as opened:
        for value in (2, 3, 4):
            run.save(float(value))
        assert torch.equal(opened.get_tensor("x"), torch.full((ELEMENTS,), 1.0))


def test_a_file_mapped_in_another_process_never_changes(run: Run) -> None:
    first = run.save(1.0)
    reader = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as f: m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "before = bytes(m)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.readline()\n"
        "sys.exit(bytes(m) != before)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", reader, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "mapped\n"
        assert first not in [run.save(float(value)) for value in (2, 3, 4)]
        other.communicate("compare\n", timeout=TIMEOUT_S)
        assert other.returncode == 0
    finally:
        other.kill()
        other.wait(TIMEOUT_S)


def test_a_file_with_another_name_is_not_recycled(run: Run, tmp_path: Path) -> None:
    first = run.save(1.0)
    os.link(run.path, tmp_path / "mine")
    before = (tmp_path / "mine").read_bytes()
    assert first not in [run.save(float(value)) for value in (2, 3, 4)]
    assert (tmp_path / "mine").read_bytes() == before


def test_slots_that_fit_nothing_are_given_back(tmp_path: Path) -> None:
    store = SlotStore(PosixFileSystem(), tmp_path / SLOTS_DIR)
    (tmp_path / "old").write_bytes(bytes(2 << 20))
    store.park(tmp_path / "old", 2 << 20)
    assert store.parked_bytes() == 2 << 20
    store.drop_unfit([9 << 20])
    assert store.parked_bytes() == 0


def test_closing_gives_the_room_back(run: Run) -> None:
    for value in (1, 2, 3):
        run.save(float(value))
    slots = run.folder / "timeline-00001" / SLOTS_DIR
    assert any(slots.iterdir())
    run.ckpt.close()
    assert not slots.exists()
