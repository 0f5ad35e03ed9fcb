"""A whole cluster in one process, by chance and by seed (after FoundationDB's simulator).

:class:`SimCluster` runs the real machines of :mod:`everstep.commit` and what carries out their
decisions, over a simulated network (:mod:`~tests.crash.sim.network`: delay, loss, doubling, parts),
disks (:mod:`~tests.crash.sim.host`: unsynced loss, one for each node or one for all), clocks
(other rates, other origins) and the death of processes, nodes and racks, with restarts of the job
on the same and on other nodes. What must hold whatever happens, :mod:`~tests.crash.sim.truth`
says:

- what is restored was truly reached, on the history of the newest timeline;
- it is the same on all ranks;
- it is at least the newest base that was reported durable, unless its files were unusable on
purpose:
  so nothing that was needed was deleted;
- what is reported durable survives any loss of power; the watermark never goes back.

The same seed gives the same schedule, always.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any
from unittest import mock

from everstep.commit.job.messages import COORDINATOR, Cluster
from everstep.commit.job.offers import Choice
from everstep.commit.lineage import BaseId
from everstep.format.records import Manifest, Marker, RunRecord, TimelineRecord
from tests.crash.sim.cluster_faults import Faults
from tests.crash.sim.host import Disk
from tests.crash.sim.job import Job, Plan
from tests.crash.sim.network import NetworkFaults, SimNetwork
from tests.crash.sim.rank import SimRank
from tests.crash.sim.truth import RUN, Contents, Timeline, Truth, ViolatedError

__all__ = ["Schedule", "SimCluster", "SimViolationError", "simulate", "simulate_many"]

_CALM_S = 60.0
_JOBS_MAX = 12
_TRACE_LINES = 120
_PREEMPTIONS_MAX = 2


class SimViolationError(AssertionError):
    """A schedule in which a promise was broken: what, and everything that led to it.

    Attributes:
        plan: with the seed that gives it again.
        trace: what happened, line by line.
    """

    def __init__(self, plan: Plan, problem: str, trace: list[str]) -> None:
        shown = "\n".join(trace[-_TRACE_LINES:])
        super().__init__(f"{problem}\n{plan}\n{shown}\n{problem}; again with seed {plan.seed}")
        self.plan = plan
        self.problem = problem
        self.trace = trace


@dataclass(slots=True)
class Schedule:
    """Statistics of one or many schedules."""

    schedules: int = 0
    jobs: int = 0
    recoveries: int = 0
    refusals: int = 0
    bases: int = 0
    messages: int = 0
    watermarks: int = 0

    def add(self, other: Schedule) -> None:
        """Counts another one in."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, name)} {name}" for name in self.__slots__)


@dataclass(slots=True)
class _Queue:
    heap: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    count: int = 0


class SimCluster:
    """One schedule.

    Args:
        plan: what happens; see :meth:`Plan.of`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.now_s = 0.0
        self.trace: list[str] = []
        self.truth = Truth()
        self.processes: list[SimRank] = []
        self.jobs: list[Job] = []
        self.counts = Schedule(schedules=1)
        self._queue = _Queue()
        self._preempted = 0
        self.network = SimNetwork(self.rng, self.later, plan.network)
        self._launching = self._calming = False
        names = ["shared"] if plan.shared else [f"node{node}" for node in range(plan.nodes)]
        self.disks = [Disk(name) for name in names]
        self.faults = Faults(self)
        for disk in self.disks:
            disk.fs.make_dir(RUN.parent)
            disk.fs.sync_dir(PurePath("/"))

    def run(self) -> Schedule:
        """Runs the schedule, then calm: the job must recover, make progress and lose power once
        more, and recover again.

        Raises:
            SimViolationError: a promise was broken.
        """
        try:
            self.launch(self.all_nodes())
            for when_s, fault in self.plan.faults:
                self.later(when_s, functools.partial(self.faults.happen, fault))
            self._until(self.plan.faults[-1][0] + 15.0)
            self._calm()
        except ViolatedError as error:
            raise SimViolationError(self.plan, str(error), self.trace) from error
        except Exception:
            # No promise: code that fails, or a planted mistake that no longer fits the code.
            print(self.plan, *self.trace[-_TRACE_LINES:], sep="\n")
            raise
        self.counts.messages = self.network.sent
        return self.counts

    # What processes use.

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        """Calls ``act`` in so many seconds."""
        self._queue.count += 1
        heapq.heappush(self._queue.heap, (self.now_s + delay_s, self._queue.count, act))

    def takes_s(self) -> float:
        """Draw the duration of an operation."""
        slow = self.rng.random() < 0.03
        return self.rng.uniform(1.0, 6.0) if slow else self.rng.uniform(0.001, 0.15)

    def note(self, who: str, what: str) -> None:
        """One line of the trace."""
        self.trace.append(f"{self.now_s:8.3f}  {who:6}  {what}")

    def disk_of(self, node: int) -> Disk:
        """The disk that processes on ``node`` see."""
        return self.disks[0 if self.plan.shared else node]

    def send(self, sender: SimRank, rank: int, data: bytes) -> None:
        """Carries a message to every process that has that rank."""
        for process in self.processes:
            if process.rank == rank and process.alive and process is not sender:
                hear = functools.partial(process.hear, data)
                self.network.carry(sender.node, process.node, hear)

    def run_others(self, process: SimRank) -> None:
        """Others may run between two operations of ``process``."""
        if self._preempted >= _PREEMPTIONS_MAX or self.rng.random() >= self.plan.preempt:
            return
        self._preempted += 1
        for _ in range(self.rng.randint(1, 6)):
            self._next(self.now_s + 1.0)
        self._preempted -= 1

    # What processes report.

    def on_opening(
        self, job: Job, key: str, number: int, parent: str | None, choice: Choice
    ) -> None:
        """Rank 0 makes the record of a timeline."""
        fork_step = 0 if choice.base is None else choice.base.step
        disks = job.layout.disks
        self.truth.timelines[key] = Timeline(key, number, parent, fork_step, disks)

    def on_go(self, rank: SimRank, number: int, choice: Choice) -> None:
        """A rank begins to train."""
        job = rank.job
        key = f"{job.session}/{number}"
        base = choice.base
        if rank.rank == COORDINATOR:
            self.counts.recoveries += 1
            job.key = key
            job.number = number
            disks = self._seen_by(job)
            contents = [process.restored for process in job.ranks]
            pair = None if base is None else (base.timeline, base.step)
            self.truth.assert_recovered(
                key, contents, pair, disks, fetch=self.plan.fetch, step=job.asked
            )
            if base is not None:
                restored = contents[0][0]
                job.step = restored.step
                job.state = restored.state
                if choice.durable:
                    job.recovered = pair
                    self.truth.timelines[restored.timeline].durable.add(restored.step)
        if base is not None and choice.durable:
            job.marks[rank.rank] = (base.timeline, base.step)
        job.gone.add(rank.rank)

    def on_refused(self, rank: SimRank, reason: str) -> None:
        """A rank is told that nothing can be restored."""
        job = rank.job
        if rank.rank == COORDINATOR:
            self.counts.refusals += 1
            disks = self._seen_by(job)
            if "deleting the bases" not in reason:
                self.truth.assert_refused(
                    job.session + "/0", disks, fetch=self.plan.fetch, step=job.asked
                )
        job.refused = True

    def on_durable(self, rank: SimRank, base: BaseId) -> None:
        """A rank reports a base as durable."""
        disks = {disk.name: disk for disk in self.disks}
        timeline = self.truth.timelines[rank.job.key]
        self.counts.bases += base.step not in timeline.durable
        self.truth.assert_durable(rank.job.key, base.step, disks)

    def on_watermark(self, rank: SimRank, base: BaseId) -> None:
        """A rank's watermark moves."""
        known = rank.job.marks.get(rank.rank)
        self.truth.assert_watermark(rank.job.key, base.timeline, base.step, known)
        rank.job.marks[rank.rank] = (base.timeline, base.step)
        if rank.rank == COORDINATOR:
            self.counts.watermarks += 1
            rank.job.watermarks += 1
            disks = {disk.name: disk for disk in self.disks}
            if rank.job.number < max(job.number for job in self.jobs):
                return  # fenced off, and does not know: the newer timeline may have deleted it
            self.truth.assert_manifests(rank.job.key, base.step, disks)

    def on_deleted(self, rank: SimRank, base: BaseId) -> None:
        """A rank deletes the files of a base: not the last one that the newest job has (I5)."""
        begun = [job for job in self.jobs if job.key]
        newest = max(begun, key=lambda job: job.number)
        if rank.disk.disk.name not in newest.layout.disks:
            return
        durable = self.truth.timelines[newest.key].durable
        needed = (newest.number, max(durable)) if durable else newest.recovered
        own = rank.job
        pair = (base.timeline, base.step)
        good = {one for one, ranks in own.read.items() if len(ranks) == len(own.ranks)}
        own.deleted.add(pair)
        if not (good | ({own.recovered} if own.recovered else set())) - own.deleted:
            raise ViolatedError(f"{rank.name} deletes {base}, nothing that stays was read (I5)")
        if pair == needed:
            raise ViolatedError(f"{rank.name} deletes {base}, which {newest.session} needs (I5)")

    def on_damaged(self, rank: SimRank, base: BaseId, of: int) -> None:
        """A rank found its files damaged: it may only say so of what was unusable."""
        if (rank.job.key, base.step, of) not in self.truth.lost:
            raise ViolatedError(f"{base} of rank {of} is called damaged, and nobody has touched it")

    # Time.

    def _next(self, until_s: float) -> bool:
        heap = self._queue.heap
        if not heap or heap[0][0] > until_s:
            return False
        when_s, _, act = heapq.heappop(heap)
        self.now_s = max(self.now_s, when_s)
        act()
        return True

    def _until(self, until_s: float, enough: Callable[[], bool] = lambda: False) -> bool:
        while not enough():
            if not self._next(until_s):
                self.now_s = max(self.now_s, until_s)
                return False
        return True

    # Jobs.

    def all_nodes(self) -> list[int]:
        """The node of each rank, when all hosts are there."""
        return [node for node in range(self.plan.nodes) for _ in range(self.plan.ranks)]

    def launch(self, nodes: list[int], asked: int | None = None) -> None:
        """Starts the job: a rank on each of ``nodes``, to go back to step ``asked``."""
        layout = Cluster(tuple(self.disk_of(node).name for node in nodes))
        job = Job(f"s{len(self.jobs) + 1}", tuple(nodes), layout, asked)
        self.note("job", f"{job.session} starts on nodes {nodes}, asked for {asked}")
        self.jobs.append(job)
        self.counts.jobs += 1
        for rank, node in enumerate(nodes):
            job.ranks.append(SimRank(self, job, rank, node))
        self.processes = [p for p in self.processes if p.alive] + job.ranks
        for process in job.ranks:
            process.start()
        self.later(1.0, lambda: self.train(job))

    def train(self, job: Job) -> None:
        """One step of training, if all ranks are there."""
        if job.ended:
            return
        if not all(process.alive for process in job.ranks) or job.refused:
            self.end(job)
            self.relaunch(asked=0 if job.refused and self.rng.random() < 0.5 else None)
            return
        self.later(self.rng.uniform(0.6, 1.2), lambda: self.train(job))
        there = len(job.gone) == len(job.ranks)
        if not there or any(p.asleep_until_s > self.now_s or p.is_full for p in job.ranks):
            return
        if any(p.member is None or p.member.fenced for p in job.ranks):
            self.end(job)
            return
        job.step += 1
        text = f"{job.state} {job.key} {job.step}"
        job.state = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.truth.timelines[job.key].states[job.step] = job.state
        if job.step % self.plan.every == 0:
            base = BaseId(job.number, job.step)
            self.note(job.session, f"captures {base}")
            for process in job.ranks:
                process.capture(base, Contents(job.key, job.step, process.rank, job.state))

    def end(self, job: Job) -> None:
        """The trainers are gone. A keeper may live on for a while, and finish what it has."""
        job.ended = True
        for process in job.ranks:
            if process.member is None or self.rng.random() < 0.4:
                process.die("its job ended")
            else:
                linger_s = self.rng.uniform(2, 40)
                self.later(linger_s, functools.partial(process.die, "its time is over"))

    def relaunch(self, nodes: list[int] | None = None, asked: int | None = None) -> None:
        """Ends the job and starts it again, a little later."""
        if self._launching or len(self.jobs) >= _JOBS_MAX:
            return
        self._launching = True

        def launch() -> None:
            if self._calming:
                return
            self._launching = False
            for job in self.jobs:
                if not job.ended:
                    self.end(job)
            self.launch(nodes or self.all_nodes(), asked)

        self.later(self.rng.uniform(0.2, 6.0), launch)

    def _seen_by(self, job: Job) -> list[Disk]:
        return [process.disk.disk for process in job.ranks]

    # The end.

    def _calm(self) -> None:
        """Nothing fails any more: the job must recover and go on, twice."""
        self.note("fault", "no more: calm")
        self._calming = self._launching = True  # nobody else launches
        self.network.faults = NetworkFaults()
        self.network.parted.clear()
        self.faults.sleeps_before_deleting = False
        for process in self.processes:
            if process.member is None:
                process.die("its start is over")  # or it would take the run over, as it may
            process.asleep_until_s = 0.0
            process.disk.failing = 0
            process.disk.crash_at = None
        for again in (False, True):
            for job in self.jobs:
                if not job.ended:
                    self.end(job)
            if again:
                self.faults.power_off(range(self.plan.nodes))
            self.launch(self.all_nodes())
            over = self._is_well_soon(again=again)
            if over and self.jobs[-1].refused:  # the files are lost: afresh, as people would say
                self.launch(self.all_nodes(), asked=0)
                over = self._is_well_soon(again=again)
            if not over:
                raise ViolatedError("nothing fails any more, and the job does not go on")

    def _is_well_soon(self, *, again: bool) -> bool:
        job = self.jobs[-1]

        def well() -> bool:
            trains = len(job.gone) == len(job.ranks) and (again or job.watermarks >= 2)
            return trains or job.refused

        return self._until(self.now_s + _CALM_S, well)


def simulate(seed: int, *, likely: tuple[str, ...] = ()) -> Schedule:
    """Runs the schedule of one seed.

    Raises:
        SimViolationError: with the trace.
    """
    with _records_once():
        return SimCluster(Plan.of(seed, likely=likely)).run()


@contextlib.contextmanager
def _records_once() -> Iterator[None]:
    """Writing and reading records as text takes most of the time, and gives the same each time:
    what has been encoded or decoded before is not done again."""
    with contextlib.ExitStack() as stack:
        for kind in (RunRecord, Marker, Manifest, TimelineRecord):
            encoded, decoded = _once(kind)
            stack.enter_context(mock.patch.object(kind, "encode", encoded))
            stack.enter_context(mock.patch.object(kind, "decode", decoded))
        yield


def _once(kind: Any) -> tuple[Any, Any]:
    encode = kind.encode
    decode = kind.decode
    known: dict[bytes, Any] = {}
    data_of: dict[int, tuple[Any, bytes]] = {}

    def encode_once(record: Any) -> bytes:
        found = data_of.get(id(record))
        if found is None:
            found = data_of[id(record)] = (record, encode(record))  # kept, so the id stays its own
        return found[1]

    def decode_once(data: bytes, path: PurePath) -> Any:
        record = known.get(data)
        if record is None:
            record = known[data] = decode(data, path)
            data_of[id(record)] = (record, data)
        return record

    return encode_once, staticmethod(decode_once)


def simulate_many(seeds: Iterable[int], *, likely: tuple[str, ...] = ()) -> Schedule:
    """Runs the schedules of many seeds; what they consisted of, all together.

    Raises:
        SimViolationError: of the first that breaks a promise.
    """
    total = Schedule()
    for seed in seeds:
        total.add(simulate(seed, likely=likely))
    return total
