"""All of ``bench step``: rounds, kills, replay, and what a replica keeps up with."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from everstep.errors import EverstepError
from everstep.workloads.processes import interruptible
from everstep_bench.persist.machine import Machine, look_at
from everstep_bench.persist.show import Display
from everstep_bench.persist.workspace import refuse_without_room, workspace
from everstep_bench.stall.cores import Placement
from everstep_bench.stall.loop import Loop, seeded_single_thread
from everstep_bench.step.figures import Rows
from everstep_bench.step.kills import Kills
from everstep_bench.step.options import Setting, StepOptions
from everstep_bench.step.rate import ReplicaRate, log_bytes_of, measure_rate
from everstep_bench.step.recovery import (
    RecoveryFigures,
    ReplayFigures,
    measure_recovery,
    measure_replay,
)
from everstep_bench.step.report import StepReport
from everstep_bench.step.rounds import Bench

__all__ = ["check_room", "run_step"]

_LOGS_TO = ("memory", "disk")
_REPLAY_PARAMS_MAX = 16_000_000  # each way has a state of its own; far beyond any cache
_STATE_BYTES = 12  # for each parameter: itself and two moments, float32
_COPIES_IN_MEMORY = 6  # training and its gradients, two bases, a log or a replica
_MEMORY_BESIDES = 1 << 30
_WHOLE_ON_DISK = 4
_DIFFERENCE = 2 / 3  # of the state: moments are stored as they are


def run_step(options: StepOptions, display: Display) -> StepReport:
    """Measures; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when replay fails. What happens to an arm is in its row.
    """
    begin_s = time.monotonic()
    with interruptible(), workspace(options.folder) as folder:
        machine = look_at(folder)
        check_room(machine, options.params, options.settings(), folder)
        placement = Placement(free_core=options.free_core)
        with seeded_single_thread(options.seed), placement.pinned():
            display.begin("making a model", 1)
            loop = Loop(options, batch=options.batch)
            bench = Bench(loop, folder, placement, display, seed=options.seed)
            rows = bench.measure(options.settings(), options.repeats)
            size_bytes = loop.size_bytes
            tensors = loop.tensors
            workload = loop.description
            params = loop.training.model.config.params
            rate: ReplicaRate | str | None = None
            if any(row.setting.arm == "lowdiff_plus" and row.blocks for row in rows):
                display.begin("what a replica keeps up with", 1)
                try:
                    rate = measure_rate(loop, folder / "rate", placement)
                except EverstepError as error:
                    rate = str(error)
        del loop, bench  # children need the memory
        kills = Kills(options, folder, display).measure()
        replay, recoveries = _replay(options, folder, display) if options.replay else (None, [])
        return StepReport(
            options=options,
            machine=machine,
            size_bytes=size_bytes,
            tensors=tensors,
            params=params,
            workload=workload,
            free_core=placement.free,
            rows=Rows(rows),
            kills=kills,
            rate=rate,
            replay=replay,
            recoveries=recoveries,
            load_after=os.getloadavg()[0],
            seconds=time.monotonic() - begin_s,
            folder=str(folder.parent),
        )


def _replay(
    options: StepOptions, folder: Path, display: Display
) -> tuple[ReplayFigures, list[RecoveryFigures]]:
    display.begin("replay", 1 + 2 * len(_LOGS_TO))
    display.advance("alone")
    replay = measure_replay(params=min(options.params, _REPLAY_PARAMS_MAX))
    recoveries = []
    for to, fused in itertools.product(_LOGS_TO, (False, True)):
        display.advance(f"log in {to}, {'fused' if fused else 'for-loop'}")
        recoveries.append(
            measure_recovery(
                folder,
                params=options.params,
                batch=options.batch,
                to=to,
                seed=options.seed,
                fused=fused,
            )
        )
    return replay, recoveries


def check_room(machine: Machine, params: int, settings: Sequence[Setting], folder: Path) -> None:
    """Looks before anything is written; one arm writes at a time.

    Raises:
        OutOfSpaceError: when disk or memory would not do.
    """
    size_bytes = _STATE_BYTES * params
    copies = float(_WHOLE_ON_DISK)
    for setting in settings:
        if setting.arm == "naive-diff":
            copies = max(copies, _WHOLE_ON_DISK + _DIFFERENCE * (setting.every + 4))
    refuse_without_room(
        machine,
        folder,
        disk_bytes=int(copies * size_bytes),
        memory_bytes=_COPIES_IN_MEMORY * size_bytes + log_bytes_of(params) + _MEMORY_BESIDES,
        hint="fewer --params, or no naive-diff among --arms",
    )
