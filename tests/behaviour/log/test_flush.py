"""A log that is written to disk in mid-step: the audit of a base wants all that there is."""

from __future__ import annotations

import shutil
from pathlib import Path

import everstep
from everstep.options import LogOptions
from everstep.testing import inspect
from everstep.trainer.attach.keeper import ThreadKeeper
from tests.support.log.every_step import World, opened, run_steps
from tests.support.world import TIMEOUT_S


def test_what_a_step_has_recorded_so_far_is_not_lost(run_folder: Path) -> None:
    log = LogOptions(to="disk", batch_steps=10, history="all")
    options = {"every": 1000, "log": log, "keeper": everstep.KeeperOptions(process=False)}
    world = World()
    with opened(run_folder, world, **options) as ckpt:
        ckpt.resume()
        states = run_steps(ckpt, world, 3)
        world.train()
        keeper = inspect(ckpt).keeper
        assert isinstance(keeper, ThreadKeeper)
        assert keeper.records is not None
        inspect(ckpt).saver.finish_captures()
        keeper.records.flush()  # behind the update of step 4, before its mark
        keeper.records.settle(TIMEOUT_S)
        ckpt.step()
        states |= {4: world.snapshot()} | run_steps(ckpt, world, 2)
    for base in run_folder.glob("timeline-00001/base/*"):
        if int(base.name) > 1:
            shutil.rmtree(base)
    for step in (4, 6):
        other = World(seed=9)
        with opened(run_folder, other, **options) as ckpt:
            recovery = ckpt.resume(step=step)
            assert (recovery.base_step, recovery.replayed) == (1, step - 1)
            assert other.snapshot() == states[step]
