"""All of ``bench step``: rounds, kills, and replay."""

from __future__ import annotations

import itertools

from everstep_bench.harness.display import Display
from everstep_bench.harness.loop import Loop
from everstep_bench.harness.session import Session, session
from everstep_bench.options import StepOptions
from everstep_bench.step.arms import settings
from everstep_bench.step.kills import Kills
from everstep_bench.step.recovery import (
    RecoveryFigures,
    ReplayFigures,
    measure_recovery,
    measure_replay,
)
from everstep_bench.step.report import StepReport
from everstep_bench.step.rounds import Bench, Rows

_REPLAY_PARAMS_MAX = 16_000_000  # each way has a state of its own; far beyond any cache
_STATE_BYTES = 12  # for each parameter: itself and two moments, float32
_COPIES_IN_MEMORY = 6  # training and its gradients, two bases, a log or a replica
_MEMORY_BESIDES = 1 << 30
_COPIES_ON_DISK = 4


def run_step(options: StepOptions, display: Display) -> StepReport:
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when replay fails. What happens to an arm is in its row.
    """
    with session(options, display) as run:
        check_room(run)
        with run.alone():
            display.begin("making a model", 1)
            loop = Loop(options)
            bench = Bench(loop, run.folder, run.placement, run.turns())
            rows = Rows(bench.measure(settings(options), options.repeats))
            size_bytes = loop.size_bytes
            tensors = loop.tensors
            workload = loop.description
            params = loop.training.model.config.params
        del loop, bench  # children need the memory
        kills = Kills(options, run.folder, display).measure()
        replay, recoveries = _replay(run) if options.replay else (None, [])
        facts = run.facts(size_bytes, tensors, workload)
        return StepReport(options, facts, params, rows, kills, replay, recoveries)


def _replay(run: Session) -> tuple[ReplayFigures, list[RecoveryFigures]]:
    ways = list(itertools.product(("memory", "disk"), (False, True)))
    run.display.begin("replay", 1 + len(ways))
    run.display.advance("alone")
    replay = measure_replay(params=min(run.options.params, _REPLAY_PARAMS_MAX))
    recoveries = []
    for to, fused in ways:
        run.display.advance(f"log in {to}, {'fused' if fused else 'for-loop'}")
        training = run.options.training()
        recoveries.append(measure_recovery(run.folder, training, to=to, fused=fused))
    return replay, recoveries


def check_room(run: Session) -> None:
    """Look before anything is written; one arm writes at a time.

    Raises:
        OutOfSpaceError: when disk or memory would not do.
    """
    size_bytes = _STATE_BYTES * run.options.params
    run.refuse_without_room(
        disk_bytes=_COPIES_ON_DISK * size_bytes,
        memory_bytes=_COPIES_IN_MEMORY * size_bytes + _MEMORY_BESIDES,
        hint="fewer --params",
    )
