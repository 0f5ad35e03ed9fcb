"""The log when things go wrong: what is torn, lost or changed is never replayed, and what cannot
be replayed is never recorded as if it could."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep.capture.batches import Batch
from everstep.capture.mark_samples import MarkSampler
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, MismatchError
from everstep.format.log import RecordHead
from everstep.format.records import TimelineRecord
from everstep.options import Budget, LogOptions
from everstep.run.chain import LogIndex, path_of
from everstep.testing import inspect
from everstep.trainer.log.recorder import Recorder
from tests.support.keeper_process import PRELUDE, TRAIN, finish, keepers_gone, start
from tests.support.lanes import HeldLane
from tests.support.log.every_step import DENSE, ON_DISK, World, opened, run_steps
from tests.support.serving import Bench, die, hold_log, serving
from tests.support.takeover import until
from tests.support.world import TIMEOUT_S, Gate

assert PRELUDE

# --- How far a log reaches --------------------------------------------------------------

SHAPE = "s"


def heads(timeline: int, first: int, last: int, *, updates: int = 2) -> list[RecordHead]:
    """Records of steps ``first`` to ``last``, each with so many updates."""
    found = []
    for step in range(first, last + 1):
        lsns = range((step - 1) * updates + 1, step * updates + 1)
        found += [RecordHead("update", timeline, step, lsn, SHAPE) for lsn in lsns]
        found.append(RecordHead("mark", timeline, step, step * updates, SHAPE))
    return found


def reach(found: list[RecordHead], base: BaseId, path: list[tuple[int, int | None]]) -> int:
    return LogIndex(found).follow(base, base.step * 2, SHAPE, path).end[1]


def test_a_whole_log_is_followed_to_its_end() -> None:
    assert reach(heads(1, 5, 9), BaseId(1, 4), [(1, None)]) == 9
    assert reach(heads(1, 1, 9), BaseId(1, 4), [(1, None)]) == 9


@given(st.integers(0, 14))
def test_without_any_one_record_it_ends_before_that_step(lost: int) -> None:
    found = heads(1, 5, 9)
    gone = found.pop(lost)
    assert reach(found, BaseId(1, 4), [(1, None)]) == gone.step - 1


def test_a_log_of_another_shape_is_not_followed() -> None:
    found = heads(1, 5, 6) + [
        RecordHead(h.kind, h.timeline, h.step, h.lsn, "other") for h in heads(1, 7, 9)
    ]
    assert reach(found, BaseId(1, 4), [(1, None)]) == 6


def test_each_step_comes_from_the_timeline_that_the_history_has_it_from() -> None:
    """Timeline 2 forked from 1 at step 6: what 1 wrote behind it is not followed, and a record of
    2 does not stand in for one that 1 has lost."""
    old, new = heads(1, 5, 9), heads(2, 7, 8)
    path: list[tuple[int, int | None]] = [(2, None), (1, 6)]
    assert LogIndex(old + new).follow(BaseId(1, 4), 8, SHAPE, path).steps == (
        (1, 5),
        (1, 6),
        (2, 7),
        (2, 8),
    )
    assert reach(old, BaseId(1, 4), path) == 6
    lost = [h for h in old if h.step != 6] + heads(2, 6, 8)
    assert reach(lost, BaseId(1, 4), path) == 5


def test_a_history_of_which_only_records_are_left() -> None:
    """Bases at the forks are long gone; the forks are where they were."""

    def record(timeline: int, parent: int | None, fork_step: int) -> TimelineRecord:
        return TimelineRecord("run", timeline, parent, fork_step, True, 1, {}, 0.0)

    records = {1: record(1, None, 0), 2: record(2, 1, 24), 3: record(3, 2, 85), 4: record(4, 3, 85)}
    assert path_of(4, records) == [(4, None), (3, 85), (2, 85), (1, 24)]
    assert reach(heads(3, 86, 99), BaseId(3, 95), path_of(3, records)) == 99
    assert path_of(4, {**records, 3: None}) == [(4, None), (3, 85)]


# --- Records that are not what they were ------------------------------------------------


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


def test_a_flipped_bit_in_memory_ends_the_replay_before_it(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    states = run_steps(ckpt, world, 6)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    until(lambda: served.server.duties.logs.current is not None)
    log = served.server.duties.logs.current
    assert log is not None
    until(lambda: any((r.head.kind, r.head.step) == ("mark", 6) for r in log.records()))
    log.settle(TIMEOUT_S)
    (mark,) = [r for r in log.records() if r.head.kind == "mark" and r.head.step == 4]
    mark.data[mark.data.nbytes // 2] ^= 1
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert recovery.step == 3
    assert other.snapshot() == states[3]
    assert any("step 4" in item.reason and "damaged" in item.reason for item in recovery.skipped)
    again.close()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("part", ["tensors", "index", "header", "marker", "no marker", "gone"])
def test_a_damaged_segment_ends_the_replay_before_it(run_folder: Path, part: str) -> None:
    world = World()
    with opened(run_folder, world, log=ON_DISK, every=100) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 8)
        inspect(ckpt).skip_last_base()  # no base at the end
    # A base that becomes durable flushes the log: where segments begin is not for this test to say.
    segments = sorted((run_folder / "timeline-00001" / "log").iterdir())
    hit = next(s for s in segments if int(s.name.split("-")[0]) >= 3)
    before = int(hit.name.split("-")[0])
    data, marker = hit / "rank-00000.safetensors", hit / "rank-00000.done"
    if part == "gone":
        data.unlink()
    elif part == "no marker":
        marker.unlink()
    else:
        path = marker if part == "marker" else data
        damaged = bytearray(path.read_bytes())
        at = {"tensors": 4096, "index": len(damaged) - 100, "header": 50, "marker": 60}[part]
        damaged[at] ^= 4
        path.write_bytes(damaged)
    other = World(seed=9)
    with opened(run_folder, other, log=ON_DISK, every=100) as ckpt:
        recovery = ckpt.resume()
        assert recovery.step == before
        assert other.snapshot() == states[before]
        if part != "no marker":  # that one was never finished
            assert recovery.skipped
        inspect(ckpt).skip_last_base()


def test_a_log_that_hangs_is_said_to(served: Bench) -> None:
    """Within the stated time, as an error for people, on every version of Python."""
    world = World()
    ckpt = opened(served.run, world)
    ckpt.resume()
    until(lambda: served.server.duties.logs.current is not None)
    log = served.server.duties.logs.current
    assert log is not None
    gate = Gate()
    hold_log(log, gate)
    with pytest.raises(DeadlineError, match=r"no progress in writing the log for 0.05 s"):
        log.settle(0.05)
    gate.open()
    log.settle(TIMEOUT_S)
    ckpt.close()


# --- What is recorded is what was consumed ----------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_zeroed_only_when_they_are_copied(
    run_folder: Path, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the gate the log holds what came later: a torn record. (Replay would find it by the
    samples in the mark.)"""
    if not gated:
        monkeypatch.setattr(MarkSampler, "other", lambda self, step, values: None)
        applied = Recorder.applied

        def ungated(self: Recorder, key: str) -> None:
            if self._pending_update is not None:
                monkeypatch.setattr(
                    self._pending_update.transfer, "gate", lambda end, timeout_s: True
                )
            applied(self, key)

        monkeypatch.setattr(Recorder, "applied", ungated)
    log, process = LogOptions(to="disk", batch_steps=1), everstep.KeeperOptions(process=False)
    torch.manual_seed(1)
    model = nn.Linear(300, 300)  # large enough not to be packed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def train() -> None:
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        HeldLane.gate.open()

    monkeypatch.setattr(HeldLane, "gate", Gate())
    HeldLane.gate.open()
    monkeypatch.setattr("everstep.capture.cuda.CpuLane", HeldLane, raising=False)
    monkeypatch.setattr("everstep.trainer.session.components.CpuLane", HeldLane)
    with everstep.Checkpointer(
        run_folder, state, method=DENSE, every=100, log=log, keeper=process
    ) as ckpt:
        ckpt.resume()
        train()
        ckpt.step()
        ckpt.wait()
        HeldLane.gate = Gate()
        if gated:  # somebody opens it while the update waits
            monkeypatch.setattr(inspect(ckpt).lane, "gate", HeldLane.gate, raising=False)
            copy = HeldLane.copy_batch

            def opening(self: HeldLane, batch: Batch, block: torch.Tensor) -> None:
                self.gate.open()
                copy(self, batch, block)

            monkeypatch.setattr(HeldLane, "copy_batch", opening)
        train()
        ckpt.step()
        wanted = model.weight.detach().clone()
        inspect(ckpt).skip_last_base()
    with torch.no_grad():
        model.weight.zero_()
    with everstep.Checkpointer(
        run_folder, state, method=DENSE, every=100, log=log, keeper=process
    ) as ckpt:
        assert ckpt.resume().step == 2
        assert torch.equal(model.weight, wanted) is gated


@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_a_scaler_skips(served: Bench, fused: bool) -> None:
    def make() -> tuple[World, torch.amp.GradScaler]:
        world = World(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), clip=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        world.state["scaler"] = scaler
        return world, scaler

    def train(world: World, scaler: torch.amp.GradScaler, step: int) -> None:
        factor = float("inf") if step in (3, 6) else 1.0
        loss = world.model(torch.randn(6, 8)).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(world.optimizer)
        scaler.update()
        world.optimizer.zero_grad()

    world, scaler = make()
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    for step in range(1, 8):
        train(world, scaler, step)
        ckpt.step()
    wanted, scale = world.snapshot(), scaler.state_dict()
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other, new = make()
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.exact) == (7, True)
    assert recovery.replayed == 6
    assert other.snapshot() == wanted
    assert new.state_dict() == scale
    again.close()


def test_parameters_that_are_frozen_and_added_in_mid_run(served: Bench) -> None:
    def make() -> World:
        return World(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clip=False)

    def grow(world: World) -> None:
        world.model.append(nn.Linear(3, 3))
        world.optimizer.add_param_group({"params": list(world.model[-1].parameters()), "lr": 0.05})

    world = make()
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    for parameter in world.model[0].parameters():
        parameter.requires_grad_(False)
    run_steps(ckpt, world, 2)
    for parameter in world.model[0].parameters():
        parameter.requires_grad_(True)
    states = run_steps(ckpt, world, 2)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = make()
    ckpt = opened(served.run, other, every=100)
    assert ckpt.resume().step == 7
    assert other.snapshot() == states[7]
    grow(other)
    states = run_steps(ckpt, other, 3)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    last = make()
    grow(last)
    ckpt = opened(served.run, last, every=100)
    recovery = ckpt.resume()
    assert recovery.step == 10
    assert last.snapshot() == states[10]
    ckpt.close()


class Gan:
    """Two optimizers, one of them updated twice in a step."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(5, 7), nn.Linear(7, 5)
        self.first = torch.optim.Adam(self.one.parameters(), lr=0.01)
        self.second = torch.optim.RMSprop(self.two.parameters(), lr=0.01)
        self.state: dict[str, Any] = {
            "one": self.one,
            "two": self.two,
            "first": self.first,
            "second": self.second,
        }

    def train(self) -> None:
        for optimizer in (self.first, self.second, self.first):
            self.two(self.one(torch.randn(3, 5))).square().mean().backward()
            optimizer.step()
            self.first.zero_grad()
            self.second.zero_grad()

    def snapshot(self) -> list[bytes]:
        return [
            tensor.numpy().tobytes()
            for value in self.state.values()
            for tensor in _tensors(value.state_dict())
        ]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(item)


def test_several_optimizers(served: Bench) -> None:
    gan = Gan(1)
    ckpt = opened(served.run, gan, every=4)  # type: ignore[arg-type]
    ckpt.resume()
    for _ in range(7):
        gan.train()
        ckpt.step()
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = Gan(2)
    again = opened(served.run, other)  # type: ignore[arg-type]
    assert again.resume().step == 7
    assert other.snapshot() == gan.snapshot()
    again.close()


def test_a_learning_rate_that_is_a_tensor(served: Bench) -> None:
    """A scheduler changes it in place, and not only in an update."""

    def make(seed: int) -> World:
        return World(
            lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False), seed=seed
        )

    world = make(1)
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    run_steps(ckpt, world, 3)  # StepLR(3, 0.5): changed behind the third update
    wanted = world.snapshot(), world.optimizer.param_groups[0]["lr"].item()
    assert wanted[1] == pytest.approx(0.005)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = make(9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.replayed) == (3, 2)
    assert (other.snapshot(), other.optimizer.param_groups[0]["lr"].item()) == wanted
    again.close()


class Shared:
    """A parameter that two optimizers own, and that something else changes between steps."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 4, bias=False)
        self.one = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        self.two = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.state: dict[str, Any] = {"model": self.model, "one": self.one, "two": self.two}

    def train(self) -> None:
        for optimizer in (self.one, self.two):
            self.model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            self.model.weight.mul_(0.9)  # nobody's: between the update and the mark

    def snapshot(self) -> list[bytes]:
        return [t.numpy().tobytes() for v in self.state.values() for t in _tensors(v.state_dict())]


def test_what_two_optimizers_own_is_put_back_at_every_mark(served: Bench) -> None:
    """The updates that follow read it (weight decay): what replay makes of it alone is wrong."""
    shared = Shared(1)
    ckpt = opened(served.run, shared, every=100)  # type: ignore[arg-type]
    ckpt.resume()
    for _ in range(5):
        shared.train()
        ckpt.step()
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = Shared(2)
    again = opened(served.run, other)  # type: ignore[arg-type]
    recovery = again.resume()
    assert (recovery.step, recovery.replayed) == (5, 4)
    assert other.snapshot() == shared.snapshot()
    again.close()


def test_a_closure(served: Bench) -> None:
    """Gradients exist only inside it."""

    def train(world: World) -> None:
        def closure() -> torch.Tensor:
            world.optimizer.zero_grad()
            loss: torch.Tensor = world.model(torch.randn(6, 8)).square().mean()
            loss.backward()
            return loss

        world.optimizer.step(closure)

    world = World()
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    for _ in range(4):
        train(world)
        ckpt.step()
    wanted = world.snapshot()
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.replayed) == (4, 3)
    assert other.snapshot() == wanted
    again.close()


@pytest.mark.parametrize("late", [True, False])
def test_a_hook_that_clips(served: Bench, late: bool) -> None:
    """Whenever it was registered: what the optimizer consumes is what is recorded."""

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    world = World(clip=False)
    if not late:
        world.optimizer.register_step_pre_hook(clip)
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    states = run_steps(ckpt, world, 2)
    if late:
        world.optimizer.register_step_pre_hook(clip)
    states = run_steps(ckpt, world, 3)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = World(seed=9, clip=False)
    again = opened(served.run, other)
    assert again.resume().step == 5
    assert other.snapshot() == states[5]
    again.close()


def test_an_update_that_no_optimizer_made_is_a_hole(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, every=100)
    ckpt.resume()
    run_steps(ckpt, world, 3)
    ckpt.before_update()
    with torch.no_grad():
        world.model[0].weight.mul_(0.5)
    ckpt.after_update()
    states = run_steps(ckpt, world, 2)  # the first of them takes a base
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert (recovery.step, recovery.base_step) == (5, 4)
    assert other.snapshot() == states[5]
    again.close()


def test_a_log_without_room_takes_bases_instead(served: Bench) -> None:
    world = World()
    budget = Budget(host_bytes=100_000)
    ckpt = opened(served.run, world, every=1000, budget=budget)
    ckpt.resume()
    states = run_steps(ckpt, world, 40)
    assert ckpt.stats().saves > 2
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other)
    recovery = again.resume()
    assert other.snapshot() == states[recovery.step]
    assert recovery.step >= 38
    again.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("history", ["last", "all"])
def test_segments_that_no_base_needs_go(run_folder: Path, history: str) -> None:
    world = World()
    # Training waits for the disk: what came there behind the last base would be cleaned up by none.
    log = LogOptions(to="disk", batch_steps=2, lag_steps=1, history=history)
    with opened(run_folder, world, log=log, every=4, keep=2) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 18)
    directory = run_folder / "timeline-00001"
    bases = sorted(int(path.name) for path in (directory / "base").iterdir())
    segments = sorted(int(path.name.split("-")[1]) for path in (directory / "log").iterdir())
    assert bases == ([16, 18] if history == "last" else [1, 16, 18])
    assert (min(segments) > 10) is (history == "last")
    other = World(seed=9)
    with opened(run_folder, other, log=log, keep=2) as ckpt:
        assert ckpt.resume(step=17).step == 17
        assert other.snapshot() == states[17]


# --- Kills ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    run = tmp_path_factory.mktemp("whole") / "run"
    status, said, err = finish(start(run, TRAIN, json.dumps({"method": "sync", "every": 4})))
    assert status == 0, err
    return {line["at"]: line["digest"] for line in said if "at" in line}


RESUME = """
ckpt = everstep.Checkpointer(run, state, every=None, method="logged")
report(ckpt.resume())
ckpt.close()
"""


@pytest.mark.parametrize(
    ("point", "hit", "lost"),
    [
        pytest.param("log.before_record", 11, 1, marks=pytest.mark.slow),
        ("log.after_record", 12, 0),
        pytest.param("capture.before_captured", 2, 1, marks=pytest.mark.slow),
        pytest.param("capture.after_captured", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_a_killed_trainer_is_back_at_its_last_step(
    point: str, hit: int, lost: int, run_folder: Path, uninterrupted: dict[int, str]
) -> None:
    options = json.dumps({"method": "logged", "every": 4})
    process = start(run_folder, TRAIN, options, EVERSTEP_FAILPOINTS=f"{point}=kill:{hit}")
    status, said, err = finish(process)
    assert status == -signal.SIGKILL, err
    reached = max((line["at"] for line in said if "at" in line), default=0)
    status, said, err = finish(start(run_folder, RESUME))
    assert status == 0, err
    (recovery,) = said
    assert recovery["digest"] == uninterrupted[recovery["step"]]
    assert recovery["exact"]
    # What a child has said and not yet marked is the step in flight.
    assert reached - recovery["step"] <= lost + 1, recovery
    keepers_gone()


def test_one_that_fails_to_resume_takes_nothing_with_it(served: Bench) -> None:
    """A model that does not fit, and the right one behind it."""
    world = World()
    ckpt = opened(served.run, world, method="logged", every=4)
    ckpt.resume()
    states = run_steps(ckpt, world, 7)
    inspect(ckpt).saver.finish_captures()
    die(ckpt)
    wrong = World()
    wrong.state["model"] = small = nn.Linear(3, 3)
    wrong.state["optimizer"] = torch.optim.AdamW(small.parameters())
    with (
        pytest.raises(MismatchError),
        opened(served.run, wrong, method="logged", every=4) as ckpt,
    ):
        ckpt.resume()
    other = World(seed=9)
    with opened(served.run, other, method="logged", every=4) as ckpt:
        recovery = ckpt.resume()
        assert (recovery.step, recovery.source, recovery.exact) == (7, "memory", True)
        assert other.snapshot() == states[7]


@pytest.mark.parametrize("hit", [5, pytest.param(14, marks=pytest.mark.slow)])
def test_a_killed_keeper_is_no_loss(
    hit: int, run_folder: Path, uninterrupted: dict[int, str]
) -> None:
    options = json.dumps({"method": "logged", "every": 4})
    point = f"keeper.log_arrived=kill:{hit}"
    status, said, err = finish(start(run_folder, TRAIN, options, EVERSTEP_FAILPOINTS=point))
    assert status == 0, err
    assert {line["at"]: line["digest"] for line in said if "at" in line} == uninterrupted
    assert said[-1]["restarts"] == 1
    keepers_gone()
    status, said, err = finish(start(run_folder, RESUME))
    assert status == 0, err
    assert said[0]["step"] == 12
    assert said[0]["digest"] == uninterrupted[12]
    keepers_gone()
