"""Base A + log = base B, bit for bit: the proof of exactness, and a check for silent corruption.

A bit that flips in memory before it is digested is vouched for by every digest from then on.
Replay does not believe the later base but computes it again from the earlier one, from what was
consumed at each step; where the two differ, one of them is wrong (I9).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from everstep.commit.lineage import BaseId
from everstep.errors import (
    AuditError,
    DamageError,
    EverstepError,
    FormatError,
    NewerFormatError,
    ReplayError,
    StorageError,
    UnsupportedStateError,
)
from everstep.restore.offline.offline import OfflineState
from everstep.restore.offline.offline_job import JobState, name_of_rank
from everstep.restore.offline.rebuild import Played, Rebuilder
from everstep.run.chain import Chain, path_of
from everstep.run.open_base import open_ranks
from everstep.run.scan import BaseFound
from everstep.state.layout.entries import Entry

__all__ = ["Audit", "Pair", "audit", "pairs"]

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
    played: Played,
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
            found[name_of_rank(name, rank) if several else name] = hex_, place.entry
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
