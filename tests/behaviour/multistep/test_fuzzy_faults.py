"""What may go wrong with bases that whoever restores them makes whole, and what each guarantee of
them is for: nothing is committed that cannot be made whole, and nothing but that is restored."""

from __future__ import annotations

import dataclasses
import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import EverstepError, OutOfSpaceError
from everstep.format.log import LogRecord
from everstep.testing import inspect
from everstep.trainer.multistep.plan import redo_bytes
from everstep.trainer.multistep.window import CapturedParts
from tests.support.following import opened, run_steps, steps_on_disk
from tests.support.logged import invoke, rebuilder_of, record
from tests.support.multistep.fuzzy import heads_on_disk, left, lsns_on_disk, rewrite
from tests.support.multistep.rows import restored
from tests.support.multistep.world import World, begin
from tests.support.serving import Bench, die, serving
from tests.support.world import (
    TIMEOUT_S,
    HookedFileSystem,
    base_folder,
    flip,
    inventory_of,
    raising,
    verdict_of,
)

REDO = "rank-00000-00001.safetensors"


@pytest.fixture
def served(run_folder: Path) -> Iterator[Bench]:
    with serving(run_folder) as made:
        yield made


@pytest.fixture
def trained(run_folder: Path) -> tuple[Path, dict[int, Any]]:
    """A run with bases of steps 4 and 7, in three parts; and the states of training."""
    with serving(run_folder) as bench:
        world = World()
        with opened(bench.run, world, method=left(3)) as ckpt:
            ckpt.resume()
            states = run_steps(ckpt, world, 2)
            begin(ckpt)
            states |= run_steps(ckpt, world, 3)
            begin(ckpt)
            states |= run_steps(ckpt, world, 2)
    assert steps_on_disk(run_folder) == [4, 7]
    return run_folder, states


# --- Deaths -----------------------------------------------------------------------------


@pytest.mark.thinned(4)
@pytest.mark.parametrize("within", range(4))
def test_a_trainer_that_dies_in_a_window_goes_back_to_the_base_before(
    within: int, served: Bench
) -> None:
    """To the newest that can be made whole, out of the keeper's memory: gradients and all."""
    world = World()
    ckpt = opened(served.run, world, method=left(4))
    states = run_steps(ckpt, world, 2)
    ckpt.save().durable.result(TIMEOUT_S)
    begin(ckpt)
    states |= run_steps(ckpt, world, within)
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other, method=left(4))
    recovery = again.resume()
    wanted = 2 if within < 3 else 5  # all of it had been told
    assert (recovery.step, recovery.source, recovery.exact) == (wanted, "memory", True)
    assert other.snapshot() == states[wanted]
    states |= run_steps(again, other, 2)
    again.close()
    alone = World()
    for _ in range(wanted + 2):
        alone.train()
    assert other.snapshot() == alone.snapshot()


def test_between_two_windows_the_last_base_is_there(trained: tuple[Path, dict[int, Any]]) -> None:
    run, states = trained
    for step in (4, 7):
        assert restored(run, World(seed=9), step) == states[step]


# --- What is committed ------------------------------------------------------------------


@pytest.mark.thinned(6)
@pytest.mark.parametrize("op", ["create", "reserve", "write", "truncate", "sync", "rename"])
def test_nothing_is_committed_whose_gradients_are_not_durable(op: str, run_folder: Path) -> None:
    filesystem, reported = HookedFileSystem(), list[EverstepError]()
    with serving(run_folder, filesystem=filesystem) as bench:
        world = World()
        ckpt = opened(bench.run, world, method=left(3), on_failure=reported.append)
        states = run_steps(ckpt, world, 2)
        ckpt.save().durable.result(TIMEOUT_S)
        filesystem.hook = raising(OSError(errno.ENOSPC, "full"), op, f"*{REDO}*")
        save = begin(ckpt)
        run_steps(ckpt, world, 2)
        assert isinstance(save.durable.exception(TIMEOUT_S), OutOfSpaceError)
        assert steps_on_disk(bench.run) == [2]
        assert not base_folder(bench.run, 4).exists()
        filesystem.hook = lambda op, path: None
        ckpt.close()
        assert reported
        assert steps_on_disk(bench.run) == [2], "what a disk has refused is not taken again"
        assert restored(bench.run, World(seed=9), 2) == states[2]


def test_the_marker_comes_behind_the_gradients(run_folder: Path) -> None:
    filesystem = HookedFileSystem()
    with serving(run_folder, filesystem=filesystem) as bench:
        world = World()
        with opened(bench.run, world, method=left(3)) as ckpt:
            run_steps(ckpt, world, 2)
            begin(ckpt)
            run_steps(ckpt, world, 2)
    seen = [(op, path.name) for op, path in filesystem.seen if path.parent.name.endswith("0004")]
    synced = max(n for n, (op, name) in enumerate(seen) if op == "sync" and REDO in name)
    named = seen.index(("rename", REDO))
    marker = next(n for n, (_, name) in enumerate(seen) if name.startswith("rank-00000.done"))
    assert synced < named < marker
    first = next(n for n, (_, path) in enumerate(filesystem.seen) if "0.done" in path.name)
    directory = base_folder(run_folder, 4)
    assert ("sync_dir", directory) in filesystem.seen[:first], "its name is durable, too"


def test_a_base_whose_updates_have_a_hole_is_refused_by_the_keeper(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the training process says: it is not committed, and another one is taken."""
    from everstep.trainer.multistep.window import Window

    whole, reported = Window.partial_updates, list[EverstepError]()

    def without_one(self: Window, *, all_of_them: bool) -> Any:
        return whole(self, all_of_them=all_of_them)[1:]

    monkeypatch.setattr(Window, "partial_updates", without_one)
    world = World()
    ckpt = opened(served.run, world, method=left(3), on_failure=reported.append)
    states = run_steps(ckpt, world, 2)
    save = begin(ckpt)
    states |= run_steps(ckpt, world, 2)
    assert "cannot be completed" in str(save.durable.exception(TIMEOUT_S))
    assert steps_on_disk(served.run) == []
    monkeypatch.setattr(Window, "partial_updates", whole)
    states |= run_steps(ckpt, world, 3)
    ckpt.close()
    assert any("cannot be completed" in error.message for error in reported)
    (step,) = steps_on_disk(served.run)
    assert restored(served.run, World(seed=9), step) == states[step]


# --- What is restored -------------------------------------------------------------------


def lift(name: str) -> Callable[[dict[str, int]], dict[str, int]]:
    """An entry that has seen one update more than it has."""
    return lambda seen: {**seen, name: seen[name] + 1}


def lift_all(seen: dict[str, int]) -> dict[str, int]:
    """Whole parameters, with their optimizer's state."""
    first = min(seen.values())
    return {name: lsn + (lsn == first) for name, lsn in seen.items()}


def turned(found: list[LogRecord]) -> list[LogRecord]:
    """The first two updates, each under the other's number."""
    first, second, *rest = found
    return [record(second, lsn=first.head.lsn), record(first, lsn=second.head.lsn), *rest]


def emptied(found: list[LogRecord]) -> list[LogRecord]:
    """The first update concerns nothing."""
    from everstep.format.log import record_digest
    from everstep.state.layout.shards import ShardLayout

    none = memoryview(b"")
    first = dataclasses.replace(
        found[0], layout=ShardLayout(()), objects={}, data=none, digest=record_digest(none, {})
    )
    return [first, *found[1:]]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no gradients": ({"records": None}, "the base has no redo file"),
    "a hole": ({"records": lambda found: found[1:]}, "the base is incomplete"),
    "a hole in the middle": ({"records": lambda f: [f[0], *f[2:]]}, "the base is incomplete"),
    "out of order": ({"records": lambda f: [f[1], f[0], *f[2:]]}, "the base is incomplete"),
    "another shape": (
        {"records": lambda f: [*f[:-1], record(f[-1], shape="another")]},
        "another composition",
    ),
    "turned": ({"records": turned}, "was captured after update"),
    "a gradient dropped": ({"records": emptied}, "another"),
    "applied twice": ({"lsns": lift_all}, "the base is incomplete"),
    "torn apart": (
        {"lsns": lift("optimizer/state/model.0.weight/exp_avg")},
        "captured at different updates",
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_made_whole_is_no_base(
    how: str, trained: tuple[Path, dict[int, Any]]
) -> None:
    """With digests that vouch for every bit; the base before is used, and the reason is told."""
    run, states = trained
    change, reason = BROKEN[how]
    rewrite(run, 7, **change)
    world = World(seed=9)
    keeper = everstep.KeeperOptions(process=False)
    with opened(run, world, method="lazy", keeper=keeper) as ckpt:
        recovery = ckpt.resume()
    assert recovery.step == 4
    assert world.snapshot() == states[4]
    assert [reason in one.reason for one in recovery.skipped] == [True], recovery.skipped
    result = invoke("restore", run, "--step", 7, "--out", run.parent / "sharp")
    assert result.exit_code != 0
    assert reason in " ".join(result.output.split())


def test_rewriting_alone_breaks_nothing(trained: tuple[Path, dict[int, Any]]) -> None:
    run, states = trained
    rewrite(run, 7)
    assert restored(run, World(seed=9), 7) == states[7]


def test_one_bit_of_the_gradients_is_noticed(trained: tuple[Path, dict[int, Any]]) -> None:
    run, states = trained
    path = base_folder(run, 7) / REDO
    flip(path, path.stat().st_size // 2)
    assert restored(run, World(seed=9)) == states[4]
    (damaged,) = [base for base in inventory_of(run).bases if base.id.step == 7]
    assert [Path(one.path).name for one in verdict_of(damaged).damages] == [REDO]
    assert invoke("verify", run).exit_code == 1


def test_a_change_behind_the_optimizers_back_is_found(
    served: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a window, which no update repeats: what replay gives is not what training had. Here
    training has not noticed."""
    monkeypatch.setattr(CapturedParts, "check", lambda self, key=None: None)
    world = World()
    ckpt = opened(served.run, world, method=left(3))
    states = run_steps(ckpt, world, 2)
    ckpt.save().durable.result(TIMEOUT_S)
    begin(ckpt)
    run_steps(ckpt, world, 1)
    with torch.no_grad():
        world.model[0].weight.data.mul_(1.5)
    run_steps(ckpt, world, 1)
    ckpt.close()
    assert steps_on_disk(served.run) == [2, 4]
    other = World(seed=9)
    with opened(served.run, other, method=left(3)) as again:
        recovery = again.resume()
    assert recovery.step == 2
    assert other.snapshot() == states[2]
    assert "outside the optimizer" in recovery.skipped[0].reason


def clamped(world: World) -> None:
    for parameter in world.model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def reset(world: World) -> None:
    for values in world.optimizer.state.values():
        values["exp_avg"].zero_()


@pytest.mark.parametrize("change", [clamped, reset])
def test_a_loop_that_always_writes_past_its_optimizer_has_bases_all_the_same(
    change: Callable[[World], None], served: Bench
) -> None:
    """Of one step each: training would only hear of the others when it needs them."""
    world = World()
    ckpt = opened(served.run, world, method=left(3), every=3, keep=2)
    ckpt.resume()
    states = {}
    for step in range(1, 13):
        world.train()
        change(world)
        ckpt.step()
        states[step] = world.snapshot()
    ckpt.close()
    report = ckpt.stats().multistep
    assert report is not None
    assert report.abandoned > 0
    found = steps_on_disk(served.run)
    assert found
    for step in found:
        assert restored(served.run, World(seed=9), step) == states[step]


def test_other_conditions_are_not_called_exact(
    trained: tuple[Path, dict[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = trained
    elsewhere = {"torch": "1.0", "machine": "abacus", "system": "none"}
    for module in ("everstep.restore.redo.driver",):
        monkeypatch.setattr(f"{module}.fingerprint", lambda: elsewhere)
    keeper = everstep.KeeperOptions(process=False)
    with opened(run, World(seed=9), method="lazy", keeper=keeper) as ckpt:
        recovery = ckpt.resume()
    assert (recovery.step, recovery.exact) == (7, False)
    assert "trained with" in recovery.evidence
    with rebuilder_of(run) as rebuilder:
        rebuilt = rebuilder.state_at(7)
    assert not rebuilt.exact
    assert "trained with" in rebuilt.why


# --- What belongs to a base -------------------------------------------------------------


def test_gradients_are_deleted_with_their_base(served: Bench) -> None:
    world = World()
    with opened(served.run, world, method=left(3), every=3, keep=1) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 14)
    assert steps_on_disk(served.run) == [14]
    assert [path.parent.name for path in served.run.rglob(REDO)] == [f"{14:012d}"]
    assert restored(served.run, World(seed=9)) == states[14]


def test_gradients_are_copied_with_their_base(run_folder: Path, tmp_path: Path) -> None:
    """By a keeper that is a process of its own."""
    world, copies = World(), tmp_path / "copies"
    with opened(run_folder, world, method=left(3), every=3, tiers=[str(copies)]) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 5)
    assert list(copies.rglob(REDO)), "its keeper has ended: the last base is copied"
    for path in base_folder(run_folder, 5).iterdir():
        path.unlink()
    other = World(seed=9)
    with opened(run_folder, other, method=left(3), tiers=[str(copies)]) as again:
        recovery = again.resume()
    assert (recovery.step, recovery.source) == (5, "copy")
    assert other.snapshot() == states[5]


def test_memory_of_gradients_is_given_back_with_that_of_their_base(served: Bench) -> None:
    world = World()
    ckpt = opened(served.run, world, method=left(4))
    run_steps(ckpt, world, 2)
    pool, used = inspect(ckpt).keepers.pool, []
    assert pool is not None
    for _ in range(3):
        save = begin(ckpt)
        run_steps(ckpt, world, 3)
        save.durable.result(TIMEOUT_S)
        ckpt.wait()
        used.append(pool.used_bytes)
    plan = inspect(ckpt).multistep.planner.plan
    assert plan is not None
    assert used[0] == used[1] == used[2]
    assert used[0] >= plan.prepared.size_bytes + redo_bytes(plan.cut), "it is held with them"
    pool.drop_kept()
    assert pool.used_bytes == 0
    ckpt.close()


def test_gradients_stay_in_memory_as_long_as_their_base(served: Bench) -> None:
    """Also when it is durable, and the next window takes memory for its own."""
    world = World()
    ckpt = opened(served.run, world, method=left(4))
    states = run_steps(ckpt, world, 2)
    begin(ckpt)
    states |= run_steps(ckpt, world, 3)
    ckpt.wait()
    begin(ckpt)
    run_steps(ckpt, world, 2)
    inspect(ckpt).lane.run(lambda: None).result(TIMEOUT_S)
    die(ckpt)
    other = World(seed=9)
    again = opened(served.run, other, method=left(4))
    recovery = again.resume()
    assert (recovery.step, recovery.source) == (5, "memory")
    assert other.snapshot() == states[5]
    again.close()


def test_its_keeper_does_without_torch() -> None:
    modules = "everstep.keeper.process.server, everstep.keeper.replica.rebuilds"
    modules += ", everstep.keeper.replica.rebuilds, everstep.run.open_base"
    check = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_heads_and_updates_of_a_base(trained: tuple[Path, dict[int, Any]]) -> None:
    run, _ = trained
    assert set(lsns_on_disk(run, 7).values()) == {5, 6, 7}
    assert [lsn for _, lsn, _ in heads_on_disk(run, 7)] == [6, 7, 7]
