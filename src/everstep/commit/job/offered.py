"""The timelines that the ranks of a job that starts tell each other of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.errors import RecoveryError
from everstep.format.records import TimelineRecord

if TYPE_CHECKING:
    from everstep.commit.job.offers import Offer

__all__ = ["timelines_of"]


def timelines_of(
    offers: Sequence[Offer],
) -> tuple[dict[int, TimelineRecord | None], set[tuple[int, int]]]:
    """The timelines that there are, and ``(rank, timeline)`` of what belongs to none of them.

    Two starts that saw none of each other's disks may both have opened a timeline of the same
    number. One that has neither bases nor a log was never trained on and does not count.

    Raises:
        RecoveryError: both were trained on: nobody but a person can say which one is meant.
    """
    records: dict[int, TimelineRecord | None] = {}
    apart: set[tuple[int, int]] = set()
    for number in sorted({number for offer in offers for number in offer.timelines}):
        kinds: dict[bytes, tuple[TimelineRecord, list[int]]] = {}
        for offer in offers:
            record = offer.timelines.get(number)
            if record is not None:
                kinds.setdefault(record.encode(), (record, []))[1].append(offer.rank)
        used = {
            key
            for key, (_, ranks) in kinds.items()
            if any(_trained_on(offer, number) for offer in offers if offer.rank in ranks)
        }
        if len(used) > 1:
            ranks = " and ".join(str(kinds[key][1]) for key in sorted(used))
            raise RecoveryError(
                f"timeline {number} was opened by two starts of the job that knew nothing of each "
                f"other, and both trained on: the disks of ranks {ranks} differ",
                hint="start with the hosts of one of them only, and empty the others' run folders",
            )
        wins = next(iter(used), None) or (min(kinds) if kinds else None)
        records[number] = None if wins is None else kinds[wins][0]
        apart |= {(r, number) for key in kinds if key != wins for r in kinds[key][1]}
    return records, apart


def _trained_on(offer: Offer, timeline: int) -> bool:
    """Whether a rank has anything of a timeline but its record."""
    logged = any(run.timeline == timeline for run in offer.logs)
    return logged or any(base.timeline == timeline for base in offer.bases)
