"""Copies of several ranks in one thread: what one says, the other hears at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.commit.job.messages import CopyMessage, CopyReply, CopyRequest
from everstep.commit.lineage import BaseId
from everstep.commit.retention import KeepRules
from everstep.errors import EverstepError
from everstep.format.writer import ChunkRing
from everstep.keeper.ship.base_copies import BaseCopies, CopyGroup, FollowingCopies
from everstep.keeper.ship.courier import ROOT, Courier
from everstep.restore.load.load import check_contents
from everstep.run.scan import scan_run
from everstep.run.verify import verify_base
from everstep.seams import ManualClock, PosixFileSystem
from everstep.seams.progress import silent
from everstep.testing.conformance import walk
from everstep.tiers import options as tier_options
from everstep.tiers.contract import Tier
from everstep.tiers.files import TierFileSystem
from everstep.tiers.memory import MemoryTier
from everstep.trainer.attach.terms import KeeperTerms

__all__ = ["FILES", "Job", "names_in", "store", "usable"]

FILES = PosixFileSystem()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryTier:
    """What all ranks find under any place; what is there was copied by hand."""
    tier = MemoryTier()
    monkeypatch.setattr(tier_options, "open_tier", lambda where, files, **_: tier)
    monkeypatch.setattr(KeeperTerms, "copy_to", lambda self, tiers: None)
    return tier


class _Others:
    """What one rank knows of the others."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self.listened_at_s = job, rank, 0.0

    @property
    def last_receive_s(self) -> float:
        self.listened_at_s += 1.0
        return self.listened_at_s

    def send(self, rank: int, message: CopyMessage) -> None:
        self._job.deliver(self._rank, rank, message)

    def is_disconnected(self, rank: int) -> bool:
        return rank in self._job.dead


class Job:
    """The copies that all ranks of one start make.

    Args:
        runs: by rank: its run folder.
        tier: as all ranks see it; or, by rank, as that one does.
        before: called with the rank, before it copies its part.
        lost: so many of the first messages are lost.

    Attributes:
        dead: ranks that say and hear nothing any more.
        dies: a rank whose part could not be copied is dead, and does not say so.
        last_words_are_lost: a rank is gone when its part is copied, and nobody hears of it.
        posted: what was told of each rank's failures.
    """

    def __init__(
        self,
        runs: list[Path],
        tier: Tier,
        timeline: int = 1,
        *,
        tiers: Mapping[int, Tier] | None = None,
        keep: int = 2,
        before: Callable[[int], None] = lambda rank: None,
        lost: int = 0,
        **more: Any,
    ) -> None:
        self.world, self.dead, self._before, self._lost = len(runs), set[int](), before, lost
        self.dies = self.last_words_are_lost = False
        self.posted: list[tuple[int, EverstepError]] = []
        self.said: list[tuple[int, CopyMessage]] = []
        clock = more.pop("clock", ManualClock())

        def group(rank: int) -> tuple[Courier, CopyGroup]:
            mine = (tiers or {}).get(rank, tier)
            courier = Courier(
                mine, timeline, clock, lambda error: self.posted.append((rank, error))
            )
            others = _Others(self, rank)
            return courier, CopyGroup(others, clock, 0, rank, self.world, timeout_s=5.0)

        courier, ranks = group(0)
        self.leader = BaseCopies(courier, FILES, PurePath(runs[0]), ranks, keep=KeepRules(keep))
        self.followers: dict[int, FollowingCopies] = {}
        for rank in range(1, self.world):
            courier, ranks = group(rank)
            self.followers[rank] = FollowingCopies(courier, FILES, PurePath(runs[rank]), ranks)

    def deliver(self, sender: int, rank: int, message: CopyMessage) -> None:
        if isinstance(message, CopyReply):
            last = self.last_words_are_lost or (self.dies and bool(message.problem))
            self.dead |= {sender} if last else set()
        if {sender, rank} & self.dead:
            return
        if self._lost:
            self._lost -= 1
            return
        self.said.append((sender, message))
        if rank == 0:
            self.leader.on_message(sender, message)
            return
        follower = self.followers[rank]
        follower.on_message(sender, message)
        if isinstance(message, CopyRequest) and follower.courier.due:
            self._before(rank)
            follower.courier.take_turn(follower)

    def copy(self) -> BaseId | None:
        """Rank 0 copies the newest base, with the others."""
        return self.leader.copy_newest()

    def problems(self) -> list[str]:
        """Why parts were not copied, as rank 0 was told."""
        return [m.problem for _, m in self.said if isinstance(m, CopyReply) and m.problem]


def names_in(tier: Tier) -> list[str]:
    return [item.name for item in walk(tier)]


def usable(tier: Tier) -> list[int]:
    """Steps of the copies that exist, each of which must be whole, with the files of all ranks."""
    files = TierFileSystem(tier, ROOT)
    found = []
    for base in scan_run(files, ROOT).bases:
        if base.status in ("committed", "complete"):
            ring = ChunkRing(3, 1)
            try:
                verdict = verify_base(
                    files, base, ring, timeout_s=30, progress=silent, contents=check_contents
                )
            finally:
                ring.close()
            assert not verdict.damages, f"{base.id} looks whole, and is not: {verdict.damages}"
            found.append(base.id.step)
    return sorted(found)
