"""``everstep verify --replay``: base A and the log give base B, bit for bit, or it is said."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep.run.segments
from everstep.restore.offline.memory import OfflineState
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import byte_view
from everstep.testing import inspect
from tests.support.logged import (
    World,
    document,
    edit_base,
    invoke,
    opened,
    segments_of,
    train,
)
from tests.support.world import flip, forget


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("audit") / "run"
    train(run, World(), 10)
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def verdicts(found: dict[str, Any]) -> list[tuple[int, int, str]]:
    return [
        (one["before"]["step"], one["after"]["step"], one["verdict"]) for one in found["replay"]
    ]


def test_all_is_as_it_should_be(run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    found = document("verify", run, "--replay")
    assert found["ok"]
    assert verdicts(found) == [(1, 4, "equal"), (4, 8, "equal"), (8, 10, "equal")]
    assert [one["updates"] for one in found["replay"]] == [3, 4, 2]
    assert {one["entries"] for one in found["replay"]} == {len(document("inspect", run)["entries"])}
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    text = invoke("verify", run, "--replay").stdout
    assert "3 of 3 bases equal what replay gives" in text
    assert "4 of 4 bases and 5 of 5 segments of the log good" in text
    assert "replay" not in document("verify", run)


def test_where_the_system_knows_no_affinity(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS: what asks how many threads may run must not need it."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert document("verify", run, "--replay")["ok"]
    assert document("restore", run, "--step", 6, "--out", tmp_path / "new")["exact"]
    checks = json.loads(invoke("doctor", run, "--json").stdout)["checks"]
    assert "fail" not in {one["verdict"] for one in checks if one["name"] == "cores"}


def flip_tensor(name: str) -> Callable[[OfflineState], None]:
    def change(state: OfflineState) -> None:
        byte_view(state.tensors[name])[-1] ^= 1

    return change


def shift_schedule(state: OfflineState) -> None:
    name = "everstep/objects/scheduler"
    tree: Any = decode(state.objects[name])
    tree["last_epoch"] += 1
    state.objects[name] = encode(tree)


CORRUPTIONS: dict[str, tuple[Callable[[OfflineState], None], str]] = {
    "a parameter": (flip_tensor("model/0.weight"), "model/0.weight"),
    "a moment": (
        flip_tensor("optimizer/state/model.4.bias/exp_avg_sq"),
        "optimizer/state/model.4.bias/exp_avg_sq",
    ),
    "a buffer": (flip_tensor("model/1.running_var"), "model/1.running_var"),
    "a random generator": (flip_tensor("everstep/rng/torch"), "everstep/rng/torch"),
    "an object": (shift_schedule, "everstep/objects/scheduler"),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_one_bit_that_every_digest_vouches_for(name: str, run: Path) -> None:
    """Wrong state, consistently written: no digest shows it, replay does."""
    change, entry = CORRUPTIONS[name]
    edit_base(run, 8, change)
    assert document("verify", run)["ok"]
    found = document("verify", run, "--replay", status=1)
    assert not found["ok"]
    first, wrong, after = found["replay"]
    assert first["verdict"] == "equal"
    assert (wrong["verdict"], wrong["differing"]) == ("different", [entry])
    assert (wrong["before"]["step"], wrong["after"]["step"], wrong["steps"]) == (4, 8, 4)
    if "running" in entry or "objects" in entry or "rng" in entry:  # the log has them in full
        assert after["verdict"] == "equal"
    else:
        assert after["verdict"] == "different"
    text = invoke("verify", run, "--replay")
    assert text.exit_code == 1
    told = f"steps 5 to 8: base 4 and the log do not give base 8 in 1 entry: '{entry}'"
    assert told in text.stdout


def note(world: World) -> None:
    world.state["plain"]["best"] = 0.5


SINCE: dict[str, tuple[Callable[[World], object], str]] = {
    "random numbers were drawn": (lambda world: torch.rand(3), "everstep/rng/torch"),
    "a result was noted": (note, "everstep/objects/plain"),
    "statistics have moved": (
        lambda world: world.model(torch.randn(6, 4)),
        "model/1.running_mean",
    ),
    "a schedule has moved": (
        lambda world: world.scheduler.step(),
        "everstep/objects/scheduler",
    ),
}


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's own, of a schedule
@pytest.mark.parametrize("what", SINCE)
def test_what_happens_between_a_step_and_save_is_no_damage(what: str, run_folder: Path) -> None:
    """A validation, above all: the mark has the state as it was before, the base as it is then."""
    world, (change, entry) = World(), SINCE[what]
    with opened(run_folder, world, every=None) as ckpt:
        ckpt.resume()
        for step in range(1, 7):
            world.train()
            ckpt.step()
            if step == 4:
                change(world)
                then = world.snapshot()
                ckpt.save()
    found = document("verify", run_folder, "--replay")
    assert verdicts(found) == [(1, 4, "equal"), (4, 6, "equal")]
    first, second = found["replay"]
    assert "after the end of its step" in first["reason"]
    assert first["entries"] < second["entries"]
    kept = shutil.copytree(run_folder, run_folder.with_name("kept"))
    # Without the word of it, it is damage; and what optimizers own is compared in any case.
    edit_base(run_folder, 4, lambda state: None)
    wrong = document("verify", run_folder, "--replay", status=1)["replay"][0]
    assert (wrong["verdict"], entry in wrong["differing"]) == ("different", True)
    edit_base(run_folder, 4, flip_tensor("model/0.weight"), behind_mark=True)
    wrong = document("verify", run_folder, "--replay", status=1)["replay"][0]
    assert (wrong["verdict"], wrong["differing"]) == ("different", ["model/0.weight"])
    other = World(seed=9)
    with opened(kept, other, every=None) as ckpt:
        assert ckpt.resume(step=4).exact
        assert other.snapshot() == then
        inspect(ckpt).skip_last_base()


def test_only_the_base_that_was_asked_for(run: Path) -> None:
    edit_base(run, 8, flip_tensor("model/0.weight"))
    assert verdicts(document("verify", run, "--replay", "--step", 4)) == [(1, 4, "equal")]
    found = document("verify", run, "--replay", "--step", 8, status=1)
    assert verdicts(found) == [(4, 8, "different")]


def test_a_damaged_segment_is_damage_and_nothing_is_checked_over_it(run: Path) -> None:
    path = Path(segments_of(run)[2].path) / "rank-00000.safetensors"
    flip(path, path.stat().st_size // 2)
    found = document("verify", run, "--replay", status=1)
    assert verdicts(found) == [(1, 4, "equal"), (4, 8, "unchecked"), (8, 10, "equal")]
    (bad,) = [one for one in found["segments"] if one["problem"] is not None]
    assert (bad["first"], bad["last"]) == (5, 6)
    assert path.parent.name in found["replay"][1]["reason"]
    text = invoke("verify", run).stdout
    assert "4 of 5 segments of the log good" in text
    assert "damage: " in text
    assert path.parent.name in text


def test_a_base_before_that_cannot_be_read(run: Path) -> None:
    flip(run / "timeline-00001/base/000000000004/rank-00000.safetensors", -9)
    found = document("verify", run, "--replay", status=1)
    # Its digests are as they were, and replay gives what they vouch for.
    assert verdicts(found) == [(1, 4, "equal"), (4, 8, "unchecked"), (8, 10, "equal")]
    assert "step 4 of timeline 1 cannot be read" in found["replay"][1]["reason"]


def test_without_the_log(run: Path) -> None:
    shutil.rmtree(run / "timeline-00001" / "log" / "000000000004-000000000006")
    found = document("verify", run, "--replay")
    assert verdicts(found) == [(1, 4, "equal"), (4, 8, "unchecked"), (8, 10, "equal")]
    assert found["replay"][1]["reason"] == "step 5 has no mark"
    shutil.rmtree(run / "timeline-00001" / "log")
    found = document("verify", run, "--replay")
    assert [one["verdict"] for one in found["replay"]] == ["unchecked"] * 3
    text = invoke("verify", run, "--replay").stdout
    assert "0 of 3 bases equal what replay gives, 3 not checked" in text
    assert "step 2 has no mark" in text
    assert 'LogOptions(to="disk")' in text, "what to do"


def test_another_shape(run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world, every=3) as ckpt:
        ckpt.resume()
        for step in range(6):
            if step == 4:
                world.state["plain"]["more"] = torch.ones(3)
            world.train()
            ckpt.step()
    forget(run_folder)
    found = document("verify", run_folder, "--replay")
    by_step = {one["after"]["step"]: one for one in found["replay"]}
    assert by_step[3]["verdict"] == "equal"
    assert by_step[5]["verdict"] == "unchecked"
    assert "state has another composition" in by_step[5]["reason"]
    assert by_step[6]["verdict"] == "equal"


def test_an_optimizer_that_is_not_in_the_matrix(run_folder: Path) -> None:
    """What it computes may differ; nothing else may."""
    train(run_folder, World(lambda p: torch.optim.Adafactor(p, lr=0.01)), 4, every=2)
    found = document("verify", run_folder, "--replay")
    assert found["replay"]
    for one in found["replay"]:
        assert one["verdict"] in ("equal", "unchecked")
        assert "not exact here" in one["reason"]
        assert "Adafactor" in one["reason"]
    edit_base(run_folder, 4, flip_tensor("model/0.weight"))
    last = document("verify", run_folder, "--replay")["replay"][-1]
    assert last["verdict"] == "unchecked"
    assert "replayed entries differ" in last["reason"]
    edit_base(run_folder, 4, flip_tensor("model/1.running_mean"))
    last = document("verify", run_folder, "--replay", status=1)["replay"][-1]
    assert (last["verdict"], last["differing"]) == ("different", ["model/1.running_mean"])


def test_the_first_base_of_a_timeline_is_not_checked_by_the_log_of_another(run: Path) -> None:
    train(run, World(seed=9), 4, at=6, every=1000)
    found = document("verify", run, "--replay")
    assert found["ok"]
    table = {(one["after"]["timeline"], one["after"]["step"]): one for one in found["replay"]}
    assert table[1, 8]["verdict"] == "equal"
    assert table[2, 10]["verdict"] == "equal"
    assert found["replay"]


def test_a_run_without_a_second_base(run_folder: Path) -> None:
    train(run_folder, World(), 1)
    text = invoke("verify", run_folder, "--replay")
    assert text.exit_code == 0
    assert "nothing to replay" in text.stdout


@pytest.mark.parametrize("goes", ["its file", "its marker", "its file alone"])
def test_a_segment_that_is_deleted_while_it_is_read_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    """Markers go first, then the rest: a process at work leaves none that lacks only its file."""
    real = everstep.run.segments.read_segment
    (first, *others) = document("verify", run)["segments"]

    def slow(filesystem: Any, segment: Any, *args: Any, **options: Any) -> Any:
        path = Path(segment.path)
        if str(path) == first["path"]:
            if goes != "its file alone":
                (path / "rank-00000.done").unlink(missing_ok=True)
            if goes != "its marker":
                (path / "rank-00000.safetensors").unlink()
            else:
                flip(path / "rank-00000.safetensors", 4000)
        return real(filesystem, segment, *args, **options)

    monkeypatch.setattr(everstep.run.segments, "read_segment", slow)
    if goes == "its file alone":
        (unusable, *_) = document("verify", run, status=1)["segments"]
        assert unusable == {**first, "problem": "its file is missing"}
    else:
        assert document("verify", run)["segments"] == others
