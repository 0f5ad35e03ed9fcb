"""What errors tell people: what happened, where, and what to do about it."""

from __future__ import annotations

import copy
import errno
import os
import re
import shutil
from pathlib import Path, PurePath

import pytest
from torch import nn

from everstep import Budget, Checkpointer, KeeperOptions
from everstep.errors import (
    DamageError,
    EverstepError,
    InfeasibleError,
    MismatchError,
    OptionError,
    StorageError,
    UnsupportedStateError,
)
from everstep.tiers.durable_files import storage_errors

THREAD = KeeperOptions(process=False)


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOTDIR, "StorageError", "a file is in the place of a directory"),
        (errno.ENOENT, "StorageError", "it was deleted, moved or unmounted while in use"),
        (errno.ENAMETOOLONG, "StorageError", "a shorter path"),
        (errno.ELOOP, "StorageError", "a cycle of links"),
        (errno.EIO, "StorageError", "check the disk"),
        (errno.ENOSPC, "OutOfSpaceError", "free some space"),
        (errno.EDQUOT, "OutOfSpaceError", "free some space"),
        (errno.EFBIG, "OutOfSpaceError", "ulimit -f"),
        (errno.EROFS, "PermissionDeniedError", "file system is read-only"),
        (errno.EACCES, "PermissionDeniedError", "that this user may write"),
    ],
)
def test_what_the_file_system_says_is_told_with_what_to_do(
    number: int, kind: str, hint: str
) -> None:
    with (
        pytest.raises(StorageError) as caught,
        storage_errors("write the base", PurePath("/run/base"), step=5, rank=3),
    ):
        raise OSError(number, os.strerror(number))
    error = caught.value
    assert type(error).__name__ == kind
    assert hint in str(error.hint)
    assert f"[step 5, rank 3, tier disk, {error.path}]" in str(error)


def test_a_run_that_is_deleted_under_a_training(run_folder: Path) -> None:
    ckpt = Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=1)
    ckpt.resume()
    shutil.rmtree(run_folder)
    with pytest.raises(StorageError) as caught:
        ckpt.step()
        ckpt.wait()
    assert "deleted, moved or unmounted" in str(caught.value.hint)
    reason = "could not write the base: No such file or directory"
    assert caught.value.message == f"{reason}: the run folder {run_folder} does not exist any more"
    ckpt.close()


def test_bases_go_on_where_a_run_folder_is_put_back(run_folder: Path) -> None:
    away = run_folder.with_name("away")
    ckpt = Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=1)
    ckpt.resume()
    run_folder.rename(away)
    with pytest.raises(StorageError, match=f"the run folder {run_folder} does not exist any more"):
        ckpt.step()
        ckpt.wait()
    away.rename(run_folder)
    ckpt.step()
    ckpt.close()
    assert ckpt.stats().durable_step == 2


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("base", ""),
        ("timeline-00001", ": {}/run/timeline-00001 does not exist"),
        ("run", ": the run folder {}/run does not exist any more"),
        ("", ": {} does not exist"),
    ],
)
def test_what_is_gone_of_the_way_to_a_file_is_named(
    missing: str, said: str, tmp_path: Path
) -> None:
    """A run folder that was renamed is not looked for in the base that could not be written."""
    disk = tmp_path / "disk"
    path = disk / "run" / "timeline-00001" / "base"
    kept = {"base": path.parent, "timeline-00001": path.parents[1], "run": disk, "": tmp_path}
    kept[missing].mkdir(parents=True, exist_ok=True)
    with pytest.raises(StorageError) as caught, storage_errors("write the base", path):
        path.open()
    reason = "could not write the base: No such file or directory"
    assert caught.value.message == reason + said.format(disk)


def test_a_run_folder_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    for run in (link, link / "run"):
        with pytest.raises(StorageError, match=f": {link} does not exist") as caught:
            Checkpointer(run, {"n": 1}, keeper=THREAD)
        assert "or unmounted" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "hint"), [("a" * 300, "a shorter path"), ("loop/x", "cycle of links")]
)
def test_paths_that_cannot_be_followed(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(StorageError) as caught:
        Checkpointer(tmp_path / name, {"n": 1}, keeper=THREAD)
    assert hint in str(caught.value.hint)


def test_a_mismatch_says_which_base_it_is_about(run_folder: Path) -> None:
    with Checkpointer(run_folder, {"m": nn.Linear(3, 2)}, keeper=THREAD, every=1) as ckpt:
        ckpt.resume()
        ckpt.step()
    with (
        Checkpointer(run_folder, {"m": nn.Linear(4, 2)}, keeper=THREAD) as ckpt,
        pytest.raises(MismatchError) as caught,
    ):
        ckpt.resume()
    base = run_folder / "timeline-00001" / "base" / "000000000001"
    assert (caught.value.step, caught.value.path) == (1, str(base))
    assert str(caught.value).startswith(
        f"the checkpoint and the live state differ in 1 place(s) [step 1, {base}]:\n  m/weight: "
    )


def test_a_damaged_record_is_named_once(run_folder: Path) -> None:
    with Checkpointer(run_folder, {"n": 1}, keeper=THREAD, every=1) as ckpt:
        ckpt.step()
    (run_folder / "run.json").write_text("{")
    with Checkpointer(run_folder, {"n": 1}, keeper=THREAD) as ckpt:
        (note,) = ckpt.resume().notes
    assert note.startswith(f"{run_folder}/run.json: run.json: not a record: ")


def test_cores_that_no_machine_has(run_folder: Path) -> None:
    """A keeper would run anywhere else, and say so where nobody looks."""
    with pytest.raises(OptionError, match="this machine has only the cores") as caught:
        Checkpointer(run_folder, {"n": 1}, keeper=KeeperOptions(cores=(10**6,)))
    assert "cores=None" in str(caught.value.hint)
    assert not run_folder.exists()


def test_a_budget_says_what_would_fit(run_folder: Path) -> None:
    with pytest.raises(StorageError) as caught:
        Checkpointer(run_folder, {"m": nn.Linear(9, 9)}, budget=Budget(disk_bytes=10))
    said = re.fullmatch(r"Budget\(disk_bytes=(\d+)\)", str(caught.value.hint))
    assert said is not None
    budget = Budget(disk_bytes=int(said[1]))
    Checkpointer(run_folder, {"m": nn.Linear(9, 9)}, budget=budget, keeper=THREAD).close()


@pytest.mark.parametrize(
    "error",
    [
        StorageError("no", step=3, rank=1, path="/x", hint="do"),
        UnsupportedStateError("no", leaves=(("x", "code"),), rank=2),
        DamageError("no", entry="model/x"),
        InfeasibleError("no", quantity="bytes", needed=2.0),
    ],
)
def test_an_error_of_another_process_has_all_its_fields(error: EverstepError) -> None:
    """torch sends the errors of ranks to each other."""
    found = copy.copy(error)  # as pickle does it
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
