"""Lazy capture (I1, I8): copies run behind the next step, updates wait for them, and whoever
changes the state outside the optimizer is caught. Each guarantee is taken away once, to see
that something goes wrong without it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.capture.spot_check import SpotCheck
from everstep.capture.version_counters import Versions
from everstep.errors import AuditError, DeadlineError, EverstepError
from everstep.testing import inspect
from everstep.trainer.base.saver import Saver
from tests.support.lanes import gives_up_soon, held
from tests.support.lazy import World
from tests.support.trainers import run_trainer, whole_lines
from tests.support.world import TIMEOUT_S, Gate, assert_same, freeze, opened

__all__ = ["held"]  # a fixture

LAZY = ["lazy", "checkfreq"]


def restored(run: Path, step: int | None = None) -> Any:
    world = World(seed=99)
    with opened(run, world.state) as ckpt:
        ckpt.resume(step)
    return world.snapshot()


@pytest.mark.parametrize("method", LAZY)
def test_the_update_waits_for_the_copy(method: str, held: Gate, run_folder: Path) -> None:
    """I1: forward and backward run while copies wait; the update does not."""
    world = World()
    with opened(run_folder, world.state, method=method) as ckpt:
        ckpt.step()
        saved = world.snapshot()
        save = ckpt.save()
        world.backward()  # buffers, plain data and the RNG have moved on
        assert not save.staged.done()
        updated = threading.Event()

        def update() -> None:
            world.optimizer.step()
            updated.set()

        thread = threading.Thread(target=update)
        thread.start()
        assert held.reached.wait(TIMEOUT_S)
        assert not updated.wait(0.05), "the update did not wait"
        held.open()
        thread.join(TIMEOUT_S)
        assert updated.is_set()
        ckpt.step()
        ckpt.wait()
        assert ckpt.stats().stall_s["gate"] >= 0.0
    assert world.snapshot() != saved
    assert restored(run_folder) == saved


@pytest.mark.parametrize("checked", [True, False], ids=["spot check", "no spot check"])
def test_without_the_gate_it_is_torn(
    checked: bool, held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for the gate; and checks find out what it lets through."""
    monkeypatch.setattr(Saver, "gate", lambda self, optimizer: None)
    if not checked:
        monkeypatch.setattr(SpotCheck, "differing", lambda *_: None)
        monkeypatch.setattr(Versions, "moved", lambda self, since, but=(): None)
    world = World()
    with opened(run_folder, world.state, method="lazy", on_failure="warn") as ckpt:
        ckpt.step()
        saved = world.snapshot()
        save = ckpt.save()
        world.backward()
        world.optimizer.step()
        held.open()
        error = save.durable.exception(TIMEOUT_S)
        if checked:
            assert isinstance(error, AuditError)
            assert "was changed while it was being copied" in str(error)
        with pytest.warns(RuntimeWarning) if checked else _nothing():
            ckpt.wait()
    if not checked:
        assert error is None
        assert restored(run_folder) != saved, "this test cannot fail"


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def through_numpy(world: World) -> None:
    for p in world.model.parameters():
        p.detach().numpy()[...] = 0


def one_tensor(world: World) -> None:
    with torch.no_grad():
        world.model[0].weight.mul_(1.5)


def moments(world: World) -> None:
    for values in world.optimizer.state.values():
        values["exp_avg"].add_(1)


def one_element(world: World) -> None:
    """Samples need not hit it; a version counter moves."""
    with torch.no_grad():
        world.model[0].weight.view(-1)[1] += 1.0


@pytest.mark.parametrize("change", [through_numpy, one_tensor, one_element, moments])
def test_changes_past_the_optimizer_are_refused(
    change: Callable[[World], None], held: Gate, run_folder: Path
) -> None:
    """I8: no version counter moves for some of these."""
    world = World()
    with opened(run_folder, world.state, method="lazy", on_failure="warn") as ckpt:
        ckpt.step()
        save = ckpt.save()
        change(world)
        held.open()
        error = save.durable.exception(TIMEOUT_S)
        assert isinstance(error, AuditError), error
        assert error.step == 1
        assert "before_update" in str(error.hint)
        with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
            ckpt.wait()
        assert isinstance(save.staged.exception(TIMEOUT_S), AuditError)
        world.backward()
        world.optimizer.step()
        ckpt.step()
        saved = world.snapshot()
        ckpt.save()  # the next one is good again
    assert restored(run_folder) == saved


def test_weights_swapped_for_an_evaluation_are_refused(held: Gate, run_folder: Path) -> None:
    """Averaged weights in, evaluate, weights back: before the next step all is as it was, but
    the copy was made in between."""
    world = World()
    with opened(run_folder, world.state, method="lazy", on_failure="warn") as ckpt:
        ckpt.step()
        before = world.snapshot()
        save = ckpt.save()
        transfer = inspect(ckpt).pending[0].transfer
        kept = [p.detach().clone() for p in world.model.parameters()]
        for p in world.model.parameters():
            p.data.mul_(0.999)
        held.open()
        assert transfer.wait(TIMEOUT_S)
        for p, value in zip(world.model.parameters(), kept, strict=True):
            p.data.copy_(value)
        assert world.snapshot() == before
        assert isinstance(save.durable.exception(TIMEOUT_S), AuditError)
        with pytest.warns(RuntimeWarning, match="was changed while it was being copied"):
            ckpt.wait()


def test_before_update_makes_them_right(held: Gate, run_folder: Path) -> None:
    world = World()
    with opened(run_folder, world.state, method="lazy") as ckpt:
        ckpt.step()
        saved = world.snapshot()
        ckpt.save()
        threading.Timer(0.01, held.open).start()
        ckpt.before_update()
        through_numpy(world)
        ckpt.after_update()
        ckpt.step()
        ckpt.save()
        after = world.snapshot()
    assert saved != after
    assert restored(run_folder, 1) == saved
    assert restored(run_folder, 2) == after


def test_an_update_that_no_hook_sees_is_refused(run_folder: Path) -> None:
    """What a captured CUDA graph does: the parameters change, no step() was called."""
    world = World()
    with opened(run_folder, world.state, method="lazy", on_failure="warn") as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        through_numpy(world)  # between the bases: nothing is torn
        ckpt.step()
        save = ckpt.save()
        error = save.durable.exception(TIMEOUT_S)
        assert isinstance(error, AuditError)
        assert "no update was seen" in str(error)
        with pytest.warns(RuntimeWarning, match="no update was seen"):
            ckpt.wait()
    assert restored(run_folder)  # the first one is there
    with opened(run_folder, World().state) as ckpt:
        assert ckpt.resume().step == 1


def test_a_static_entry_that_changes_is_refused(run_folder: Path) -> None:
    world = World()
    world.state["frozen"] = nn.Linear(3, 3).requires_grad_(False)
    with opened(
        run_folder, world.state, method="lazy", on_failure="warn", static=["frozen/*"]
    ) as ckpt:
        ckpt.step()
        ckpt.save()
        ckpt.wait()
        world.state["frozen"].weight.data[0] = 7
        world.backward()
        world.optimizer.step()
        ckpt.step()
        error = ckpt.save().durable.exception(TIMEOUT_S)
        assert isinstance(error, AuditError)
        assert "'frozen/weight' was declared static but has changed" in str(error)
        with pytest.warns(RuntimeWarning):
            ckpt.wait()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", [*LAZY, "async"])
def test_several_in_flight_are_not_mixed(method: str, run_folder: Path) -> None:
    """PEERS, point 1: every one of them is the state of its own step."""
    world, snapshots = World(), {}
    with opened(run_folder, world.state, method=method, every=1, keep=100) as ckpt:
        for step in range(1, 13):
            world.backward()
            world.optimizer.step()
            snapshots[step] = world.snapshot()
            ckpt.step()
        ckpt.wait()
        assert ckpt.stats().committed == 12
    for step in (1, 2, 7, 11, 12):
        assert restored(run_folder, step) == snapshots[step], step


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", LAZY)
def test_an_arena_for_one_capture_pushes_back(method: str, run_folder: Path) -> None:
    """I10: never grows, never drops."""
    world = World()
    room = sum(e.size_bytes for e in everstep_entries(world)) + (1 << 16)
    snapshots = {}
    budget = everstep.Budget(host_bytes=room)
    with opened(run_folder, world.state, method=method, every=1, keep=100, budget=budget) as ckpt:
        for step in range(1, 7):
            world.backward()
            world.optimizer.step()
            snapshots[step] = world.snapshot()
            ckpt.step()
        ckpt.wait()
        stats = ckpt.stats()
        assert stats.committed == 6
        assert stats.host_bytes <= room
    for step, wanted in snapshots.items():
        assert restored(run_folder, step) == wanted


def everstep_entries(world: World) -> Any:
    from everstep.state.training_state import State

    return State(world.state).survey().shape.entries


def test_groups_that_change_in_mid_run(run_folder: Path) -> None:
    """Parameters added, frozen, and optimizer state that appears: each base is right."""
    world = World()
    snapshots = {}
    with opened(run_folder, world.state, method="lazy", every=1, keep=100) as ckpt:
        for step in range(1, 7):
            if step == 3:
                world.model.add_module("3", nn.Linear(7, 2))
                world.optimizer.add_param_group({"params": world.model[3].parameters()})
            if step == 5:
                world.model[0].weight.requires_grad_(False)
            world.backward()
            world.optimizer.step()
            snapshots[step] = world.snapshot()
            ckpt.step()
    fresh = World(seed=99)
    fresh.model.add_module("3", nn.Linear(7, 2))
    fresh.optimizer.add_param_group({"params": fresh.model[3].parameters()})
    with opened(run_folder, fresh.state) as ckpt:
        ckpt.resume()
    assert fresh.snapshot() == snapshots[6]
    assert restored(run_folder, 2) == snapshots[2]


def test_two_optimizers_each_wait_for_their_own(held: Gate, run_folder: Path) -> None:
    """A GAN: the update of one does not wait for the other's parameters."""
    torch.manual_seed(1)
    one, two = nn.Linear(50, 50), nn.Linear(50, 50)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(two.parameters(), lr=0.1)
    state: dict[str, Any] = {"one": one, "two": two, "first": first, "second": second}
    with opened(run_folder, state, method="lazy") as ckpt:
        ckpt.step()
        for model in (one, two):
            model(torch.randn(4, 50)).sum().backward()
        wanted = freeze({"one": one.state_dict(), "two": two.state_dict()})
        ckpt.save()
        ends = inspect(ckpt).pending[0].prepared.ends
        assert ends["first"] < ends["second"]
        threading.Timer(0.01, held.open).start()
        first.step()
        second.step()
        ckpt.step()
    with torch.no_grad():
        for p in (*one.parameters(), *two.parameters()):
            p.zero_()
    with opened(run_folder, state) as ckpt:
        ckpt.resume()
    assert freeze({"one": one.state_dict(), "two": two.state_dict()}) == wanted


def test_a_copy_that_hangs_does_not_hang_training(
    held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: the base is lost, training is not."""
    world = World()
    options: dict[str, Any] = {"progress_timeout_s": TIMEOUT_S, "on_failure": "warn"}
    with opened(run_folder, world.state, method="lazy", **options) as ckpt:
        ckpt.step()
        save = ckpt.save()
        world.backward()
        with monkeypatch.context() as impatient:
            gives_up_soon(impatient, TIMEOUT_S)
            world.optimizer.step()
        assert isinstance(save.durable.exception(TIMEOUT_S), EverstepError)
        held.open()
        with pytest.warns(RuntimeWarning):
            ckpt.wait()
        ckpt.step()
        wanted = world.snapshot()
        ckpt.save().durable.result(TIMEOUT_S)
    assert restored(run_folder) == wanted


def test_a_forked_child_waits_for_no_copy(
    held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that copies is not there, and will never be done."""
    with opened(run_folder, World().state, method="lazy") as ckpt:
        ckpt.step()
        ckpt.save()
        child = threading.Thread(target=ckpt.before_update, daemon=True)
        with monkeypatch.context() as forked:
            forked.setattr(ckpt, "_check_open", lambda: None)
            forked.setattr(os, "getpid", lambda: -1)
            child.start()
            child.join(TIMEOUT_S / 4)
            assert not child.is_alive(), "it waits"
        held.open()


def test_what_no_optimizer_owns_is_copied_at_the_mark(held: Gate, run_folder: Path) -> None:
    """Buffers, averaged weights, plain tensors: they may change as soon as save() returns."""
    world = World()
    world.state["average"] = nn.Linear(30, 30).requires_grad_(False)
    world.state["tensor"] = torch.arange(1000.0)
    with opened(run_folder, world.state, method="lazy") as ckpt:
        ckpt.step()
        wanted = freeze(
            [
                dict(world.model.named_buffers()),
                world.state["average"].state_dict(),
                world.state["tensor"],
            ]
        )
        ckpt.save()
        world.state["average"].weight.zero_()
        world.state["tensor"].zero_()
        world.backward()  # running statistics
        held.open()
    other = World(seed=99)
    other.state["average"] = nn.Linear(30, 30).requires_grad_(False)
    other.state["tensor"] = torch.zeros(1000)
    with opened(run_folder, other.state) as ckpt:
        ckpt.resume()
    found = [
        dict(other.model.named_buffers()),
        other.state["average"].state_dict(),
        other.state["tensor"],
    ]
    assert freeze(found) == wanted
    assert_same(found[2], torch.arange(1000.0))


A_THOUSAND_SAVES = """
import sys
from pathlib import Path
from everstep.options import Budget
from tests.support.lazy import World; from tests.support.world import opened

world = World()
options = {"every": 1, "keep": 1, "budget": Budget(host_bytes=2 << 20)}
with opened(Path(sys.argv[1]), world.state, method="lazy", **options) as ckpt:
    for step in range(1, 1001):
        world.backward()
        world.optimizer.step()
        ckpt.step()
        if step in (100, 1000):
            ckpt.wait()
            print(Path("/proc/self/statm").read_text().split()[1], flush=True)
"""


@pytest.mark.slow
def test_a_thousand_saves_take_no_more_memory(run_folder: Path) -> None:
    """Resident memory after 1000 saves: less than 1 % more than after 100, in a process that does
    nothing else. (With room for a few bases only: where the disk is slower than the saves, all of
    the budget is used in time.)"""
    status, out, err = run_trainer(A_THOUSAND_SAVES, str(run_folder), timeout_s=30 * TIMEOUT_S)
    assert status == 0, err
    at_100, at_1000 = map(int, whole_lines(out))
    assert at_1000 < 1.01 * at_100, out


def test_memory_for_the_first_base_is_taken_behind_a_resume(run_folder: Path) -> None:
    """And not by the training thread, when the base is due."""
    world = World()
    with opened(run_folder, world.state, method="lazy") as ckpt:
        ckpt.step()
        size_bytes = ckpt.save().durable.result(TIMEOUT_S)
    with opened(run_folder, World().state, method="lazy") as ckpt:
        ckpt.resume()
        inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
        pool = inspect(ckpt).keepers.pool
        assert pool is not None
        assert pool.touched_bytes >= size_bytes // 2 + 1  # without the header


def test_the_deadline_error_is_reported(
    held: Gate, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    reported: list[EverstepError] = []
    options: dict[str, Any] = {"progress_timeout_s": TIMEOUT_S, "on_failure": reported.append}
    with opened(run_folder, world.state, method="lazy", **options) as ckpt:
        ckpt.step()
        ckpt.save()
        world.backward()
        with monkeypatch.context() as impatient:
            gives_up_soon(impatient, TIMEOUT_S)
            world.optimizer.step()
        held.open()
        ckpt.wait()
    assert any(isinstance(error, DeadlineError) for error in reported), reported


@pytest.mark.parametrize("method", ["sync", "lazy"])
def test_storages_of_the_user_stay_resizable(run_folder: Path, method: str) -> None:
    """FSDP frees and takes parameters by resizing their storage; ``Tensor.numpy()`` forbids it."""
    world = World()
    with opened(run_folder, world.state, method=method) as ckpt:
        world.backward()
        world.optimizer.step()
        ckpt.step()
        ckpt.save()
    with opened(run_folder, world.state, method=method) as ckpt:
        assert ckpt.resume().step == 1
    assert all(p.untyped_storage().resizable() for p in world.model.parameters())
