"""Copies of bases and log in ``tiers=``: a duty of the keeper, if the trainer asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from everstep.commit.lineage import BaseId
from everstep.keeper.process.duty import Handler, ServedTimeline
from everstep.link.keeper_stats import KeeperStats
from everstep.link.messages import identity_from_wire
from everstep.seams import Seams

if TYPE_CHECKING:
    from everstep.keeper.ship.couriers import Couriers


class Copies:
    """Couriers of the timeline that is served.

    Attributes:
        couriers: copy bases and log; None if there are no tiers.
    """

    handlers: Mapping[str, Handler] = {}

    def __init__(self, seams: Seams, run: PurePath) -> None:
        self._seams = seams
        self._run = run
        self.couriers: Couriers | None = None

    def serve(self, timeline: ServedTimeline) -> None:
        """Start to copy bases to the tiers that the trainer names."""
        # Closed, but still needed: the objects of the last hour count against the limit of the new
        # ones.
        before = self.couriers
        self.couriers = None
        settings = timeline.settings
        if not settings.get("tiers"):
            return
        # Loaded at first use, as most runs need none: training waits for a keeper to start.
        from everstep.keeper.ship.couriers import Couriers

        self.couriers = Couriers(
            self._seams,
            self._run,
            identity_from_wire(settings["identity"]),
            timeline.channel.post,
            timeout_s=timeline.timeout_s,
            link=timeline.link,
            before=before,
        )
        self.couriers.start(settings["tiers"], timeline.log)
        # An earlier keeper may have ended before it copied the newest base.
        self.couriers.base_durable()

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Stop all copies."""
        if self.couriers is not None:
            self.couriers.close()

    def base_durable(self, base: BaseId) -> None:
        """Copy a base that is durable."""
        if self.couriers is not None:
            self.couriers.base_durable(base)

    def base_known(self, base: BaseId) -> None:
        """Note that a base is durable. The trainer is notified next; retention has not run yet."""
        if self.couriers is not None:
            self.couriers.base_known(base)

    def pause(self) -> None:
        """Expect the trainer to open another timeline: being fenced off is no error then."""
        if self.couriers is not None:
            self.couriers.pause()

    def trainer_lost(self) -> None:
        """Copy the rest of the log, too: the trainer died."""
        if self.couriers is not None:
            self.couriers.trainer_lost()

    def finish(self) -> bool:
        """Prepare for the end of the keeper; return True while a copy is still being made."""
        return self.couriers is not None and self.couriers.finish()

    def add_to(self, stats: KeeperStats) -> None:
        """Add the figures since the start of the timeline to ``stats``."""
        if self.couriers is not None:
            self.couriers.add_to(stats)
