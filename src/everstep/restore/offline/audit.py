"""Base A + log = base B, bit for bit: the proof of exactness, and a check for silent corruption.

A bit that flips in memory before it is digested is vouched for by every digest from then on.
Replay does not believe the later base but computes it again from the earlier one, from what was
consumed at each step; where the two differ, one of them is wrong (I9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Literal

from everstep.commit.lineage import BaseId, split_by_history
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
from everstep.format.digests import digest
from everstep.format.records import AuditRecord
from everstep.format.writer import ChunkRing
from everstep.restore.offline.job_state import JobState, rank_entry_name
from everstep.restore.offline.rebuild import Rebuilder, ReplayResult, replay_conditions
from everstep.restore.offline.run_log import RunLog
from everstep.restore.offline.state import OfflineState
from everstep.run.audits import NAMES_MAX
from everstep.run.chain import Chain, path_of
from everstep.run.open_base import open_ranks
from everstep.run.scan import BaseFound, newest_timeline, scan_base, scan_run
from everstep.run.segments import SegmentFound
from everstep.seams import Clock
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.fingerprint import fingerprint
from everstep.seams.machine import memory_available_bytes
from everstep.state.layout.entries import Entry
from everstep.version import __version__

__all__ = [
    "Audit",
    "Pair",
    "audit",
    "audit_newest",
    "pairs",
]

Verdict = Literal["equal", "different", "unchecked"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two consecutive bases of a history.

    Attributes:
        chain: the steps of the log between them, if it has all; otherwise as far as it goes.
    """

    before: BaseFound
    after: BaseFound
    chain: Chain

    @property
    def whole(self) -> bool:
        """Whether the log leads from one to the other."""
        return self.chain.end == (self.after.id.timeline, self.after.id.step)


@dataclass(frozen=True, slots=True)
class Audit:
    """What replay says about a base.

    Attributes:
        verdict: ``"equal"``: each of ``entries`` has the digest that replay gives.
            ``"different"``: ``differing`` have not. ``"unchecked"``: for ``reason``.
        reason: also where they are equal, or differ in what need not be equal, of how much
            worth that is; may be ``""``.
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
    """Consecutive bases of all histories, each pair once, in order."""
    log = rebuilder.log
    branches = log.inventory.branches
    usable = log.usable
    found: dict[tuple[BaseId, BaseId], Pair] = {}
    for number in sorted(branches):
        path = path_of(number, log.inventory.timelines)
        limits = dict(path)
        there = [
            key
            for key in sorted(usable, key=lambda key: (key.step, key.timeline))
            if key.timeline in limits
            and ((limit := limits[key.timeline]) is None or key.step <= limit)
        ]
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
    """Replays the log from one base to the next, and compares the digest of every entry.

    The later base's digests are those that its header vouches for; whether its bytes are what
    the digests say is for :func:`everstep.run.verify.verify_base`.

    Raises:
        NewerFormatError, UnavailableError, DeadlineError: nothing can be said at all.
    """
    before = pair.before.id
    after = pair.after.id
    chain = pair.chain

    def unchecked(why: str) -> Audit:
        return Audit(before, after, "unchecked", why)

    if before.step == after.step:
        return unchecked("both are of the same step")
    if not pair.whole:
        if len(chain.steps) == after.step - before.step:
            return unchecked("it is the first of its timeline: the log was of another")
        return unchecked(chain.stopped)
    try:
        expected, behind_mark = _digests(rebuilder, pair.after)
    except NewerFormatError:
        raise
    except (DamageError, FormatError, ReplayError, UnsupportedStateError, OSError) as error:
        return unchecked(f"{after} cannot be read: {_words(error)}")
    marks = rebuilder.log.index.marks
    assert pair.before.manifest is not None
    updates = marks[chain.steps[-1]].lsn - pair.before.manifest.markers[0].lsn
    try:
        state = rebuilder.load(pair.before, chain)
    except NewerFormatError:
        raise
    except (DamageError, FormatError, ReplayError, UnsupportedStateError, OSError) as error:
        return unchecked(f"{before} cannot be read: {_words(error)}")
    try:
        played = rebuilder.play(chain, state, on_step=on_step)
    except (NewerFormatError, MemoryError):
        raise
    except AuditError as error:  # the log itself says what training had
        steps = len(chain.steps)
        return Audit(before, after, "different", error.message, steps=steps, updates=updates)
    except EverstepError as error:
        if not _of_the_log(error):
            raise
        return unchecked(f"the log cannot be replayed: {error.message}")
    return _compared(pair, state, expected, played, updates, behind_mark=behind_mark)


def _compared(
    pair: Pair,
    state: OfflineState | JobState,
    expected: dict[str, tuple[str, Entry]],
    played: ReplayResult,
    updates: int,
    *,
    behind_mark: bool,
) -> Audit:
    found = state.digests()
    differing = [name for name, (wanted, _) in expected.items() if found.get(name) != wanted]
    differing += [name for name in found if name not in expected]
    for name, (_, entry) in expected.items():
        mine = state.entries.get(name)
        if mine is not None and _form(mine) != _form(entry) and name not in differing:
            differing.append(name)
    # Between the mark and the base the loop may have drawn random numbers, or noted a result.
    since = state.from_mark.intersection(differing if behind_mark else ())
    differing = [name for name in differing if name not in since]
    # What an optimizer has computed here may differ where replay is not exact; nothing else may.
    excused = state.replayed | state.unlogged if played.replay else set()
    firm = [name for name in differing if name not in excused]
    wrong = bool(firm or (played.surprise and not excused))
    verdict: Verdict = "different" if wrong else "equal"
    reason = played.surprise if wrong else ""
    if since and not wrong:
        reason = "save() took it behind the end of its step: what has changed since is not compared"
    if excused:
        reason = f"replay is not exact here: {played.replay}"
        if not wrong and differing:
            verdict = "unchecked"
            reason += f"; {len(differing)} replayed entries differ, as they may"
    return Audit(
        pair.before.id,
        pair.after.id,
        verdict,
        reason,
        steps=len(pair.chain.steps),
        updates=updates,
        entries=len(expected) - len(since),
        differing=tuple(firm or differing),
    )


def _digests(rebuilder: Rebuilder, base: BaseFound) -> tuple[dict[str, tuple[str, Entry]], bool]:
    """Digest and form of each entry; and whether the base was taken behind its step's mark."""
    with open_ranks(rebuilder.filesystem, base) as every:
        pass
    several = len(every) > 1
    if any(one.redo is not None for one in every):  # its entries are of several updates
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


def _of_the_log(error: EverstepError) -> bool:
    """Whether it says that a record cannot be used, and not that this machine cannot go on."""
    kinds = (DamageError, FormatError, ReplayError, UnsupportedStateError)
    return isinstance(error, kinds) or type(error) is StorageError


def _words(error: Exception) -> str:
    if isinstance(error, EverstepError):
        return error.message
    return str(getattr(error, "strerror", None) or error)


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
    why = replay_conditions(timelines.get(timeline) for timeline, _ in pair.chain.steps)[1]
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
