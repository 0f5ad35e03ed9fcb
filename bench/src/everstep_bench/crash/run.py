"""Costs of a save, then lives of all arms."""

from __future__ import annotations

import random
from dataclasses import replace

from everstep_bench.crash.interval import SaveCosts, costs_of, interval_of, logged_interval_of
from everstep_bench.crash.lives import Lives, Losses, lived
from everstep_bench.crash.report import CrashReport, CrashTable
from everstep_bench.harness.display import Display
from everstep_bench.harness.session import Session, session
from everstep_bench.options import CRASH_ARMS, IDEAL, NONE, STALL_ARMS, CrashOptions, StallOptions
from everstep_bench.stall.report import StallReport
from everstep_bench.stall.run import run_stall
from everstep_bench.step.ours import missing
from everstep_bench.step.recovery import measure_recovery
from everstep_bench.step.run import check_room
from everstep_bench.step.settings import Setting

_BLOCK_STEPS = 8  # in which costs are measured; longer where a save takes longer
_BATCH_STEPS = 5  # that a log writes at a time
_LOGGED = "logged"
_BASES_OF_LOGGED = "lazy"

Costs = dict[str, SaveCosts | str]


def run_crash(options: CrashOptions, display: Display) -> CrashReport:
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when costs cannot be measured. What happens to an arm is in its row.
    """
    with session(options, display) as run:
        names = [name for name in options.names() if missing(name) is None]
        check_room(run)
        wanted = {_stand_in(name) for name in names} - {NONE}
        stalls = run_stall(
            StallOptions(
                params=options.params,
                batch=options.batch,
                every=(_BLOCK_STEPS,),
                repeats=options.repeats,
                seed=options.seed,
                link_bytes_per_s=options.link_bytes_per_s,
                free_core=options.free_core,
                arms=tuple(name for name in STALL_ARMS if name in wanted),
                folder=run.folder,
            ),
            display,
        )
        bench = Bench(run, names, _costs(run, names, stalls), stalls.facts.size_bytes)
        tables = [bench.table(mtbf_s) for mtbf_s in options.crash_every_s]
        facts = replace(
            run.facts(stalls.facts.size_bytes, stalls.facts.tensors, stalls.facts.workload),
            free_core=stalls.facts.free_core,
        )
        return CrashReport(options, facts, bench.costs, tables, bench.losses)


def _costs(run: Session, names: list[str], stalls: StallReport) -> Costs:
    """Return the costs of each arm that saves; in words why there are none."""
    (interval,) = stalls.intervals
    found: Costs = {}
    for name in names:
        if name != NONE:
            row = next(row for row in interval.rows if row.name == _stand_in(name))
            found[name] = costs_of(interval, row) or row.error or "nothing was measured"
    base = found.get(_LOGGED)
    if isinstance(base, SaveCosts):
        run.display.begin("replay of a log", 1)
        figures = measure_recovery(run.folder, run.options.training(), to="disk")
        found[_LOGGED] = replace(base, replay_s=figures.replay_s / figures.steps)
    return found


def _stand_in(name: str) -> str:
    """Return the arm whose saves cost the same: a log's bases cost what bases without one do."""
    return _BASES_OF_LOGGED if name == _LOGGED else name


class Bench:
    """Lives of all arms.

    Attributes:
        losses: of all steps.
    """

    def __init__(self, run: Session, names: list[str], costs: Costs, size_bytes: int) -> None:
        self._options: CrashOptions = run.options
        self._run = run
        self._names = names
        self.costs = costs
        self._size_bytes = size_bytes
        self.losses = Losses()

    def table(self, mtbf_s: float) -> CrashTable:
        """Let all arms live under the same failures, in an order that is drawn."""
        options = self._options
        lifetimes = options.lifetimes(mtbf_s)
        order = [IDEAL, *self._names]
        random.Random(options.seed).shuffle(order)
        self._run.display.begin(f"a failure every {mtbf_s:g} s", len(order))
        found: dict[str, Lives] = {}
        for name in order:
            self._run.display.advance(name)
            setting = self._chosen(name, mtbf_s)
            if isinstance(setting, str):
                found[name] = Lives(name, 0, error=setting)
                continue
            lives = lifetimes[-1:] if name == IDEAL else lifetimes
            folder = self._run.folder / "lives"
            found[name] = lived(options, setting, folder, lives, self.losses, name=name)
        absent = [name for name in options.names() if name not in self._names]
        rows = [found[name] for name in self._names]
        rows += [Lives(name, 0, error=missing(name)) for name in absent]
        rows.sort(key=lambda lives: CRASH_ARMS.index(lives.arm))
        return CrashTable(mtbf_s, found[IDEAL], rows)

    def _chosen(self, name: str, mtbf_s: float) -> Setting | str:
        """Return the arm with its own best interval; or why there is none."""
        costs = self.costs.get(name)
        if costs is None:  # it saves nothing
            return _setting(self._options, NONE, 1)
        if isinstance(costs, str):
            return costs
        if costs.replay_s is None:
            return _setting(self._options, name, interval_of(costs, mtbf_s))
        size_bytes = self._size_bytes
        every = logged_interval_of(costs, mtbf_s, state_bytes=size_bytes, batch=_BATCH_STEPS)
        return _setting(self._options, name, every)


def _setting(options: CrashOptions, name: str, every: int) -> Setting:
    return Setting(
        name,
        every,
        batch_steps=min(_BATCH_STEPS, every),
        block_steps=every,
        link_bytes_per_s=options.link_bytes_per_s,
        log_on_disk=True,
    )
