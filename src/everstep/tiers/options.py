"""What a user can choose of the places that keep copies, validated once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from everstep.config.given import checked, is_int, is_number, is_sequence
from everstep.errors import OptionError

__all__ = ["LOG_FORMS", "PeerOptions", "TierOptions", "split_peers", "validate_tiers"]

LOG_FORMS = ("none", "whole", "adaptive")
"""What of the log a place gets: nothing; every bit; or approximate gradients, eight bits for each
element of a small tensor and the largest elements of a large one (TierCheck, section 3.2)."""

_YEAR_S = 366 * 86_400.0
_LOG_OBJECTS_MIN = 4  # an hour, of each rank: a segment, and room for parts of a base


def _check_log(kind: str, log: object, ratio: object, int8_below: object) -> None:
    if log not in LOG_FORMS:
        raise OptionError(f"{kind}.log must be one of {', '.join(LOG_FORMS)}, not {log!r}")
    if not is_number(ratio) or not 0 < ratio <= 1:  # type: ignore[operator]
        raise OptionError(f"{kind}.log_ratio must be in (0, 1], not {ratio!r}")
    if not is_int(int8_below) or int8_below < 0:  # type: ignore[operator]
        raise OptionError(f"{kind}.log_int8_below must be at least 0, not {int8_below!r}")


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
        log: what of the gradient log is copied, behind training: ``"none"``; ``"whole"``;
            ``"adaptive"``: lossy gradients, a hundredth of the bytes. A run that goes on from
            these is not exact, and says so.
        log_steps: steps of a segment; more where the cap of objects wants it (TierCheck batches
            5).
        log_ratio: of ``log="adaptive"``: the share of a large gradient's elements that is kept.
        log_int8_below: of fewer elements is a small one (TierCheck: 100,000).
    """

    where: str
    every_s: float = 0.0
    keep: int | None = None
    objects_per_hour: int | None = None
    log: str = "none"
    log_steps: int = 5
    log_ratio: float = 0.01
    log_int8_below: int = 100_000

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
        _check_log("TierOptions", self.log, self.log_ratio, self.log_int8_below)
        if not is_int(self.log_steps) or self.log_steps < 1:
            raise OptionError(f"TierOptions.log_steps must be at least 1, not {self.log_steps!r}")
        self._check_cap(1)

    def of_rank(self, world: int) -> TierOptions:
        """What holds for one of ``world`` ranks: no message says who has written how much, so
        each keeps to its part of the cap."""
        if self.objects_per_hour is None or world == 1:
            return self
        self._check_cap(world)
        return replace(self, objects_per_hour=max(1, self.objects_per_hour // world))

    def _check_cap(self, world: int) -> None:
        cap = self.objects_per_hour
        if self.log != "none" and cap is not None and cap < _LOG_OBJECTS_MIN * world:
            raise OptionError(
                f"TierOptions.objects_per_hour={cap} is too little for a log of {world} rank(s): a "
                "segment is two objects, and bases need some",
                hint=f'objects_per_hour={_LOG_OBJECTS_MIN * world} or more, or log="none"',
            )


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
        log: what of a gradient log is sent: ``"whole"``, or ``"adaptive"`` or ``"none"`` (see
            :class:`TierOptions`).
        log_ratio: of ``log="adaptive"``: the share of a large gradient's elements that is kept.
        log_int8_below: of fewer elements is a small one.
    """

    bytes_per_s: float | None = None
    host_bytes: int | None = None
    emulated_node: str | None = None
    if_there: bool = False
    log: str = "whole"
    log_ratio: float = 0.01
    log_int8_below: int = 100_000

    def __post_init__(self) -> None:
        _check_log("PeerOptions", self.log, self.log_ratio, self.log_int8_below)
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
    if not is_sequence(tiers):
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


def validate_tiers(
    tiers: Sequence[str | TierOptions],
    keep: int,
    peers: PeerOptions | None = None,
    *,
    logs: bool = False,
) -> tuple[TierOptions, ...]:
    """The places that a user has named.

    Args:
        keep: bases on disk: as many copies, where nothing else is said.
        logs: there is a gradient log.

    Raises:
        OptionError
    """
    found = [one if isinstance(one, TierOptions) else TierOptions(one) for one in tiers]
    asked = [one.log for one in found] + ([peers.log] if peers is not None else [])
    if not logs and ("adaptive" in asked or any(one.log != "none" for one in found)):
        raise OptionError(
            "tiers= wants the gradient log copied, and this method keeps none",
            hint='method="logged" keeps one; or leave log= out of TierOptions and PeerOptions',
        )
    return tuple(replace(one, every_s=float(one.every_s), keep=one.keep or keep) for one in found)
