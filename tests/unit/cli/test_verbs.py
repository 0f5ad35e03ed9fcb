"""The command: what each verb says, its exit status, and that looking changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import everstep
import everstep.cli
import everstep.run.scan
import everstep.run.verify
from everstep.cli import app, main
from everstep.cli.common.errors import EXIT_STATUS, ExitCode, status_of
from everstep.cli.common.output import in_words, plain, when
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FormatError,
    InfeasibleError,
    KeeperError,
    KeeperTimeoutError,
    NewerFormatError,
    OptionError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    UnavailableError,
    UnsupportedStateError,
)
from everstep.format.digests import digest
from everstep.format.names import base_dir, timeline_dir
from everstep.format.records import canonical
from everstep.seams import PosixFileSystem
from everstep.seams.failpoints import FailpointError, arm, disarm_all
from everstep.tiers.memory import MemoryTier
from tests.support.command import document, invoke

HOSTILE = "[bold red]x[/] :skull: \x1b[2J\x1b]0;title\x07\u202eevil\n\rline"
"""Markup, an emoji code, escapes, a mark that turns the direction of writing, line ends."""

READERS = (["ls"], ["inspect"], ["verify"], ["du"])
"""Verbs that only look."""


# --- Runs to look at --------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Timeline 1 with bases 2, 4, 6; timeline 2, forked from its step 4, with base 6."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    for resumed_step in (0, 4):
        torch.manual_seed(resumed_step)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "data": {HOSTILE: torch.arange(6.0).reshape(2, 3).t(), "tied": model[0].weight},
        }
        with everstep.Checkpointer(folder, state, method="sync", every=2, keep=9) as ckpt:
            start = ckpt.resume(step=resumed_step).step
            for _ in range(start, 6):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                ckpt.step()
    return folder


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    """A copy of the template that a test may spoil."""
    return Path(shutil.copytree(template, tmp_path / "run"))


def base_of(run: Path, timeline: int = 2, step: int = 6) -> Path:
    return Path(base_dir(run, timeline, step))


def shard_of(run: Path, timeline: int = 2, step: int = 6) -> Path:
    return base_of(run, timeline, step) / "rank-00000.safetensors"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def listing(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every name below ``folder`` with mode, size and times, directories included."""
    found: dict[str, tuple[int, ...]] = {}
    for path in [folder, *folder.rglob("*")]:
        info = path.lstat()
        key = os.fspath(path.relative_to(folder))
        found[key] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    return found


# --- Running the command ----------------------------------------------------------------


def entries_of(run: Path, *args: object) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in document("inspect", run, *args)["entries"]}


# --- ls ---------------------------------------------------------------------------------


def test_ls_tells_history_and_what_resume_would_choose(run: Path) -> None:
    found = document("ls", run)
    assert found["resume"] == {"timeline": 2, "step": 6}
    assert found["problems"] == []
    bases = {(base["timeline"], base["step"]): base for base in found["bases"]}
    assert [key for key, base in bases.items() if not base["in_history"]] == [(1, 6)]
    assert {base["status"] for base in bases.values()} == {"committed"}
    assert all(base["exact"] and base["created_unix_s"] > 0 for base in bases.values())
    first, second = found["timelines"]
    assert (first["parent"], first["fork_step"]) == (None, None)
    assert (second["parent"], second["fork_step"]) == (1, 4)

    text = invoke("ls", run).stdout
    assert "step 4 of timeline 1" in text
    assert "abandoned" in text
    assert "resume() would choose step 6 of timeline 2" in text


def test_ls_passes_over_what_resume_would_pass_over(run: Path) -> None:
    os.truncate(shard_of(run), 5000)
    found = document("ls", run, status=1)
    assert not found["ok"]
    assert found["resume"] == {"timeline": 1, "step": 4}
    newest = found["bases"][-1]
    assert "rank-00000.safetensors is missing, or has another length" in newest["problems"][0]
    shown = invoke("ls", run)
    assert (shown.exit_code, "see below" in shown.stdout) == (ExitCode.DIFFERENT, True)
    assert "passed over step 6" in invoke("inspect", run).stdout
    assert document("inspect", run, status=1)["step"] == 4
    assert document("inspect", run, "--step", 4)["step"] == 4, "nothing was passed over"


def test_ls_calls_no_damage_what_is_deleted_while_it_looks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process at work: base and segments were there when the folder was listed."""
    real = everstep.run.scan.scan_run

    def scan(*args: Any) -> Any:
        found = real(*args)
        if base_of(run).exists():
            shutil.rmtree(base_of(run))
        return found

    monkeypatch.setattr(everstep.run.scan, "scan_run", scan)
    assert document("ls", run)["ok"]


@pytest.mark.parametrize("manifest_too", [True, False])
def test_verify_calls_no_damage_a_base_that_goes_as_it_is_read(
    run: Path, manifest_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest goes first: where only the data are gone, nobody has deleted the base."""
    real, base = everstep.run.verify.verify_base, base_of(run)

    def slow(*args: Any, **options: Any) -> Any:
        if (base / "manifest.json").exists() and str(base) in str(args):
            if manifest_too:
                (base / "manifest.json").unlink()
            (base / "rank-00000.safetensors").unlink(missing_ok=True)
        return real(*args, **options)

    monkeypatch.setattr(everstep.run.verify, "verify_base", slow)
    found = document("verify", run, status=0 if manifest_too else 1)
    at = int(base.parent.parent.name.removeprefix("timeline-")), int(base.name)
    (mine,) = [one for one in found["bases"] if (one["timeline"], one["step"]) == at]
    assert bool(mine["damages"]) == (not manifest_too)


@pytest.mark.parametrize("how", ["unfinished", "condemned", "removed"])
def test_ls_calls_no_damage_what_is_unfinished_or_goes(run: Path, how: str) -> None:
    if how == "unfinished":
        base_of(run, 2, 8).mkdir()
        (base_of(run, 2, 8) / "rank-00000.safetensors.tmp").write_bytes(b"half")
    else:
        name = "manifest.condemned" if how == "condemned" else "manifest.deleting"
        (base_of(run, 1, 2) / "manifest.json").rename(base_of(run, 1, 2) / name)
        shard_of(run, 1, 2).unlink()
    assert document("ls", run)["ok"]
    assert document("verify", run)["ok"], "the same"


def test_ls_and_resume_agree(run: Path) -> None:
    flip(shard_of(run), 4000)  # header padding: no size gives it away
    (base_of(run, 1, 4) / "manifest.json").unlink()
    chosen = document("ls", run, status=1)["resume"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with everstep.Checkpointer(run, state, every=None) as ckpt:
        recovery = ckpt.resume(strict=False)
    assert chosen == {"timeline": 1, "step": recovery.base_step}


def test_ls_shortens_long_lists(run: Path) -> None:
    for step in range(100, 160):
        base_of(run, 2, step).mkdir()
    text = invoke("ls", run).stdout
    assert "14 older bases: --all lists them" in text
    steps = {line.split()[0] for line in text.splitlines()}
    assert {"110", "159"} <= steps
    assert "109" not in steps
    assert "older" not in invoke("ls", run, "--all").stdout
    assert len(document("ls", run)["bases"]) == 64


# --- inspect ----------------------------------------------------------------------------


def test_inspect_lists_every_entry_as_saved(run: Path) -> None:
    found = document("inspect", run)
    assert (found["timeline"], found["step"], found["vouched"]) == (2, 6, True)
    entries = {entry["name"]: entry for entry in found["entries"]}
    assert found["entries_total"] == len(entries)
    assert found["entries_bytes_total"] == sum(entry["size_bytes"] for entry in entries.values())

    entries = entries_of(run, "--step", 4)  # saved before any resume: ties and strides are there
    weight = entries["model/0.weight"]
    assert (weight["dtype"], weight["shape"], weight["size_bytes"]) == ("F32", [3, 4], 48)
    assert weight["aliases"] == ["data/tied"]
    assert entries["everstep/objects/model"]["kind"] == "object"
    hostile = next(entry for name, entry in entries.items() if name.startswith("data/"))
    assert hostile["stride"] == [1, 3]

    shown = invoke("inspect", run, "--step", 4).stdout
    assert all(plain(name) in shown for name in entries)
    (line,) = (line for line in shown.splitlines() if line.startswith("model/0.weight"))
    assert line.split() == ["model/0.weight", "F32", "3x4", "48", "B", "=", "data/tied"]


def test_inspect_chooses_base_and_entries(run: Path) -> None:
    assert document("inspect", run, "--step", 4)["timeline"] == 1
    assert document("inspect", run, "--step", 6, "--timeline", 1)["timeline"] == 1
    assert set(entries_of(run, "--entry", "bias")) >= {"model/0.bias", "model/1.bias"}
    assert set(entries_of(run, "--entry", "model/?.bias")) == {"model/0.bias", "model/1.bias"}
    assert set(entries_of(run, "--step", 4, "--entry", "data/tied")) == {"model/0.weight"}, (
        "by its alias"
    )
    missing = invoke("inspect", run, "--entry", "model/0.wieght")
    assert missing.exit_code == ExitCode.USAGE
    assert "did you mean 'model/0.weight'" in missing.stderr
    for args in (["--entry", "zzzzzzzz"], ["--step", "5"]):
        assert "hint: " in invoke("inspect", run, *args).stderr, "what to do"
    assert "hint: " in invoke("inspect", run / "none.safetensors").stderr


def test_inspect_says_which_bases_it_passes_over(run: Path) -> None:
    flip(shard_of(run), 4000)
    shown = invoke("inspect", run).stdout
    assert "passed over step 6 of timeline 2: " in shown
    assert "the header's digest does not match" in shown
    (passed,) = document("inspect", run, status=1)["skipped"]
    assert (passed["timeline"], passed["step"]) == (2, 6)
    assert "the header's digest" in passed["reason"]
    assert document("inspect", run, "--step", 4)["skipped"] == []


def test_inspect_reads_a_single_file(run: Path, tmp_path: Path) -> None:
    assert document("inspect", shard_of(run))["vouched"] is True
    copied = tmp_path / "alone.safetensors"
    shutil.copy(shard_of(run), copied)
    assert document("inspect", copied)["vouched"] is False
    assert "nothing vouches" in invoke("inspect", copied).stdout
    assert invoke("inspect", copied, "--step", 1).exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 8192, b"\xff" * 8192, (100).to_bytes(8, "little") + b"[" * 100, b"short"],
    ids=["empty", "zeros", "absurd length", "deep JSON", "short"],
)
def test_inspect_refuses_files_that_are_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(data)
    assert invoke("inspect", path).exit_code == ExitCode.DIFFERENT
    assert document("inspect", path, status=1)["error"] == "FormatError"


def test_inspect_of_an_unfinished_base_says_so(run: Path) -> None:
    base_of(run, 2, 8).mkdir()
    result = invoke("inspect", run, "--step", 8)
    assert result.exit_code == ExitCode.DIFFERENT
    assert "step 8 of timeline 2 is incomplete" in result.stderr


# --- verify -----------------------------------------------------------------------------


def test_verify_of_a_good_run(run: Path) -> None:
    found = document("verify", run)
    assert found["ok"] is True
    assert len(found["bases"]) == 4
    assert all(base["ok"] and base["read"] for base in found["bases"])
    sizes = [shard_of(run, *key).stat().st_size for key in ((1, 2), (1, 4), (1, 6), (2, 6))]
    assert found["size_bytes"] == sum(sizes)
    assert "4 of 4 bases good" in invoke("verify", run).stdout
    assert len(document("verify", run, "--step", 6)["bases"]) == 1
    assert len(document("verify", run, "--step", 6, "--all")["bases"]) == 2
    assert len(document("verify", run, "--timeline", 1)["bases"]) == 3


@pytest.mark.parametrize("name", ["model/0.weight", "everstep/rng/torch", "everstep/objects/data"])
def test_verify_names_file_and_entry_of_a_flipped_bit(run: Path, name: str) -> None:
    entry = entries_of(run)[name]
    flip(shard_of(run), entry["offset"] + entry["size_bytes"] // 2)
    result = invoke("verify", run)
    assert result.exit_code == ExitCode.DIFFERENT
    assert repr(name) in result.stdout
    assert os.fspath(shard_of(run)) in result.stdout
    found = document("verify", run, status=1)
    damages = [damage for base in found["bases"] for damage in base["damages"]]
    assert [(damage["path"], damage["entry"]) for damage in damages] == [
        (os.fspath(shard_of(run)), name)
    ]
    assert [base["ok"] for base in found["bases"]].count(False) == 1


@pytest.mark.parametrize("kind", ["header", "truncated", "longer", "gone", "link"])
def test_verify_names_the_file_of_any_other_damage(run: Path, kind: str) -> None:
    shard = shard_of(run)
    if kind == "header":
        flip(shard, 4000)
    elif kind == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "longer":
        os.truncate(shard, shard.stat().st_size + 1)
    else:
        shard.rename(run / "elsewhere")
        if kind == "link":
            shard.symlink_to(run / "elsewhere")
    result = invoke("verify", run)
    assert result.exit_code == ExitCode.DIFFERENT
    assert "rank-00000.safetensors" in result.stdout
    assert "Errno" not in result.stdout
    assert "3 of 4 bases good" in result.stdout
    assert "everstep rm" in result.stdout, "what to do"
    assert document("verify", run, "--step", 4)["ok"] is True, "the others are not concerned"


@pytest.mark.parametrize("name", ["rank-00000.done", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "gone", "of another base"])
def test_verify_reports_each_record_beside_a_good_one(run: Path, name: str, how: str) -> None:
    path = base_of(run) / name
    if how == "flipped":
        flip(path, 100)
    elif how == "gone":
        path.unlink()
    else:
        shutil.copy(base_of(run, 1, 4) / name, path)
    rolls_forward = (name, how) == ("manifest.json", "gone")
    found = document("verify", run, status=0 if rolls_forward else 1)
    base = next(base for base in found["bases"] if base["timeline"] == 2)
    assert base["read"] is True, "the other record is enough to read it"
    assert base["entries"] > 0
    if rolls_forward:
        assert "roll it forward" in base["note"]
    else:
        (damage,) = base["damages"]
        assert name in damage["path"] + damage["problem"]
    # Markers are not read beside a manifest: that is for verify.
    listed = document("ls", run, status=int(name == "manifest.json" and not rolls_forward))
    assert listed["resume"] == {"timeline": 2, "step": 6}, "it does no harm"
    assert "newest good" in invoke("rm", run, "--step", 6, "--timeline", 2).stderr


def test_verify_reports_a_base_that_lost_both_records(run: Path) -> None:
    (base_of(run) / "manifest.json").unlink()
    flip(base_of(run) / "rank-00000.done", 100)
    found = document("verify", run, status=1)
    assert found["bases"][0]["status"] == "damaged"
    assert "rank-00000.done is damaged" in found["bases"][0]["damages"][0]["problem"]


@pytest.mark.parametrize("name", ["run.json", "timeline-00002/timeline.json"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_verify_reports_damaged_records_of_run_and_timelines(
    run: Path, name: str, how: str
) -> None:
    flip(run / name, 30) if how == "flipped" else (run / name).unlink()
    found = document("verify", run, status=1)
    assert [problem["path"] for problem in found["problems"]] == [os.fspath(run / name)]
    assert all(base["ok"] for base in found["bases"])
    assert name.split("/")[-1] in invoke("verify", run).stdout


def test_an_unfinished_base_is_no_damage_unless_it_is_asked_for(run: Path) -> None:
    base_of(run, 2, 8).mkdir()
    shutil.copy(shard_of(run), shard_of(run, 2, 8))
    result = invoke("verify", run)
    assert result.exit_code == ExitCode.OK
    assert "step 8 of timeline 2: unfinished" in result.stdout
    assert invoke("verify", run, "--step", 8).exit_code == ExitCode.DIFFERENT


def condemn(run: Path, timeline: int, step: int) -> None:
    """What a deleter has done that dies before it removes a file."""
    path = base_of(run, timeline, step)
    (path / "manifest.json").rename(path / "manifest.condemned")


def test_verify_reads_what_is_to_be_deleted_and_is_there(run: Path) -> None:
    """resume() takes it, if nothing newer can be used."""
    condemn(run, 2, 6)
    found = document("verify", run)
    (base,) = (base for base in found["bases"] if base["timeline"] == 2)
    assert (base["status"], base["read"], base["ok"]) == ("condemned", True, True)
    assert "all there" in base["note"]
    assert "4 of 4 bases good" in invoke("verify", run).stdout
    assert document("verify", run, "--step", 6, "--timeline", 2)["ok"]
    refused = invoke("rm", run, "--step", 6, "--timeline", 2)
    assert "newest good base" in refused.stderr, "the same"


def test_verify_names_damage_to_what_is_to_be_deleted(run: Path) -> None:
    condemn(run, 2, 6)
    entry = entries_of(run, "--step", 6, "--timeline", 2)["model/0.weight"]
    flip(shard_of(run), entry["offset"])
    found = document("verify", run, status=1)
    (base,) = (base for base in found["bases"] if base["timeline"] == 2)
    assert [damage["entry"] for damage in base["damages"]] == ["model/0.weight"]
    assert "DAMAGED" in invoke("verify", run).stdout


def test_a_base_whose_deletion_goes_on_while_it_is_read_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condemn(run, 1, 2)
    real = everstep.run.verify.verify_base

    def slow(filesystem: Any, base: Any, *args: Any, **options: Any) -> Any:
        if base.id.step == 2:
            path = base_of(run, 1, 2)
            (path / "manifest.condemned").rename(path / "manifest.deleting")
            shard_of(run, 1, 2).unlink()
        return real(filesystem, base, *args, **options)

    monkeypatch.setattr(everstep.run.verify, "verify_base", slow)
    found = document("verify", run)
    (base,) = (base for base in found["bases"] if base["step"] == 2)
    assert "deleted" in base["note"]


def test_a_base_that_is_deleted_while_it_is_read_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = everstep.run.verify.verify_base

    def slow(filesystem: Any, base: Any, *args: Any, **options: Any) -> Any:
        if base.id.step == 2:
            shutil.rmtree(base.path)
        return real(filesystem, base, *args, **options)

    monkeypatch.setattr(everstep.run.verify, "verify_base", slow)
    found = document("verify", run)
    (base,) = (base for base in found["bases"] if base["step"] == 2)
    assert "deleted" in base["note"]


# --- rm ---------------------------------------------------------------------------------


def test_rm_dry_run_lists_and_deletes_nothing(run: Path) -> None:
    before = listing(run)
    found = document("rm", run, "--step", 2, "--dry-run")
    names = {Path(file["path"]).name: file["size_bytes"] for file in found["files"]}
    assert names == {path.name: path.stat().st_size for path in base_of(run, 1, 2).iterdir()}
    assert found["size_bytes"] == sum(names.values())
    assert (found["deleted"], found["refusal"]) == (False, None)
    assert "would delete step 2 of timeline 1" in invoke("rm", run, "--step", 2, "--dry-run").stdout
    assert (
        "newest good" in document("rm", run, "--step", 6, "--timeline", 2, "--dry-run")["refusal"]
    )
    assert listing(run) == before


def test_rm_deletes_one_base_and_no_other(run: Path) -> None:
    result = invoke("rm", run, "--step", 2)
    assert result.exit_code == ExitCode.OK, result.output
    assert not base_of(run, 1, 2).exists()
    assert [base["step"] for base in document("ls", run)["bases"]] == [4, 6, 6]
    assert document("verify", run)["ok"] is True
    again = invoke("rm", run, "--step", 2)
    assert again.exit_code == ExitCode.USAGE
    assert "nearest: step 4" in again.stderr or "there are: step 4" in again.stderr


def test_rm_refuses_the_newest_good_base(run: Path) -> None:
    before = listing(run)
    result = invoke("rm", run, "--step", 6, "--timeline", 2)
    assert result.exit_code == ExitCode.USAGE
    assert "newest good base" in result.stderr
    assert "--force" in result.stderr
    assert listing(run) == before
    assert document("rm", run, "--step", 6, "--timeline", 2, "--force")["deleted"] is True
    assert document("ls", run)["resume"] == {"timeline": 1, "step": 4}


def test_rm_knows_the_newest_good_base_by_reading_it(run: Path) -> None:
    entry = entries_of(run)["model/0.weight"]
    flip(shard_of(run), entry["offset"])
    refused = invoke("rm", run, "--step", 4)
    assert refused.exit_code == ExitCode.USAGE
    assert "step 4 of timeline 1 is the newest good base" in refused.stderr
    assert invoke("rm", run, "--step", 6, "--timeline", 2).exit_code == ExitCode.OK


def test_rm_keeps_the_last_base_although_it_is_damaged(run: Path) -> None:
    for timeline, step in ((1, 2), (1, 4), (1, 6)):
        shutil.rmtree(base_of(run, timeline, step))
    flip(shard_of(run), 4000)
    result = invoke("rm", run, "--step", 6)
    assert result.exit_code == ExitCode.USAGE
    assert "all there is to save" in result.stderr


def test_rm_wants_to_know_which_timeline(run: Path) -> None:
    result = invoke("rm", run, "--step", 6)
    assert result.exit_code == ExitCode.USAGE
    assert "--timeline 1" in result.stderr
    assert invoke("rm", run).exit_code == ExitCode.USAGE, "--step is needed"


def test_rm_of_a_base_without_manifest(run: Path) -> None:
    (base_of(run, 1, 4) / "manifest.json").unlink()
    assert invoke("rm", run, "--step", 4).exit_code == ExitCode.OK
    assert not base_of(run, 1, 4).exists()


def test_rm_of_an_unfinished_base_needs_force(run: Path) -> None:
    base_of(run, 2, 8).mkdir()
    (base_of(run, 2, 8) / "rank-00000.safetensors.tmp").write_bytes(b"half")
    result = invoke("rm", run, "--step", 8)
    assert result.exit_code == ExitCode.USAGE
    assert "may be writing it right now" in result.stderr
    assert invoke("rm", run, "--step", 8, "--force").exit_code == ExitCode.OK
    assert not base_of(run, 2, 8).exists()


def test_rm_leaves_what_is_not_ours(run: Path) -> None:
    (base_of(run, 1, 2) / "notes.txt").write_text("mine")
    found = document("rm", run, "--step", 2)
    assert found["stays"] == ["notes.txt"]
    assert [path.name for path in base_of(run, 1, 2).iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("place", ["retain.after_condemn", "retain.before_unlink"])
def test_rm_that_crashes_is_finished_by_the_next(run: Path, place: str) -> None:
    arm(place, "raise")
    with pytest.raises(FailpointError):
        CliRunner().invoke(app, ["rm", str(run), "--step", "2"], catch_exceptions=False)
    disarm_all()
    first = document("ls", run)["bases"][0]
    assert (first["step"], first["status"]) == (2, "condemned")
    assert document("verify", run)["ok"] is True, "it counts no more, and is no damage"
    assert invoke("rm", run, "--step", 2).exit_code == ExitCode.OK
    assert not base_of(run, 1, 2).exists()


# --- Usage errors as documents ----------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ls", "r", "--bogus"], "--bogus"),
        (["rm", "r"], "--step"),
        (["bogus"], "bogus"),
        (["bench", "persist", "--folder", "x"], "--folder"),
        (["plan", "bogus"], "bogus"),
        (["--bogus"], "--bogus"),
    ],
)
def test_usage_errors_are_documents_if_one_was_asked_for(words: list[str], message: str) -> None:
    found = document(*words, status=ExitCode.USAGE)
    assert (found["error"], found["exit_code"]) == ("UsageError", ExitCode.USAGE)
    assert message in found["message"]
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert message in result.stderr


def test_a_name_that_looks_like_an_option_asks_for_nothing() -> None:
    result = invoke("ls", "--bogus", "--", "--json")
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_inspect_of_what_is_no_regular_file(kind: str, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if kind == "link":
        path.symlink_to(base_of(run) / "rank-00000.safetensors")
    else:
        os.mkfifo(path)
    result = invoke("inspect", path)
    assert result.exit_code == ExitCode.USAGE
    assert ("is a symbolic link" if kind == "link" else "is no regular file") in result.stderr
    assert "name the file itself" in result.stderr


# --- du ---------------------------------------------------------------------------------


def test_du_counts_every_file_once(run: Path) -> None:
    slots = timeline_dir(run, 2) / "slots"
    Path(slots).mkdir()
    with Path(slots / "slot-00000").open("wb") as file:
        file.truncate(1 << 20)  # sparse: it holds a mebibyte and takes nothing
    (base_of(run) / "rank-00000.safetensors.tmp").write_bytes(b"t" * 100)
    (run / "run.json.1-abc.tmp").write_bytes(b"t" * 10)
    (run / "mine").mkdir()
    (run / "mine" / "loss.csv").write_bytes(b"m" * 1000)
    (run / "link").symlink_to("/")
    base_of(run, 2, 8).mkdir()
    (base_of(run, 2, 8) / "rank-00000.safetensors").write_bytes(b"u" * 50)

    found = document("du", run)
    files = [path for path in run.rglob("*") if not path.is_dir() or path.is_symlink()]
    assert found["files"] == len(files)
    assert found["size_bytes"] == sum(path.lstat().st_size for path in files)
    assert found["allocated_bytes"] == sum(path.lstat().st_blocks * 512 for path in files)
    second = found["timelines"][1]
    assert second["slots"] == {"files": 1, "size_bytes": 1 << 20, "allocated_bytes": 0}
    assert second["temporary"]["size_bytes"] == 100
    assert (found["temporary"]["size_bytes"], found["other"]["files"]) == (10, 2)
    assert found["reclaimable"]["size_bytes"] == (1 << 20) + 100 + 10 + 50
    by_step = {base["step"]: base for base in second["bases"]}
    assert by_step[6]["files"] == 3
    text = invoke("du", run).stdout
    assert "slots (to be overwritten)" in text
    assert "base 8, incomplete" in text


# --- doctor -----------------------------------------------------------------------------


def test_doctor_checks_and_leaves_nothing(tmp_path: Path) -> None:
    found = document("doctor", tmp_path)
    assert list(tmp_path.iterdir()) == []
    names = [check["name"] for check in found["checks"]]
    assert names[:2] == ["platform", "torch"]
    assert {"locked memory", "free space", "O_DIRECT", "recycling"} <= set(names)
    assert all(check["verdict"] in ("ok", "warn", "fail") for check in found["checks"])
    assert all(check["advice"] for check in found["checks"] if check["verdict"] != "ok")
    assert "O_DIRECT" in invoke("doctor", tmp_path).stdout


def test_doctor_looks_where_the_folder_would_be_made(tmp_path: Path) -> None:
    assert document("doctor", tmp_path / "runs" / "gpt2")["checked_directory"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert invoke("doctor", tmp_path / "file" / "run").exit_code == ExitCode.USAGE
    for url in ("s3://bucket/run", "memory://x"):
        refused = invoke("doctor", url)
        assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
        assert repr(url) in refused.stderr
        assert "hint: a directory" in refused.stderr


def test_doctor_of_a_file_system_in_memory(tmpfs_folder: Path) -> None:
    checks = {check["name"]: check for check in document("doctor", tmpfs_folder)["checks"]}
    assert (checks["file system"]["verdict"], checks["file system"]["found"]) == ("warn", "tmpfs")
    assert checks["recycling"]["verdict"] in ("ok", "warn")


def test_doctor_fails_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    result = invoke("doctor", tmp_path)
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "cannot be written: Permission denied" in result.stdout
    found = document("doctor", tmp_path, status=4)
    assert found["ok"] is False


@pytest.mark.parametrize(("answer", "verdict"), [(None, "warn"), ("file", "fail")])
def test_doctor_tells_leases_that_do_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, verdict: str
) -> None:
    real = PosixFileSystem.reuse

    class Granted:
        def close(self) -> None: ...

    def reuse(self: PosixFileSystem, path: Path, **options: Any) -> Any:
        return None if answer is None else real(self, path, **options) or Granted()

    monkeypatch.setattr(PosixFileSystem, "reuse", reuse)
    checks = json.loads(invoke("doctor", tmp_path, "--json").stdout)["checks"]
    assert next(check for check in checks if check["name"] == "recycling")["verdict"] == verdict


def test_doctor_says_that_a_keeper_process_cannot_have_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a sandbox that forbids the system call (docs/OPERATIONS.md)."""
    checks = {check["name"]: check for check in document("doctor", tmp_path)["checks"]}
    assert checks["memfd_create"]["verdict"] == "ok"

    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("everstep.seams.memory._memfd_create", refuse)
    checks = {check["name"]: check for check in document("doctor", tmp_path, status=4)["checks"]}
    found = checks["memfd_create"]
    assert (found["verdict"], found["found"]) == ("fail", "refused here: Operation not permitted")
    assert "KeeperOptions(process=False)" in found["advice"]


def test_doctor_says_what_the_locked_memory_limit_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "8.4 MB (ulimit -l); it limits pinned memory" in invoke("doctor", tmp_path).stdout


# --- What cannot be opened --------------------------------------------------------------


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "du", "rm"])
def test_folders_that_are_no_runs(run: Path, tmp_path: Path, verb: str) -> None:
    step = ["--step", "2"] if verb == "rm" else []
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / HOSTILE.replace("/", "|")).write_text("")
    expected = {
        tmp_path / "rum": f"did you mean {run}?",
        tmp_path: "runs in it: run",
        tmp_path / "empty": "is empty",
        tmp_path / "foreign": "is not an everstep run folder",
        base_of(run).parent: f"the run is {run}",
        Path(run / "run.json"): "but a file",
        Path("s3://bucket/run"): "",
    }
    for path, words in expected.items():
        result = invoke(verb, path, *step)
        assert result.exit_code == ExitCode.USAGE, (path, result.output)
        assert words in result.stderr
        assert "hint: " in result.stderr, "what to do"
        assert result.stdout == ""
        assert result.stderr.replace("\n", "").isprintable()
        assert document(verb, path, *step, status=2)["exit_code"] == 2


@pytest.mark.parametrize(
    ("failure", "hint"),
    [
        (PermissionDeniedError("no credentials were found", hint="set them"), "hint: set them"),
        (StorageError("no connection", hint="look at the network"), "hint: look at the network"),
    ],
)
def test_what_an_object_store_says_is_shown_and_what_to_do_about_it(
    failure: EverstepError, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They got the advice for a folder on a disk."""

    def fail(*_: object) -> None:
        raise failure

    tier = MemoryTier()
    monkeypatch.setattr(MemoryTier, "url", "s3://bucket/run")
    monkeypatch.setattr(tier, "scan", fail)
    monkeypatch.setattr(tier, "open", fail)
    monkeypatch.setattr("everstep.tiers.options.open_tier", lambda *_: tier)
    for verb in ("ls", "verify"):
        result = invoke(verb, "s3://bucket/run")
        assert result.exit_code == ExitCode.ENVIRONMENT
        assert failure.message in result.stderr
        assert hint in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "du"])
def test_a_run_of_a_newer_format(run: Path, verb: str) -> None:
    fields = {"kind": "run", "format": 99, "run": "a-later-one"}
    record = canonical({**fields, "digest": digest(canonical(fields))})
    (run / "run.json").write_bytes(record)
    result = invoke(verb, run)
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "format 99" in result.stderr
    assert document(verb, run, status=4)["error"] == "NewerFormatError"


def test_a_run_without_bases(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    everstep.Checkpointer(folder, {"x": {"y": torch.ones(2)}}).close()
    assert document("ls", folder)["resume"] is None
    assert "start afresh" in invoke("ls", folder).stdout
    assert document("verify", folder)["bases"] == []
    assert invoke("inspect", folder).exit_code == ExitCode.USAGE
    assert invoke("rm", folder, "--step", 1).exit_code == ExitCode.USAGE
    assert document("du", folder)["files"] == 1


def test_what_may_not_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PosixFileSystem, path: Path) -> None:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(PosixFileSystem, "scan", refuse)
    result = invoke("ls", run)
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert "may not read" in result.stderr
    assert "hint:" in result.stderr


# --- Hostile folders --------------------------------------------------------------------


@pytest.fixture
def hostile(run: Path) -> Path:
    """Links where directories and files should be, odd names, an absurd record."""
    base_of(run, 1, 2).rename(run / "away")
    base_of(run, 1, 2).symlink_to(run / "away")
    (base_of(run, 1, 4) / "rank-00001.done").symlink_to("/etc/passwd")
    (base_of(run, 1, 4) / HOSTILE.replace("/", "|")).write_text("")
    (run / HOSTILE.replace("/", "|")).write_text("")
    (run / os.fsdecode(b"\xff\xfe")).write_text("")
    os.mkfifo(base_of(run) / "rank-00007.done")
    return run


@pytest.mark.parametrize("columns", [None, 20, 60])
@pytest.mark.parametrize("verb", [*READERS, ["rm", "--step", "4", "--dry-run"]])
def test_names_are_never_markup_nor_escapes(
    hostile: Path, verb: list[str], columns: int | None
) -> None:
    if verb[0] == "inspect":  # there is none that resume() would choose
        verb = [*verb, "--step", "4"]
    result = invoke(*verb, hostile, columns=columns)
    assert result.exit_code in (ExitCode.OK, ExitCode.DIFFERENT), result.output
    assert all(char.isprintable() for char in result.output.replace("\n", ""))
    if verb[0] == "inspect" and columns is None:
        assert "[bold red]x[~1] :skull: \\x1b[2J" in result.stdout
    json.loads(invoke(*verb, hostile, "--json").stdout)


def test_verify_reports_what_is_hostile_and_follows_no_link(hostile: Path) -> None:
    found = document("verify", hostile, status=1)
    damages = [damage for base in found["bases"] for damage in base["damages"]]
    damaged = {damage["path"]: damage["problem"] for damage in damages}
    assert "rank-00001.done is a link" in damaged[os.fspath(base_of(hostile, 1, 4))]
    assert "rank-00007.done is a other" in damaged[os.fspath(base_of(hostile))]
    assert os.fspath(base_of(hostile, 1, 2)) in damaged
    assert invoke("rm", hostile, "--step", 2, "--force").exit_code == ExitCode.USAGE
    assert len(list((hostile / "away").iterdir())) == 3


# --- Looking changes nothing ------------------------------------------------------------


@pytest.fixture
def read_only(run: Path) -> Iterator[Path]:
    """A run that nobody but root could write to."""
    directories = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o500)
    yield run
    for path in directories:
        path.chmod(0o700)


@pytest.mark.parametrize("verb", [*READERS, ["rm", "--step", "2", "--dry-run"]])
def test_verbs_that_look_never_write(
    read_only: Path, verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PosixFileSystem, *args: object, **options: object) -> None:
        raise AssertionError(f"a verb that only looks has written: {args}")

    for name in ("create", "reuse", "rename", "link", "unlink", "make_dir", "remove_dir"):
        monkeypatch.setattr(PosixFileSystem, name, refuse)
    monkeypatch.setattr(PosixFileSystem, "sync_dir", refuse)
    before = listing(read_only)
    assert invoke(*verb, read_only).exit_code == ExitCode.OK
    document(*verb, read_only)
    assert listing(read_only) == before


# --- The command as a whole -------------------------------------------------------------


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"everstep {everstep.__version__}\n"
    text = invoke("--help").stdout
    for verb in ("ls", "inspect", "verify", "rm", "du", "doctor", "ps", "stop", "demo"):
        assert f"\n  {verb} " in text
        shown = invoke(verb, "--help")
        assert shown.exit_code == 0
        assert "--json" in shown.stdout
    for group in ([], ["plan"], ["bench"]):
        assert "..." not in invoke(*group, "--help").stdout.partition("Commands:")[2]
    assert invoke("lss").exit_code == ExitCode.USAGE
    assert invoke("ls", "--jsn", ".").exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OptionError("x"), 2),
        (FormatError("x"), 1),
        (EverstepError("x"), 1),
        (StorageError("x"), 4),
        (NewerFormatError("x"), 4),
        (OutOfSpaceError("x"), 4),
        (PermissionDeniedError("x"), 4),
        (UnavailableError("x"), 4),
        (DeadlineError("x"), 4),
        (KeeperError("x"), 4),
        (KeeperTimeoutError("x"), 4),
        (InfeasibleError("x", quantity="mtbf_s", needed=1.0), 3),
        (UnsupportedStateError("x", leaves=()), 3),
    ],
)
def test_exit_status_of_errors(error: EverstepError, status: int) -> None:
    assert status_of(error) == status


def test_what_each_exit_status_means_is_said_alike_everywhere() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    texts = {"help": invoke("--help").stdout, "module": everstep.cli.__doc__, "README": readme}
    for where, text in texts.items():
        assert EXIT_STATUS in " ".join((text or "").split()), where
    numbers = [int(part.split()[0]) for part in EXIT_STATUS.split(", ")]
    assert numbers == list(ExitCode)


@pytest.mark.parametrize("verb", [["ls"], ["verify", "--json"]])
def test_ctrl_c_is_quiet(run: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(everstep.run.scan, "scan_run", interrupted)
    result = invoke(*verb, run)
    assert result.exit_code == 130
    assert result.output == ""


def test_main_returns_the_status(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, status in ((["ls", str(run)], 0), (["ls", "/nowhere"], 2), (["--version"], 0)):
        monkeypatch.setattr(sys, "argv", ["everstep", *args])
        assert main() == status
    captured = capsys.readouterr()
    assert "4 bases" in captured.out
    assert "there is no run /nowhere" in captured.err


def test_output_for_a_pipe_is_not_folded(run: Path) -> None:
    deep = run.parent / ("long-name-" * 20) / "run"
    shutil.copytree(run, deep)
    os.truncate(shard_of(deep), 5000)
    result = invoke("verify", deep)
    assert any(os.fspath(shard_of(deep)) in line for line in result.stdout.splitlines())


def test_a_terminal_that_knows_ascii_only(run: Path) -> None:
    folder = run.rename(run.parent / "läuft")
    done = subprocess.run(
        [sys.executable, "-m", "everstep", "inspect", folder],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "model" in done.stdout
    assert done.stdout.isascii()
    assert invoke("ls", folder).exit_code == ExitCode.OK


# --- Words ------------------------------------------------------------------------------


def test_words() -> None:
    assert [in_words(size) for size in (0, 999, 1500, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "5.0 TB",
    ]
    assert plain("a\x1b[0m\u202e\ud800b") == "a\\x1b[0m\\u202e\\ud800b"
    assert len(plain("x" * 10_000)) == 240
    unlikely: tuple[float | None, ...] = (None, 1e300, -1e300, float("nan"), 10**400)
    assert [when(value) for value in unlikely] == ["?"] * 5
    assert when(0.0).startswith(("1970-01-01", "1969-12-31"))


_: Callable[[], int] = main  # what the entry point of the package calls
