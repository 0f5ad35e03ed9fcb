"""What would come back now: after the death of the training process, and of its machine; and how
soon it is bounded again after a keeper was lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.keeper.replica import replica
from everstep.options import KeeperOptions, LogOptions
from everstep.testing import inspect
from tests.support.following import opened, run_steps, steps_on_disk, taken_here, until, until_at
from tests.support.log.every_step import World
from tests.support.serving import die, serving
from tests.support.trainers import run_trainer, whole_lines
from tests.support.world import TIMEOUT_S, Gate, HookedFileSystem, forget

EVERY = 4


# --- A replica that does not follow yet -------------------------------------------------


def test_bases_are_bounded_in_steps_before_the_replica_follows(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new keeper loads torch, for seconds. What was asked for meanwhile would be lost with it."""
    loads = threading.Event()
    monkeypatch.setattr(replica, "import_torch", lambda: loads.wait(TIMEOUT_S))
    with serving(run_folder) as bench:
        ckpt = opened(bench.run, world := World(), every=EVERY)
        for step in range(1, 10 * EVERY + 1):
            run_steps(ckpt, world, 1)
            replica_bases = inspect(ckpt).replica
            assert replica_bases is not None
            taken = replica_bases.taken
            assert taken is not None
            until(taken.durable.done, "a base of training's own")  # the writer waits for no replica
            assert step - max(steps_on_disk(bench.run)) < 2 * EVERY
        assert steps_on_disk(bench.run) == [1, *range(2 * EVERY, 10 * EVERY + 1, 2 * EVERY)]
        loads.set()
        until_at(bench, 10 * EVERY)
        run_steps(ckpt, world, 2)
        until(lambda: inspect(ckpt).keeper.replica_applied > 0, "its first step")
        before = taken_here(ckpt)
        run_steps(ckpt, world, 3 * EVERY)
        ckpt.close()
        assert taken_here(ckpt) == before, "from here on the replica is asked"


def test_who_takes_over_does_not_wait_for_a_replica_that_loads_torch(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, began = threading.Event(), threading.Event()

    def load() -> None:
        began.set()
        loads.wait(TIMEOUT_S)

    monkeypatch.setattr(replica, "import_torch", load)
    try:
        with serving(run_folder) as bench:
            ckpt = opened(bench.run, world := World())
            run_steps(ckpt, world, 1)
            assert began.wait(TIMEOUT_S)
            run_steps(ckpt, world, 2)
            die(ckpt)
            with opened(bench.run, World(seed=2)) as ckpt:
                recovery = ckpt.resume()
                assert (recovery.step, recovery.source) == (3, "memory")
                loads.set()
    finally:
        loads.set()


# --- What stats() says ------------------------------------------------------------------


def said(ckpt: everstep.Checkpointer) -> tuple[int, int | None, int | None, int | None]:
    stats = ckpt.stats()
    return stats.step, stats.durable_step, stats.lag_steps, stats.recoverable_step


def test_a_log_in_memory_survives_the_training_process_alone(run_folder: Path) -> None:
    with serving(run_folder) as bench:
        ckpt = opened(bench.run, world := World(), method="logged")
        assert said(ckpt) == (0, None, None, None)
        run_steps(ckpt, world, 1)
        ckpt.wait()
        run_steps(ckpt, world, 4)
        assert said(ckpt) == (5, 1, 4, 5)
        die(ckpt)
        with opened(bench.run, world := World(), method="logged") as ckpt:
            assert ckpt.resume().step == 5
            assert said(ckpt) == (5, 1, 4, 5), "the base of step 1 is on disk, as before"
            run_steps(ckpt, world, 3)
            ckpt.wait()
            assert said(ckpt) == (8, 6, 2, 8)
            ckpt.rewind(7)
            assert said(ckpt) == (7, 6, 1, 7)


def test_a_capture_survives_when_it_is_whole(run_folder: Path) -> None:
    gate, disk = Gate(), HookedFileSystem()
    disk.hook = lambda op, path: gate.wait_at() if str(path).endswith(".safetensors.tmp") else None
    with serving(run_folder, filesystem=disk) as bench:
        ckpt = opened(bench.run, world := World(), method="lazy")
        run_steps(ckpt, world, 2)
        assert said(ckpt) == (2, None, None, None)
        save = ckpt.save()
        run_steps(ckpt, world, 1)
        save.staged.result(TIMEOUT_S)
        assert said(ckpt) == (3, None, None, 2)
        gate.open()
        ckpt.wait()
        assert said(ckpt) == (3, 2, 1, 2)
        ckpt.close()


def test_a_thread_survives_nothing(run_folder: Path) -> None:
    forget(run_folder)
    world = World()
    thread = KeeperOptions(process=False)
    with everstep.Checkpointer(
        run_folder, world.state, method="logged", every=2, keeper=thread
    ) as ckpt:
        run_steps(ckpt, world, 2)
        ckpt.wait()
        run_steps(ckpt, world, 1)
        assert said(ckpt) == (3, 2, 1, 2)


def test_a_log_on_disk_survives_everything(run_folder: Path) -> None:
    log = LogOptions(to="disk", batch_steps=1, lag_steps=0)
    with serving(run_folder) as bench:
        ckpt = opened(bench.run, world := World(), method="logged", log=log)
        run_steps(ckpt, world, 4)
        assert said(ckpt) == (4, 4, 0, 4)
        ckpt.close()


def test_after_a_hole_a_new_base_counts(run_folder: Path) -> None:
    log = LogOptions(to="disk", batch_steps=1, lag_steps=0)
    with serving(run_folder) as bench:
        ckpt = opened(bench.run, world := World(), method="logged", log=log)
        run_steps(ckpt, world, 3)
        inspect(ckpt).recorder.skipped("a test")
        assert said(ckpt) == (3, 3, 0, 3), "what is there stays"
        run_steps(ckpt, world, 1)
        assert said(ckpt) == (4, 4, 0, 4)
        ckpt.close()


# --- After a lost keeper ----------------------------------------------------------------

TRAIN = """
import os, signal, sys, time
from everstep.testing import inspect
import everstep
from tests.support.following import until
from tests.support.log.every_step import World

run, method, lost_at, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
world = World()
ckpt = everstep.Checkpointer(run, world.state, method=method, every=20, on_failure="warn")
print("resumed", ckpt.resume().step, flush=True)
for step in range(1, steps + 1):
    world.train()
    ckpt.step()
    if step == 1:
        ckpt.save()
        ckpt.wait()
    if step == lost_at:
        os.kill(inspect(ckpt).keeper.pid, signal.SIGKILL)
        until(lambda: inspect(ckpt).keepers.lost is not None, "the loss")
        print("without", ckpt.stats().recoverable_step, flush=True)
if not steps:
    ckpt.close()
    sys.exit()
stats = ckpt.stats()
waited = stats.stall_s["keeper"] > 0
print("said", stats.recoverable_step, stats.keeper_restarts, waited, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("method", "lost_steps"),
    [("lazy", 3), ("logged", 0), ("lowdiff_plus", 0), ("checkflow", 2)],
)
@pytest.mark.thinned(2)
def test_a_run_is_recoverable_again_one_step_after_a_lost_keeper(
    run_folder: Path, method: str, lost_steps: int
) -> None:
    """A base is taken at the next step, which is over when the new keeper has it, or, without a
    log, when its copies are made. (A capture of every step may end one step late on a busy machine,
    and counts from then.)"""
    lost_at, steps = 9, 13
    killed = run_trainer(TRAIN, str(run_folder), method, str(lost_at), str(steps), timeout_s=120)
    found: dict[str, Any] = {}
    for line in whole_lines(killed[1]):
        word, *rest = line.split()
        found[word] = rest
    assert found["without"] == ["1"], "nothing but the base on disk"
    recoverable_step, restarts, waited = found["said"]
    assert (restarts, waited) == ("1", "True"), killed[2]
    assert int(recoverable_step) >= steps - lost_steps
    again = run_trainer(TRAIN, str(run_folder), method, "0", "0", timeout_s=120)
    _, resumed_step = whole_lines(again[1])[0].split()
    assert int(resumed_step) >= int(recoverable_step), again[2]
