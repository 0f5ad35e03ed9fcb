"""A simulated ring of nodes with disks of their own, copies in the memory of the next node and in a
durable tier that all can read; and two of its nodes lost at once.

Which base is sent, and how long copies stay, the machines of :mod:`everstep.commit.peer_copies`
say; which base is restored, the agreement of the ranks. What could be is counted here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from everstep.commit.job.messages import COORDINATOR, PeerRound, Send
from everstep.commit.job.offers import Choice, Source
from everstep.commit.lineage import BaseId
from everstep.commit.peer_copies import CopyRounds, HeldCopies, peer_of
from everstep.format.names import base_dir, marker_name, shard_name
from everstep.format.records import Marker
from tests.crash.sim.host import Disk
from tests.crash.sim.job import Job, Plan
from tests.crash.sim.network import NetworkFaults
from tests.crash.sim.rank import SimRank
from tests.crash.sim.truth import RUN, ViolatedError
from tests.crash.story import Story

__all__ = ["Pair", "Ring"]

Pair = Literal["adjacent", "apart"]

_NODES = 4
_COPY_BYTES = 96
_EVERY = 2
_STORED_EVERY = 2  # of so many bases one is copied to the durable tier
_SOON_S = 60.0


@dataclass(slots=True)
class _Keeper:
    """What one rank's keeper holds for the one before it."""

    shelf: HeldCopies = field(default_factory=lambda: HeldCopies(2 * _COPY_BYTES))
    copies: dict[tuple[int, BaseId], tuple[Marker, bytes]] = field(default_factory=dict)


class Ring(Story):
    """Trains, loses two nodes at once, is started again with two new ones; twice.

    Args:
        pair: which two: next to each other in the ring, or not.

    Attributes:
        tiers: by start: tiers that its ranks have read from; empty: afresh, or refused.
        back: by start: whether what it has gone back to is older than the newest durable base.
    """

    def __init__(self, seed: int, pair: Pair) -> None:
        loss = (0.0, 0.05)[seed % 2]
        network = NetworkFaults(loss, loss, loss)
        super().__init__(Plan(seed, False, True, _NODES, 1, 2, _EVERY, network, (), 0.0))
        self._pair = pair
        self._launching = True  # nobody but this class starts the job again
        self._keepers = [_Keeper() for _ in range(_NODES)]  # by node
        self._names = [f"node{node}" for node in range(_NODES)]
        self._store: dict[BaseId, dict[int, tuple[Marker, bytes]]] = {}
        self._captured: dict[BaseId, dict[int, tuple[Marker, bytes]]] = {}
        self._durable: list[BaseId] = []
        self._sound: BaseId | None = None  # of this start: whole with all peers
        self._rounds = CopyRounds(_NODES)
        self.tiers: list[set[str]] = []
        self.back: list[bool] = []

    def _run_through(self) -> None:
        self.launch(self.all_nodes())
        for _ in range(2):
            job = self.jobs[-1]
            trains_s = self.rng.uniform(4.0, 20.0)
            assert self._until(self.now_s + _SOON_S, functools.partial(self._is_over, job))
            if job.refused:
                return  # nothing was durable that is left: a person has to say so
            self._until(self.now_s + trains_s)
            self._lose_two()
            job.ended = True  # keepers that are left stay
            self.launch(self.all_nodes())
        job = self.jobs[-1]
        assert self._until(self.now_s + _SOON_S, lambda: self._is_over(job))

    @staticmethod
    def _is_over(job: Job) -> bool:
        return job.refused or len(job.gone) == len(job.ranks)

    def _lose_two(self) -> None:
        first = self.rng.randrange(_NODES)
        lost = {first, (first + (1 if self._pair == "adjacent" else 2)) % _NODES}
        self.note("fault", f"nodes {sorted(lost)} are lost")
        self.faults.power_off(lost)
        for node in lost:
            self.disks[node] = Disk(f"node{node}.{len(self.jobs)}")
            self.disks[node].fs.make_dir(RUN.parent)
            self.disks[node].fs.sync_dir(PurePath("/"))
            self._keepers[node] = _Keeper()

    # Copies.

    def on_durable(self, rank: SimRank, base: BaseId) -> None:
        """Its parts go to the next nodes; of every second base, to the durable tier, too."""
        super().on_durable(rank, base)
        if base not in self._durable:
            self._durable.append(base)
        part = self._captured.setdefault(base, {})
        part[rank.rank] = rank.memory[base]
        if len(part) < _NODES or rank.job.ended:
            return
        if base.step // _EVERY % _STORED_EVERY == 0:
            self._store[base] = dict(part)
            self.note("store", f"has {base}")
        self._tell(rank.job, self._rounds.durable(base, self.now_s))

    def _tell(self, job: Job, sends: list[Send]) -> None:
        for one in sends:
            assert isinstance(one.message, PeerRound)
            act = functools.partial(self._on_round, job, job.ranks[one.rank], one.message)
            self.later(self.rng.uniform(0.1, 1.5), act)

    def _on_round(self, job: Job, rank: SimRank, told: PeerRound) -> None:
        """A keeper hears which base all send now, and which one all peers have."""
        if job.ended or not rank.alive:
            return
        keeper = self._keepers[rank.node]
        if told.everywhere is not None:
            self._let_go(keeper, keeper.shelf.passed(told.everywhere))
        if told.base is not None:
            part = self._captured[told.base][rank.rank]
            act = functools.partial(self._arrive, job, rank, told.base, *part)
            self.later(self.rng.uniform(0.1, 1.5), act)

    def _arrive(self, job: Job, rank: SimRank, base: BaseId, marker: Marker, data: bytes) -> None:
        """The part of a rank is with its peer."""
        peer = peer_of(self._names, rank.rank)
        assert peer is not None
        if job.ended or not (rank.alive and job.ranks[peer].alive):
            return
        keeper = self._keepers[peer]
        gone, why = keeper.shelf.begin(rank.rank, base, _COPY_BYTES)
        self._let_go(keeper, gone)
        if not why:
            keeper.copies[rank.rank, base] = marker, data
            keeper.shelf.finished(rank.rank, base)
        said = "failed" if why else "whole"
        self._tell(job, self._rounds.on_reply(rank.rank, base, said, self.now_s))
        if self._rounds.everywhere == base:
            self.note("peers", f"have {base}")
            self._sound = base

    @staticmethod
    def _let_go(keeper: _Keeper, gone: list[Any]) -> None:
        for copy in gone:
            keeper.copies.pop((copy.source, copy.base), None)

    # A start.

    def launch(self, nodes: list[int], asked: int | None = None) -> None:
        """Its ranks offer copies, too."""
        super().launch(nodes, asked)
        self._rounds = CopyRounds(_NODES)
        for process in self.jobs[-1].ranks:
            process.held = functools.partial(self.held, process)  # type: ignore[method-assign]
            real = process.fetch
            fetch = functools.partial(self.fetch, process, real)
            process.fetch = fetch  # type: ignore[method-assign]
        self.tiers.append(set())

    def held(self, process: SimRank) -> list[tuple[Marker, str]]:
        """What its peer holds of a rank, and all that is in the durable tier."""
        found = [
            (marker, "peer")
            for keeper in self._keepers
            for (rank, _), (marker, _) in keeper.copies.items()
            if rank == process.rank
        ]
        stored = [
            (marker, "object") for parts in self._store.values() for marker, _ in parts.values()
        ]
        return [*found, *stored]

    def fetch(
        self,
        process: SimRank,
        real: Callable[..., bytes | None],
        base: BaseId,
        rank: int,
        at: Source,
    ) -> bytes | None:
        found = None
        if at.tier == "object":
            found = self._store[base][rank][1]
        elif at.tier == "peer":
            held = (keeper.copies.get((rank, base)) for keeper in self._keepers)
            found = next((data for copy in held if copy for data in (copy[1],)), None)
        else:
            found = real(base, rank, at)
        if found is not None:
            self.tiers[-1].add(at.tier)
        return found

    def on_go(self, rank: SimRank, number: int, choice: Choice) -> None:
        """It goes back to the newest that is left of all ranks, and says what is lost."""
        super().on_go(rank, number, choice)
        if rank.rank != COORDINATOR or not self._durable:
            return
        newest = max((base for base in self._durable if self._is_left(base)), default=None)
        if choice.base is None or (newest is not None and choice.base < newest):
            raise ViolatedError(f"goes back to {choice.base}, and all of {newest} is left")
        sound = self._sound if self._pair == "apart" else None
        if sound is not None and choice.base < sound:
            raise ViolatedError(f"goes back to {choice.base}, and all peers had {sound}")
        if not self._is_left(choice.base):
            raise ViolatedError(f"goes back to {choice.base}, of which not all is left")
        said = dict(choice.skipped)
        for base in self._durable:
            there = any(self._has(base, node) for node in range(_NODES))  # or who could tell
            if base > choice.base and there and "missing" not in said.get(base, ""):
                raise ViolatedError(f"{base} is lost, and nobody says so: {said}")
        self._sound = None
        self.back.append(choice.base < max(self._durable))
        self._durable = [base for base in self._durable if base <= choice.base]

    def on_refused(self, rank: SimRank, reason: str) -> None:
        """Only where nothing is left."""
        super().on_refused(rank, reason)
        left = [base for base in self._durable if self._is_left(base)]
        if left and "deleting the bases" not in reason:
            raise ViolatedError(f"refused, and all of {left} is left: {reason}")

    def _is_left(self, base: BaseId) -> bool:
        """Whether all of a base lies somewhere: on disks, with peers, in the durable tier."""
        if base in self._store:
            return True
        return all(self._has(base, node) for node in range(_NODES))

    def _has(self, base: BaseId, node: int) -> bool:
        """Whether the part of the rank on ``node`` lies on its disk or with its peer."""
        directory, paths = base_dir(RUN, base.timeline, base.step), self.disks[node].fs.paths()
        here = all(str(directory / name(node)) in paths for name in (shard_name, marker_name))
        return here or any((node, base) in keeper.copies for keeper in self._keepers)
