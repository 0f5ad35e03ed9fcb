"""Run the two trainings, and look at them: what was where, next to what was announced.

Bytes in each place are seen from outside: files by their sizes, memory by its pages.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.arena import CONTROL_BYTES, PAGE_BYTES
from everstep.errors import DeadlineError, EverstepError, OptionError
from everstep.format.names import parse_segment
from everstep.seams import Seams
from everstep.seams.processes.processes import process_ended
from everstep.testing.conformance import walk
from everstep.tiers.options import is_url, open_tier
from everstep_bench.harness.children import TIMEOUT_S, Child
from everstep_bench.harness.display import Display
from everstep_bench.harness.figures import Verdict, picked
from everstep_bench.harness.machine import cpu_s
from everstep_bench.harness.report import Report, Table, drawn, number, per_cent
from everstep_bench.harness.running import kill_keepers
from everstep_bench.harness.session import session
from everstep_bench.options import TiersOptions
from everstep_bench.tiers.child import RankOrder

MEMORY = "memory"
PEER = "peer"
DISK = "disk"
COPIES = "copies"
_BLOCK_BYTES = 512
_ARENA = "everstep-arena"


@dataclass(slots=True)
class Sampler:
    """Looks at everything, and keeps the most that was there in each step.

    Args:
        runs: folder of each rank.
        keepers: its keeper's process.
        host_bytes: size of the arena that each rank has announced.
        place: where copies go; None: nowhere.

    Attributes:
        most: by tier and step, bytes; of memory, peer and disk those of the rank with the most.
        looked: how often, all in all.
        cpu_s: processor time of each keeper, as it was last seen.
        log: the largest copy of the log that was there.
    """

    runs: Sequence[Path]
    keepers: Sequence[int]
    host_bytes: Sequence[int]
    place: str | None
    most: dict[str, dict[int, int]] = field(default_factory=dict)
    looked: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)
    log: LogCopies = field(default_factory=lambda: LogCopies())

    def look(self, step: int) -> None:
        """Looks once.

        Raises:
            EverstepError: the store cannot be listed.
        """
        self.looked += 1
        for keeper, host_bytes in zip(self.keepers, self.host_bytes, strict=True):
            self.cpu_s[keeper] = max(cpu_s(keeper), self.cpu_s.get(keeper, 0.0))
            own, others = memory_bytes(keeper, host_bytes)
            self._saw(MEMORY, step, own)
            if len(self.runs) > 1 and self.place is not None:
                self._saw(PEER, step, others)
        for run in self.runs:
            self._saw(DISK, step, files_bytes(run))
        if self.place is not None:
            bases_bytes, log = copies_in(self.place)
            self._saw(COPIES, step, bases_bytes)
            self.log = max(self.log, log, key=lambda one: one.size_bytes)

    def _saw(self, tier: str, step: int, size_bytes: int) -> None:
        found = self.most.setdefault(tier, {})
        found[step] = max(found.get(step, 0), size_bytes)


def memory_bytes(keeper: int, host_bytes: int) -> tuple[int, int]:
    """Pages that a keeper's shared memory has taken: its own arena, and copies of other ranks.

    They are told apart by the arena's size. A keeper that has ended has none.
    """
    arena_bytes = host_bytes // PAGE_BYTES * PAGE_BYTES + CONTROL_BYTES
    seen: dict[int, os.stat_result] = {}
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{keeper}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if _ARENA in os.readlink(descriptor):
                    found = descriptor.stat()
                    seen[found.st_ino] = found
    own = sum(s.st_blocks for s in seen.values() if s.st_size == arena_bytes)
    others = sum(s.st_blocks for s in seen.values() if s.st_size != arena_bytes)
    return own * _BLOCK_BYTES, others * _BLOCK_BYTES


def files_bytes(folder: Path) -> int:
    """Sizes of all files below a folder, temporary ones included."""
    return sum(size_bytes for _, size_bytes in _files(folder))


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for directory, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):  # deleted, or renamed, meanwhile
                yield path, os.lstat(path).st_size


@dataclass(frozen=True, slots=True)
class LogCopies:
    """Copies of the log in the durable place.

    Attributes:
        size_bytes: of all segments of all ranks.
        steps: that they contain.
    """

    size_bytes: int = 0
    steps: int = 0

    @property
    def step_bytes(self) -> float:
        """Bytes of a step of all ranks."""
        return self.size_bytes / max(1, self.steps)


def copies_in(place: str) -> tuple[int, LogCopies]:
    """Return the bytes of all bases, and the log, in a folder or below a URL."""
    bases_bytes = log_bytes = 0
    segments = set()
    for name, size_bytes in _files_in(place):
        found = [part for part in Path(name).parts if parse_segment(part)]
        if found:
            log_bytes += size_bytes
            segments.update(found)
        else:
            bases_bytes += size_bytes
    spans = [parse_segment(name) or (0, 0) for name in segments]
    return bases_bytes, LogCopies(log_bytes, sum(last - after for after, last in spans))


def _files_in(place: str) -> Iterator[tuple[str, int]]:
    if not is_url(place):
        yield from _files(Path(place))
        return
    seams = Seams()
    with contextlib.closing(open_tier(place, seams.filesystem, clock=seams.clock)) as tier:
        for item in walk(tier):
            yield item.name, item.size_bytes or 0


def above(most: Mapping[int, int], bound_bytes: int) -> list[int]:
    """The steps in which there was more than that."""
    return [step for step, size_bytes in sorted(most.items()) if size_bytes > bound_bytes]


THREAD_SHARE_MAX = 0.01
_MB = 1e6
_INCHES = (10.0, 6.5)
_BYTES = ("what", "announced", "at most", "share", "at the end", "steps above")
_LOG = ("form", "at most", "steps", "a step", "its gradients", "share")
_GRADIENT_SHARE = 3  # of parameters and both moments
_COST = ("training", "thread ms per step", "of a step", "trainers, CPU s", "keepers, CPU s")
TIERS: Mapping[str, str] = {
    MEMORY: "captured state in a keeper's memory",
    PEER: "copies of another rank in a keeper's memory",
    DISK: "a rank's run folder",
    COPIES: "copies of all ranks in the durable place",
}
"""Description of the bytes that are counted, by place."""


@dataclass(frozen=True, slots=True)
class Occupied:
    """Bytes held by a tier.

    Attributes:
        bound_bytes: that was announced; of several ranks the smallest, of the durable place the
            sum.
        most: bytes, by step: the most that was seen in it, on any rank.
    """

    tier: str
    bound_bytes: int
    most: Mapping[int, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.most.values(), default=0)

    @property
    def above(self) -> list[int]:
        """Steps in which there was more than announced."""
        return above(self.most, self.bound_bytes)


@dataclass(slots=True)
class Trained:
    """One training of all ranks.

    Attributes:
        tiers: whether bases went anywhere but to the disk.
        saved_s: processor time of the training thread in the library, by step, on the rank that
            took most of it in all.
        trained_s: the same of the rest of each step, the library's hooks included.
        wall_s: of each step there, by the clock.
        trainer_cpu_s: of all training processes and threads.
        keeper_cpu_s: of all keepers.
        done: what each rank's Checkpointer counted.
        log: copies of the log, at most.
    """

    tiers: bool
    occupied: list[Occupied] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    trainer_cpu_s: float = 0.0
    keeper_cpu_s: float = 0.0
    looked: int = 0
    done: list[dict[str, Any]] = field(default_factory=list)
    log: LogCopies = field(default_factory=LogCopies)

    @property
    def thread_s(self) -> float:
        """Processor time in the library, of a step, in the mean."""
        return math.fsum(self.saved_s) / max(1, len(self.saved_s))

    @property
    def step_s(self) -> float:
        """Processor time of a step without the library's call, in the middle: it does not wait
        for a turn, so that a busy machine makes no step look long."""
        return statistics.median(self.trained_s)


@dataclass
class TiersReport(Report):
    """Everything that was found.

    Attributes:
        without, with_tiers: the same training, without and with tiers.
    """

    options: TiersOptions
    without: Trained
    with_tiers: Trained

    @property
    def added_s(self) -> float:
        """Processor time of the training thread that tiers add to a step."""
        return self.with_tiers.thread_s - self.without.thread_s

    def labels(self) -> list[str]:
        """Return remarks that belong to every figure of this run."""
        return [] if self.options.ranks == 1 else ["EMULATED: all nodes are on this machine"]

    def verdicts(self) -> list[Verdict]:
        """The targets, each with the measured figure."""
        found = []
        for one in self.with_tiers.occupied:
            figure = f"{words_of(one.peak_bytes)} at most, {words_of(one.bound_bytes)} announced"
            if one.above:
                figure += f"; above in {len(one.above)} steps, first in step {one.above[0]}"
            found.append(Verdict(f"{one.tier} within its bound", figure, not one.above))
        unseen = [s for s in range(1, self.options.steps + 1) if not self._seen(s)]
        seen = f"{self.options.steps - len(unseen)} of {self.options.steps} steps"
        found.append(Verdict("looked at in each step", seen, not unseen))
        share = self.added_s / self.with_tiers.step_s
        figure = f"{1e3 * self.added_s:+.3f} ms, {100 * share:+.2f} % of a step"
        found.append(
            Verdict("thread time that tiers add <= 1 %", figure, share <= THREAD_SHARE_MAX)
        )
        return found

    def _seen(self, step: int) -> bool:
        return all(step in one.most for one in self.with_tiers.occupied)

    def rounds(self) -> str:
        """Return what was trained."""
        options = self.options
        return (
            f"{options.ranks} rank(s); {options.steps} steps, a base every {options.every}, keep "
            f"{options.keep}; copies in {options.place or 'a folder of this machine'}; seed "
            f"{options.seed}; load {self.facts.machine.load:.1f} before and "
            f"{self.facts.load_after:.1f} after"
        )

    def tables(self) -> Iterator[Table]:
        """Yield bytes, and what tiers cost."""
        yield Table(
            f"Bytes over {self.options.steps} steps", _BYTES, map(_bytes, self.with_tiers.occupied),
            words=("what",),
        )  # fmt: skip
        if self.options.log != "none":
            rows = [self._log_cells()]
            yield Table("Copies of the log in the durable place", _LOG, rows, words=("form",))
        yield Table(
            "What they cost", _COST, map(_cost, (self.without, self.with_tiers)), ("training",)
        )

    def _log_cells(self) -> tuple[str, ...]:
        log = self.with_tiers.log
        dense_bytes = self.facts.size_bytes / _GRADIENT_SHARE
        return (
            self.options.log,
            words_of(log.size_bytes),
            f"{log.steps}",
            words_of(log.step_bytes),
            words_of(dense_bytes),
            per_cent(log.step_bytes / dense_bytes),
        )

    def notes(self) -> Iterator[str]:
        """Yield what the columns mean."""
        yield (
            f"looked at {self.with_tiers.looked} times, in each step and between; files by their "
            "sizes, memory by the pages that the kernel has given. of each step the most on any "
            "rank. at the end: the last step, until the keepers have ended, at most. thread: "
            "processor time of the training thread in ckpt.step(), on the rank with the most; a "
            "step: its processor time without that."
        )

    def figures(self) -> dict[str, Any]:
        """Return everything, each step included."""
        return {
            **picked(self.options, "steps ranks every keep batch log"),
            "load_before": self.facts.machine.load,
            "state_bytes": self.facts.size_bytes,
            "thread_added_s": self.added_s,
            "verdicts": self.verdicts(),
            "arms": [_as_json(arm) for arm in (self.without, self.with_tiers)],
        }

    def write(self) -> None:
        """Draw bytes in each tier over the steps, below the line that was announced."""
        path = self.options.picture
        if path is None:
            return
        found = self.with_tiers.occupied
        labels = "".join(f" [{label.split(':', 1)[0]}]" for label in self.labels())
        title = f"{self.options.ranks} rank(s), keep {self.options.keep}{labels}"
        with drawn(path, title, _INCHES, rows=-(-len(found) // 2), columns=2) as panels:
            for axes, one in zip(panels, found, strict=False):
                steps = sorted(one.most)
                values = [one.most[step] / _MB for step in steps]
                bound_mb = one.bound_bytes / _MB
                top = max(bound_mb, one.peak_bytes / _MB)
                axes.step(steps, values, where="mid", label="measured")
                axes.axhline(bound_mb, color="tab:red", linestyle="--", label="announced")
                axes.set(title=f"{one.tier}: {TIERS[one.tier]}", ylabel="MB", ylim=(0, 1.1 * top))
                axes.legend(loc="lower right", fontsize="small")
            for axes in panels[len(found) :]:
                axes.set_visible(False)
            for axes in panels[-2:]:
                axes.set_xlabel("step")


def words_of(size_bytes: float) -> str:
    """``"12.35 MB"``."""
    return f"{size_bytes / _MB:.2f} MB"


def _as_json(arm: Trained) -> dict[str, Any]:
    return {
        **picked(arm, "tiers thread_s saved_s trainer_cpu_s keeper_cpu_s looked done log"),
        "step_thread_s": arm.step_s,
        "step_wall_s": statistics.median(arm.wall_s),
        "occupied": [
            {
                **picked(one, "tier bound_bytes peak_bytes"),
                "steps_above": one.above,
                "bytes_by_step": [one.most[step] for step in sorted(one.most)],
            }
            for one in arm.occupied
        ],
    }


def _bytes(one: Occupied) -> tuple[str, ...]:
    return (
        f"{one.tier}: {TIERS[one.tier]}",
        words_of(one.bound_bytes),
        words_of(one.peak_bytes),
        per_cent(one.peak_bytes / one.bound_bytes),
        words_of(one.most[max(one.most)]),
        f"{len(one.above)} of {len(one.most)}",
    )


def _cost(arm: Trained) -> tuple[str, ...]:
    return (
        "with tiers" if arm.tiers else "without",
        number(arm.thread_s, 3, 1e3),
        f"{100 * arm.thread_s / arm.step_s:.2f} %",
        number(arm.trainer_cpu_s),
        number(arm.keeper_cpu_s),
    )


_LOOK_EVERY_S = 0.005
_STATE_BYTES_PER_PARAM = 12
_PROCESS_BYTES = 400 << 20  # torch, in each of two processes of a rank


def run_tiers(options: TiersOptions, display: Display) -> TiersReport:
    """Measures; every process is ended and everything of its own is removed, whatever happens.

    Copies in a store that was named stay there: it is the user's.

    Raises:
        OptionError: the place is not empty.
        OutOfSpaceError: before anything is written, when disk or memory would not do.
        EverstepError: a rank fails, or is killed.
    """
    if options.place is not None and any(size for _, size in _files_in(options.place)):
        raise OptionError(f"{options.place} is not empty", hint="name a place with nothing in it")
    with session(options, display) as run:
        state_bytes = _STATE_BYTES_PER_PARAM * options.params
        run.refuse_without_room(
            disk_bytes=3 * (options.keep + 2) * options.ranks * state_bytes,
            memory_bytes=options.ranks * (8 * state_bytes + _PROCESS_BYTES),
            hint="smaller --params, or fewer --ranks",
        )
        trained = []
        for tiers in (False, True):
            name = "with" if tiers else "without"
            display.begin(f"training {name} tiers", options.steps)
            trained.append(_Job(options, run.folder / name, tiers).run(display))
        size_bytes = trained[1].state_bytes
        facts = run.facts(size_bytes, trained[1].tensors, "parameters and moments of each rank")
        return TiersReport(options, facts, trained[0].found, trained[1].found)


class _Job:
    """All ranks of one training.

    Attributes:
        state_bytes, tensors: of a rank, as it says.
    """

    def __init__(self, options: TiersOptions, folder: Path, tiers: bool) -> None:
        self._options = options
        self._folder = folder
        self._tiers = tiers
        self._runs = [folder / f"host{rank}" / "run" for rank in range(options.ranks)]
        self._place: str | None = None
        if tiers:
            self._place = options.place or str(folder / "place")
        self.state_bytes = self.tensors = 0
        self.found = Trained(tiers)

    def run(self, display: Display) -> _Job:
        """Trains to the end."""
        options = self._options
        self._folder.mkdir()
        for run in self._runs:
            run.parent.mkdir()
        if self._tiers and options.place is None:
            Path(str(self._place)).mkdir()
        with self._ended(), contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(Child("tiers.child", self._order(rank).encode()))
                for rank in range(options.ranks)
            ]
            self._follow(ranks, display)
        return self

    def _order(self, rank: int) -> RankOrder:
        meet = str(self._folder / "meet")
        return RankOrder(os.getpid(), self._options, rank, str(self._runs[rank]), meet, self._place)

    def _follow(self, ranks: Sequence[Child], display: Display) -> None:
        found = self.found
        ready = [process.next("ready") for process in ranks]
        self.state_bytes = ready[0]["state_bytes"]
        self.tensors = ready[0]["tensors"]
        bounds = [one["bounds"] for one in ready]
        if any(len(one["keepers"]) != 1 for one in ready):
            raise EverstepError("a rank has no keeper, or several")
        keepers = [one["keepers"][0] for one in ready]
        sampler = Sampler(self._runs, keepers, [one["arena_bytes"] for one in bounds], self._place)
        sampler.look(1)
        began_s = dict(sampler.cpu_s)
        steps = self._steps(ranks, sampler, display)
        found.done = [process.next("done") for process in ranks]
        self._refuse_failed()
        _await_keepers(keepers, sampler, self._options.steps)
        slowest = max(steps, key=lambda said: sum(one["saved_s"] for one in said))
        for name in ("saved_s", "trained_s", "wall_s"):
            setattr(found, name, [one[name] for one in slowest])
        found.trainer_cpu_s = sum(done["cpu_s"] for done in found.done)
        found.keeper_cpu_s = sum(sampler.cpu_s[keeper] - began_s[keeper] for keeper in keepers)
        found.looked = sampler.looked
        found.log = sampler.log
        found.occupied = [
            Occupied(tier, _bound(tier, bounds), most) for tier, most in sampler.most.items()
        ]

    def _steps(
        self, ranks: Sequence[Child], sampler: Sampler, display: Display
    ) -> list[list[dict[str, Any]]]:
        """Return what each rank says of each step; look at everything meanwhile."""
        steps: list[list[dict[str, Any]]] = [[] for _ in ranks]
        for step in range(1, self._options.steps + 1):
            for rank, process in enumerate(ranks):
                _look_until(process, sampler, step)
                steps[rank].append(process.next("step", step))
            sampler.look(step)
            display.advance(f"step {step}")
            ranks[0].tell()
        _look_until(ranks[0], sampler, self._options.steps)
        return steps

    def _refuse_failed(self) -> None:
        for rank, done in enumerate(self.found.done):
            if done["failed"] or done["keeper_restarts"]:
                raise EverstepError(
                    f"rank {rank}: {done['failed']} bases have failed, {done['keeper_restarts']} "
                    "keepers were lost: nothing that was measured means anything",
                    rank=rank,
                )

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """No keeper is left of a training that has failed."""
        try:
            yield
        except BaseException:
            for run in self._runs:
                kill_keepers(run)
            raise


def _bound(tier: str, bounds: Sequence[dict[str, Any]]) -> int:
    """Return the announced bound. An arena has a control area in front of the requested bytes."""
    if tier == COPIES:
        return sum(size for bound in bounds for _, size in bound["copies"])
    field = {MEMORY: "arena_bytes", PEER: "peer_bytes", DISK: "disk_bytes"}[tier]
    more = CONTROL_BYTES if tier == MEMORY else 0
    return int(min(bound[field] for bound in bounds)) + more


def _look_until(process: Child, sampler: Sampler, step: int) -> None:
    """Look again and again until it has said something, or has ended."""
    while not process.wait(_LOOK_EVERY_S):
        sampler.look(step)


def _await_keepers(keepers: Sequence[int], sampler: Sampler, step: int) -> None:
    """End them after the last copy."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(process_ended(keeper, 0.0) for keeper in keepers):
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"a keeper has not ended within {TIMEOUT_S:g} s")
        sampler.look(step)
