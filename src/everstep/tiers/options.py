"""What a user can choose of the places that keep copies, validated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.errors import OptionError

__all__ = ["TierOptions", "validate_tiers"]

_YEAR_S = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class TierOptions:
    """A place that keeps copies of committed bases.

    Attributes:
        where: ``"s3://bucket/prefix"``, or the absolute path of a directory on another disk.
        every_s: from copy to copy, at least; the newest base counts.
        keep: copies to keep; None: as many as bases.
        objects_per_hour: a cap on what is written there; copies wait for it.
    """

    where: str
    every_s: float = 0.0
    keep: int | None = None
    objects_per_hour: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.where, str) or not self.where:
            raise OptionError(f"a tier is a URL or a directory, not {self.where!r}")
        if not isinstance(self.every_s, (int, float)) or not 0 <= self.every_s <= _YEAR_S:
            raise OptionError(f"TierOptions.every_s must be seconds, not {self.every_s!r}")
        for name in ("keep", "objects_per_hour"):
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not is_int or value < 1):
                raise OptionError(f"TierOptions.{name} must be at least 1, not {value!r}")


def validate_tiers(tiers: Sequence[str | TierOptions], keep: int) -> tuple[TierOptions, ...]:
    """The places that a user has named.

    Args:
        keep: bases on disk: as many copies, where nothing else is said.

    Raises:
        OptionError
    """
    if isinstance(tiers, str):
        raise OptionError(f"tiers={tiers!r} must be a list of places", hint=f"tiers=[{tiers!r}]")
    found = [one if isinstance(one, TierOptions) else TierOptions(one) for one in tiers]
    return tuple(
        TierOptions(one.where, float(one.every_s), one.keep or keep, one.objects_per_hour)
        for one in found
    )
