"""Elements of a simulated schedule: its plan, drawn from a seed, and the starts of the job."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.commit.job.messages import Cluster
from tests.crash.sim.network import NetworkFaults

if TYPE_CHECKING:
    from tests.crash.sim.rank import SimRank

__all__ = ["FAULTS", "Job", "Plan"]

FAULTS = (
    "kill the trainers",
    "kill a process",
    "kill rank 0",
    "power off a node",
    "lose a node",
    "power off the rack",
    "freeze a process",
    "part the network",
    "damage a file",
    "fill a disk",
    "start a second job",
    "rewind",
    "rewind past a sleeper",
    "change the world",
    "leave hosts out",
)
"""What may happen, and the last few only where the disks and their contents allow it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule: what the cluster is like and what happens to it.

    Attributes:
        shared: all nodes see one folder; else each has a disk of its own.
        fetch: ranks hand each other what they can read.
        ranks: on each node.
        keep: bases to keep.
        every: steps between bases.
        faults: ``(when, which)``, in order.
        preempt: how likely others run between two operations of a process.
    """

    seed: int
    shared: bool
    fetch: bool
    nodes: int
    ranks: int
    keep: int
    every: int
    network: NetworkFaults
    faults: tuple[tuple[float, str], ...]
    preempt: float

    @classmethod
    def of(cls, seed: int, *, likely: tuple[str, ...] = ()) -> Plan:
        """The plan that a seed stands for.

        Args:
            likely: faults that shall happen more often than the others.
        """
        rng = random.Random(f"plan {seed}")
        shared = rng.random() < 0.4
        fetch = shared or rng.random() < 0.7
        nodes = rng.choice((2, 2, 2, 3, 3, 4))
        ranks = 1 if nodes > 2 else rng.choice((1, 1, 2))
        network = NetworkFaults()
        if rng.random() < 0.7:
            network = NetworkFaults(
                rng.choice((0.0, 0.05, 0.2)), rng.choice((0.0, 0.2)), rng.choice((0.0, 0.05))
            )
        allowed = [name for name in FAULTS if fetch or name not in FAULTS[-2:]]
        weights = [4 if name in likely else 1 for name in allowed]
        when_s = 3.0
        faults = []
        for _ in range(rng.randint(1, 4)):
            when_s += rng.choice((0.5, 3.0, 8.0, 14.0)) * rng.uniform(0.5, 1.5)
            faults.append((when_s, rng.choices(allowed, weights)[0]))
        return cls(
            seed,
            shared,
            fetch,
            nodes,
            ranks,
            rng.choice((1, 1, 2, 3)),
            rng.choice((2, 3)),
            network,
            tuple(faults),
            rng.choice((0.0, 0.05, 0.2)),
        )

    def __str__(self) -> str:
        disks = "one folder" if self.shared else "a disk each"
        faults = ", ".join(f"{what} at {when_s:.1f}" for when_s, what in self.faults)
        return (
            f"seed {self.seed}: {self.nodes} nodes with {self.ranks} rank(s) and {disks}, "
            f"{'' if self.fetch else 'no '}fetching, keep={self.keep}, every={self.every}, "
            f"{self.network}; {faults}"
        )


@dataclass(slots=True)
class Job:
    """One start of the job.

    Attributes:
        session: its name, which no other start has.
        nodes: by rank.
        layout: which ranks share a disk.
        asked: the step to go back to; None: the newest.
        ranks: its processes, by rank.
        recovered: what it began with, if that was durable.
        read: ranks that have read their files of a base back and found them good.
        deleted: bases that its ranks have deleted.
        key, number: of the timeline that it trains on; empty and 0 before.
        gone: ranks that train.
        step, state: where training is, and what the state is there.
    """

    session: str
    nodes: tuple[int, ...]
    layout: Cluster
    asked: int | None = None
    ranks: list[SimRank] = field(default_factory=list)
    key: str = ""
    number: int = 0
    gone: set[int] = field(default_factory=set)
    training: bool = True
    refused: bool = False
    step: int = 0
    state: str = ""
    ended: bool = False
    recovered: tuple[int, int] | None = None
    watermarks: int = 0
    read: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    deleted: set[tuple[int, int]] = field(default_factory=set)
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
