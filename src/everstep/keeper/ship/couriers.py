"""All copies that one keeper makes to places in ``tiers=``: a courier for bases and one for the log
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import CopyMessage, CopyReply, CopyRequest
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, EverstepError
from everstep.link.keeper_stats import KeeperStats
from everstep.link.messages import identity_from_wire
from everstep.seams import Seams
from everstep.seams.files.stalls import observed
from everstep.tiers.options import TierOptions

# Loaded at first use, as most runs need none of it: training waits for a keeper to start.
if TYPE_CHECKING:
    from everstep.keeper.process.duty import Handler, ServedTimeline
    from everstep.keeper.ship.base_copies import BaseCopies, FollowingCopies
    from everstep.keeper.ship.courier import Courier
    from everstep.keeper.ship.log_copies import LogCopies
    from everstep.tiers.rate import ObjectRate
    from everstep.tiers.watched import WatchedTier

_HANG_S = 600.0
"""Seconds without progress after which a call counts as hung.

Large syncs take minutes.
"""
_RETRY_S = 5.0
"""Seconds until the log is copied again after a failure."""


class Couriers:
    """The keeper's duty to make copies, if the trainer asks for it.

    Args:
        run: the run folder.

    Attributes:
        bases: copies of bases, by index of the place.
        logs: copies of the log.
    """

    handlers: Mapping[str, Handler] = {}

    def __init__(self, seams: Seams, run: PurePath) -> None:
        self.bases: dict[int, BaseCopies | FollowingCopies] = {}
        self.logs: list[LogCopies] = []
        self._seams = seams
        self._run = run
        self._timeline: ServedTimeline
        self._tiers: list[WatchedTier] = []
        # URLs of places that hang, as reported.
        self._hanging: set[str] = set()
        # By URL or directory. Kept from one timeline to the next: the limit holds for any hour,
        # also when the trainer restarts within it.
        self._rates: dict[str, ObjectRate] = {}

    def serve(self, timeline: ServedTimeline) -> None:
        """Start to copy to the tiers that the trainer names."""
        self.bases = {}
        self.logs = []
        self._tiers = []
        self._hanging = set()
        self._timeline = timeline
        for number, fields in enumerate(timeline.settings.get("tiers") or ()):
            self._open(number, TierOptions(**fields))
        if timeline.settings.get("tiers") and timeline.link is not None:
            timeline.link.subscribe(CopyMessage, self._on_message)
        # An earlier keeper may have ended before it copied the newest base.
        self.base_durable()

    def _open(self, number: int, options: TierOptions) -> None:
        from everstep.keeper.ship.courier import CopyPlace, Courier
        from everstep.keeper.ship.log_copies import LogCopies
        from everstep.keeper.ship.lossy_log import shrinking
        from everstep.tiers.rate import ObjectRate, pace_s
        from everstep.tiers.urls import open_tier
        from everstep.tiers.watched import WatchedTier

        clock = self._seams.clock
        post = self._timeline.channel.post
        identity = identity_from_wire(self._timeline.settings["identity"])
        # Completed operations on the directory count as progress of its courier.
        files = observed(self._seams.filesystem, partial(self._on_operation, number))
        try:
            opened = open_tier(options.where, files, clock=clock)
        except EverstepError as error:
            # The trainer opened it, but the keeper's environment may differ (credentials).
            post(error)
            return
        tier = WatchedTier(opened, clock)
        self._tiers.append(tier)
        rate = ObjectRate(options.objects_per_hour, clock, self._rates.get(options.where))
        self._rates[options.where] = rate
        place = CopyPlace(tier, identity.timeline, rate)
        if options.log != "none":
            every_s = pace_s(options.objects_per_hour)
            steps = LogCopies(
                Courier(place, clock, post, retry_s=max(_RETRY_S, every_s)),
                self._timeline.log,
                identity,
                batch_steps=options.log_steps,
                lossy=shrinking(options),
                pace_s=every_s,
            )
            steps.start()
            self.logs.append(steps)
        bases = self._bases(number, options, Courier(place, clock, post))
        bases.courier.start(bases.turn, "everstep-base-copy")
        self.bases[number] = bases

    def _bases(
        self, number: int, options: TierOptions, courier: Courier
    ) -> BaseCopies | FollowingCopies:
        from everstep.keeper.ship.base_copies import BaseCopies, CopyGroup, FollowingCopies

        files = self._seams.filesystem
        link = self._timeline.link
        rank, world = (0, 1) if link is None else (link.session.rank, len(link.session.disks))
        group = CopyGroup(link, courier.clock, number, rank, world, self._timeline.timeout_s)
        if rank != COORDINATOR:
            return FollowingCopies(courier, files, self._run, group)
        keep = options.keep or 1
        return BaseCopies(courier, files, self._run, group, keep=keep, every_s=options.every_s)

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

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Stop all copies."""
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
        if number in self.bases:
            self.bases[number].group.report_progress()

    def _on_message(self, sender: int, message: CopyMessage) -> None:
        if (bases := self.bases.get(message.place)) is not None:
            bases.on_message(sender, message)
        elif isinstance(message, CopyRequest) and self._timeline.link is not None:
            first = message.manifest.record.markers[0]
            base = BaseId(first.timeline, first.step)
            # Reply at once: rank 0 would wait for this rank until a timeout.
            reason = "this rank could not open the place"
            self._timeline.link.send(sender, CopyReply(message.place, base, reason))

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
                self._timeline.channel.post(
                    DeadlineError(
                        f"copying to {tier.url} hangs: no progress in {call} for {for_s:.0f} s",
                        tier=tier.traits.kind,
                        path=tier.url,
                        hint="check the mount and its server (dmesg, df); training does not wait "
                        "for copies, which continue when it responds",
                    )
                )
        return found
