"""``everstep bench step`` at work: arms give back what they say, kills are real, nothing stays."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from everstep.errors import EverstepError, OptionError, OutOfSpaceError
from everstep.workloads.comparison import fingerprint
from everstep_bench.harness import children
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.options import from_words
from everstep_bench.harness.placement import Placement
from everstep_bench.harness.session import Session, Turns
from everstep_bench.options import FrequencyOptions, StepOptions, Training
from everstep_bench.step import arms, rounds, run
from everstep_bench.step.arms import Ours, Setting, StepArm, TorchSave, missing, probed
from everstep_bench.step.child import ChildOrder
from everstep_bench.step.frequency import run_frequency
from everstep_bench.step.kills import Kills
from everstep_bench.step.rounds import Row
from tests.support.displays import Silent
from tests.support.stalls import MACHINE, invoke

TINY = Training(params=100_000, batch=1)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits for what other processes write; and every thread gets its cores back."""
    monkeypatch.setattr(os, "sync", lambda: None)
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def loop_of(seed: int = 1) -> Loop:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return Loop(TINY)


def setting(arm: str, every: int = 1, ratio: float = 0.1, block_steps: int = 4) -> Setting:
    return Setting(arm, every, ratio, 2, block_steps)


def made(kind: type[StepArm], loop: Loop, folder: Path, chosen: Setting) -> Any:
    return kind(chosen, loop, folder, Placement(free_core=True))


@contextlib.contextmanager
def opened(arm: Any) -> Iterator[Any]:
    try:
        arm.open()
        yield arm
    finally:
        arm.close()


# --- What arms give back ----------------------------------------------------------------


def test_torch_save_gives_back_every_bit(tmp_path: Path) -> None:
    loop = loop_of()
    with opened(made(TorchSave, loop, tmp_path / "a", setting("torch.save"))) as arm:
        assert arm.resume().step == 0
        for _ in range(3):
            loop.step()
            arm.after_step()
    expected = fingerprint(loop.training)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["2", "3"]
    (tmp_path / "a" / "4.unfinished").write_bytes(b"cut short")
    other = loop_of(seed=1)
    with opened(made(TorchSave, other, tmp_path / "a", setting("torch.save"))) as arm:
        found = arm.resume()
    assert (found.step, found.source) == (3, "disk")
    assert fingerprint(other.training) == expected


def test_torch_save_every_so_many_steps(tmp_path: Path) -> None:
    loop = loop_of()
    with opened(made(TorchSave, loop, tmp_path / "a", setting("torch.save", 2))) as arm:
        for _ in range(7):
            loop.step()
            arm.after_step()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["4", "6"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["lowdiff", "lowdiff_plus", "lazy"])
def test_arms_of_ours_take_memory_and_end_their_keepers(tmp_path: Path, arm: str) -> None:
    if why := missing(arm):
        pytest.skip(why)
    turns = Turns(Silent(), 1)
    loop, placement = loop_of(), Placement(free_core=True)
    bench = rounds.Bench(loop, tmp_path, placement, turns)
    every = 1 if arm == "lazy" else 4
    row = Row(arm, setting=setting(arm, every))
    block = bench.block(row)
    assert (block.steps, block.wall_s > 0) == (4, True)
    assert block.memory_bytes is not None
    assert block.written_bytes is None or block.written_bytes > 0
    size_bytes = loop.size_bytes
    if arm == "lazy":
        assert block.memory_bytes == 4 * size_bytes
    elif arm == "lowdiff":  # a base, and a fraction of gradients
        assert size_bytes < block.memory_bytes < 1.5 * size_bytes
    assert f'method="{arm}", every={every}' in row.detail
    assert not list(tmp_path.iterdir())
    assert Ours(row.setting, loop, tmp_path / "1", placement).processes() == []


def test_a_preset_that_is_not_there_is_said() -> None:
    assert missing("lazy") is None
    assert missing("torch.save") is None


# --- Rounds ---------------------------------------------------------------------------------


class Arm(StepArm):
    """Tells what happens to it."""

    told: list[str]
    fails = False

    def open(self) -> None:
        self._folder.mkdir()
        self.told.append(f"open {self.setting.arm}")

    def warm_up(self) -> None:
        self.told.append("warm-up")

    def after_step(self) -> None:
        self.told.append("after")
        if self.fails:
            raise EverstepError("the disk is full")

    def settle(self) -> None:
        self.told.append("settle")

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Arm.told, Arm.fails, Arm.saves_each_step = [], False, False
    monkeypatch.setattr(rounds, "make_arm", lambda *given: Arm(*given))
    monkeypatch.setattr(gc, "collect", lambda: 0)
    return Arm.told


def bench_of(folder: Path, seed: int = 1) -> rounds.Bench:
    loop: Any = SimpleNamespace(step=lambda: None)
    return rounds.Bench(loop, folder, Placement(free_core=True), Turns(Silent(), seed))


def test_rounds_have_every_arm_once_and_references_twice(told: list[str], tmp_path: Path) -> None:
    rows = bench_of(tmp_path).measure([setting("none"), setting("lazy"), setting("logged")], 3)
    assert [{number: len(blocks) for number, blocks in row.blocks.items()} for row in rows] == [
        {1: 2, 2: 2, 3: 2}, {1: 1, 2: 1, 3: 1}, {1: 1, 2: 1, 3: 1},
    ]  # fmt: skip
    orders = [word for word in told if word.startswith("open")]
    assert orders[:4] != orders[4:8] or orders[4:8] != orders[8:]
    assert told[:8] == [orders[0], "warm-up", *["after"] * 4, "settle", "close"]
    assert not list(tmp_path.iterdir())


def test_the_order_is_drawn_with_the_seed(told: list[str], tmp_path: Path) -> None:
    def order(seed: int) -> list[str]:
        told.clear()
        bench_of(tmp_path, seed).measure([setting(name) for name in ("none", "lazy", "logged")], 4)
        return [word for word in told if word.startswith("open")]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_block_among_saves_begins_with_one(told: list[str], tmp_path: Path) -> None:
    Arm.saves_each_step = True
    row = Row("lazy", setting=setting("lazy"))
    block = bench_of(tmp_path).block(row)
    assert told.count("after") == 5
    assert block.steps == 4


def test_an_arm_that_fails_is_closed_and_its_folder_removed(
    told: list[str], tmp_path: Path
) -> None:
    Arm.fails = True
    (row,) = bench_of(tmp_path).measure([setting("lazy")], 3)
    assert row.error == "failed: the disk is full"
    assert not row.blocks
    assert told.count("close") == told.count("open lazy") == 1
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    def check(free_bytes: int, memory_bytes: int) -> None:
        machine = replace(MACHINE, free_bytes=free_bytes, memory_available_bytes=memory_bytes)
        nothing: Any = None
        options = StepOptions(params=10**8)
        run.check_room(Session(options, nothing, tmp_path, machine, nothing, (), 0.0))

    check(10**12, 10**12)
    for free_bytes, memory_bytes, said in ((10**9, 10**12, "free"), (10**12, 10**9, "memory")):
        with pytest.raises(OutOfSpaceError, match=said):
            check(free_bytes, memory_bytes)


# --- Kills ------------------------------------------------------------------------------

STEPS = 10


class Scripted(Kills):
    """Children that only say what they are told to."""

    def __init__(self, scripts: list[list[dict[str, Any]]], folder: Path) -> None:
        super().__init__(StepOptions(every=(4,), arms=("lazy",)), folder, Silent())
        self.scripts = scripts

    def child(self, setting: Setting, folder: Path) -> children.Child:
        lines = "".join(json.dumps(word) + "\n" for word in self.scripts.pop(0)).encode()
        code = f"import os, sys; os.write(1, {lines!r}); sys.stdin.read()"  # whole, or not at all
        return children.Child("a child", command=[sys.executable, "-c", code])


def words(begin: int, end: int, state: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    recovered = {"step": begin, "source": "memory", "base_step": 4, "replayed": begin - 4}
    said: list[dict[str, Any]] = [{"event": "ready"}]
    said += [{"event": "resumed", "seconds": 0.25, "recovered": recovered}]
    said += [{"event": "step", "step": n, "seconds": 0.001} for n in range(begin + 1, end + 1)]
    return said + ([{"event": "finished", "fingerprint": state}] if state is not None else [])


def killed(folder: Path, *, back: int, state: Mapping[str, str]) -> Any:
    same = {"a": "1", "b": "2"}
    script = [words(0, STEPS, same), words(0, 8), words(back, STEPS, state)]
    bench = Scripted(script, folder)
    (outcome,) = bench.measure()
    return outcome


def test_a_kill_that_loses_nothing(tmp_path: Path) -> None:
    outcome = killed(tmp_path, back=8, state={"a": "1", "b": "2"})
    (kill,) = outcome.kills
    assert (kill.completed, kill.lost, kill.identical, kill.seconds) == (8, 0, True, 0.25)
    assert kill.recovered.replayed == 4
    assert outcome.lost() == 0


@pytest.mark.parametrize("state", [{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}])
def test_a_kill_that_loses_steps_and_bits(tmp_path: Path, state: dict[str, str]) -> None:
    (kill,) = killed(tmp_path, back=5, state=state).kills
    assert (kill.completed, kill.lost, kill.identical) == (8, 3, False)
    assert kill.different == 1


def test_a_child_that_hangs_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Scripted([words(0, STEPS, {"a": "1"}), words(0, 8), words(8, STEPS)], tmp_path)
    monkeypatch.setattr(children, "TIMEOUT_S", 2.0)
    (outcome,) = bench.measure()
    assert not outcome.kills
    assert "has not answered" in outcome.error


# --- End to end -------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_tiny_run_from_end_to_end(tmp_path: Path, kills: int) -> None:
    print("seed 7")
    result = invoke(
        "step", "--params", "100K", "--batch", "1", "--repeats", "1", "--every", "3", "--seed", "7",
        "--arms", "lowdiff", "--kills", str(kills), "--no-replay", "--dir", str(tmp_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert not list(tmp_path.iterdir())
    assert [arm["name"] for arm in found["arms"]] == ["none", "compressed", "lowdiff"]
    assert [len(arm["blocks"]) for arm in found["arms"]] == [2, 2, 1]
    lowdiff = found["arms"][2]
    assert lowdiff["slowdown_against_compressed"]["median"] > -1
    assert lowdiff["memory_bytes_per_step"]["median"] > 0
    if not kills:
        assert found["kills"] == []
        return
    ((kill,),) = [killed["kills"] for killed in found["kills"]]
    assert kill["recovered"]["exact"] is True
    assert (kill["lost"], kill["identical"], kill["different"]) == (0, True, 0)
    assert kill["parts"] > 50


@pytest.mark.slow
def test_a_lossy_arm_from_end_to_end(tmp_path: Path) -> None:
    result = invoke(
        "step", "--params", "100K", "--batch", "1", "--repeats", "1", "--every", "3", "--seed", "7",
        "--arms", "adaptive", "--ratio", "0.5", "--no-replay", "--dir", str(tmp_path), "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [arm["name"] for arm in found["arms"]] == ["none", "adaptive"]
    ((kill,),) = [killed["kills"] for killed in found["kills"]]
    assert (kill["recovered"]["exact"], kill["lost"], kill["identical"]) == (False, 0, False)
    assert 'log="adaptive"' in found["arms"][1]["detail"]


def test_a_missed_target_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    report = SimpleNamespace(as_json=dict, all_met=lambda: False, write=lambda: None)
    monkeypatch.setattr(run, "run_step", lambda options, display: report)
    assert invoke("step", "--check", "--json").exit_code == 3
    assert invoke("step", "--json").exit_code == 0


@pytest.mark.slow
def test_frequency_from_end_to_end(tmp_path: Path) -> None:
    options = FrequencyOptions(
        params=100_000, batch=1, repeats=1, every_max=2, within=0.999, arms=("torch.save",),
        folder=tmp_path,
    )  # fmt: skip
    (found,) = run_frequency(options, Silent()).found
    assert found.probes
    assert found.every == 1 or found.probes[0].slowdown.median > options.within
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_arm_copies_its_bases_to_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the blocks of everstep's arms there are copies in each place; behind them nothing is."""
    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
    copied: list[int] = []
    emptied = arms.empty_place

    def empty(place: str, seams: Any) -> None:
        copied.append(len(list(Path(place).rglob("manifest.json"))))
        emptied(place, seams)

    monkeypatch.setattr(arms, "empty_place", empty)
    options = FrequencyOptions(
        params=100_000, batch=1, repeats=1, every_max=1, within=0.999, folder=tmp_path,
        arms=("torch.save", "lazy"), tiers=tuple(map(str, places)),
    )  # fmt: skip
    report = run_frequency(options, Silent())
    assert [found.error for found in report.found] == [None, None]
    assert len(copied) == 2
    assert all(copied)
    assert sorted(tmp_path.iterdir()) == sorted(places)
    assert not any(list(place.iterdir()) for place in places)
    assert report.as_json()["tiers"] == list(options.tiers)
    assert "everstep's arms copy" in report.labels()[-1]


def test_which_arms_copy_and_where_to(tmp_path: Path) -> None:
    options = from_words(FrequencyOptions, tiers=f"s3://bucket/run, {tmp_path},{tmp_path}")
    assert options.tiers == ("s3://bucket/run", str(tmp_path))
    assert probed(options, "torch.save", 2, 4).tiers == ()
    lowdiff = probed(options, "lowdiff", 2, 4)
    assert lowdiff.tiers == options.tiers
    order = ChildOrder(os.getppid(), lowdiff, TINY, "folder", 3)
    assert ChildOrder.decode(order.encode()) == order
    assert not order.is_orphaned
    assert from_words(FrequencyOptions, tiers="").tiers == ()
    with pytest.raises(OptionError, match="no folder"):
        FrequencyOptions(tiers=(str(tmp_path / "nothing"),))
