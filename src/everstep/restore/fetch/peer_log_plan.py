"""Which steps of other ranks' logs come back from the memory of peers: decisions without I/O.

Added to what each rank has of its own log, they may lead all ranks to a later step; then each
fetches those that it needs to get there, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from everstep.commit.job.offer_codec import run_from_wire, run_to_wire
from everstep.commit.job.offers import Choice, Offer
from everstep.commit.lineage import BaseId
from everstep.commit.log_reach import LogRun
from everstep.commit.peer_copies import merged
from everstep.format.records import TimelineRecord
from everstep.restore.fetch.peer_log import PeerLog

__all__ = ["LogTold", "logs_needed", "with_logs"]

_WIRE = PurePath("log of a peer")


@dataclass(frozen=True, slots=True)
class LogTold:
    """Steps of a rank's log that the keeper of some rank holds for it.

    Attributes:
        holder: that rank.
        record: of their timeline, as it was on the disk of ``source``.
        size_bytes, index_bytes, index_digest: see :class:`.peer_log.Packed`.
    """

    holder: int
    source: int
    record: bytes
    run: LogRun
    size_bytes: int
    index_bytes: int
    index_digest: str

    @property
    def base(self) -> BaseId:
        """Timeline and first step, which name them."""
        return BaseId(self.run.timeline, self.run.first)

    @property
    def place(self) -> tuple[BaseId, int, bool]:
        """Names them among all that the holder has."""
        return self.base, self.source, True

    @property
    def key(self) -> tuple[int, ...]:
        """Names them among all copies."""
        return self.holder, self.source, self.run.timeline, self.run.first, 1

    @classmethod
    def to_wire(cls, log: PeerLog) -> list[Any]:
        """What a holder says of what it has."""
        steps = log.steps
        about = [steps.memory.nbytes, steps.index_bytes, steps.index_digest]
        return [log.source, log.record, run_to_wire(steps.run), *about]

    @classmethod
    def from_wire(cls, holder: int, fields: Sequence[Any]) -> LogTold:
        """The inverse of :meth:`to_wire`."""
        source, record, run, size_bytes, index_bytes, index_digest = fields
        about = int(size_bytes), int(index_bytes), str(index_digest)
        return cls(holder, int(source), record, run_from_wire(*run), *about)


def with_logs(offers: Sequence[Offer], logs: Sequence[LogTold]) -> list[Offer]:
    """What the ranks could offer if each had what is held of its log."""
    found = []
    for offer in offers:
        mine = _of(offer, logs)
        timelines = dict(offer.timelines)
        for log in mine:
            if timelines.get(log.run.timeline) is None:
                timelines[log.run.timeline] = TimelineRecord.decode(log.record, _WIRE)
        runs = merged(offer.log, (log.run for log in mine)) if mine else offer.log
        found.append(replace(offer, log=runs, timelines=timelines))
    return found


def logs_needed(
    offers: Sequence[Offer], logs: Sequence[LogTold], choice: Choice
) -> dict[int, list[LogTold]]:
    """What each rank fetches to reach the step of ``choice``: that of :func:`with_logs`."""
    base = choice.base
    reach = choice.reach
    if base is None or reach is None:
        return {}
    found: dict[int, list[LogTold]] = {}
    for offer in offers:
        known: dict[BaseId, LogTold] = {}
        for log in _of(offer, logs):
            if any(base.step < s <= reach.step and not _has(offer, log, s) for s in _steps(log)):
                known.setdefault(log.base, log)
        if known:
            found[offer.rank] = [log for _, log in sorted(known.items())]
    return found


def _of(offer: Offer, logs: Sequence[LogTold]) -> list[LogTold]:
    """Steps of a rank's log, of timelines that are what its disk has under that number, or of which
    it has none (I7)."""
    found = []
    for log in logs:
        known = offer.timelines.get(log.run.timeline)
        if log.source == offer.rank and (known is None or known.encode() == log.record):
            found.append(log)
    return found


def _steps(log: LogTold) -> range:
    return range(log.run.first, log.run.last + 1)


def _has(offer: Offer, log: LogTold, step: int) -> bool:
    """Whether a rank has a step itself, with all updates since the one before."""
    at = step - log.run.first
    before = log.run.lsns[at - 1] if at else log.run.after
    return any(
        run.timeline == log.run.timeline
        and run.first <= step <= run.last
        and run.follows(step, before)
        for run in offer.log
    )
