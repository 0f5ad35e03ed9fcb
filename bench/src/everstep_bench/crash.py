"""Benchmark: share of training that remains with a failure every few seconds (GoCkpt Table 1).

First it is measured what a save costs each arm, and how long a step takes; from both follows how
often that arm had best save (section 3.1). Then a process trains with that interval, is killed
with SIGKILL at moments that are the same for all arms, its keeper with it, and another process
resumes from what is on the disk, again and again. What counts is the step that is reached in the
end. The time that a new process takes to start is left out: it is the same for all arms.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from everstep.errors import EverstepError, InfeasibleError
from everstep.events import read_events
from everstep.plan.interval import Costs, best_choice
from everstep.testing.keepers import end_keeper
from everstep_bench.harness.children import Child
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Verdict, picked, plain
from everstep_bench.harness.report import Report, Table, ms, number, per_cent
from everstep_bench.harness.running import kill_keepers
from everstep_bench.harness.session import Session, session
from everstep_bench.options import (
    AUTO,
    CRASH_ARMS,
    IDEAL,
    NONE,
    STALL_ARMS,
    CrashOptions,
    StallOptions,
)
from everstep_bench.stall.figures import Interval, Row
from everstep_bench.stall.report import StallReport
from everstep_bench.stall.run import run_stall
from everstep_bench.step.arms import Recovered, Setting, missing
from everstep_bench.step.child import ChildOrder
from everstep_bench.step.recovery import measure_recovery
from everstep_bench.step.run import check_room


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """Costs of a save.

    Attributes:
        step_s: seconds of a step that nobody saves in.
        save_s: that a save takes from training [T_ckpt].
        durable_s: until it is durable; the next one begins no sooner.
        replay_s: to redo a step from a log, where there is one.
    """

    step_s: float
    save_s: float
    durable_s: float
    replay_s: float | None = None


def costs_of(interval: Interval, row: Row) -> SaveCosts | None:
    """From measured rounds of an arm; None where there are none.

    A save takes what the training thread spends in the library, or what it slows steps down by
    (they share cores, memory and disk with it), where in the median of the rounds this is more.
    """
    step = interval.step_s()
    slowdown = interval.slowdown_s(row)
    stall_s = row.median(lambda block: block.stall_s)
    durable_s = row.median(lambda block: block.durable_s)
    if step is None or stall_s is None or durable_s is None:
        return None
    save_s = stall_s if slowdown is None else max(stall_s, slowdown.median)
    return SaveCosts(step.median, save_s, durable_s)


def interval_of(costs: SaveCosts, mtbf_s: float) -> int:
    """Steps from save to save: ``floor(sqrt(2 T_ckpt / p) / T_step)`` for ``p = 1 / mtbf_s``
    failures in a second (GoCkpt section 3.1 and Table 1, its N_best), but one save is durable
    before the next begins."""
    best = math.floor(math.sqrt(2 * costs.save_s * mtbf_s) / costs.step_s)
    return max(1, best, math.ceil(costs.durable_s / costs.step_s))


def logged_interval_of(costs: SaveCosts, mtbf_s: float, *, state_bytes: int, batch: int) -> int:
    """Steps from base to base where a log brings back the steps between them.

    What a failure then costs is replay, not training; so bases may be further apart
    (:func:`everstep.plan.interval.best_choice`).

    Args:
        batch: steps that the log writes at a time.
    """
    assert costs.replay_s is not None
    model = Costs(
        state_bytes=state_bytes,
        write_bytes_per_s=state_bytes / costs.durable_s,
        replay_s=costs.replay_s,
        mtbf_s=mtbf_s,
        step_s=costs.step_s,
        base_cost_s=costs.save_s,
    )
    try:
        return best_choice(model, batch_max=batch).interval_steps
    except InfeasibleError:  # a replay as slow as training: as if there were no log
        return interval_of(costs, mtbf_s)


def share_of(costs: SaveCosts, every: int, mtbf_s: float, load_s: float) -> float:
    """The share of training's speed that is left with saves every so many steps: ``1 / (1 + P)``
    with ``P = T_ckpt / (N T_step) + p N T_step / 2 + p T_load`` (GoCkpt section 3.1)."""
    between_s = every * costs.step_s
    again_s = between_s / 2
    if costs.replay_s is not None:
        again_s *= costs.replay_s / costs.step_s
    return 1 / (1 + costs.save_s / between_s + (again_s + load_s) / mtbf_s)


@dataclass(frozen=True, slots=True)
class Life:
    """A training process from its first ``resume()`` until it was killed.

    Attributes:
        recovered: what it went on from.
        load_s: seconds until that was there.
        seconds: all of it.
        reached: the last step that it was let go from.
    """

    recovered: Recovered
    load_s: float
    seconds: float
    reached: int

    @property
    def steps(self) -> int:
        """That it has trained."""
        return self.reached - self.recovered.step


@dataclass(slots=True)
class Lives:
    """All processes of an arm, one after the other.

    Attributes:
        every: steps from save to save.
        error: why there are no more.
        methods: those that "auto" has chosen, in the order of processes.
    """

    arm: str
    every: int
    lives: list[Life] = field(default_factory=list)
    error: str | None = None
    methods: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of training and resuming; starts of processes are left out."""
        return sum(life.seconds for life in self.lives)

    @property
    def reached(self) -> int:
        """The step that it has come to: what is left of all that was trained."""
        return self.lives[-1].reached

    @property
    def steps_per_s(self) -> float:
        """Useful ones."""
        return self.reached / self.seconds

    def lost(self) -> list[int]:
        """Steps that each failure has cost: they were completed, and have to be repeated."""
        pairs = zip(self.lives, self.lives[1:], strict=False)
        return [before.reached - after.recovered.step for before, after in pairs]

    def loads_s(self) -> list[float]:
        """Seconds of each resume after a failure."""
        return [life.load_s for life in self.lives[1:]]


@dataclass(slots=True)
class Losses:
    """The loss of each step, by whoever was there first; all others must have the same.

    Attributes:
        again: steps that were trained once more.
        different: of these, those whose loss differed: ``(arm, step)``.
    """

    known: dict[int, str] = field(default_factory=dict)
    again: int = 0
    different: list[tuple[str, int]] = field(default_factory=list)

    def see(self, arm: str, step: int, loss: str) -> None:
        """A process has trained a step."""
        if step not in self.known:
            self.known[step] = loss
            return
        self.again += 1
        if self.known[step] != loss:
            self.different.append((arm, step))


def lived(
    options: CrashOptions,
    setting: Setting,
    folder: Path,
    lifetimes: Sequence[float],
    losses: Losses,
    *,
    name: str | None = None,
    steps_min: int = 0,
) -> Lives:
    """Trains with an arm; nothing of it remains, neither processes nor files.

    Args:
        folder: its own, which it makes.
        lifetimes: seconds of each process; all but the last end in a failure.
        name: of the arm, where it is not that of the setting.
        steps_min: steps that each process is let train, however long they take.
    """
    order = ChildOrder(os.getpid(), setting, options.training(), str(folder))
    found = Lives(name or setting.arm, setting.every)
    try:
        for number, seconds in enumerate(lifetimes, start=1):
            found.lives.append(_live(order, found.arm, seconds, losses, steps_min))
            if number < len(lifetimes):
                kill_keepers(folder)
        if setting.arm == AUTO:
            started = (one for one in read_events(folder) if one.kind == "started")
            found.methods = [str(one.details["method"]) for one in started]
    except EverstepError as error:
        found.error = f"failed: {error}"
    finally:
        end_keeper(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _live(order: ChildOrder, arm: str, lifetime_s: float, losses: Losses, steps_min: int) -> Life:
    """Let one process live, killed so long after it was ready."""

    def seen(words: Iterable[dict[str, Any]], reached: int) -> int:
        for word in words:
            if word["step"] != reached + 1:
                raise EverstepError(f"a training process went from {reached} to {word['step']}")
            reached = word["step"]
            losses.see(arm, reached, word["loss"])
        return reached

    with Child("step.child", order.encode()) as process:
        begin_s = process.next("ready")["at_s"]
        resumed = process.next("resumed")
        recovered = Recovered(**resumed["recovered"])
        reached = seen(process.until(begin_s + lifetime_s), recovered.step)
        while reached < recovered.step + steps_min:
            reached = seen([process.next("step")], reached)
        killed_s = time.monotonic()
        reached = seen(process.kill(), reached)
    return Life(recovered, resumed["at_s"] - begin_s, killed_s - begin_s, reached)


PEERS = ("torch.save", "dcp-warm")
_COLUMNS = ("arm", "T_ckpt ms", "durable ms", "every", "steps/s", "of ideal", "model",
            "lost steps", "load ms", "from", "method")  # fmt: skip


@dataclass(slots=True)
class CrashTable:
    """All arms under the same failures.

    Attributes:
        mtbf_s: seconds from one to the next, on average.
        ideal: training without failures, and without a save.
    """

    mtbf_s: float
    ideal: Lives
    rows: list[Lives]

    def share(self, lives: Lives) -> float | None:
        """Return useful steps in a second, next to training without failures."""
        if lives.error is not None or self.ideal.error is not None or not self.ideal.reached:
            return None
        return lives.steps_per_s / self.ideal.steps_per_s


@dataclass
class CrashReport(Report):
    """Everything that was found.

    Attributes:
        costs: of a save, by arm; in words why they are not known.
        losses: of all steps of all arms.
    """

    options: CrashOptions
    costs: dict[str, SaveCosts | str]
    crashes: list[CrashTable]
    losses: Losses

    def modelled_share(self, table: CrashTable, lives: Lives) -> float | None:
        """Return :meth:`CrashTable.share` according to the formula."""
        costs = self.costs.get(lives.arm)
        loads_s = lives.loads_s()
        if not isinstance(costs, SaveCosts) or not loads_s:
            return None
        return share_of(costs, lives.every, table.mtbf_s, statistics.mean(loads_s))

    def rounds(self) -> str:
        """Return how often arms fail, and how costs were measured."""
        options = self.options
        return (
            f"{options.crashes} failures of each arm, their moments drawn with seed "
            f"{options.seed}; costs measured in {options.repeats} rounds"
        )

    def verdicts(self) -> list[Verdict]:
        """Return the targets, each with the measured figure."""
        return [self._same_verdict(), *map(self._peers_verdict, self.crashes)]

    def tables(self) -> Iterator[Table]:
        """Yield one table for each distance of failures."""
        for table in self.crashes:
            title = f"A failure every {table.mtbf_s:g} s on average, each arm at its best interval"
            rows = [self._cells(table, lives) for lives in (table.ideal, *table.rows)]
            yield Table(title, _COLUMNS, rows, words=("arm", "from", "method"))

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            "T_ckpt: what a save takes from training: the time of its thread in the library, or "
            "the slow-down of steps where that is more. every: floor(sqrt(2 T_ckpt / p) / "
            "T_step), but one save is durable before the next begins; with a log, the interval "
            "that wastes the least, replay included. steps/s: useful steps, those that are there "
            "in the end, for each second of training and resuming. model: what the same formula "
            "promises. lost steps: that were completed, and had to be repeated, for each failure."
        )
        yield (
            "Real: training, saves, SIGKILL of the training process and of its keeper, resume() "
            "in a new process. Left out: what it takes to start that process. Made up: that "
            "something fails, and when. Page caches survive."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, every process included."""
        return {
            "emulated_link_bytes_per_s": self.options.link_bytes_per_s,
            "host_bytes": self.options.host_bytes,
            "costs": self.costs,
            "tables": [
                {
                    "mtbf_s": table.mtbf_s,
                    "ideal": self._lives_as_json(table, table.ideal),
                    "arms": [self._lives_as_json(table, lives) for lives in table.rows],
                }
                for table in self.crashes
            ],
            "steps_trained_again": self.losses.again,
            "of_these_different": self.losses.different,
        }

    def _same_verdict(self) -> Verdict:
        what = "a step that is trained again has the same loss, bit for bit, whichever arm"
        again = self.losses.again
        different = self.losses.different
        figure = f"{again} step(s) trained again, {len(different)} with another loss"
        if different:
            arm, step = different[0]
            figure += f", the first of them step {step} of {arm}"
        return Verdict(what, figure, not different if again else None)

    def _peers_verdict(self, table: CrashTable) -> Verdict:
        what = (
            f"a failure every {table.mtbf_s:g} s: useful steps of everstep's best arm, next to "
            "those of the best peer: more"
        )
        found = [(lives.steps_per_s, lives.arm) for lives in table.rows if lives.error is None]
        ours = [one for one in found if one[1] not in (*PEERS, NONE)]
        peers = [one for one in found if one[1] in PEERS]
        if not ours or not peers:
            return Verdict(what, "-", None)
        (mine, arm) = max(ours)
        (other, peer) = max(peers)
        figure = f"{mine:.2f} a second ({arm}) next to {other:.2f} ({peer})"
        return Verdict(what, figure, mine > other)

    def _cells(self, table: CrashTable, lives: Lives) -> tuple[str | Text, ...]:
        ours = lives.arm not in (*PEERS, NONE, IDEAL)
        name = Text(lives.arm, style="bold" if ours else "")
        if lives.error is not None:
            return name, lives.error
        costs = self.costs.get(lives.arm)
        known = isinstance(costs, SaveCosts)
        save_s = costs.save_s if isinstance(costs, SaveCosts) else None
        durable_s = costs.durable_s if isinstance(costs, SaveCosts) else None
        lost = lives.lost()
        loads_s = lives.loads_s()
        sources = sorted({life.recovered.source for life in lives.lives[1:]})
        return (
            name,
            ms(save_s, 2),
            ms(durable_s),
            f"{lives.every}" if known else "-",
            number(lives.steps_per_s),
            per_cent(table.share(lives)),
            per_cent(self.modelled_share(table, lives)),
            number(statistics.mean(lost) if lost else None, 1),
            ms(statistics.mean(loads_s) if loads_s else None, 0),
            ", ".join(sources) or "-",
            ", ".join(one for one, _ in itertools.groupby(lives.methods)) or lives.arm,
        )

    def _lives_as_json(self, table: CrashTable, lives: Lives) -> dict[str, Any]:
        return {
            "name": lives.arm,
            **picked(lives, "every methods error"),
            "steps_per_s": lives.steps_per_s if lives.error is None else None,
            "share_of_ideal": table.share(lives),
            "modelled_share": self.modelled_share(table, lives),
            "lost": lives.lost(),
            "lives": plain(lives.lives),
        }


_BLOCK_STEPS = 8  # in which costs are measured; longer where a save takes longer
_BATCH_STEPS = 5  # that a log writes at a time
_LOGGED = "logged"
_BASES_OF_LOGGED = "lazy"


def run_crash(options: CrashOptions, display: Display) -> CrashReport:
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: when costs cannot be measured. What happens to an arm is in its row.
    """
    with session(options, display) as run:
        names = [name for name in options.names() if missing(name) is None]
        check_room(run)
        wanted = {_stand_in(name) for name in names} - {NONE, AUTO}
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


def _costs(run: Session, names: list[str], stalls: StallReport) -> dict[str, SaveCosts | str]:
    """Return the costs of each arm that saves; in words why there are none."""
    (interval,) = stalls.intervals
    found: dict[str, SaveCosts | str] = {}
    for name in names:
        if name not in (NONE, AUTO):
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

    def __init__(
        self,
        run: Session,
        names: list[str],
        costs: dict[str, SaveCosts | str],
        size_bytes: int,
    ) -> None:
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
        if name == AUTO:  # it chooses itself
            return setting_of(self._options, name, 1)
        costs = self.costs.get(name)
        if costs is None:  # it saves nothing
            return setting_of(self._options, NONE, 1)
        if isinstance(costs, str):
            return costs
        if costs.replay_s is None:
            return setting_of(self._options, name, interval_of(costs, mtbf_s))
        size_bytes = self._size_bytes
        every = logged_interval_of(costs, mtbf_s, state_bytes=size_bytes, batch=_BATCH_STEPS)
        return setting_of(self._options, name, every)


def setting_of(options: CrashOptions, name: str, every: int) -> Setting:
    """Return the setting of an arm that saves every so many steps."""
    return Setting(
        name,
        every,
        batch_steps=min(_BATCH_STEPS, every),
        block_steps=every,
        link_bytes_per_s=options.link_bytes_per_s,
        log_on_disk=True,
        host_bytes=options.host_bytes,
    )
