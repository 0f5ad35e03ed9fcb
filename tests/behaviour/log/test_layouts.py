"""Steps that go on to have new patterns of gradients (layers that are dropped, experts that get no
tokens): trainer and keeper remember the last ones only, and the log gives back every step."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.link.messages import LogLayouts, receive_layout
from everstep.link.recordable import record_layout
from everstep.options import KeeperOptions, LogOptions
from everstep.state.layout import shards as recent
from everstep.state.layout.entries import Entry
from everstep.state.layout.shards import LRUCache, ShardLayout
from everstep.testing import inspect
from everstep.trainer.attach.remote import RemoteKeeper
from tests.support.following import until
from tests.support.log.every_step import opened
from tests.support.lost_keepers import kill_keeper
from tests.support.serving import Bench, die, serving

LAYERS = 10
PATTERNS = 300  # of which the first are forgotten when the last have come
STEPS = PATTERNS + 20


class World:
    """A model of which each step trains some layers; all of them in its first.

    Args:
        pattern: of each step, whose bits say which layers have no gradient.
    """

    def __init__(self, pattern: Callable[[int], int], *, seed: int = 1, layers: int = LAYERS):
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"layers": self.layers, "optimizer": self.optimizer}
        self.pattern = pattern

    def train(self, step: int) -> None:
        dropped, found = self.pattern(step), torch.randn(2, 4)
        for number, layer in enumerate(self.layers):
            if not dropped >> number & 1:
                found = found + layer(found)
        found.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, bytes]:
        found = {name: p.detach().numpy().tobytes() for name, p in self.layers.named_parameters()}
        for number, values in enumerate(self.optimizer.state.values()):
            found |= {f"{number}.{key}": t.numpy().tobytes() for key, t in values.items()}
        return {**found, "rng": torch.get_rng_state().numpy().tobytes()}


def new_and_then_old(step: int) -> int:
    """A new pattern in each step, and in the last ones those of the first again."""
    return (step - 1) % PATTERNS


def run(ckpt: everstep.Checkpointer, world: Any, upto: int) -> dict[int, dict[str, bytes]]:
    """Trains to step ``upto``; the state after each step."""
    found = {}
    for step in range(ckpt.stats().step + 1, upto + 1):
        world.train(step)
        ckpt.step()
        found[step] = world.snapshot()
    return found


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a keeper is told what."""
    found, send = Counter[str](), RemoteKeeper.send

    def sending(keeper: RemoteKeeper, message: dict[str, Any]) -> None:
        found[message["kind"]] += 1
        if message["kind"] in ("log", "redo", "log_layout"):  # or its number may be another's
            assert keeper.log_layouts.lock.locked()
        send(keeper, message)

    monkeypatch.setattr(RemoteKeeper, "send", sending)
    return found


def layouts_alive() -> int:
    gc.collect()
    return sum(isinstance(one, ShardLayout) for one in gc.get_objects())


# --- What is remembered -----------------------------------------------------------------


def test_of_too_many_those_go_that_were_not_used_for_longest() -> None:
    values = LRUCache[str, int](count_max=3, weight_max=10)
    for number, name in enumerate("abc"):
        values.add(name, number, 2)
    assert values.get("a") == 0
    assert values.evict_for(2) == [1]
    values.add("d", 3, 2)
    assert [values.get(name) for name in "abcd"] == [0, None, 2, 3]
    values.add("e", 4, 7)
    assert [values.get(name) for name in "acde"] == [None, None, 3, 4]
    values.add("f", 5, 99)  # alone
    assert (len(values), values.get("f")) == (1, 5)
    values.add("f", 6, 1)
    values.add("g", 7, 9)
    assert [values.get(name) for name in "fg"] == [6, 7]


@pytest.mark.parametrize("seed", range(6))
def test_both_sides_mean_the_same_by_a_number(seed: int) -> None:
    draw, known, told = random.Random(seed), dict[int, ShardLayout](), list[dict[str, Any]]()
    entries = [Entry.whole(f"{n}", "U8", (n % 7,)) for n in range(60)]
    numbers = LRUCache[ShardLayout, int](8, 50)
    ours = LogLayouts(told.append, numbers)
    there = [record_layout(entries[: draw.choice([0, 1, 2, 20, 60])]) for _ in range(12)]
    for _ in range(400):
        if draw.random() < 0.3:
            begin = draw.randrange(60)
            there[draw.randrange(12)] = record_layout(entries[begin : begin + draw.choice([3, 30])])
        layout = draw.choice(there)
        number = ours.number(layout)
        for message in told:
            receive_layout(known, message)
        told.clear()
        assert known[number] == layout
        assert len(known) == len(numbers) <= 8
        assert len(known) == 1 or sum(len(one.placed) for one in known.values()) <= 50
        assert max(known) < 8
        assert ours.number(layout) == number
        assert not told


def test_a_number_that_was_not_told_is_given_to_the_next_layout() -> None:
    """It stays free: where layouts were evicted, another number might be in use already."""
    failing = [False]

    def send(message: dict[str, Any]) -> None:
        if failing[0]:
            raise KeyboardInterrupt
        receive_layout(known, message)

    known = dict[int, ShardLayout]()
    ours = LogLayouts(send, LRUCache(4, 8))
    small = [record_layout([Entry.whole(f"{n}", "U8", (n,))]) for n in range(4)]
    numbers = {id(layout): ours.number(layout) for layout in small}
    failing[0] = True
    with pytest.raises(KeyboardInterrupt):  # of the four, two make room for it
        ours.number(record_layout([Entry.whole(f"large {n}", "U8", (n,)) for n in range(6)]))
    failing[0] = False
    more = [record_layout([Entry.whole(f"more {n}", "U8", (n,))]) for n in range(2)]
    numbers |= {id(layout): ours.number(layout) for layout in more}
    for layout in (*small[2:], *more):
        assert ours.number(layout) == numbers[id(layout)]
        assert known[numbers[id(layout)]] == layout


def test_a_keeper_that_is_told_by_an_older_trainer() -> None:
    known = dict[int, ShardLayout]()
    receive_layout(known, {"kind": "log_layout", "number": 7, "layout": []})
    assert known == {7: ShardLayout(())}


# --- Training ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("no_garbage")
def test_nothing_grows_with_the_steps(served: Bench) -> None:
    """Neither in the trainer nor in the keeper, which are one process here."""
    world = World(lambda step: step - 1, layers=11)
    with opened(served.run, world, method="logged", every=20) as ckpt:  # type: ignore[arg-type]
        ckpt.resume()
        run(ckpt, world, PATTERNS)
        ckpt.wait()
        before = layouts_alive()
        run(ckpt, world, 2 * PATTERNS + 5)
        ckpt.wait()
        assert layouts_alive() < before + 100
        trainer = served.server.trainer
        assert trainer is not None
        assert len(trainer.log_layouts) <= recent.COUNT_MAX


@pytest.mark.parametrize("rebuild", ["keeper", "recovery"])
def test_a_base_over_several_steps_with_more_patterns_than_are_remembered(
    rebuild: str, served: Bench, said: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "COUNT_MAX", 2)
    method = everstep.Method(base="multistep", parts=5, rebuild=rebuild)
    world = World(lambda step: step - 1)
    ckpt = opened(served.run, world, method=method, every=6)  # type: ignore[arg-type]
    ckpt.resume()
    states = run(ckpt, world, 40)
    inspect(ckpt).saver.finish_captures()
    ckpt.wait()
    trainer = served.server.trainer
    assert trainer is not None
    assert len(trainer.log_layouts) == 2
    assert said["redo"] >= said["log_layout"] > 10
    die(ckpt)
    other = World(world.pattern, seed=9)
    with opened(served.run, other, method=method) as again:  # type: ignore[arg-type]
        found = again.resume()
        assert found.step > 30
        assert found.exact
        assert other.snapshot() == states[found.step]


def test_patterns_that_come_back_are_told_once(served: Bench, said: Counter[str]) -> None:
    world = World(lambda step: step % 80 if step > 1 else 0)
    with opened(served.run, world, method="logged", every=50) as ckpt:  # type: ignore[arg-type]
        ckpt.resume()
        run(ckpt, world, 400)
    assert said["log"] == 800
    assert 80 < said["log_layout"] < 85


def test_a_killed_trainer_loses_no_step(served: Bench, said: Counter[str]) -> None:
    world = World(new_and_then_old)
    ckpt = opened(served.run, world, every=1000)  # type: ignore[arg-type]
    ckpt.resume()
    states = run(ckpt, world, STEPS)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    assert said["log_layout"] > STEPS
    other = World(new_and_then_old, seed=9)
    with opened(served.run, other, every=1000) as again:  # type: ignore[arg-type]
        found = again.resume()
        assert (found.step, found.exact, found.replayed) == (STEPS, True, STEPS - 1)
        assert other.snapshot() == states[STEPS]


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize("process", [True, False])
def test_a_segment_holds_what_its_keeper_has_forgotten(run_folder: Path, process: bool) -> None:
    """All that is logged waits for one segment, while layouts go and come."""
    log = LogOptions(to="disk", batch_steps=10 * STEPS, history="all")
    options: dict[str, Any] = {"every": 10 * STEPS, "log": log, "keep": 5}
    if not process:
        options["keeper"] = KeeperOptions(process=False)
    world = World(new_and_then_old)
    with serving(run_folder) if process else nullcontext():
        with opened(run_folder, world, **options) as ckpt:  # type: ignore[arg-type]
            ckpt.resume()
            states = run(ckpt, world, STEPS)
        for step in (40, STEPS - 1):
            other = World(new_and_then_old, seed=9)
            with opened(run_folder, other, **options) as again:  # type: ignore[arg-type]
                found = again.resume(step=step)
                assert (found.step, found.exact, found.replayed) == (step, True, step - 1)
                assert other.snapshot() == states[step]


@pytest.mark.slow
@pytest.mark.usefixtures("no_keeper_stays")
@pytest.mark.filterwarnings("ignore:everstep. the keeper .* is gone:RuntimeWarning")
def test_a_keeper_that_takes_over_is_told_anew(run_folder: Path) -> None:
    world = World(new_and_then_old)
    with opened(run_folder, world, every=1000) as ckpt:  # type: ignore[arg-type]
        ckpt.resume()
        run(ckpt, world, PATTERNS - 10)
        kill_keeper()
        until(lambda: inspect(ckpt).keepers.lost is not None, "the loss of the keeper")
        states = run(ckpt, world, STEPS)
        assert ckpt.stats().keeper_restarts == 1
        assert ckpt.rewind(step=STEPS - 5).exact
        assert world.snapshot() == states[STEPS - 5]
