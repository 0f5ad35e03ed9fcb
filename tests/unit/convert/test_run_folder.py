"""Run folders that are replaced in one step: wherever the process dies, one of them is there."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch

import everstep
from everstep.convert import run_folder
from everstep.convert.importing import state_of
from everstep.convert.run_folder import (
    earlier,
    put_earlier_back,
    remove_run,
    replace_run,
    write_run,
)
from everstep.errors import OptionError, StorageError
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.seams import PosixFileSystem
from tests.support.trainers import run_trainer
from tests.support.world import TIMEOUT_S


def write(path: Path, value: int) -> None:
    state = state_of({"model": {"weight": torch.full((4,), float(value))}, "n": value}, value)
    with closing(ChunkRing(CHUNKS, WRITERS)) as ring:
        replace_run(PosixFileSystem(), path, state, ring)


def read(path: Path) -> int:
    loaded = everstep.load(path)
    value = loaded.objects["n"]
    assert torch.equal(loaded.tensors["model/weight"], torch.full((4,), float(value)))
    return int(value)


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_newest_one_is_under_the_name(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:  # as on NFS
        monkeypatch.setattr(run_folder, "exchange", lambda *names: errno.EINVAL)
    for value in (5, 3, 3, 9):  # also of an earlier step, and of the same
        write(tmp_path / "deep" / "last.ckpt", value)
        assert read(tmp_path / "deep" / "last.ckpt") == value
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["last.ckpt"]


KILLED = """
import errno, os, signal, sys
from contextlib import closing
from pathlib import Path
import torch
from everstep.convert import run_folder
from everstep.convert.importing import state_of
from everstep.format.writer import CHUNKS, WRITERS, ChunkRing
from everstep.seams import PosixFileSystem
from everstep.seams.filesystem import observed

path, left, exchanges = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"

def moved():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

if not exchanges:
    run_folder.exchange = lambda *names: errno.EINVAL
state = state_of({"model": {"weight": torch.full((4,), 2.0)}, "n": 2}, 2)
filesystem = observed(PosixFileSystem(), moved)
with closing(ChunkRing(CHUNKS, WRITERS)) as ring:
    run_folder.replace_run(filesystem, path, state, ring)
"""


# All operations around the replacement, and some of those that write the files before it.
POINTS = (*range(1, 80, 7), *range(80, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [True, False])
def test_it_is_killed_after_any_operation(exchanges: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    found = list[int]()
    for operations in POINTS:
        write(path, 1)
        killed, _, err = run_trainer(
            KILLED, str(path), str(operations), str(int(exchanges)), timeout_s=TIMEOUT_S
        )
        assert killed in (0, -signal.SIGKILL), err
        if not exchanges:
            put_earlier_back(PosixFileSystem(), path)
        found.append(read(path))
        if killed == 0:
            break
    assert POINTS[len(found) - 1] > 80
    assert found == sorted(found), "before the replacement the old one, after it the new one"
    assert set(found) == {1, 2}
    write(path, 3)  # removes what dead processes have left
    assert [one.name for one in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_killed_replacement_is_found_by_its_name(tmp_path: Path) -> None:
    """Where names cannot be exchanged: programs list ``last*.ckpt`` to find the newest."""
    write(tmp_path / "last.ckpt", 1)
    os.rename(tmp_path / "last.ckpt", earlier(tmp_path / "last.ckpt"))
    assert read(next(tmp_path.glob("last*.ckpt"))) == 1
    put_earlier_back(PosixFileSystem(), tmp_path / "last.ckpt")
    assert read(tmp_path / "last.ckpt") == 1


def test_an_error_leaves_the_old_one_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "last.ckpt", 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(PosixFileSystem, "sync_dir", full)
        with pytest.raises(StorageError, match="No space left"):
            write(tmp_path / "last.ckpt", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert read(tmp_path / "last.ckpt") == 1


def test_what_another_process_writes_is_not_swept(tmp_path: Path) -> None:
    partial = tmp_path / f"{run_folder._PARTIAL}other"
    partial.mkdir()
    with run_folder._held(partial):
        write(tmp_path / "a.ckpt", 1)
        assert partial.exists()
    write(tmp_path / "b.ckpt", 1)
    assert not partial.exists()


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "best.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    write(tmp_path / "last.ckpt", 2)
    assert (read(tmp_path / "best.ckpt"), read(tmp_path / "last.ckpt")) == (1, 2)
    assert not (tmp_path / "last.ckpt").is_symlink()


def test_a_removed_one_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", 1)
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")
    remove_run(PosixFileSystem(), tmp_path / "link.ckpt")
    assert read(tmp_path / "a.ckpt") == 1
    remove_run(PosixFileSystem(), tmp_path / "a.ckpt")
    remove_run(PosixFileSystem(), tmp_path / "a.ckpt")  # fine
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "what"),
    [("file", "is a file"), ("run", "is a run of everstep"), ("folder", "another")],
)
def test_other_things_are_not_replaced(other: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    if other == "file":
        path.write_bytes(b"of torch.save")
    elif other == "folder":
        path.mkdir()
        (path / "mine").touch()
    else:
        state = state_of({"model": {"weight": torch.ones(4)}}, 1)
        with closing(ChunkRing(CHUNKS, WRITERS)) as ring:
            write_run(PosixFileSystem(), path, state, ring)
    with pytest.raises(OptionError, match=what):
        write(path, 1)
    with pytest.raises(OptionError, match=what):
        remove_run(PosixFileSystem(), path)
    assert path.exists()
