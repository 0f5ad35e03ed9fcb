"""Markers of all ranks that are those of no base."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.format.records import Marker, manifest_of
from everstep.state.layout.replica_digest import describe_mismatch

__all__ = ["disagreement"]


def disagreement(world: int, markers: Mapping[int, Marker]) -> str:
    """Why all markers together are those of no base, and never will be; "" if they are, or
    some are missing."""
    if len(markers) < world or manifest_of(markers) is not None:
        return ""
    by_lsn: dict[int, list[int]] = {}
    for rank, marker in sorted(markers.items()):
        by_lsn.setdefault(marker.lsn, []).append(rank)
    if why := describe_mismatch({rank: marker.common for rank, marker in markers.items()}):
        return (
            f"the ranks differ in what they have in common ({why}), so each leaves to others "
            "what these do not write; give every rank the same state (the DDP wrapper or the "
            "module in it, on all of them), and freeze and train the same layers on each"
        )
    if len(by_lsn) == 1:
        return "the markers of the ranks contradict each other"
    counted = ", ".join(
        f"rank(s) {' '.join(map(str, ranks))}: {lsn}" for lsn, ranks in sorted(by_lsn.items())
    )
    return (
        f"the ranks have counted different numbers of optimizer updates ({counted}); each of "
        "them has to make as many in a step as the others, or leave out as many"
    )
