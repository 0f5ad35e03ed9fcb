"""What a user can choose of the places that keep copies, validated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.errors import OptionError
from everstep.given import checked, is_int, is_number

__all__ = ["PeerOptions", "TierOptions", "split_peers", "validate_tiers"]

_YEAR_S = 366 * 86_400.0


@checked
@dataclass(frozen=True, slots=True)
class TierOptions:
    """A place that keeps copies of committed bases.

    Attributes:
        where: ``"s3://bucket/prefix"``, or the absolute path of a directory on another disk.
        every_s: from copy to copy, at least; the newest base counts.
        keep: copies to keep; None: as many as bases.
        objects_per_hour: a cap on what is written there, by all ranks together, each of which
            has an equal part of it; copies wait for it.
    """

    where: str
    every_s: float = 0.0
    keep: int | None = None
    objects_per_hour: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.where, PurePath):
            object.__setattr__(self, "where", str(self.where))
        if not isinstance(self.where, str) or not self.where:
            raise OptionError(f"a tier is a URL or a directory, not {self.where!r}")
        if not is_number(self.every_s) or not 0 <= self.every_s <= _YEAR_S:
            raise OptionError(f"TierOptions.every_s must be seconds, not {self.every_s!r}")
        for name in ("keep", "objects_per_hour"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise OptionError(f"TierOptions.{name} must be at least 1, not {value!r}")

    def of_rank(self, world: int) -> TierOptions:
        """What holds for one of ``world`` ranks: no message says who has written how much, so
        each keeps to its part of the cap."""
        if self.objects_per_hour is None or world == 1:
            return self
        return replace(self, objects_per_hour=max(1, self.objects_per_hour // world))


@checked
@dataclass(frozen=True, slots=True)
class PeerOptions:
    """The memory of another node as a tier; ``"peer"`` means ``PeerOptions()``.

    Attributes:
        bytes_per_s: of each rank, that its keeper sends at most. None: so many that a base is there
            after four fifths of the time between two bases (TierCheck, section 3.2).
        host_bytes: of the copies that are held here for other ranks, at most; a part of
            ``Budget.host_bytes``. None: half of it.
        emulated_node: stands for a node, for tests and drills on one machine: ranks that name the
            same are on the same one. A copy on the same machine protects nothing.
        if_there: where there is no other node nothing is sent, and that is no error.
    """

    bytes_per_s: float | None = None
    host_bytes: int | None = None
    emulated_node: str | None = None
    if_there: bool = False

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "host_bytes"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise OptionError(f"PeerOptions.{name} must be above 0, not {value!r}")
        node = self.emulated_node
        if node is not None and (not isinstance(node, str) or not node):
            raise OptionError(f"PeerOptions.emulated_node must be a name, not {node!r}")


def split_peers(
    tiers: Sequence[str | PurePath | TierOptions | PeerOptions], method_tiers: Sequence[str] = ()
) -> tuple[list[str | TierOptions], PeerOptions | None]:
    """The places that keep copies, and what was said of peers; None: they keep none.

    Args:
        method_tiers: where bases live: in peers' memory, if there are any, if nothing is said.

    Raises:
        OptionError: peers were named twice, or it is no list.
    """
    if not isinstance(tiers, (list, tuple)):
        places = isinstance(tiers, (str, PurePath, TierOptions, PeerOptions))
        hint = f"tiers=[{tiers!r}]" if places else 'for example tiers=["s3://bucket/prefix"]'
        raise OptionError(f"tiers={tiers!r} must be a list of places", hint=hint)
    plain = [str(one) if isinstance(one, PurePath) else one for one in tiers]
    named = [PeerOptions() if one == "peer" else one for one in plain]
    peers = [one for one in named if isinstance(one, PeerOptions)]
    if len(peers) > 1:
        raise OptionError("tiers= names peers twice: each rank has one peer")
    rest = [one for one in named if not isinstance(one, PeerOptions)]
    implied = PeerOptions(if_there=True) if "peer" in method_tiers else None
    return rest, peers[0] if peers else implied


def validate_tiers(tiers: Sequence[str | TierOptions], keep: int) -> tuple[TierOptions, ...]:
    """The places that a user has named.

    Args:
        keep: bases on disk: as many copies, where nothing else is said.

    Raises:
        OptionError
    """
    found = [one if isinstance(one, TierOptions) else TierOptions(one) for one in tiers]
    return tuple(
        TierOptions(one.where, float(one.every_s), one.keep or keep, one.objects_per_hour)
        for one in found
    )
