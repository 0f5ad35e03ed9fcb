"""Audits the newest base of a history that can be audited and was not yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from everstep.commit.lineage import split_by_history
from everstep.errors import FencedError
from everstep.format.digests import digest
from everstep.format.records import AuditRecord
from everstep.format.writer import ChunkRing
from everstep.restore.offline.audit import Audit, Pair, audit, pairs
from everstep.restore.offline.logged import RunLog
from everstep.restore.offline.rebuild import Rebuilder, conditions
from everstep.run.audits import NAMES_MAX
from everstep.run.scan import newest_timeline, scan_base, scan_run
from everstep.run.segments import SegmentFound
from everstep.seams import Clock
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.fingerprint import fingerprint
from everstep.seams.machine import memory_available_bytes
from everstep.version import __version__

__all__ = ["audit_newest"]

_CHUNKS = 4
_READERS = 2
_TIMEOUT_S = 120.0
# What replay takes, measured and rounded up: the state and what an update makes beside it;
# segments that are read, and that updates keep which wait to be applied together.
_TORCH_BYTES = 400 << 20
_STATES = 2
_SEGMENTS = 6
_STEPS = 12
_NAME_CHARS_MAX = 500
_REASON_CHARS_MAX = 1000


def audit_newest(
    filesystem: FileSystem, run: PurePath, timeline: int, clock: Clock
) -> AuditRecord | str:
    """What the newest audit says that can be made now; or why there is none, in words.

    Args:
        timeline: that the keeper serves.

    Raises:
        FencedError: a newer timeline has begun.
        EverstepError, OSError: nothing can be said.
    """
    inventory = scan_run(filesystem, run)
    log = RunLog.of(filesystem, inventory)
    ring = ChunkRing(_CHUNKS, _READERS)
    try:
        rebuilder = Rebuilder(filesystem, log, ring, timeout_s=_TIMEOUT_S)
        pair = _newest(rebuilder)
        if pair is None:
            return "there is no base that the log on disk leads to and that has no audit yet"
        segments = _between(log, pair)
        if lacking := _lack_of_memory(pair, segments):
            return lacking

        def still_ours(step: int) -> None:
            newest = newest_timeline(filesystem, run)
            if newest > timeline:
                raise FencedError(f"timeline {newest} has taken the run over from {timeline}")

        found = _audited(rebuilder, pair, segments, still_ours)
        if found.verdict == "unchecked" and not _there(filesystem, run, pair, segments):
            return f"{pair.before.id}, or the log behind it, was deleted while it was audited"
        return _record(pair, found, clock)
    finally:
        ring.close()


def _newest(rebuilder: Rebuilder) -> Pair | None:
    """The newest two bases of the current history that the log connects, or would, were it not
    damaged; None if that was looked at before."""
    log = rebuilder.log
    here = set(split_by_history(log.usable, log.inventory.branches)[0])
    for pair in reversed(pairs(rebuilder)):
        connected = pair.whole or any(one.problem for one in _between(log, pair))
        if {pair.before.id, pair.after.id} <= here and connected:
            return None if pair.after.audit is not None else pair
    return None


def _between(log: RunLog, pair: Pair) -> list[SegmentFound]:
    """The segments of the steps between two bases."""
    return [
        one
        for one in log.segments
        if one.after < pair.after.id.step
        and one.last > pair.before.id.step
        and pair.before.id.timeline <= one.timeline <= pair.after.id.timeline
    ]


def _lack_of_memory(pair: Pair, segments: list[SegmentFound]) -> str:
    """Why there is not enough; "" if there is: all that it takes is half of what is left."""
    assert pair.before.manifest is not None
    ranks = len(pair.before.manifest.markers)  # that are read and replayed side by side
    largest = ranks * max((one.size_bytes for one in segments), default=0)
    a_step = ranks * max((one.size_bytes // (one.last - one.after) for one in segments), default=0)
    need = _TORCH_BYTES + _STATES * max(pair.before.size_bytes, pair.after.size_bytes)
    need += _SEGMENTS * largest + _STEPS * a_step
    left = memory_available_bytes()
    if need <= left // 2:
        return ""
    return f"an audit of {pair.after.id} takes {need} bytes of memory; it may have half of {left}"


def _audited(
    rebuilder: Rebuilder,
    pair: Pair,
    segments: list[SegmentFound],
    still_ours: Callable[[int], None],
) -> Audit:
    """The audit; none is tried where its outcome would prove nothing."""
    before = pair.before.id
    after = pair.after.id
    broken = [one.problem for one in segments if one.problem]
    if broken and not pair.whole:
        return Audit(before, after, "unchecked", f"the log is damaged: {broken[0]}")
    timelines = rebuilder.log.inventory.timelines
    why = conditions(timelines.get(timeline) for timeline, _ in pair.chain.steps)[1]
    if why:
        return Audit(before, after, "unchecked", f"replay is not exact here: {why}")
    return audit(rebuilder, pair, still_ours)


def _there(filesystem: FileSystem, run: PurePath, pair: Pair, segments: list[SegmentFound]) -> bool:
    """Whether retention has left everything where it was."""
    try:
        for base in (pair.before, pair.after):
            if scan_base(filesystem, run, base.id).manifest != base.manifest:
                return False
        return all(any(filesystem.scan(segment.path)) for segment in segments)
    except FileNotFoundError:
        return False


def _record(pair: Pair, found: Audit, clock: Clock) -> AuditRecord:
    manifest = pair.after.manifest
    assert manifest is not None
    return AuditRecord(
        run=manifest.markers[0].run,
        timeline=found.after.timeline,
        step=found.after.step,
        manifest=digest(manifest.encode()),
        before=(found.before.timeline, found.before.step),
        verdict=found.verdict,
        reason=found.reason[:_REASON_CHARS_MAX],
        steps=found.steps,
        updates=found.updates,
        entries=found.entries,
        count=len(found.differing),
        differing=tuple(name[:_NAME_CHARS_MAX] for name in found.differing[:NAMES_MAX]),
        fingerprint={"everstep": __version__, **fingerprint()},
        created_unix_s=clock.unix_s(),
    )
