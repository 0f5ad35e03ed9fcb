"""``everstep cp``: a copy of a run that is being trained is a run, whole."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

import everstep
from everstep import Checkpointer, KeeperOptions, LogOptions
from everstep.errors import FencedError, OutOfSpaceError, StorageError
from everstep.format.names import base_dir
from everstep.look.copy_run import copy_run
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.tiers.disk_tier import DiskTier
from tests.support.command import document, invoke
from tests.support.world import HookedFileSystem, flip

FILES = PosixFileSystem()
LOGGED: dict[str, Any] = {
    "method": "logged",
    "every": 4,
    "keep": 2,
    "log": LogOptions(to="disk", batch_steps=1, audit=False),
    "keeper": KeeperOptions(process=False),
}


class Training:
    """A model that is trained without randomness; ``trail`` has its weights after each step."""

    def __init__(self, run: Path, **options: Any) -> None:
        self.model = torch.nn.Linear(3, 2, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(torch.arange(6.0).reshape(2, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = Checkpointer(run, state, **{**LOGGED, **options})
        self.step = self.ckpt.resume().step
        self.trail: dict[int, torch.Tensor] = {}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.model.weight.grad = torch.full_like(self.model.weight, 0.1 * self.step)
            self.optimizer.step()
            self.ckpt.step()
            self.ckpt.wait()
            self.trail[self.step] = self.weight

    @property
    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def steps_of(run: Path) -> list[int]:
    return sorted(base.id.step for base in scan_run(FILES, run).bases if base.manifest is not None)


def test_a_copy_is_a_run_and_a_second_one_adds_what_is_new(tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = tmp_path / "out"
    training = Training(run)
    training.train(6)
    first = document("cp", run, out)
    assert (first["bases"], first["damaged"]) == (len(steps_of(run)), [])
    assert first["segments"] > 0
    assert invoke("verify", out).exit_code == 0
    assert document("cp", run, out)["copied_bytes"] == 0
    loaded = everstep.load(out)
    assert loaded.step == 6
    assert torch.equal(loaded.tensors["model/weight"], training.trail[6])
    training.train(8)
    training.ckpt.close()
    assert document("cp", run, out)["copied_bytes"] > 0
    again = Training(out)
    assert (again.step, again.ckpt.stats().failed) == (14, 0)
    assert torch.equal(again.weight, training.trail[14])
    again.ckpt.close()


def test_retention_in_the_middle_of_a_copy_costs_another_pass(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run)
    training.train(9)
    passes = 0

    def during(name: str, path: PurePath) -> None:
        nonlocal passes
        # The oldest base is about to be copied.
        if name == "open" and "base" in path.parts and path.suffix == ".safetensors" and not passes:
            passes += 1
            training.train(8)

    out = tmp_path / "out"
    before = steps_of(run)
    done = copy_run(HookedFileSystem(during), PurePath(run), DiskTier(FILES, PurePath(out)))
    assert passes == 1
    assert set(before).isdisjoint(steps_of(run)), "retention has deleted what was listed first"
    assert set(steps_of(run)) <= set(steps_of(out))
    assert done.damaged == []
    assert invoke("verify", out).exit_code == 0
    training.ckpt.close()
    for step in (12, 15, 17):
        again = Training(out)
        assert again.ckpt.rewind(step).step == step
        assert torch.equal(again.weight, training.trail[step])
        again.ckpt.close()


def test_retention_that_is_always_faster_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run)
    training.train(5)

    def gone(name: str, path: PurePath) -> None:
        if name == "open" and path.suffix == ".safetensors":
            raise FileNotFoundError(errno.ENOENT, "gone", str(path))

    with pytest.raises(StorageError, match="deleted while they were copied"):
        copy_run(HookedFileSystem(gone), PurePath(run), DiskTier(FILES, tmp_path / "out"))
    training.ckpt.close()
    assert steps_of(tmp_path / "out") == []


@pytest.mark.parametrize("full_at", range(0, 24, 3))
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, full_at: int) -> None:
    run = tmp_path / "run"
    out = tmp_path / "out"
    training = Training(run)
    training.train(6)
    training.ckpt.close()
    writes = 0

    def hook(name: str, path: PurePath) -> None:
        nonlocal writes
        if name == "create":
            writes += 1
            if writes > full_at:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

    tier = DiskTier(HookedFileSystem(hook), PurePath(out))
    with contextlib.suppress(OutOfSpaceError):
        copy_run(FILES, PurePath(run), tier)
        assert writes <= full_at, "an error was not raised"
    if (out / "run.json").exists():
        assert invoke("verify", out).exit_code in (0, 3) or not steps_of(out)
        assert [one for one in out.rglob("*") if one.name.endswith(".tmp")] == []
    assert document("cp", run, out)["damaged"] == []
    again = Training(out)
    assert again.step == 6
    again.ckpt.close()


def test_a_damaged_base_is_left_out_and_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run)
    training.train(9)
    training.ckpt.close()
    oldest = steps_of(run)[0]
    flip(Path(base_dir(run, 1, oldest)) / "rank-00000.safetensors", 5000)
    result = invoke("cp", run, tmp_path / "out")
    assert result.exit_code == 1
    assert f"{oldest:012d}" in result.stdout
    assert steps_of(tmp_path / "out") == steps_of(run)[1:]
    assert not Path(base_dir(tmp_path / "out", 1, oldest)).exists()
    assert invoke("verify", tmp_path / "out").exit_code == 0


def test_places_that_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = tmp_path / "other"
    for path in (run, other):
        training = Training(path)
        training.train(1)
        training.ckpt.close()
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    file = tmp_path / "file"
    file.write_text("")
    for dest, says in (
        (run, "the run itself"),
        (other, "another run"),
        (home, "not empty"),
        (file, "not a directory"),
    ):
        result = invoke("cp", run, dest)
        assert result.exit_code != 0
        assert says in result.stderr.replace("\n", " "), result.stderr
    assert [one.name for one in home.iterdir()] == ["letter.txt"]
    assert invoke("cp", tmp_path / "none", tmp_path / "out").exit_code == 2


def test_a_copy_that_was_trained_on_is_not_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = tmp_path / "out"
    training = Training(run)
    training.train(5)
    assert invoke("cp", run, out).exit_code == 0
    copy = Training(out)
    copy.train(2)
    copy.ckpt.close()
    training.train(5)
    training.ckpt.close()
    with pytest.raises(FencedError):
        copy_run(FILES, PurePath(run), DiskTier(FILES, PurePath(out)))
    again = Training(out)
    assert again.step == 7
    again.ckpt.close()


def test_pins_and_metrics_are_copied(tmp_path: Path) -> None:
    run = tmp_path / "run"
    training = Training(run)
    training.train(4)
    training.ckpt.save(metrics={"loss": 0.5}, note="good")
    training.ckpt.close()
    assert invoke("pin", run, "--step", 4).exit_code == 0
    assert invoke("cp", run, tmp_path / "out").exit_code == 0
    base = document("ls", tmp_path / "out")["bases"][-1]
    assert (base["pinned"], base["metrics"], base["note"]) == (True, {"loss": 0.5}, "good")
    shutil.rmtree(run)
    again = Training(tmp_path / "out")
    assert again.step == 4
    again.ckpt.close()
