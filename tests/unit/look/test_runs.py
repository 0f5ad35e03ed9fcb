"""``everstep.load`` and ``everstep.peek`` of runs whose processes are gone: what they give is what
``resume()`` gives, and nothing of the run has changed afterwards."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.commit.lineage import BaseId
from everstep.errors import (
    DamageError,
    ForeignDirectoryError,
    MismatchError,
    OptionError,
    RecoveryError,
    StorageError,
    UnsupportedStateError,
)
from everstep.look import load as look
from everstep.run.scan import scan_run
from everstep.seams import PosixFileSystem
from everstep.tiers.contract import Traits
from everstep.tiers.disk_tier import DiskTier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.options import TierOptions
from tests.support.copying import train as train_with_copies
from tests.support.inside.declared import declared
from tests.support.logged import World, opened, segments_of, train
from tests.support.world import HookedFileSystem, base_folder, flip, forget


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """Bases 1, 4, 8, 10, and all of the log."""
    run = tmp_path_factory.mktemp("look") / "run"
    return run, train(run, World(), 10)


@pytest.fixture
def run(template: tuple[Path, dict[int, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[0], tmp_path / "run"))


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nothing below a folder is written, made or removed."""
    before = {path: path.lstat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    yield
    assert {path: path.lstat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before


def numbers() -> tuple[float, float, float]:
    """What the generators of this process give next; they are as they were then."""
    import random

    import numpy as np

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    found = float(torch.rand(1)), random.random(), float(np.random.rand())
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    return found


# --- Which step, and all of it ------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 1, 3, 4, 7, 10])
def test_objects_get_what_training_had(
    step: int | None, run: Path, template: tuple[Path, dict[int, Any]]
) -> None:
    """A base, a step between two of them, and the newest; moments, schedule and plain data, too."""
    world, before = World(seed=99), numbers()
    with untouched(run):
        found = everstep.load(run, step, into=world.state)
    assert (found.step, found.exact, found.source) == (step or 10, True, "disk")
    assert found.replayed == found.step - found.base_step
    wanted = template[1][found.step]
    given = world.snapshot()
    assert {k: v for k, v in given.items() if k != "rng"} == {
        k: v for k, v in wanted.items() if k != "rng"
    }
    assert numbers() == before, "a look draws nothing, and sets nothing"
    assert (dict(found.tensors), dict(found.objects)) == ({}, {})


@pytest.mark.parametrize("step", [1, 6, 10])
def test_tensors_and_state_dicts(
    step: int, run: Path, template: tuple[Path, dict[int, Any]]
) -> None:
    found = everstep.load(run, step)
    world = World(seed=99)
    world.model.load_state_dict(found.state_dict("model"))
    world.optimizer.load_state_dict(found.state_dict("optimizer"))
    world.scheduler.load_state_dict(found.state_dict("scheduler"))
    world.state["plain"] = found.objects["plain"]
    torch.set_rng_state(found.objects["everstep/rng"]["torch"])
    assert world.snapshot() == template[1][step]
    assert found.tensors["model/tied"] is found.tensors["model/3.weight"], "each name is there"
    assert f"xxh3-128 of {len(world.snapshot())}"[:8] in found.evidence
    if found.replayed:
        assert f"{found.replayed} step(s) replayed from the log" in found.evidence


def test_peek_says_what_resume_gives(run: Path) -> None:
    with untouched(run):
        found = everstep.peek(run)
    told = (found.step, found.exact, found.source, found.base_step, found.replayed)
    assert told == (10, True, "disk", 10, 0)
    shutil.rmtree(base_folder(run, 10))
    found = everstep.peek(run)
    assert (found.step, found.base_step, found.replayed, found.timeline) == (10, 8, 2, 1)
    world = World(seed=3)
    with opened(run, world) as ckpt:
        assert ckpt.resume().step == 10


@pytest.mark.parametrize("how", ["missing", "short"])
def test_peek_passes_over_a_base_without_its_files(how: str, without_log: Path) -> None:
    """Names and lengths are what it looks at."""
    bases = [base_folder(without_log, step) / "rank-00000.safetensors" for step in (8, 4)]

    def spoil(path: Path) -> None:
        path.unlink() if how == "missing" else os.truncate(path, 100)

    spoil(bases[0])
    with untouched(without_log):
        found = everstep.peek(without_log)
    assert (found.step, found.base_step) == (4, 4)
    assert "missing, or has another length" in found.skipped[-1].reason
    assert everstep.load(without_log).step == 4
    spoil(bases[1])
    with pytest.raises(RecoveryError, match="none can be used"):
        everstep.peek(without_log)
    with (
        opened(without_log, World(), method="sync", log=None) as ckpt,
        pytest.raises(RecoveryError, match="none can be used"),
    ):
        ckpt.resume()


def test_the_newest_base_is_deleted_while_it_is_looked_at(
    without_log: Path, tmp_path: Path
) -> None:
    """A trainer that keeps few bases commits the next one behind the listing, and deletes this."""
    newer, newest = tmp_path / "newer", base_folder(without_log, 8)
    newest.rename(newer)

    def overtakes(op: str, path: Any) -> None:
        older = base_folder(without_log, 4)
        if (op, Path(path)) == ("scan", older) and newer.exists():
            newer.rename(newest)
            (older / "manifest.json").rename(older / "manifest.deleting")

    found = scan_run(HookedFileSystem(overtakes), without_log)
    assert max(base.id for base in found.bases if base.is_usable) == BaseId(1, 8)


def test_a_fresh_path(tmp_path: Path) -> None:
    for path in (tmp_path / "new", tmp_path):
        found = everstep.peek(path)
        assert (found.step, found.exact, found.source, found.base_step) == (0, True, "fresh", None)
        with pytest.raises(RecoveryError, match="there is no run"):
            everstep.load(path)
    assert not (tmp_path / "new").exists()


def test_a_run_without_a_base(tmp_path: Path) -> None:
    with opened(tmp_path / "run", World()):
        assert everstep.peek(tmp_path / "run").step == 0
        with pytest.raises(RecoveryError, match="has no base yet"):
            everstep.load(tmp_path / "run")


def test_a_step_that_is_not_there(run: Path) -> None:
    with pytest.raises(RecoveryError, match="neither a base nor the log has step 11") as caught:
        everstep.load(run, 11)
    assert "1 to 10" in (caught.value.hint or "")


def test_the_history_that_was_given_up(run: Path, template: tuple[Path, dict[int, Any]]) -> None:
    states = train(run, World(seed=9), 3, at=6)
    assert everstep.peek(run).step == 9
    assert everstep.load(run).timeline == 2
    world = World(seed=99)
    found = everstep.load(run, 10, into=world.state)  # as resume(step=10) would
    assert found.timeline == 1
    assert "timeline 2" in found.notes[0]
    assert world.snapshot()["plain"] == template[1][10]["plain"]
    everstep.load(run, 8, into=world.state)
    assert world.snapshot()["0.exp_avg"] == states[8]["0.exp_avg"]


# --- Damage -------------------------------------------------------------------------------


def data_file(run: Path, step: int) -> Path:
    return base_folder(run, step) / "rank-00000.safetensors"


def test_a_damaged_base_is_passed_over_by_name(
    run: Path, template: tuple[Path, dict[int, Any]]
) -> None:
    """The older one and the log lead to the same step; without the log, to the step before."""
    flip(data_file(run, 10), -40)
    found = everstep.load(run)
    assert (found.step, found.base_step, found.exact) == (10, 8, True)
    assert any((one.step, "digest" in one.reason) == (10, True) for one in found.skipped)
    for segment in segments_of(run):
        shutil.rmtree(segment.path)
    found = everstep.load(run)
    assert (found.step, found.base_step, found.replayed) == (8, 8, 0)
    assert "only step 8 could be loaded" in found.notes[0]
    with pytest.raises(RecoveryError, match="digest"):
        everstep.load(run, 10)


def test_nothing_is_whole(run: Path) -> None:
    for step in (1, 4, 8, 10):
        flip(data_file(run, step), -40)
    with pytest.raises(RecoveryError, match="bases exist, but none can be used") as caught:
        everstep.load(run)
    assert all(f"step {step}, timeline 1" in str(caught.value) for step in (1, 4, 8, 10))


def test_a_damaged_log_ends_before_the_step(
    run: Path, template: tuple[Path, dict[int, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (8, 10):
        shutil.rmtree(base_folder(run, step))
    (last,) = [one for one in segments_of(run) if one.last == 8]
    flip(Path(last.path / "rank-00000.safetensors"), -40)
    world = World(seed=99)
    with caplog.at_level(logging.WARNING, "everstep"):
        found = everstep.load(run, into=world.state)
    assert found.base_step == 4
    assert found.step in (6, 7)
    assert world.snapshot()["plain"] == template[1][found.step]["plain"]
    assert world.snapshot()["0.exp_avg"] == template[1][found.step]["0.exp_avg"]
    assert f"the log ends with step {found.step}" in caplog.text
    assert "up to step 10 are unusable" in found.notes[0]
    with pytest.raises(RecoveryError, match=r"digest|damaged"):
        everstep.load(run, 8)


def test_a_damaged_entry_that_is_not_asked_for(run: Path) -> None:
    """What is read is verified; nothing else is read."""
    from everstep.run.open_base import OpenBase
    from everstep.run.scan import scan_run

    (base,) = [b for b in scan_run(PosixFileSystem(), run).bases if b.id == BaseId(1, 10)]
    found = OpenBase.open(PosixFileSystem(), base, rank=0)
    ((_, _, header, _),) = found.shards
    found.close()
    (place,) = [
        p for p in header.placed if p.entry.name == "optimizer/state/model.0.weight/exp_avg"
    ]
    flip(data_file(run, 10), header.room_bytes + place.begin)
    assert everstep.load(run, 10, only="model/*").step == 10
    found = everstep.load(run, 10, only="optimizer/*")
    assert (found.step, found.base_step) == (10, 8), "the log leads there from the base before"
    assert "model.0.weight/exp_avg" in found.skipped[-1].reason


def test_an_optimizer_that_only_its_program_can_replay(tmp_path: Path) -> None:
    """The newest base is given, and it is said what it is short of."""

    class Own(torch.optim.SGD):
        pass

    run = tmp_path / "run"
    with declared(Own):
        train(run, World(lambda p: Own(p, lr=0.1)), 6)
    shutil.rmtree(base_folder(run, 6))
    with pytest.raises(UnsupportedStateError, match="without the program that declares it"):
        everstep.load(run, 6)
    found = everstep.load(run)
    assert (found.step, found.replayed, found.exact) == (4, 0, True)
    assert "step 6 exists, but only step 4 could be loaded" in found.notes[0]
    assert "without the program that declares it" in found.notes[0]


# --- Places -------------------------------------------------------------------------------


def test_a_folder_that_may_only_be_read(run: Path) -> None:
    for path in [run, *run.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert everstep.peek(run).step == 10
        assert everstep.load(run).step == 10
        assert everstep.load(run, 7).step == 7
    finally:
        for path in [run, *run.rglob("*")]:
            path.chmod(0o700)


def test_copies_in_another_directory(tmp_path: Path) -> None:
    """The run folder is gone."""
    run, copies = tmp_path / "run", tmp_path / "copies"
    weight, _, _ = train_with_copies(run, 5, tiers=[str(copies)])
    shutil.rmtree(run)
    with untouched(copies):
        assert everstep.peek(copies).step == 4
        found = everstep.load(str(copies), only="model/*")
        assert everstep.load(TierOptions(str(copies))).step == 4
    assert (found.step, found.exact) == (4, True)
    assert found.tensors["model/weight"].shape == weight.shape


def test_copies_in_a_store(
    run: Path, monkeypatch: pytest.MonkeyPatch, template: tuple[Path, dict[int, Any]]
) -> None:
    """As of a directory, through the tier that a URL names."""
    seen = []

    class Store(DiskTier):
        @property
        def url(self) -> str:
            return "s3://bucket/prefix"

    def opens(where: str, filesystem: Any) -> Any:
        seen.append(where)
        tier = Store(filesystem, run)
        tier.traits = Traits("object", frozenset(), 3)
        return tier

    monkeypatch.setattr(look, "open_tier", opens)
    with untouched(run):
        found = everstep.load("s3://bucket/prefix")
        told = everstep.peek("s3://bucket/prefix")
    assert seen == ["s3://bucket/prefix"] * 2
    assert (found.step, found.source, told.step, told.source) == (10, "object", 10, "object")
    assert isinstance(look.Place.of("s3://bucket/prefix").filesystem, TierFileSystem)


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("chapter 1")
    (tmp_path / "file").write_text("a file")
    for looks in (everstep.peek, everstep.load):
        with pytest.raises(ForeignDirectoryError):
            looks(tmp_path / "thesis")
        with pytest.raises(StorageError):
            looks(tmp_path / "file")
        with pytest.raises(OptionError):
            looks("")
        with pytest.raises(OptionError):
            looks("s4://what/is/this")


# --- A part of it -------------------------------------------------------------------------


@pytest.mark.parametrize("step", [8, 9])
def test_only(run: Path, step: int) -> None:
    """Of a base, and of a step that the log leads to."""
    found = everstep.load(run, step, only="model/*")
    assert {name.partition("/")[0] for name in found.tensors} == {"model"}
    assert list(found.objects) == ["model"]
    World(seed=2).model.load_state_dict(found.state_dict("model"))
    found = everstep.load(run, step, only=["*.bias", "plain", "scheduler/*"])
    assert all(name.endswith(".bias") for name in found.tensors if name.startswith("model/"))
    assert set(found.state_dict("model")) == {"0.bias", "1.bias", "3.bias", "4.bias"}
    assert set(found.objects) == {"model", "plain", "scheduler"}
    with pytest.raises(OptionError, match="'optimizer' is not among what was loaded") as caught:
        found.state_dict("optimizer")
    assert "'model'" in (caught.value.hint or "")
    found = everstep.load(run, step, only="optimizer/*/exp_avg")
    with pytest.raises(OptionError, match="'optimizer' was loaded incompletely"):
        found.state_dict("optimizer")
    found = everstep.load(run, step, only="model/tied")  # another name of model/3.weight
    assert list(found.tensors) == ["model/tied"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": "modle/*"}, r"only='modle/\*' matches nothing of step 10"),
        ({"only": ["model/*", "x"]}, "only='x' matches nothing"),
        ({"only": []}, "only must be a pattern"),
        ({"only": 3}, "only"),
        ({"step": -1}, "step must be"),
        ({"map_location": "cup"}, "map_location 'cup' is not a device"),
        ({"into": {"model": nn.Linear(1, 1)}, "map_location": "cpu"}, "map_location applies to"),
        ({"into": {}}, "the state is empty"),
        ({"onyl": "model/*"}, "did you mean 'only'"),
    ],
)
def test_refusals(run: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        everstep.load(run, **options)


def test_map_location(run: Path) -> None:
    found = everstep.load(run, only="model/*", map_location="meta")
    assert {one.device.type for one in found.tensors.values()} == {"meta"}
    assert found.tensors["model/tied"] is found.tensors["model/3.weight"]
    assert everstep.load(run, map_location=torch.device("cpu")).step == 10


def test_into_a_part(run: Path, template: tuple[Path, dict[int, Any]]) -> None:
    world, other = World(seed=7), World(seed=8)
    before = other.snapshot()
    everstep.load(run, 6, into={"model": world.model})
    same = world.snapshot()
    assert all(same[key] == template[1][6][key] for key in world.model.state_dict())
    everstep.load(run, 6, only="model/0.*", into={"model": other.model})
    after = other.snapshot()
    for key in other.model.state_dict():
        wanted = template[1][6][key] if key.startswith("0.") else before[key]
        assert after[key] == wanted, key
    state = {"plain": None}
    everstep.load(run, 6, into=state)
    assert state == {"plain": {"seen": 6}}


@pytest.mark.parametrize("what", ["shape", "name", "part", "ties", "optimizer", "dtype"])
def test_what_does_not_fit_is_not_touched(run: Path, what: str) -> None:
    world = World(seed=7)
    into: dict[str, Any] = {"model": world.model, "optimizer": world.optimizer}
    if what == "shape":
        world.model[4] = nn.Linear(6, 3)
        into = {"model": world.model}
    elif what == "name":
        world.model.head = nn.Linear(6, 3)  # type: ignore[assignment]
        into = {"model": world.model}
    elif what == "part":
        into["ema"] = {"step": 0}
    elif what == "ties":
        world.model[0].bias = world.model[3].bias
        into = {"model": world.model}
    elif what == "optimizer":
        into = {"optimizer": torch.optim.AdamW([*world.model.parameters()][:3])}
    elif what == "dtype":
        world.model.to(torch.bfloat16)
        into = {"model": world.model}
    before = world.snapshot()
    with untouched(run), pytest.raises(MismatchError) as caught:
        everstep.load(run, into=into)
    assert world.snapshot() == before
    assert caught.value.step == 10
    named = {name for name, _ in caught.value.mismatches}
    expected = {"part": "ema", "name": "model/head.weight", "shape": "model/4.weight"}
    assert expected.get(what, next(iter(named))) in named


def test_into_and_only_contradict(run: Path) -> None:
    world = World(seed=7)
    before = world.snapshot()
    with pytest.raises(OptionError, match=r"leaves out .* of 'optimizer'"):
        everstep.load(run, only="model/*", into=world.state)
    assert world.snapshot() == before


def test_the_memory_of_what_is_not_asked_for_is_not_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.restore.offline import rank_files

    made: list[str] = []
    makes = rank_files.empty_like_entry

    def noted(entry: Any) -> torch.Tensor:
        made.append(entry.name)
        return makes(entry)

    monkeypatch.setattr(rank_files, "empty_like_entry", noted)
    everstep.load(run, only="model/*.bias")
    assert made
    assert all(name.startswith("model/") and name.endswith(".bias") for name in made)


# --- A base of a part of the state --------------------------------------------------------


def take_over(run: Path, parts: list[str], seed: int = 5, **options: Any) -> everstep.Recovery:
    """What somebody does who looks at a run by resuming it."""
    world = World(seed=seed)
    state = {key: world.state[key] for key in parts}
    forget(run)
    keeper = everstep.KeeperOptions(process=False)
    with everstep.Checkpointer(run, state, every=None, method="sync", keeper=keeper) as ckpt:
        recovery = ckpt.resume(**options)
        ckpt.save()
    forget(run)
    return recovery


@pytest.fixture
def without_log(tmp_path: Path) -> Path:
    run = tmp_path / "bases"
    train(run, World(), 8, method="sync", log=None)
    return run


def test_a_part_that_takes_over_is_told_of(
    without_log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "everstep"):
        recovery = take_over(without_log, ["model"], strict=False)
    assert "To read a run without taking it over, use everstep.load(path)" in caplog.text
    assert "'optimizer', 'scheduler', 'plain'" in recovery.notes[0]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "everstep"):
        take_over(without_log, ["model", "optimizer", "scheduler", "plain"], strict=False)
    assert "everstep.load" not in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_a_base_of_a_part_is_not_what_a_full_state_is_restored_from(
    without_log: Path, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    take_over(without_log, ["model"], strict=False)
    assert everstep.peek(without_log).base_step == 8
    assert everstep.peek(without_log).timeline == 1
    found = everstep.load(without_log)
    assert found.timeline == 1
    assert "optimizer" in found.objects
    assert "has no 'optimizer', 'plain', 'scheduler'" in found.skipped[-1].reason
    passed_over = found.skipped[-1].reason
    assert passed_over in found.notes
    assert passed_over in everstep.peek(without_log).notes
    world = World(seed=99)
    with (
        caplog.at_level(logging.WARNING, "everstep"),
        opened(without_log, world, method="sync", log=None) as ckpt,
    ):
        recovery = ckpt.resume(strict=strict)
    assert (recovery.step, recovery.base_step, recovery.exact) == (8, 8, True)
    assert "the base of step 8 of timeline 2 has no 'optimizer'" in recovery.notes[0]
    assert "is passed over" in caplog.text
    assert [(one.timeline, one.step) for one in recovery.skipped][-1] == (2, 8)


def test_no_base_has_all_of_it(without_log: Path) -> None:
    """The error names the base and the parts."""
    take_over(without_log, ["model"], strict=False)
    shutil.rmtree(without_log / "timeline-00001" / "base")
    world = World(seed=99)
    with (
        pytest.raises(MismatchError) as caught,
        opened(without_log, world, method="sync", log=None) as ckpt,
    ):
        ckpt.resume()
    assert caught.value.step == 8
    assert "timeline-00002" in (caught.value.path or "")
    assert {name for name, _ in caught.value.mismatches} == {"optimizer", "scheduler", "plain"}


def test_the_only_base_that_has_all_of_it_is_damaged(without_log: Path) -> None:
    take_over(without_log, ["model"], strict=False)
    for path in (without_log / "timeline-00001" / "base").iterdir():
        flip(path / "rank-00000.safetensors", -40)
    world = World(seed=99)
    with (
        pytest.raises(RecoveryError, match="is passed over") as caught,
        opened(without_log, world, method="sync", log=None) as ckpt,
    ):
        ckpt.resume()
    assert "digest" in str(caught.value)


def test_a_new_part_of_the_state_is_no_reason_to_go_back(without_log: Path) -> None:
    """No base has it: the newest one is restored, as ever, or refused by name."""
    world = World(seed=99)
    world.state["new"] = {"n": 1}
    with opened(without_log, world, method="sync", log=None) as ckpt:
        with pytest.raises(MismatchError, match="new: not in the checkpoint") as caught:
            ckpt.resume()
        assert caught.value.step == 8
        assert ckpt.resume(strict=False).step == 8


def test_a_part_never_drops_a_log_unasked(run: Path, template: tuple[Path, dict[int, Any]]) -> None:
    """Whoever only looks would lose the steps behind the newest base."""
    shutil.rmtree(base_folder(run, 10))
    with (
        untouched(run / "timeline-00001"),
        pytest.raises(RecoveryError, match=r"reaches step 10, but without 'optimizer'"),
    ):
        take_over(run, ["model"], strict=False)
    assert not list(run.glob("timeline-00002*"))
    assert everstep.peek(run).step == 10
    world = World(seed=99)
    with opened(run, world) as ckpt:
        assert ckpt.resume().step == 10
        assert world.snapshot() == template[1][10]
    assert take_over(run, ["model"], step=8, strict=False).step == 8, "who says so may"


def test_the_one_that_was_taken_over_is_told_so(without_log: Path) -> None:
    first, second = World(seed=1), World(seed=2)
    how: dict[str, Any] = {"method": "sync", "log": None, "on_failure": "warn"}
    with opened(without_log, first, **how) as older:
        older.resume()
        forget(without_log)
        with opened(without_log, second, **how) as newer:
            newer.resume()
            first.train()
            older.step()
            with pytest.warns(RuntimeWarning) as warned:
                error = older.save().durable.exception(20)
    said = str(error)
    assert isinstance(error, everstep.errors.FencedError)
    assert "another process" in said
    assert "has resumed this run: timeline 3 has taken the run over from timeline 2" in said
    assert "stop this process" in said
    assert "has resumed this run" in str(warned[0].message)


def test_who_has_opened_a_timeline_is_named(without_log: Path) -> None:
    from everstep.run.fence import Fence

    fence = Fence(PosixFileSystem(), without_log, 1)
    take_over(without_log, ["model"], strict=False)
    with pytest.raises(everstep.errors.FencedError, match=f"process {os.getpid()} on "):
        fence.check()


def test_damage_is_no_reason_to_say_that_parts_are_missing(without_log: Path) -> None:
    """What cannot be read of a base is damage, whatever parts it has."""
    take_over(without_log, ["model"], strict=False)
    for path in (without_log / "timeline-00002" / "base").iterdir():
        flip(path / "rank-00000.safetensors", 20)
    found = everstep.load(without_log)
    assert found.timeline == 1
    assert not any("has no" in one.reason for one in found.skipped)
    assert issubclass(DamageError, StorageError)
