"""What a run may take of each place where bytes live: computed once, printed at the start.

Records count, not only the state: headers, markers and manifests of a small state are not little
beside it. What a failure leaves (a base that was cut off) goes with the next base, and is not in
these numbers; nor is a log that goes to disk, which is printed for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.filesize import decimal

from everstep.commit.peers import NEEDED_MAX
from everstep.config.options import Options
from everstep.format.header import ShardIdentity
from everstep.format.plan import plan_files
from everstep.state.ranks.ranks import RankInfo
from everstep.state.survey.survey import Shape
from everstep.tiers.options import TierOptions
from everstep.tiers.rate import pace_s

__all__ = ["Bounds", "bounds_of", "copies_announcement"]

_RECORD_BYTES = 1024  # of a marker for one file; about 450 are used
_RUN_BYTES = 8192  # run.json, and a few timelines
_DRIFT_BYTES = 4096  # objects may grow so much before a base is planned anew
_DRIFT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of this rank, at most, while nothing fails.

    Attributes:
        host_bytes: host memory for captured state, the log and a replica.
        peer_bytes: host memory for copies of other ranks.
        base_bytes: of one base with its records, as files.
        beside: bases that are on the disk before the oldest goes, beyond those to keep: the one
            that is written; of several ranks one more, for rank 0 says when the oldest goes, and
            the others write the next one meanwhile; and those that stay because peers have them.
        disk_bytes: of all bases in the run folder.
        copies: where copies are made, and what this rank has in each place.
    """

    host_bytes: int
    peer_bytes: int
    base_bytes: int
    beside: int
    disk_bytes: int
    copies: tuple[tuple[str, int], ...] = ()

    @property
    def other_bytes(self) -> int:
        """Of the run folder, beside bases and log."""
        return _RUN_BYTES


def bounds_of(
    options: Options,
    shape: Shape,
    ranks: RankInfo,
    places: Sequence[TierOptions] = (),
    *,
    host_bytes: int,
    peer_bytes: int,
) -> Bounds:
    """The bounds of a rank whose state has this shape now."""
    base_bytes = _base_bytes(shape, ranks)
    copies = tuple(
        (place.where, ((place.keep or options.keep) + 1) * base_bytes + _RUN_BYTES)
        for place in places
    )
    beside = 1 if ranks.world == 1 else 2
    if len(set(ranks.nodes)) > 1 and not options.method.in_memory:
        beside += max(0, 1 + NEEDED_MAX - options.keep)
    disk_bytes = (options.keep + beside) * base_bytes + _RUN_BYTES
    return Bounds(host_bytes, peer_bytes, base_bytes, beside, disk_bytes, copies)


def copies_announcement(
    bounds: Bounds, places: Sequence[TierOptions], world: int, gradients_bytes: int
) -> str:
    """The line printed at start about copies: how many where, and what they take.

    Args:
        gradients_bytes: that the log of this rank takes in each step, residuals included; 0: not
            known, as they are compressed.
    """
    said = [
        f"{place.where}: keep {place.keep}, up to {decimal(size_bytes)}"
        f"{_log_announcement(place, gradients_bytes)}{_cap_announcement(place, world)}"
        for place, (_, size_bytes) in zip(places, bounds.copies, strict=True)
    ]
    of = "" if world == 1 else " of this rank"
    return f"copies{of} in {'; in '.join(said)}"


def _log_announcement(place: TierOptions, gradients_bytes: int) -> str:
    if place.log == "none":
        return ""
    size_bytes = gradients_bytes
    how = "whole"
    if place.log == "adaptive":  # of a large gradient: float16 values and int32 indices, of four
        how = "lossy"
        size_bytes = round(gradients_bytes * place.log_ratio * 6 / 4)
    about = f", about {decimal(size_bytes)} in each step" if size_bytes else ""
    return f", and the log behind them, {how}{about}"


def _cap_announcement(place: TierOptions, world: int) -> str:
    cap = place.objects_per_hour
    part = place.of_rank(world).objects_per_hour
    if cap is None:
        return ""
    whose = "" if world == 1 else f" by all {world} ranks, {part} by this one"
    pace = "" if place.log == "none" else f" (a segment of the log every {pace_s(part):.0f} s)"
    return f", at most {cap} objects an hour{whose}{pace}"


def _base_bytes(shape: Shape, ranks: RankInfo) -> int:
    identity = ShardIdentity("0" * 32, 0, 0, 0, ranks.rank, ranks.world, True)
    files = plan_files(identity, shape.entries, shape.aliases, shape.objects_bytes)
    drift = sum(max(_DRIFT_BYTES, n // _DRIFT_SHARE) for n in shape.objects_bytes.values())
    marker = _RECORD_BYTES * max(1, len(files))
    # The marker, and the manifest, which has those of all ranks.
    return sum(file.size_bytes for file in files) + drift + (2 + ranks.world) * marker
