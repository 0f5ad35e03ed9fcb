"""All copies that one keeper makes to places in ``tiers=``: a courier for bases and one for the log
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePath
from typing import Any

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR, CopyMessage
from everstep.commit.job.messages import CopyReply, CopyRequest
from everstep.errors import DeadlineError, EverstepError
from everstep.format import ShardIdentity
from everstep.keeper.log import LogStore
from everstep.keeper.persist import JobLink
from everstep.keeper.ship.base_copies import BaseCopies, CopyGroup
from everstep.keeper.ship.courier import CopyPlace, Courier, ObjectRate, pace_s
from everstep.keeper.ship.log_copies import LogCopies
from everstep.keeper.ship.lossy_log import shrinking
from everstep.keeper.ship.rank_copies import FollowingCopies, LeadingCopies
from everstep.link.messages import KeeperStats
from everstep.seams import Seams
from everstep.seams.filesystem import observed
from everstep.tiers import TierOptions
from everstep.tiers.urls import open_tier
from everstep.tiers.watched import WatchedTier

_HANG_S = 600.0
"""Seconds without progress after which a call counts as hung.

Large syncs take minutes.
"""
_RETRY_S = 5.0
"""Seconds until the log is copied again after a failure."""


class Couriers:
    """The couriers of one timeline.

    Args:
        identity: identity of this rank; its timeline is copied.
        post: called with errors.
        timeout_s: seconds without progress after which a transfer counts as hung.
        link: link to the keepers of the other ranks; None: there is one rank.
        before: couriers of the previous timeline in the same keeper; objects they wrote within the
            last hour count against the limit.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        identity: ShardIdentity,
        post: Callable[[EverstepError], None],
        *,
        timeout_s: float,
        link: JobLink | None = None,
        before: Couriers | None = None,
    ) -> None:
        # By index of the place.
        self.bases: dict[int, BaseCopies | FollowingCopies] = {}
        self.logs: list[LogCopies] = []
        self._seams = seams
        self._run = run
        self._identity = identity
        self._post = post
        self._timeout_s = timeout_s
        self._link = link
        self._tiers: list[WatchedTier] = []
        # URLs of places that hang, as reported.
        self._hanging: set[str] = set()
        # By URL or directory. Kept from one timeline to the next: the limit holds for any hour,
        # also when the trainer restarts within it.
        self._rates: dict[str, ObjectRate] = {} if before is None else before._rates

    def start(self, places: Iterable[dict[str, Any]], log: LogStore) -> None:
        """Start to copy to these places.

        Args:
            places: fields of each place's :class:`~everstep.tiers.options.TierOptions`.
            log: log of this rank.
        """
        for number, fields in enumerate(places):
            self._open(number, TierOptions(**fields), log)
        if self._link is not None:
            self._link.subscribe(CopyMessage, self._on_message)

    def _open(self, number: int, options: TierOptions, log: LogStore) -> None:
        clock = self._seams.clock
        # Completed operations on the directory count as progress of its courier.
        files = observed(self._seams.filesystem, partial(self._on_operation, number))
        try:
            opened = open_tier(options.where, files, clock=clock)
        except EverstepError as error:
            # The trainer opened it, but the keeper's environment may differ (credentials).
            self._post(error)
            return
        tier = WatchedTier(opened, clock)
        self._tiers.append(tier)
        rate = ObjectRate(options.objects_per_hour, clock, self._rates.get(options.where))
        self._rates[options.where] = rate
        place = CopyPlace(tier, self._identity.timeline, rate)
        if options.log != "none":
            every_s = pace_s(options.objects_per_hour)
            steps = LogCopies(
                Courier(place, clock, self._post, retry_s=max(_RETRY_S, every_s)),
                log,
                self._identity,
                batch_steps=options.log_steps,
                lossy=shrinking(options),
                pace_s=every_s,
            )
            steps.start()
            self.logs.append(steps)
        bases = self._bases(number, options, Courier(place, clock, self._post))
        bases.courier.start(bases, "everstep-base-copy")
        self.bases[number] = bases

    def _bases(
        self, number: int, options: TierOptions, courier: Courier
    ) -> BaseCopies | FollowingCopies:
        files = self._seams.filesystem
        rank = self._identity.rank
        group = CopyGroup(
            self._link, courier.clock, number, rank, self._identity.world, self._timeout_s
        )
        if self._link is not None and rank != COORDINATOR:
            return FollowingCopies(courier, files, self._run, group)
        kind = BaseCopies if self._link is None else LeadingCopies
        keep = options.keep or 1
        return kind(courier, files, self._run, group, keep=keep, every_s=options.every_s)

    def base_durable(self, base: BaseId | None = None) -> None:
        """Queue a new base in all places.

        Args:
            base: the base; None: look whether there is one.
        """
        self._report_hanging()
        for one in self._all:
            one.base_durable(base)

    def base_known(self, base: BaseId) -> None:
        """Note that a base is durable. The trainer is notified next; retention has not run yet."""
        for log in self.logs:
            log.base_known(base)

    def pause(self) -> None:
        """Expect the attached process to open another timeline: being fenced off is no error
        then.
        """
        for bases in self.bases.values():
            bases.courier.pause()
        for log in self.logs:
            log.pause()

    def trainer_lost(self) -> None:
        """Copy the rest of the log, too: the training process died."""
        for log in self.logs:
            log.flush()

    def finish(self) -> bool:
        """Prepare for the end of the keeper; return True while a copy is still being made."""
        for bases in self.bases.values():
            bases.expedite()
        for log in self.logs:
            # The final base contains the steps of the unfinished segment.
            log.pause()
        # A call that hangs cannot be cancelled: do not wait for it.
        hanging = self._report_hanging()
        return any(one.busy and one.courier.place.tier not in hanging for one in self._all)

    def close(self) -> None:
        """Stop all couriers."""
        for bases in self.bases.values():
            bases.courier.close()
        for log in self.logs:
            log.close()

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures since the start of the timeline to ``stats``."""
        self._report_hanging()
        bases = [one.courier.stats for one in self.bases.values()]
        stats.copied = sum(one.copied for one in bases)
        stats.copied_bytes = sum(one.copied_bytes for one in bases)
        logs = [one.courier.stats for one in self.logs]
        stats.copied_steps = sum(one.copied for one in logs)
        stats.copied_log_bytes = sum(one.copied_bytes for one in logs)
        stats.copy_missed = sum(one.missed for one in logs)

    @property
    def _all(self) -> list[BaseCopies | FollowingCopies | LogCopies]:
        return [*self.bases.values(), *self.logs]

    def _on_operation(self, number: int) -> None:
        # Opening the tier reads the directory before there is a courier.
        if number in self.bases:
            self.bases[number].group.report_progress()

    def _on_message(self, sender: int, message: CopyMessage) -> None:
        bases = self.bases.get(message.place)
        if isinstance(bases, LeadingCopies | FollowingCopies):
            bases.on_message(sender, message)
        elif isinstance(message, CopyRequest) and self._link is not None:
            first = message.manifest.record.markers[0]
            base = BaseId(first.timeline, first.step)
            # Reply at once: rank 0 would wait for this rank until a timeout.
            reason = "this rank could not open the place"
            self._link.send(sender, CopyReply(message.place, base, reason))

    def _report_hanging(self) -> list[WatchedTier]:
        """Return the places that hang; report each once while it does."""
        found: list[WatchedTier] = []
        for tier in self._tiers:
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
