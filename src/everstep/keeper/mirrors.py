"""The mirrors of one keeper: one for each place that keeps copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from everstep.errors import EverstepError
from everstep.keeper.mirror import Mirror
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
    ) -> None:
        self._mirrors = []
        for one in told:
            tier = TierOptions(**one)
            try:
                place = open_tier(tier.where, seams.filesystem, clock=seams.clock)
            except EverstepError as error:  # this environment is not that of the trainer
                post(error)
                continue
            self._mirrors.append(
                Mirror(
                    seams.filesystem,
                    run,
                    timeline,
                    place,
                    seams.clock,
                    post,
                    keep=tier.keep or 1,
                    every_s=tier.every_s,
                    rate=ObjectRate(tier.objects_per_hour, seams.clock),
                    timeout_s=timeout_s,
                )
            )

    def base_durable(self) -> None:
        """There is a new base on disk."""
        for mirror in self._mirrors:
            mirror.base_durable()

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
