"""Costs of a save, then lives of all arms."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path

from everstep.workloads.processes import interruptible
from everstep_bench.crash.interval import SaveCosts, costs_of, interval_of, logged_interval_of
from everstep_bench.crash.lives import Lives, Losses, lived
from everstep_bench.crash.options import ARMS, IDEAL, CrashOptions
from everstep_bench.crash.report import CrashReport, CrashTable
from everstep_bench.persist.machine import look_at
from everstep_bench.persist.show import Display
from everstep_bench.persist.workspace import workspace
from everstep_bench.stall.options import ARMS as STALL_ARMS
from everstep_bench.stall.options import StallOptions
from everstep_bench.stall.report import StallReport
from everstep_bench.stall.run import run_stall
from everstep_bench.step.options import NONE, Setting
from everstep_bench.step.ours import missing
from everstep_bench.step.recovery import measure_recovery
from everstep_bench.step.run import check_room

__all__ = ["run_crash"]

_BLOCK_STEPS = 8  # in which costs are measured; longer where a save takes longer
_BATCH_STEPS = 5  # that a log writes at a time
_LOGGED = "logged"
_BASES_OF_LOGGED = "lazy"


def run_crash(options: CrashOptions, display: Display) -> CrashReport:
    """Measures; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when costs cannot be measured. What happens to an arm is in its row.
    """
    begin_s = time.monotonic()
    with interruptible(), workspace(options.folder) as folder:
        machine = look_at(folder)
        names = [name for name in options.names() if missing(name) is None]
        check_room(machine, options.params, [_setting(name, 1) for name in names], folder)
        stalls = run_stall(_costs_options(options, names, folder), display)
        costs = _costs(options, names, stalls, folder, display)
        losses = Losses()
        tables = [
            _table(options, names, costs, stalls.size_bytes, mtbf_s, folder, losses, display)
            for mtbf_s in options.crash_every_s
        ]
        return CrashReport(
            options=options,
            machine=machine,
            size_bytes=stalls.size_bytes,
            tensors=stalls.tensors,
            workload=stalls.workload,
            free_core=stalls.free_core,
            costs=costs,
            tables=tables,
            losses=losses,
            load_after=os.getloadavg()[0],
            seconds=time.monotonic() - begin_s,
            folder=str(folder.parent),
        )


def _costs_options(options: CrashOptions, names: list[str], folder: Path) -> StallOptions:
    wanted = {_BASES_OF_LOGGED if name == _LOGGED else name for name in names} - {NONE}
    return StallOptions(
        params=options.params,
        batch=options.batch,
        every=(_BLOCK_STEPS,),
        repeats=options.repeats,
        seed=options.seed,
        link_bytes_per_s=options.link_bytes_per_s,
        free_core=options.free_core,
        arms=tuple(name for name in STALL_ARMS if name in wanted),
        folder=folder,
    )


def _costs(
    options: CrashOptions,
    names: list[str],
    stalls: StallReport,
    folder: Path,
    display: Display,
) -> dict[str, SaveCosts | str]:
    """Of each arm that saves; in words why there are none."""
    (interval,) = stalls.intervals
    found: dict[str, SaveCosts | str] = {}
    for name in names:
        if name == NONE:
            continue
        row = next(row for row in interval.rows if row.name == _stand_in(name))
        found[name] = costs_of(interval, row) or row.error or "nothing was measured"
    base = found.get(_LOGGED)
    if isinstance(base, SaveCosts):
        display.begin("replay of a log", 1)
        figures = measure_recovery(
            folder,
            params=options.params,
            batch=options.batch,
            to="memory" if options.spare_keeper else "disk",
            seed=options.seed,
        )
        replay_s = figures.replay_s / figures.steps
        found[_LOGGED] = replace(base, replay_s=replay_s)
    return found


def _stand_in(name: str) -> str:
    """A log's bases cost what bases without one do."""
    return _BASES_OF_LOGGED if name == _LOGGED else name


def _table(
    options: CrashOptions,
    names: list[str],
    costs: dict[str, SaveCosts | str],
    size_bytes: int,
    mtbf_s: float,
    folder: Path,
    losses: Losses,
    display: Display,
) -> CrashTable:
    lifetimes = options.lifetimes(mtbf_s)
    settings = {name: _chosen(name, costs.get(name), mtbf_s, size_bytes) for name in names}
    order = [IDEAL, *names]
    random.Random(options.seed).shuffle(order)
    display.begin(f"a failure every {mtbf_s:g} s", len(order))
    found: dict[str, Lives] = {}
    for name in order:
        display.advance(name)
        if name == IDEAL:
            found[name] = lived(
                options, _setting(NONE, 1), folder / "lives", lifetimes[-1:], losses, name=IDEAL
            )
            continue
        setting = settings[name]
        if isinstance(setting, str):
            found[name] = Lives(name, 0, error=setting)
            continue
        found[name] = lived(options, setting, folder / "lives", lifetimes, losses)
    absent = [Lives(name, 0, error=missing(name)) for name in options.names() if name not in names]
    rows = [found[name] for name in names] + absent
    rows.sort(key=lambda lives: ARMS.index(lives.arm))
    return CrashTable(mtbf_s, found[IDEAL], rows)


def _chosen(
    name: str, costs: SaveCosts | str | None, mtbf_s: float, size_bytes: int
) -> Setting | str:
    """The arm with its own best interval; or why there is none."""
    if costs is None:
        return _setting(name, 1)  # it saves nothing
    if isinstance(costs, str):
        return costs
    if costs.replay_s is None:
        return _setting(name, interval_of(costs, mtbf_s))
    every = logged_interval_of(costs, mtbf_s, state_bytes=size_bytes, batch=_BATCH_STEPS)
    return _setting(name, every)


def _setting(name: str, every: int) -> Setting:
    return Setting(name, every, 1.0, min(_BATCH_STEPS, every), every)
