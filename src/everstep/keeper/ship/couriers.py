"""All copies that one keeper makes to places in ``tiers=``: a courier for bases and one for the log
each.

Copies that hang are detected here. A directory on a network file system responds when its
server does, perhaps never, and a thread in such a call cannot be interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from everstep.commit import BaseId
from everstep.commit.job import COORDINATOR, CopyMessage
from everstep.commit.job.messages import CopyReply, CopyRequest
from everstep.commit.retention import KeepRules
from everstep.errors import DeadlineError, EverstepError
from everstep.format import ShardIdentity
from everstep.link.messages import KeeperStats, from_plain, identity_from_wire
from everstep.seams import Seams
from everstep.seams.filesystem import observed
from everstep.tiers import TierOptions

if TYPE_CHECKING:
    from everstep.keeper.log import LogStore
    from everstep.keeper.persist import JobLink
    from everstep.keeper.process.duty import Handler, ServedTimeline
    from everstep.keeper.ship.base_copies import BaseCopies, FollowingCopies
    from everstep.keeper.ship.courier import Courier
    from everstep.keeper.ship.log_copies import LogCopies

_HANG_S = 600.0
"""Seconds without progress after which a copy counts as hung.

Large syncs take minutes.
"""
_RETRY_S = 5.0
"""Seconds until the log is copied again after a failure."""


class Couriers:
    """Copies bases and log to the places in ``tiers=``: a duty of the keeper, if the trainer names
    any.
    """

    handlers: Mapping[str, Handler] = {}

    def __init__(self, seams: Seams, run: PurePath) -> None:
        # By index of the place.
        self.bases: dict[int, BaseCopies | FollowingCopies] = {}
        self.logs: list[LogCopies] = []
        self._seams = seams
        self._run = run
        self._link: JobLink | None = None
        # URLs of places that hang, as reported.
        self._hanging: set[str] = set()

    def serve(self, timeline: ServedTimeline) -> None:
        """Start to copy to the places that the trainer names."""
        settings = timeline.settings
        self.bases = {}
        self.logs = []
        self._hanging = set()
        if settings.get("tiers"):
            self.start(
                settings["tiers"],
                identity_from_wire(settings["identity"]),
                timeline.log,
                timeline.channel.post,
                keep=from_plain(settings["keep"], KeepRules),
                timeout_s=timeline.timeout_s,
                link=timeline.link,
                tell=timeline.trainer.send,
            )
            # An earlier keeper may have ended before it copied the newest base.
            self.base_durable()

    def start(
        self,
        places: Iterable[dict[str, Any]],
        identity: ShardIdentity,
        log: LogStore,
        post: Callable[[EverstepError], None],
        *,
        keep: KeepRules,
        timeout_s: float,
        link: JobLink | None = None,
        tell: Callable[[dict[str, Any]], None] = lambda message: None,
    ) -> None:
        """Start to copy to these places.

        Args:
            places: fields of each place's :class:`~everstep.tiers.options.TierOptions`.
            identity: identity of this rank; its timeline is copied.
            log: log of this rank.
            post: called with errors.
            keep: bases to keep; a place may keep another number of newest ones.
            timeout_s: seconds without progress after which a transfer counts as hung.
            link: link to the keepers of the other ranks; None: there is one rank.
            tell: sends a message to the trainer.
        """
        self._link = link
        self._tell = tell
        self._post = post
        self._keep = keep
        for number, fields in enumerate(places):
            self._open(number, TierOptions(**fields), identity, log, timeout_s)
        if link is not None:
            link.subscribe(CopyMessage, partial(_on_message, link, self.bases))

    def _open(
        self,
        number: int,
        options: TierOptions,
        identity: ShardIdentity,
        log: LogStore,
        timeout_s: float,
    ) -> None:
        keep = replace(self._keep, newest=options.keep or self._keep.newest)
        # Loaded at first use, as most runs need none: training waits for a keeper to start.
        from everstep.keeper.ship.base_copies import BaseCopies, CopyGroup, FollowingCopies
        from everstep.keeper.ship.courier import Courier
        from everstep.keeper.ship.log_copies import LogCopies, shrinking

        clock = self._seams.clock
        files = self._seams.filesystem
        # Completed operations on the directory count as progress of its courier.
        watched = observed(files, partial(_on_operation, self.bases, number))
        try:
            tier = options.open(watched, clock)
        except EverstepError as error:
            # The trainer opened it, but the keeper's environment may differ (credentials).
            self._post(error)
            return
        if options.log != "none":
            steps = LogCopies(
                Courier(tier, identity.timeline, clock, self._post, retry_s=_RETRY_S),
                log,
                identity,
                batch_steps=options.log_steps,
                keep=keep,
                lossy=shrinking(options),
                on_step=partial(self._log_arrived, number, identity.timeline),
            )
            steps.start()
            self.logs.append(steps)
        courier = Courier(tier, identity.timeline, clock, self._post)
        group = CopyGroup(self._link, clock, number, identity.rank, identity.world, timeout_s)
        arrived = partial(self._base_arrived, number, identity.timeline)
        bases: BaseCopies | FollowingCopies
        if self._link is None or identity.rank == COORDINATOR:
            bases = BaseCopies(
                courier,
                files,
                self._run,
                group,
                keep=keep,
                every_s=options.every_s,
                on_base=arrived,
            )
        else:
            bases = FollowingCopies(courier, files, self._run, group, arrived)
        courier.start(bases, "everstep-base-copy")
        self.bases[number] = bases

    def _log_arrived(self, number: int, timeline: int, step: int) -> None:
        place = {"kind": "copied", "of_timeline": timeline, "place": number}
        self._tell({**place, "base": None, "step": step})

    def _base_arrived(self, number: int, timeline: int, base: BaseId) -> None:
        if base.timeline == timeline:
            place = {"kind": "copied", "of_timeline": timeline, "place": number}
            self._tell({**place, "base": base.step, "step": None})

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
        return any(one.busy and one.courier not in hanging for one in self._all)

    def close(self, *, timeout_s: float = 0.0) -> None:
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

    def _report_hanging(self) -> list[Courier]:
        """Return the couriers that hang; report each place once while it does."""
        found = [one.courier for one in self._all if one.courier.stalled_s >= _HANG_S]
        hanging = {one.place.url: one for one in found}
        for url, courier in hanging.items():
            if url not in self._hanging:
                self._post(
                    DeadlineError(
                        f"copying to {url} hangs: no progress for {courier.stalled_s:.0f} s",
                        tier=courier.place.kind,
                        path=url,
                        hint="check the mount and its server (dmesg, df); training does not wait "
                        "for copies, which continue when it responds",
                    )
                )
        self._hanging = set(hanging)
        return found


# Bound to the places of one timeline: threads and messages of the one before may come later.


def _on_operation(places: Mapping[int, BaseCopies | FollowingCopies], number: int) -> None:
    # Opening the tier reads the directory before there is a courier.
    bases = places.get(number)
    if bases is not None:
        bases.group.report_progress()


def _on_message(
    link: JobLink,
    places: Mapping[int, BaseCopies | FollowingCopies],
    sender: int,
    message: CopyMessage,
) -> None:
    bases = places.get(message.place)
    if bases is not None:
        bases.on_message(sender, message)
    elif isinstance(message, CopyRequest):
        first = message.manifest.record.markers[0]
        base = BaseId(first.timeline, first.step)
        # Reply at once: rank 0 would wait for this rank until a timeout.
        reason = "this rank could not open the place"
        link.send(sender, CopyReply(message.place, base, reason))
