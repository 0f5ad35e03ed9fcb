"""Reasons why a restored state is not bit for bit that of training (I9)."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.commit.lineage import BaseId
from everstep.format.records import AuditRecord, Marker, TimelineRecord
from everstep.restore.load.load import LoadedBase
from everstep.run.audits import describe_audit

__all__ = ["why_inexact"]


def why_inexact(
    replay: str,
    audit: AuditRecord | None,
    loaded: LoadedBase | None,
    base: BaseId | None,
    markers: Iterable[Marker],
    timelines: Iterable[TimelineRecord | None],
) -> str:
    """Return in words why a state is not exact; "" if it is.

    Args:
        replay: why the replay of the log was not exact; "" if it was.
        audit: audit that the state rests on.
        loaded: result of loading the base; None on a fresh start, like ``base``.
        base: base that was loaded.
        markers: markers of the ranks that wrote it.
        timelines: timeline records of the run.
    """
    if replay:
        return replay
    if audit is not None and audit.verdict == "different":
        return describe_audit(audit)
    if loaded is None or base is None:
        return ""
    found = []
    if of := {marker.rank: marker.inexact for marker in markers if not marker.exact}:
        ranks = f" (rank(s) {', '.join(map(str, sorted(of)))})" if loaded.marker.world > 1 else ""
        reasons = "; ".join(dict.fromkeys(filter(None, of.values())))
        why = ": ".join(filter(None, (_lineage(base, timelines), reasons)))
        found.append(f"the base of {base}{ranks} is marked as not exact: {why}")
    if loaded.mismatches:
        name, problem = loaded.mismatches[0]
        more = _more(len(loaded.mismatches), "mismatched")
        found.append(f"{name!r} was left out, or may differ: {problem}{more}")
    if loaded.notes:
        found.append(f"{loaded.notes[0]}{_more(len(loaded.notes), 'notes')}")
    return "; ".join(found)


def _more(count: int, where: str) -> str:
    return f" (and {count - 1} more, see Recovery.{where})" if count > 1 else ""


def _lineage(base: BaseId, timelines: Iterable[TimelineRecord | None]) -> str:
    records = {one.timeline: one for one in timelines if one is not None}
    since = None
    record = records.get(base.timeline)
    while record is not None and not record.exact:
        since = record
        parent = record.parent
        # A forged record may name a later parent, or itself: ignore it, or the loop never ends.
        record = records.get(parent) if parent is not None and parent < since.timeline else None
    if since is None:
        return "it was not saved from the complete, exact state of training"
    return (
        f"it descends from the state with which timeline {since.timeline} began at step "
        f"{since.fork_step}, which was not exact"
    )
