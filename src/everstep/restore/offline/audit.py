"""Audit a base: replay the log from the base before it, and compare bit for bit.

A bit that flips in memory before it is digested passes every later check of digests. Replay does
not trust the later base: it computes it again from the earlier one and the inputs of each step.
Where the two differ, one of them is wrong (I9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Literal

from everstep.commit import BaseId, split_by_history
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    FencedError,
    FormatError,
    NewerFormatError,
    ReplayError,
    StorageError,
    UnsupportedStateError,
)
from everstep.format import digest
from everstep.format.records import AuditRecord
from everstep.format.writer import ChunkRing
from everstep.restore.offline.job_state import JobState, rank_entry_name
from everstep.restore.offline.rebuild import Rebuilder, ReplayResult
from everstep.restore.offline.run_log import RunLog, bases_on
from everstep.restore.redo import replay_conditions
from everstep.run import BaseFound, Chain, newest_timeline, scan_base, scan_run
from everstep.run.chain import path_of
from everstep.run.open_base import open_ranks
from everstep.run.segments import SegmentFound
from everstep.run.verify import NAMES_MAX
from everstep.seams import Clock, FileSystem
from everstep.seams.fingerprint import fingerprint
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout import Entry
from everstep.version import __version__

Verdict = Literal["equal", "different", "unchecked"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive bases of a history.

    Attributes:
        chain: logged steps between them; incomplete if the log stops before the later base.
    """

    before: BaseFound
    after: BaseFound
    chain: Chain

    @property
    def is_connected(self) -> bool:
        """Return True if the log leads from one base to the other."""
        return self.chain.end == (self.after.id.timeline, self.after.id.step)


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit.

    Attributes:
        before: base that replay started from.
        after: base that was audited.
        verdict: ``"equal"``: each of ``entries`` has the digest that replay gives. ``"different"``:
            those in ``differing`` have not. ``"unchecked"``: nothing is proven, see ``reason``.
        reason: why nothing is proven, or what limits the proof; may be ``""``.
        steps, updates: number of replayed steps and updates.
        entries: number of compared entries.
        differing: names of entries, in the order of the base's files.
    """

    before: BaseId
    after: BaseId
    verdict: Verdict
    reason: str = ""
    steps: int = 0
    updates: int = 0
    entries: int = 0
    differing: tuple[str, ...] = ()


def pairs(rebuilder: Rebuilder) -> list[Pair]:
    """Return consecutive bases of all histories, each pair once, in order."""
    log = rebuilder.log
    branches = log.inventory.branches
    usable = log.usable
    found: dict[tuple[BaseId, BaseId], Pair] = {}
    for number in sorted(branches):
        path = path_of(number, log.inventory.timelines)
        there = sorted(bases_on(path, usable), key=lambda key: (key.step, key.timeline))
        for before, after in pairwise(there):
            if (before, after) in found:
                continue
            chain = log.chain(usable[before], path)
            steps = tuple(item for item in chain.steps if item[1] <= after.step)
            cut = Chain(before, steps, chain.stopped)
            found[before, after] = Pair(usable[before], usable[after], cut)
    return [found[key] for key in sorted(found, key=lambda key: (key[1], key[0]))]


def audit(
    rebuilder: Rebuilder, pair: Pair, on_step: Callable[[int], None] = lambda step: None
) -> Audit:
    """Replay the log from one base to the next, and compare the digest of every entry.

    The digests of the later base are those in its headers; :func:`everstep.run.verify.verify_base`
    checks that its bytes match them.

    Args:
        rebuilder: access to the run.
        pair: the two bases.
        on_step: called after each replayed step.

    Raises:
        NewerFormatError, UnavailableError, DeadlineError: no verdict is possible.
    """
    before = pair.before.id
    after = pair.after.id
    chain = pair.chain

    def unchecked(why: str) -> Audit:
        return Audit(before, after, "unchecked", why)

    if before.step == after.step:
        return unchecked("both bases are of the same step")
    if not pair.is_connected:
        if len(chain.steps) == after.step - before.step:
            return unchecked(
                "it is the first base of its timeline; the log belongs to the timeline before"
            )
        return unchecked(chain.stopped)
    read = after
    try:
        expected, after_mark = _digests(rebuilder, pair.after)
        read = before
        state = rebuilder.load(pair.before, chain)
    except NewerFormatError:
        raise
    except (DamageError, FormatError, ReplayError, UnsupportedStateError, OSError) as error:
        return unchecked(f"{read} cannot be read: {_message_of(error)}")
    marks = rebuilder.log.index.marks
    assert pair.before.manifest is not None
    updates = marks[chain.steps[-1]].lsn - pair.before.manifest.markers[0].lsn
    try:
        played = rebuilder.play(chain, state, on_step=on_step)
    except (NewerFormatError, MemoryError):
        raise
    except AuditError as error:
        steps = len(chain.steps)
        return Audit(before, after, "different", error.message, steps=steps, updates=updates)
    except EverstepError as error:
        if not _is_log_defect(error):
            raise
        return unchecked(f"the log cannot be replayed: {error.message}")
    return _compared(pair, state, expected, played, updates, after_mark=after_mark)


def _compared(
    pair: Pair,
    state: JobState,
    expected: dict[str, tuple[str, Entry]],
    played: ReplayResult,
    updates: int,
    *,
    after_mark: bool,
) -> Audit:
    differing = _differing(state, expected)
    # A base taken after the mark: the loop may have drawn random numbers or changed its own objects
    # since, so entries restored from the mark need not match.
    changed = state.from_mark.intersection(differing if after_mark else ())
    differing = [name for name in differing if name not in changed]
    # Where replay is inexact, entries computed by an optimizer may differ; no others may.
    excused = state.replayed | state.unlogged if played.replay else set()
    firm = [name for name in differing if name not in excused]
    wrong = bool(firm or (played.surprise and not excused))
    verdict: Verdict = "different" if wrong else "equal"
    reason = played.surprise if wrong else ""
    if changed and not wrong:
        reason = "save() took it after the end of its step: changes since then are not compared"
    if excused:
        reason = f"replay is not exact here: {played.replay}"
        if not wrong and differing:
            verdict = "unchecked"
            reason += f"; {len(differing)} replayed entries differ"
    return Audit(
        pair.before.id,
        pair.after.id,
        verdict,
        reason,
        steps=len(pair.chain.steps),
        updates=updates,
        entries=len(expected) - len(changed),
        differing=tuple(firm or differing),
    )


def _differing(state: JobState, expected: dict[str, tuple[str, Entry]]) -> list[str]:
    """Return the names of entries with another digest or form than expected, or of one side
    only."""
    found = state.digests()
    entries = state.entries
    differing = [name for name, (wanted, _) in expected.items() if found.get(name) != wanted]
    differing += [name for name in found if name not in expected]
    for name, (_, entry) in expected.items():
        mine = entries.get(name)
        if mine is not None and _form(mine) != _form(entry) and name not in differing:
            differing.append(name)
    return differing


def _digests(rebuilder: Rebuilder, base: BaseFound) -> tuple[dict[str, tuple[str, Entry]], bool]:
    """Return digest and entry of each name; and True if the base was taken after the mark of its
    step."""
    # Only the headers are used: the files are closed again at once.
    with open_ranks(rebuilder.filesystem, base) as every:
        pass
    several = len(every) > 1
    # The entries of a multi-step base are of several updates: complete them before comparing.
    if any(one.redo is not None for one in every):
        state = rebuilder.load(base, Chain(base.id, (), ""))
        objects = Entry.whole("objects", "U8", (0,))
        entries = state.entries
        digests = state.digests().items()
        return {name: (hex_, entries.get(name, objects)) for name, hex_ in digests}, False
    headers = [(one.marker.rank, header) for one in every for _, _, header, _ in one.shards]
    found: dict[str, tuple[str, Entry]] = {}
    for rank, header in headers:
        for place, hex_ in zip(header.placed, header.digests, strict=True):
            name = place.entry.name
            found[rank_entry_name(name, rank) if several else name] = hex_, place.entry
    return found, any(header.identity.behind_mark for _, header in headers)


def _form(entry: Entry) -> tuple[object, ...]:
    part = entry.global_shape, entry.global_offset, entry.placement
    return entry.dtype, entry.shape, entry.logical_dtype, *part


def _is_log_defect(error: EverstepError) -> bool:
    """Return True if the error means that a record is unusable; False if this machine failed."""
    kinds = (DamageError, FormatError, ReplayError, UnsupportedStateError)
    return isinstance(error, kinds) or type(error) is StorageError


def _message_of(error: Exception) -> str:
    if isinstance(error, EverstepError):
        return error.message
    return str(getattr(error, "strerror", None) or error)


_CHUNKS = 4
_READERS = 2
_TIMEOUT_S = 120.0
# Memory of replay, measured and rounded up: torch; the state and temporaries of an update; segments
# being read; updates waiting to be applied together.
_TORCH_BYTES = 400 << 20
_STATES = 2
_SEGMENTS = 6
_STEPS = 12
_NAME_CHARS_MAX = 500
_REASON_CHARS_MAX = 1000


def audit_newest(
    filesystem: FileSystem, run: PurePath, timeline: int, clock: Clock
) -> AuditRecord | str:
    """Audit the newest base that can be audited and has no audit yet.

    Args:
        filesystem: file system of the run.
        run: run folder.
        timeline: timeline that the keeper serves.
        clock: clock for the record's time.

    Returns:
        The record of the audit; or, as text, the reason why there is none.

    Raises:
        FencedError: a newer timeline has begun.
        EverstepError, OSError: no verdict is possible.
    """
    inventory = scan_run(filesystem, run)
    log = RunLog.of(filesystem, inventory)
    ring = ChunkRing(_CHUNKS, _READERS)
    try:
        rebuilder = Rebuilder(filesystem, log, ring, timeout_s=_TIMEOUT_S)
        pair = _newest(rebuilder)
        if pair is None:
            return "no base without an audit can be reached by the log on disk"
        segments = _between(log, pair)
        if shortage := _memory_shortage(pair, segments):
            return shortage

        def check_not_fenced(step: int) -> None:
            # Checked at each step: a keeper that was fenced off may write no finding to the run
            # (I11).
            newest = newest_timeline(filesystem, run)
            if newest > timeline:
                raise FencedError(f"timeline {newest} has taken over the run from {timeline}")

        found = _audited(rebuilder, pair, segments, check_not_fenced)
        # Retention may delete files during the audit: that is no finding about the base.
        if found.verdict == "unchecked" and not _still_exists(filesystem, run, pair, segments):
            return f"{pair.before.id}, or the log before it, was deleted during the audit"
        return _record(pair, found, clock)
    finally:
        ring.close()


def _newest(rebuilder: Rebuilder) -> Pair | None:
    """Return the newest two bases of the current history that the log connects, or would connect if
    it were not damaged; None if they have an audit."""
    log = rebuilder.log
    here = set(split_by_history(log.usable, log.inventory.branches)[0])
    for pair in reversed(pairs(rebuilder)):
        connected = pair.is_connected or any(one.problem for one in _between(log, pair))
        # The newest pair wins and nothing is queued: an older pair is not audited later.
        if {pair.before.id, pair.after.id} <= here and connected:
            return None if pair.after.audit is not None else pair
    return None


def _between(log: RunLog, pair: Pair) -> list[SegmentFound]:
    """Return the segments of the steps between two bases, in their history."""
    before = pair.before.id
    after = pair.after.id
    ends = {
        timeline: after.step if limit is None else min(after.step, limit)
        for timeline, limit in path_of(after.timeline, log.inventory.timelines)
        if timeline >= before.timeline
    }
    return [
        one
        for one in log.segments
        if one.last > before.step and one.after < ends.get(one.timeline, 0)
    ]


def _memory_shortage(pair: Pair, segments: list[SegmentFound]) -> str:
    """Return why memory does not suffice; "" if it does. An audit may take half of the available
    memory."""
    assert pair.before.manifest is not None
    ranks = len(pair.before.manifest.markers)  # their records are held at the same time
    largest = ranks * max((one.size_bytes for one in segments), default=0)
    per_step = ranks * max(
        (one.size_bytes // (one.last - one.after) for one in segments), default=0
    )
    need = _TORCH_BYTES + _STATES * max(pair.before.size_bytes, pair.after.size_bytes)
    need += _SEGMENTS * largest + _STEPS * per_step
    left = memory_available_bytes()
    if need <= left // 2:
        return ""
    return (
        f"an audit of {pair.after.id} takes {need} bytes of memory; half of the {left} available "
        "bytes may be used"
    )


def _audited(
    rebuilder: Rebuilder,
    pair: Pair,
    segments: list[SegmentFound],
    check_not_fenced: Callable[[int], None],
) -> Audit:
    """Audit a pair, unless the outcome would prove nothing."""
    before = pair.before.id
    after = pair.after.id
    broken = [one.problem for one in segments if one.problem]
    if broken and not pair.is_connected:
        return Audit(before, after, "unchecked", f"the log is damaged: {broken[0]}")
    timelines = rebuilder.log.inventory.timelines
    why = replay_conditions(timelines.get(timeline) for timeline, _ in pair.chain.steps)[1]
    if why:
        return Audit(before, after, "unchecked", f"replay is not exact here: {why}")
    return audit(rebuilder, pair, check_not_fenced)


def _still_exists(
    filesystem: FileSystem, run: PurePath, pair: Pair, segments: list[SegmentFound]
) -> bool:
    """Return True if retention has deleted nothing of the pair and its log."""
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
        # Bound to the manifest: a base that is written again under the same name was not audited.
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
