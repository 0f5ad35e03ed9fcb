"""Ranks of each size and number, one job after the other; what they say; the report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from everstep.errors import EverstepError
from everstep_bench.harness.children import Child
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Row, Spread, picked
from everstep_bench.harness.report import Report, Table, ms, number
from everstep_bench.harness.running import kill_keepers
from everstep_bench.harness.session import Session, session
from everstep_bench.options import IDEAL, SCALE_ARMS, ScaleOptions
from everstep_bench.scale.child import WARM_UPS, RankOrder
from everstep_bench.stall.peers import installed

_STATE_BYTES_PER_PARAM = 12
_PROCESS_BYTES = 400 << 20  # torch, in each of two processes of a rank
_COLUMNS = ("arm", "parameters", "ranks", "state MB", "step ms", "lost ms", "range", "call ms",
            "GB/s to training", "durable s", "GB/s to disk")  # fmt: skip


class Block(NamedTuple):
    """Steps that begin with a save, of all ranks.

    Attributes:
        wall_s: of the slowest rank.
        call_s: longest call that saves.
        durable_s: from the call to the moment at which all ranks' parts are on disk; None without
            a save.
    """

    wall_s: float
    call_s: float
    durable_s: float | None

    @classmethod
    def of(cls, said: Sequence[Mapping[str, Any]]) -> Block:
        """Return the block of what all ranks say."""
        durable = [one["durable_s"] for one in said if one["durable_s"] is not None]
        return cls(
            max(one["wall_s"] for one in said),
            max(one["call_s"] for one in said),
            max(durable, default=None),
        )


@dataclass(slots=True)
class Job:
    """Figures of one size and number of ranks.

    Attributes:
        size_bytes: of the state, once.
        rows: arms; the first saves nothing.
    """

    params: int
    ranks: int
    every: int
    size_bytes: int = 0
    tensors: int = 0
    workload: str = ""
    rows: list[Row[Block]] = field(default_factory=list)

    @property
    def ideal(self) -> Row[Block]:
        """Training that saves nothing."""
        return self.rows[0]

    def step_s(self, row: Row[Block]) -> float | None:
        """Return the mean duration of a step in a block with one save."""
        wall_s = row.median(lambda block: block.wall_s)
        return None if wall_s is None else wall_s / self.every

    def lost_s(self, row: Row[Block]) -> Spread | None:
        """Return what a save takes from training, next to the block without one of its round."""
        return row.paired(self.ideal.blocks, lambda mine, ideal: mine.wall_s - ideal.wall_s)

    def seen_bytes_per_s(self, row: Row[Block]) -> float | None:
        """Return the bandwidth that training sees: state, divided by what a save takes from it."""
        lost = self.lost_s(row)
        return None if lost is None or lost.median <= 0 else self.size_bytes / lost.median


@dataclass
class ScaleReport(Report):
    """Everything that was found."""

    jobs: list[Job]

    def tables(self) -> Iterator[Table]:
        """Yield one table: arms by size and number of ranks."""
        cells = [self._cells(job, row) for job in self.jobs for row in job.rows]
        yield Table("A save, by size of the model and number of ranks", _COLUMNS, cells)

    def details(self) -> Iterator[str]:
        """Yield why arms have no figures."""
        for job in self.jobs:
            for row in job.rows:
                if row.error is not None:
                    yield f"{row.name}, {job.params:,} parameters, {job.ranks} ranks: {row.error}"

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            f"A block is {self.options.every} steps and one save. lost: its time on the clock next "
            "to the block without a save of the same round, of the slowest rank; median and range "
            "over the rounds. GB/s to training: state, counted once, divided by that; a dash where "
            "nothing was lost. durable: until the parts of all ranks are on disk, synced. torch."
            "save: rank 0 saves, the others wait for it in their next step."
        )
        cores = self.facts.machine.cores
        if any(job.ranks > cores for job in self.jobs):
            yield f"More ranks than the {cores} cores: they take turns, and every figure grows."

    def figures(self) -> dict[str, Any]:
        """Return everything, by size, number of ranks and arm."""
        return {
            **picked(self.options, "every batch"),
            "jobs": [
                {
                    **picked(job, "params ranks size_bytes tensors"),
                    "arms": [
                        {
                            **picked(row, "name error"),
                            "step_s": job.step_s(row),
                            "lost_s": None if row is job.ideal else job.lost_s(row),
                            "call_s": row.spread(lambda block: block.call_s),
                            "durable_s": row.spread(lambda block: block.durable_s),
                        }
                        for row in job.rows
                    ],
                }
                for job in self.jobs
            ],
        }

    def _cells(self, job: Job, row: Row[Block]) -> list[str]:
        saves = row is not job.ideal and bool(row.blocks)
        lost = job.lost_s(row) if saves else None
        durable = row.spread(lambda block: block.durable_s)
        to_disk = None if durable is None else job.size_bytes / durable.median
        seen = job.seen_bytes_per_s(row) if saves else None
        return [
            row.name,
            f"{job.params / 1e6:g} M",
            str(job.ranks),
            number(job.size_bytes / 1e6, 1),
            ms(job.step_s(row)),
            ms(lost),
            "" if lost is None else f"{1e3 * lost.low:.1f} - {1e3 * lost.high:.1f}",
            ms(row.spread(lambda block: block.call_s)) if saves else "-",
            number(seen, 2, 1e-9),
            number(durable, 3),
            number(to_disk, 2, 1e-9),
        ]


def run_scale(options: ScaleOptions, display: Display) -> ScaleReport:
    """Measure; every process is ended and everything written is removed, whatever happens.

    Raises:
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: a rank or one of our own arms fails. A peer that fails is reported.
    """
    with session(options, display) as run:
        state_bytes = _STATE_BYTES_PER_PARAM * max(options.params)
        arms = len(options.names())
        run.refuse_without_room(
            disk_bytes=4 * arms * state_bytes,
            memory_bytes=max(options.ranks) * (2 * arms * state_bytes + 2 * _PROCESS_BYTES),
            hint="smaller --params, or fewer --ranks",
        )
        jobs = []
        for params in options.params:
            for ranks in options.ranks:
                display.begin(
                    f"{params:,} parameters, {ranks} rank(s)",
                    len(options.names()) * (options.repeats + WARM_UPS),
                )
                jobs.append(_measured(run, params, ranks))
        largest = max(jobs, key=lambda job: job.size_bytes)
        facts = run.facts(largest.size_bytes, largest.tensors, f"largest: {largest.workload}")
        return ScaleReport(options, facts, jobs)


def _measured(run: Session, params: int, ranks: int) -> Job:
    """Train with this many ranks, all arms in turn."""
    options: ScaleOptions = run.options
    folder = run.folder / f"{params}-{ranks}"
    folder.mkdir()
    job = Job(params, ranks, options.every, rows=[_row(name) for name in options.names()])
    names = tuple(row.name for row in job.rows if row.error is None)
    order = [
        RankOrder(os.getpid(), _with_arms(options, names), params, rank, ranks, str(folder))
        for rank in range(ranks)
    ]
    with _ended(folder), contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child("scale.child", one.encode())) for one in order]
        ready, *_ = [child.next("ready") for child in children]
        job.size_bytes = ready["size_bytes"]
        job.tensors = ready["tensors"]
        job.workload = ready["workload"]
        _follow(job, children, run.display)
    return job


def _follow(job: Job, children: Sequence[Child], display: Display) -> None:
    """Collect what all ranks say, until they are done: the same in the same order."""
    rows = {row.name: row for row in job.rows}
    while True:
        said = [child.next() for child in children]
        events = {one["event"] for one in said}
        if events == {"done"}:
            return
        row = rows[said[0]["arm"]]
        if events == {"failed"}:
            row.error = next((one["error"] for one in said if one["error"]), "it has failed")
        elif events == {"block"}:
            number = said[0]["round"]
            if number > 0:
                row.blocks[number] = Block.of(said)
            display.advance(row.name)
        else:
            raise EverstepError(f"the ranks of a job say different things: {sorted(events)}")


def _row(name: str) -> Row[Block]:
    error = None if installed(name) else "not installed"
    return Row(name, "ideal" if name == IDEAL else "ours", error=error)


def _with_arms(options: ScaleOptions, names: Sequence[str]) -> ScaleOptions:
    chosen = tuple(name for name in SCALE_ARMS if name in names)
    return ScaleOptions(
        options.params,
        options.ranks,
        options.every,
        options.batch,
        options.repeats,
        options.seed,
        chosen,
        options.folder,
    )


@contextlib.contextmanager
def _ended(folder: Path) -> Iterator[None]:
    """No keeper is left of a job that has failed."""
    try:
        yield
    except BaseException:
        for run in folder.glob("everstep-*"):
            kill_keepers(run)
        raise
