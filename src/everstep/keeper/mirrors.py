"""The mirrors of one keeper: one for each place that keeps copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from everstep.commit.cluster import COORDINATOR
from everstep.commit.lineage import BaseId
from everstep.commit.messages import CopyMessage, CopyTold, CopyWanted
from everstep.errors import EverstepError
from everstep.keeper.commits import RankCommits
from everstep.keeper.mirror import Mirror
from everstep.keeper.rank_mirror import Followed, FollowingMirror, LeadingMirror
from everstep.keeper.seat import Seat
from everstep.seams import Seams
from everstep.tiers.options import TierOptions
from everstep.tiers.rate import ObjectRate
from everstep.tiers.urls import open_tier

__all__ = ["Mirrors"]


class Mirrors:
    """All of them, for one timeline.

    Args:
        told: the fields of each place's :class:`~everstep.tiers.options.TierOptions`.
        post: told of what fails.
        seat: of this rank among several; None: it is alone.
        commits: of the same.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        timeline: int,
        told: Sequence[dict[str, Any]],
        post: Callable[[EverstepError], None],
        *,
        timeout_s: float,
        seat: Seat | None = None,
        commits: RankCommits | None = None,
    ) -> None:
        self._mirrors: list[Mirror] = []
        self._of_ranks: dict[int, Followed] = {}  # by number of the place
        self._commits = commits
        for number, one in enumerate(told):
            options = TierOptions(**one)
            try:
                tier = open_tier(options.where, seams.filesystem, clock=seams.clock)
            except EverstepError as error:  # this environment is not that of the trainer
                post(error)
                continue
            about = seams.filesystem, run, timeline, tier, seams.clock, post
            settings: dict[str, Any] = {
                "keep": options.keep or 1,
                "every_s": options.every_s,
                "rate": ObjectRate(options.objects_per_hour, seams.clock),
                "timeout_s": timeout_s,
            }
            if seat is None or commits is None:
                self._mirrors.append(Mirror(*about, **settings))
                continue
            kind = LeadingMirror if seat.rank == COORDINATOR else FollowingMirror
            self._of_ranks[number] = kind(
                *about,
                others=commits,
                number=number,
                rank=seat.rank,
                world=len(seat.disks),
                **settings,
            )
            self._mirrors.append(self._of_ranks[number])
        if told and commits is not None:
            commits.on_copy = self._heard

    def base_durable(self, base: BaseId | None = None) -> None:
        """There is a new base on disk.

        Args:
            base: which; None: perhaps there is one.
        """
        for mirror in self._mirrors:
            mirror.base_durable(base)

    def _heard(self, sender: int, message: CopyMessage) -> None:
        mirror = self._of_ranks.get(message.place)
        if mirror is not None:
            mirror.heard(sender, message)
        elif isinstance(message, CopyWanted) and self._commits is not None:
            first = message.manifest.markers[0]
            base = BaseId(first.timeline, first.step)
            why = "it could not be opened there"
            self._commits.send(sender, CopyTold(message.place, base, why))

    def finish(self) -> bool:
        """The keeper is about to end; whether a copy is still being made."""
        for mirror in self._mirrors:
            mirror.hurry()
        return any(mirror.busy for mirror in self._mirrors)

    def close(self) -> None:
        """Ends all of them."""
        for mirror in self._mirrors:
            mirror.close()

    @property
    def copied(self) -> tuple[int, int]:
        """Copies made, and their bytes."""
        every = [mirror.stats for mirror in self._mirrors]
        return sum(one.copied for one in every), sum(one.copied_bytes for one in every)
