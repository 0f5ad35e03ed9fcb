"""All copies that one keeper makes to places in ``tiers=``: a mirror for bases and one for the log
each.
"""

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
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.persist.job_link import JobLink
from everstep.keeper.ship.log_mirror import LogMirror
from everstep.keeper.ship.lossy_log import shrinking
from everstep.keeper.ship.mirror import Mirror, MirrorOptions
from everstep.keeper.ship.place import CopyPlace
from everstep.keeper.ship.rank_mirror import (
    AnyRankMirror,
    CopyMember,
    FollowingMirror,
    LeadingMirror,
)
from everstep.link.keeper_stats import KeeperStats
from everstep.seams import Clock, Seams
from everstep.seams.files.stalls import ObservedFileSystem
from everstep.tiers.options import TierOptions
from everstep.tiers.rate import ObjectRate
from everstep.tiers.urls import open_tier
from everstep.tiers.watched import WatchedTier

__all__ = ["Mirrors"]

_HANG_S = 600.0
"""Seconds without progress after which a call counts as hung.

Large syncs take minutes.
"""


class Mirrors:
    """The mirrors of one timeline.

    Args:
        places: fields of each place's :class:`~everstep.tiers.options.TierOptions`.
        post: called with errors.
        link: link to the keepers of the other ranks; None: there is one rank.
        log: log of this rank.
        identity: identity of this rank, for segments of the log.
        before: mirrors of the previous timeline in the same keeper; objects they wrote within the
            last hour count against the limit.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        timeline: int,
        places: Sequence[dict[str, Any]],
        post: Callable[[EverstepError], None],
        *,
        timeout_s: float,
        link: JobLink | None = None,
        log: LogStore | None = None,
        identity: ShardIdentity | None = None,
        before: Mirrors | None = None,
    ) -> None:
        self._post = post
        self._watched: dict[Mirror | LogMirror, WatchedTier] = {}
        # URLs of places that hang, as reported.
        self._hanging: set[str] = set()
        self._mirrors: list[Mirror] = []
        self._logs: list[LogMirror] = []
        # By index of the place.
        self._rank_mirrors: dict[int, AnyRankMirror] = {}
        self._link = link
        # By URL or directory.
        self._rates: dict[str, ObjectRate] = {}
        for number, fields in enumerate(places):
            options = TierOptions(**fields)
            # Completed operations on the directory count as progress of its rank mirror.
            files = ObservedFileSystem(seams.filesystem, partial(self._on_operation, number))
            try:
                opened = open_tier(options.where, files, clock=seams.clock)
            except EverstepError as error:
                # The trainer opened it, but the keeper's environment may differ (credentials).
                post(error)
                continue
            tier = WatchedTier(opened, seams.clock)
            earlier = None if before is None else before._rates.get(options.where)
            rate = ObjectRate(options.objects_per_hour, seams.clock, earlier)
            self._rates[options.where] = rate
            place = CopyPlace(tier, timeline, rate)
            if options.log != "none" and log is not None and identity is not None:
                log_mirror = _start_log_mirror(place, options, log, identity, seams.clock, post)
                self._logs.append(log_mirror)
                self._watched[log_mirror] = tier
            pace = MirrorOptions(options.keep or 1, options.every_s, timeout_s)
            if link is None:
                mirror = Mirror(seams.filesystem, run, place, seams.clock, post, pace)
            else:
                rank = link.session.rank
                kind = LeadingMirror if rank == COORDINATOR else FollowingMirror
                member = CopyMember(link, number, rank, len(link.session.disks))
                mirror = kind(seams.filesystem, run, place, seams.clock, post, pace, member)
                self._rank_mirrors[number] = mirror
            self._mirrors.append(mirror)
            self._watched[mirror] = tier
        if places and link is not None:
            link.on_copies(self._on_message)

    def base_durable(self, base: BaseId | None = None) -> None:
        """Queue a new base in all mirrors.

        Args:
            base: the base; None: look whether there is one.
        """
        self._report_hanging()
        for mirror in self._all:
            mirror.base_durable(base)

    def base_known(self, base: BaseId) -> None:
        """Note that a base is durable. The trainer is notified next; retention has not run yet."""
        for log in self._logs:
            log.base_known(base)

    def pause(self) -> None:
        """Expect the attached process to open another timeline: being fenced off is no error
        then.
        """
        for mirror in self._all:
            mirror.pause()

    def trainer_lost(self) -> None:
        """Copy the rest of the log, too: the training process died."""
        for log in self._logs:
            log.flush()

    def _on_operation(self, number: int) -> None:
        if number in self._rank_mirrors:
            self._rank_mirrors[number].report_progress()

    def _on_message(self, sender: int, message: CopyMessage) -> None:
        mirror = self._rank_mirrors.get(message.place)
        if mirror is not None:
            mirror.on_message(sender, message)
        elif isinstance(message, CopyRequest) and self._link is not None:
            first = message.manifest.record.markers[0]
            base = BaseId(first.timeline, first.step)
            # Reply at once: rank 0 would wait for this rank until a timeout.
            reason = "this rank could not open the place"
            self._link.send(sender, CopyReply(message.place, base, reason))

    def finish(self) -> bool:
        """Prepare for the end of the keeper; return True while a copy is still being made."""
        for mirror in self._mirrors:
            mirror.expedite()
        for log in self._logs:
            # The final base contains the steps of the unfinished segment.
            log.pause()
        # A call that hangs cannot be cancelled: do not wait for it.
        hanging = self._report_hanging()
        return any(mirror.busy and self._watched[mirror] not in hanging for mirror in self._all)

    def close(self) -> None:
        """Stop all mirrors."""
        for mirror in self._all:
            mirror.close()

    @property
    def _all(self) -> list[Mirror | LogMirror]:
        return [*self._mirrors, *self._logs]

    def _report_hanging(self) -> list[WatchedTier]:
        """Return the places that hang; report each once while it does."""
        found: list[WatchedTier] = []
        for tier in dict.fromkeys(self._watched.values()):
            stuck = tier.stuck(_HANG_S)
            if stuck is None:
                self._hanging.discard(tier.url)
                continue
            found.append(tier)
            if tier.url not in self._hanging:
                self._hanging.add(tier.url)
                call, for_s = stuck
                self._post(
                    DeadlineError(
                        f"copying to {tier.url} hangs: no progress in {call} for {for_s:.0f} s",
                        tier=tier.traits.kind,
                        path=tier.url,
                        hint="check the mount and its server (dmesg, df); training does not wait "
                        "for copies, which continue when it responds",
                    )
                )
        return found

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures since the start of the timeline to ``stats``."""
        self._report_hanging()
        bases = [mirror.stats for mirror in self._mirrors]
        stats.copied = sum(one.copied for one in bases)
        stats.copied_bytes = sum(one.copied_bytes for one in bases)
        logs = [log.stats for log in self._logs]
        stats.copied_steps = sum(one.steps for one in logs)
        stats.copied_log_bytes = sum(one.copied_bytes for one in logs)
        stats.copy_missed = sum(one.missed for one in logs)


def _start_log_mirror(
    place: CopyPlace,
    options: TierOptions,
    log: LogStore,
    identity: ShardIdentity,
    clock: Clock,
    post: Callable[[EverstepError], None],
) -> LogMirror:
    mirror = LogMirror(
        place,
        log,
        identity,
        clock,
        post,
        batch_steps=options.log_steps,
        lossy=shrinking(options),
        leads=identity.rank == COORDINATOR,
        objects_per_hour=options.objects_per_hour,
    )
    mirror.start()
    return mirror
