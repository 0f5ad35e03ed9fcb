"""Faults of a simulated cluster: carry out each fault of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

from everstep.format.names import parse_base, parse_shard
from tests.crash.sim.host import Disk
from tests.crash.sim.truth import RUN, Contents

if TYPE_CHECKING:
    from tests.crash.sim.cluster import SimCluster
    from tests.crash.sim.job import Job
    from tests.crash.sim.rank import SimRank

__all__ = ["Faults"]


class Faults:
    """Makes faults happen in ``cluster``.

    Attributes:
        sleeps_before_deleting: the next process that is about to condemn a base falls asleep
            first, and the job goes back to that very base meanwhile.
    """

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._rng = cluster.rng
        self._exchanged = 0
        self.sleeps_before_deleting = False

    def happen(self, fault: str) -> None:
        """One of :data:`tests.crash.sim.job.FAULTS` happens."""
        cluster = self._cluster
        nodes = self._cluster.plan.nodes
        cluster.note("fault", fault)
        job = cluster.jobs[-1]
        acts: dict[str, Callable[[], object]] = {
            "kill the trainers": lambda: self._restart(job),
            "kill a process": lambda: self._kill(self._rng.choice(job.ranks)),
            "kill rank 0": lambda: self._kill(job.ranks[0]),
            "power off a node": lambda: self.power_off([self._rng.randrange(nodes)]),
            "lose a node": self._lose_node,
            "power off the rack": lambda: self.power_off(range(nodes)),
            "freeze a process": lambda: self._freeze(job),
            "part the network": self._part,
            "damage a file": self._damage,
            "fill a disk": lambda: self._fill(self._rng.choice(job.ranks)),
            "start a second job": lambda: cluster.launch(cluster.all_nodes()),
            "rewind": lambda: self._rewind(job),
            "rewind past a sleeper": self._rewind_past_a_sleeper,
            "change the world": self._resize,
            "leave hosts out": self._leave_out,
        }
        acts[fault]()

    def power_off(self, nodes: Iterable[int]) -> None:
        """Nodes lose power: their processes, and what their disks had not synced."""
        cluster = self._cluster
        off = set(nodes)
        for process in cluster.processes:
            if process.node in off:
                process.die("power")
        seed = self._rng.randrange(1 << 30)
        choice = self._rng.randrange(8)
        if not cluster.plan.shared:
            for node in sorted(off):
                cluster.disks[node].lose_power(seed, choice)
        elif len(off) == cluster.plan.nodes:
            cluster.disks[0].lose_power(seed, choice)
        else:
            for node in sorted(off):
                cluster.disks[0].lose_client(node)

    def falls_asleep(self, process: SimRank, step: int) -> bool:
        """``process`` is about to condemn the base of ``step``: whether it sleeps first."""
        job = process.job
        if not self.sleeps_before_deleting or job.ended or process.alive is False:
            return False
        self.sleeps_before_deleting = False
        process.asleep_until_s = self._cluster.now_s + self._rng.uniform(3, 10)
        job.ended = True  # the launcher takes it for dead
        self._cluster.relaunch(asked=step)
        return True

    def _restart(self, job: Job) -> None:
        self._cluster.end(job)
        self._cluster.relaunch()

    def _kill(self, process: SimRank) -> None:
        process.disk.crash_at = process.disk.operations + self._rng.randint(1, 25)
        process.disk.after = self._rng.random() < 0.5

    def _lose_node(self) -> None:
        cluster = self._cluster
        node = self._rng.randrange(self._cluster.plan.nodes)
        self.power_off([node])
        if cluster.plan.shared:
            return
        self._exchanged += 1
        cluster.disks[node] = Disk(f"node{node}.{self._exchanged}")
        cluster.disks[node].fs.make_dir(RUN.parent)
        cluster.disks[node].fs.sync_dir(PurePath("/"))

    def _freeze(self, job: Job) -> None:
        process = self._rng.choice(job.ranks)
        process.asleep_until_s = self._cluster.now_s + self._rng.uniform(3, 25)
        self._cluster.note(process.name, f"sleeps until {process.asleep_until_s:.3f}")
        if self._rng.random() < 0.7:  # the launcher takes it for dead; its keeper wakes up later
            job.ended = True
            self._cluster.relaunch()

    def _part(self) -> None:
        one, two = self._rng.sample(range(self._cluster.plan.nodes), 2)
        pair = (min(one, two), max(one, two))
        parted = self._cluster.network.parted
        parted.add(pair)
        self._cluster.later(self._rng.uniform(3, 15), lambda: parted.discard(pair))

    def _damage(self) -> None:
        disk = self._rng.choice(self._cluster.disks)
        found = [PurePath(p) for p in disk.fs.paths() if p.endswith(".safetensors")]
        if not found:
            return
        path = self._rng.choice(found)
        try:
            contents = Contents.decode(disk.fs.read_bytes(path))
            rank = parse_shard(path.name)
        except ValueError:
            return  # damaged already, or never written
        assert rank is not None
        assert parse_base(path.parent.name) == contents.step
        self._cluster.truth.lost.add((contents.timeline, contents.step, rank[0]))
        disk.fs.corrupt(path, 0)
        self._cluster.note(disk.name, f"{path} is damaged")

    def _fill(self, process: SimRank) -> None:
        process.disk.failing = 1

    def _rewind(self, job: Job) -> None:
        timeline = self._cluster.truth.timelines.get(job.key)
        steps = sorted(timeline.durable) if timeline else []
        asked = self._rng.choice(steps[-3:]) if steps else 0
        self._cluster.end(job)
        self._cluster.relaunch(asked=asked)

    def _rewind_past_a_sleeper(self) -> None:
        self.sleeps_before_deleting = True

    def _resize(self) -> None:
        cluster = self._cluster
        cluster.end(cluster.jobs[-1])
        nodes = range(cluster.plan.nodes)
        count = self._rng.randint(1, 2 * cluster.plan.nodes)
        cluster.relaunch(sorted(self._rng.choices(nodes, k=count)))

    def _leave_out(self) -> None:
        cluster = self._cluster
        cluster.end(cluster.jobs[-1])
        nodes = range(cluster.plan.nodes)
        cluster.relaunch(sorted(self._rng.sample(nodes, self._rng.randint(1, len(nodes)))))
