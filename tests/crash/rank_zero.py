"""Rank 0 dies at any act of a commit of several ranks: a cluster that is told at which.

An act is what anybody else can see of a process: an operation on its disk, or a message. They are
numbered together, so all steps of a commit, and all places between two messages of one step, are
among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from everstep.commit.job.messages import COORDINATOR, MarkerNotice, decode_message
from everstep.commit.job.offers import Choice
from everstep.commit.lineage import BaseId
from everstep.format.names import MANIFEST, base_dir, marker_name, shard_name
from tests.crash.sim.faults import SimulatedCrash
from tests.crash.sim.job import Job, Plan
from tests.crash.sim.network import NetworkFaults
from tests.crash.sim.rank import SimRank
from tests.crash.sim.truth import RUN, ViolatedError
from tests.crash.story import Story

__all__ = ["ENDINGS", "LAYOUTS", "NEW", "OLD", "Commit", "Death", "Ending"]

EVERY = 2
OLD, NEW = BaseId(1, EVERY), BaseId(1, 2 * EVERY)

Ending = Literal["kept", "power", "at once", "at once, power", "restarted"]
ENDINGS: tuple[Ending, ...] = ("kept", "power", "at once", "at once, power", "restarted")
"""What becomes of the others: they live on and roll forward, until all are killed or lose power; or
that happens at once; or the job is started again while their keepers are still there."""

LAYOUTS = {"one folder": (3, 1, True), "a disk each": (3, 1, False), "two each": (2, 2, False)}
"""Nodes, ranks on each, and whether they share a folder."""

_ROLLED_S = 40.0
_OVER_S = 60.0
_SWEPT_S = 8.0


@dataclass(frozen=True, slots=True)
class Death:
    """Rank 0 of the start ``session`` dies before or after its act of this number; those of the
    first start count from when the new base was captured."""

    session: str
    act: int
    after: bool


class Commit(Story):
    """A job that has a base, takes one more, and is started again; and again, if that start dies.

    Args:
        layout: one of :data:`LAYOUTS`.
        deaths: of rank 0; one of the first start, and perhaps one of the second.
        ending: of the others, when rank 0 of the first start has died.

    Attributes:
        acts: by session: what rank 0 has done, in words; of ``"resume"``: what that of the last
            start has done before it goes on.
        recovered: what each start has gone back to.
        reported: ranks that have said that the new base is durable.
    """

    def __init__(
        self, seed: int, layout: str, deaths: tuple[Death, ...] = (), ending: Ending = "kept"
    ) -> None:
        nodes, ranks, shared = LAYOUTS[layout]
        preempt = 0.2 * (seed % 2)
        super().__init__(
            Plan(seed, shared, True, nodes, ranks, 1, EVERY, NetworkFaults(), (), preempt)
        )
        self._deaths = {death.session: death for death in deaths}
        self._ending = ending
        self._launching = True  # nobody but this class starts the job again
        self.acts: dict[str, list[str]] = {"s1": []}
        self.recovered: list[BaseId | None] = []
        self.reported: set[int] = set()
        self._goes_on = self._starts = False

    def _run_through(self) -> None:
        self.launch(self.all_nodes())
        first = self.jobs[0]
        dies = "s1" in self._deaths
        assert self._until(_OVER_S, lambda: self._is_over(first)), "the commit goes on for ever"
        if self._ending in ("kept", "power") or not dies:
            self._until(self.now_s + _ROLLED_S)
            self._check_survivors(first)
        else:
            self._check_disks()
        self._end(first)
        expected = self._on_disks()
        self._start_again()
        if "s2" in self._deaths:
            self._end(self.jobs[-1])
            expected |= self._on_disks()
            self._start_again()
        self._go_on()
        assert None not in self.recovered, "training began afresh"
        assert set(self.recovered) <= {OLD, NEW}
        if self._ending != "restarted" and dies:
            assert self.recovered[-1] == max(expected), f"{self.recovered}, on disks: {expected}"
        assert self.recovered == sorted(filter(None, self.recovered)), "a start went back further"

    def _is_over(self, job: Job) -> bool:
        return job.step == 2 * EVERY and (not job.ranks[0].alive or job.watermarks == 2)

    def _end(self, job: Job) -> None:
        if self._ending == "restarted":
            self.end(job)  # some keepers live on, and finish what they have
            return
        for process in job.ranks:
            process.die("its job ended")
        job.ended = True
        if self._ending in ("power", "at once, power"):
            self.faults.power_off(range(self.plan.nodes))

    def _start_again(self) -> None:
        self.launch(self.all_nodes())
        job = self.jobs[-1]
        there = self._until(self.now_s + _OVER_S, lambda: self._trains(job))
        assert there, "the job does not go on"
        assert not job.refused
        self._until(self.now_s + _SWEPT_S, lambda: not job.ranks[0].alive)
        assert job.ranks[0].alive == (job.session not in self._deaths)

    def _trains(self, job: Job) -> bool:
        dead = job.session in self._deaths and not job.ranks[0].alive
        return dead or job.refused or len(job.gone) == len(job.ranks)

    def _go_on(self) -> None:
        """Nobody dies any more: the next base becomes durable."""
        job = self.jobs[-1]
        self.acts["resume"] = [*self.acts[job.session]]
        self._goes_on = True
        self.train(job)
        assert self._until(self.now_s + _OVER_S, lambda: job.watermarks > 0), "and gets no base"

    # What is looked at.

    def _check_survivors(self, job: Job) -> None:
        """If one of those who are left can know of rank 0's marker, the base becomes durable, and
        not otherwise. Who is told by nobody goes on waiting; what is recovered is the same."""
        left = {process.rank for process in job.ranks if process.alive}
        reported = self.reported & left
        known = any("MarkerNotice" in act for act in self.acts["s1"])
        if self.plan.shared or self.plan.ranks > 1:  # somebody sees the same disk
            known |= NEW in self._on_disks()
        assert bool(reported) == known, (
            f"rolled forward: {reported}, rank 0's marker known: {known}"
        )
        self._check_disks()

    def _check_disks(self) -> None:
        """No manifest where a marker or its files are missing, unless they are being deleted."""
        there = self._on_disks()
        new, old = (self._with_manifest(base) for base in (NEW, OLD))
        assert NEW in there or not new, f"a manifest of {NEW}, and not all files"
        assert OLD in there or not old or new == len(self.disks), f"deletes {OLD} too early"

    def _with_manifest(self, base: BaseId) -> int:
        path = str(base_dir(RUN, base.timeline, base.step) / MANIFEST)
        return sum(path in disk.fs.paths() for disk in self.disks)

    def _on_disks(self) -> set[BaseId]:
        """Bases of which every rank has its files and its marker, whoever knows of that."""
        found = set()
        for base in (OLD, NEW):
            directory = base_dir(RUN, base.timeline, base.step)
            names = [
                (self.disk_of(node), directory / name)
                for rank, node in enumerate(self.all_nodes())
                for name in (shard_name(rank), marker_name(rank))
            ]
            if all(str(path) in disk.fs.paths() for disk, path in names):
                found.add(base)
        return found

    # What is watched.

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        """As a process that dies in sending does nothing more."""

        def guarded() -> None:
            with contextlib.suppress(SimulatedCrash):
                act()

        super().later(delay_s, guarded)

    def launch(self, nodes: list[int], asked: int | None = None) -> None:
        """Numbers the operations of rank 0."""
        self._starts = True
        super().launch(nodes, asked)
        self._starts = False
        process = self.jobs[-1].ranks[0]
        between = process.disk.between

        def counted() -> None:
            between()
            if process.alive and self._acts(process, "operation"):
                process.disk.crash_at, process.disk.after = process.disk.operations + 1, True

        process.disk.between = counted

    def send(self, sender: SimRank, rank: int, data: bytes) -> None:
        """Numbers the messages of rank 0."""
        if sender.rank != COORDINATOR:
            super().send(sender, rank, data)
            return
        message = decode_message(data).message
        new = not isinstance(message, MarkerNotice) or message.marker.record.step == NEW.step
        kind = type(message).__name__ if new else "an older marker"
        dies = self._acts(sender, f"{kind} to {rank}")
        if sender.alive:
            super().send(sender, rank, data)
        if dies or not sender.alive:
            sender.die("it has sent a message")
            if not self._starts:
                raise SimulatedCrash(sender.name)

    def _acts(self, process: SimRank, what: str) -> bool:
        """Rank 0 does something: whether it dies when that is done. It may die before."""
        if process.job.session == "s1" and process.job.step < 2 * EVERY:
            return False
        acts = self.acts.setdefault(process.job.session, [])
        death = self._deaths.get(process.job.session)
        dies = death is not None and len(acts) + 1 == death.act
        if dies and death is not None and not death.after:
            process.die(f"before its act {death.act}, {what}")
            return False
        acts.append(what)
        return dies

    def train(self, job: Job) -> None:
        if job.session != "s1" and not self._goes_on:
            return
        if job.session == "s1":
            if job.step == 2 * EVERY:
                return
            if job.step == 2 * EVERY - 1 and job.watermarks < 1:  # the old base first
                self.later(0.5, lambda: self.train(job))
                return
        super().train(job)

    def on_go(self, rank: SimRank, number: int, choice: Choice) -> None:
        """Notes what a start goes back to."""
        super().on_go(rank, number, choice)
        if rank.rank == COORDINATOR and rank.job.session != "s1":
            self.recovered.append(choice.base)

    def on_durable(self, rank: SimRank, base: BaseId) -> None:
        """Notes who reports the new base."""
        if not rank.alive:
            raise ViolatedError("the dead report nothing")
        super().on_durable(rank, base)
        if rank.job.session == "s1" and base == NEW:
            self.reported.add(rank.rank)
