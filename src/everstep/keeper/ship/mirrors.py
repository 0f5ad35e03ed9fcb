"""The mirrors of one keeper: one for each place that keeps copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import CopyMessage, CopyReply, CopyRequest
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, EverstepError
from everstep.format.header import ShardIdentity
from everstep.keeper.log.log import LogStore
from everstep.keeper.persist.rank_commits import RankCommits
from everstep.keeper.ship.log_mirror import LogMirror
from everstep.keeper.ship.lossy_log import shrinking
from everstep.keeper.ship.mirror import Mirror
from everstep.keeper.ship.place import CopyPlace
from everstep.keeper.ship.rank_mirror import Followed, FollowingMirror, LeadingMirror
from everstep.link.job_session import JobSession
from everstep.link.keeper_stats import KeeperStats
from everstep.seams import Seams
from everstep.seams.files.stalls import ObservedFileSystem
from everstep.tiers.options import TierOptions
from everstep.tiers.rate import ObjectRate
from everstep.tiers.urls import open_tier
from everstep.tiers.watched import WatchedTier

__all__ = ["Mirrors"]

_HANG_S = 600.0  # what has not moved for so long hangs; to make much durable at once takes minutes


class Mirrors:
    """All of them, for one timeline.

    Args:
        told: the fields of each place's :class:`~everstep.tiers.options.TierOptions`.
        post: told of what fails.
        job_session: of this rank among several; None: it is alone.
        commits: of the same.
        log: of this rank.
        identity: of this rank, in what is copied of the log.
        before: those of the timeline before, in the same keeper: what they have written within the
            hour counts, too.
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
        job_session: JobSession | None = None,
        commits: RankCommits | None = None,
        log: LogStore | None = None,
        identity: ShardIdentity | None = None,
        before: Mirrors | None = None,
    ) -> None:
        self._post = post
        self._watched: dict[Mirror | LogMirror, WatchedTier] = {}
        self._hanging: set[str] = set()  # places that were told of
        self._mirrors: list[Mirror] = []
        self._logs: list[LogMirror] = []
        self._of_ranks: dict[int, Followed] = {}  # by number of the place
        self._commits = commits
        self._rates: dict[str, ObjectRate] = {}  # by place
        for number, one in enumerate(told):
            options = TierOptions(**one)
            try:
                moved = partial(self._moved, number)
                files = ObservedFileSystem(seams.filesystem, moved)  # that a directory is on
                place = open_tier(options.where, files, clock=seams.clock)
            except EverstepError as error:  # this environment is not that of the trainer
                post(error)
                continue
            tier = WatchedTier(place, seams.clock)
            about = seams.filesystem, run, timeline, tier, seams.clock, post
            counted = None if before is None else before._rates.get(options.where)
            rate = ObjectRate(options.objects_per_hour, seams.clock, counted)
            self._rates[options.where] = rate
            settings: dict[str, Any] = {
                "keep": options.keep or 1,
                "every_s": options.every_s,
                "rate": rate,
                "timeout_s": timeout_s,
            }
            if options.log != "none" and log is not None and identity is not None:
                about_log = options, log, identity, seams, post
                self._logs.append(_log_mirror(CopyPlace(tier, timeline, rate), *about_log))
                self._watched[self._logs[-1]] = tier
            if job_session is None or commits is None:
                self._mirrors.append(Mirror(*about, **settings))
                self._watched[self._mirrors[-1]] = tier
                continue
            kind = LeadingMirror if job_session.rank == COORDINATOR else FollowingMirror
            self._of_ranks[number] = kind(
                *about,
                others=commits,
                number=number,
                rank=job_session.rank,
                world=len(job_session.disks),
                **settings,
            )
            self._mirrors.append(self._of_ranks[number])
            self._watched[self._mirrors[-1]] = tier
        if told and commits is not None:
            commits.on_copy = self._heard

    def base_durable(self, base: BaseId | None = None) -> None:
        """There is a new base on disk.

        Args:
            base: which; None: perhaps there is one.
        """
        self._look()
        for mirror in self._every:
            mirror.base_durable(base)

    def base_known(self, base: BaseId) -> None:
        """It is durable, and whoever trains is about to hear of it; retention is not over."""
        for log in self._logs:
            log.base_known(base)

    def pause(self) -> None:
        """Training is about to open another timeline itself: what it shuts out here is no error."""
        for mirror in self._every:
            mirror.pause()

    def lost(self) -> None:
        """Training has died: what is left of the log is copied, too."""
        for log in self._logs:
            log.flush()

    def _moved(self, number: int) -> None:
        if number in self._of_ranks:
            self._of_ranks[number].goes_on()

    def _heard(self, sender: int, message: CopyMessage) -> None:
        mirror = self._of_ranks.get(message.place)
        if mirror is not None:
            mirror.heard(sender, message)
        elif isinstance(message, CopyRequest) and self._commits is not None:
            first = message.manifest.markers[0]
            base = BaseId(first.timeline, first.step)
            why = "it could not be opened there"
            self._commits.send(sender, CopyReply(message.place, base, why))

    def finish(self) -> bool:
        """The keeper is about to end; whether a copy is still being made."""
        for mirror in self._mirrors:
            mirror.hurry()
        for log in self._logs:
            log.pause()  # a base is better than the rest of a log that it is behind
        hanging = self._look()  # nobody ends that, and nobody waits for it
        return any(mirror.busy and self._watched[mirror] not in hanging for mirror in self._every)

    def close(self) -> None:
        """Ends all of them."""
        for mirror in self._every:
            mirror.close()

    @property
    def _every(self) -> list[Mirror | LogMirror]:
        return [*self._mirrors, *self._logs]

    def _look(self) -> list[WatchedTier]:
        """Places that hang, each of which is told of once, as long as it does."""
        found: list[WatchedTier] = []
        for tier in dict.fromkeys(self._watched.values()):
            stuck = tier.stuck(_HANG_S)
            if stuck is None:
                self._hanging.discard(tier.url)
                continue
            found.append(tier)
            if tier.url not in self._hanging:
                self._hanging.add(tier.url)
                what, for_s = stuck
                self._post(
                    DeadlineError(
                        f"copying to {tier.url} hangs: {what} has not moved for {for_s:.0f} s",
                        tier=tier.traits.kind,
                        path=tier.url,
                        hint="look at the mount, and at the server behind it (dmesg, df); nobody "
                        "waits for copies, which go on when it answers",
                    )
                )
        return found

    def add_to(self, stats: KeeperStats) -> None:
        """Notes what was copied since the timeline began."""
        self._look()
        bases = [mirror.stats for mirror in self._mirrors]
        stats.copied = sum(one.copied for one in bases)
        stats.copied_bytes = sum(one.copied_bytes for one in bases)
        logs = [log.stats for log in self._logs]
        stats.copied_steps = sum(one.steps for one in logs)
        stats.copied_log_bytes = sum(one.copied_bytes for one in logs)
        stats.copy_missed = sum(one.missed for one in logs)


def _log_mirror(
    place: CopyPlace,
    options: TierOptions,
    log: LogStore,
    identity: ShardIdentity,
    seams: Seams,
    post: Callable[[EverstepError], None],
) -> LogMirror:
    mirror = LogMirror(
        place,
        log,
        identity,
        seams.clock,
        post,
        batch_steps=options.log_steps,
        lossy=shrinking(options),
        leads=identity.rank == COORDINATOR,
        objects_per_hour=options.objects_per_hour,
    )
    mirror.start()
    return mirror
