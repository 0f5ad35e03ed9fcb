"""Reads a base into live objects, verifying every byte on the way.

Records, headers and objects are read and compared with the live state first; until then
nothing is touched. Then the tensors are streamed straight into live memory where the live
tensor has the saved dtype and shape. A damaged entry is noticed at its end: what has been
overwritten by then is made good by the next older base, or the caller is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from everstep.errors import FormatError, MismatchError
from everstep.format.digests import digest
from everstep.format.reader import ReadsAhead, read_body
from everstep.format.records import Marker
from everstep.format.writer import ChunkRing
from everstep.restore.load.pieces import Fill, PieceReads, fills, fills_by_file
from everstep.restore.load.saved_ranks import (
    SavedLayout,
    SavedRanks,
    View,
    ambiguous_tensors,
    read_object,
)
from everstep.restore.load.targets import (
    FiniteCheck,
    Targets,
    overlapping_entries,
    restrided,
    shared_memory_error,
    tie_changes,
)
from everstep.run.open_base import OpenBase, open_ranks
from everstep.run.scan import BaseFound
from everstep.run.shape import shape_of_base
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.machine import memory_available_bytes
from everstep.seams.progress import ProgressSink
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX
from everstep.state.layout.placement import Box
from everstep.state.providers.gradients import discard_gradients
from everstep.state.providers.provider import RestorePlan
from everstep.state.ranks.rank_share import SkippedState
from everstep.state.training_state import NOT_IN_STATE, State
from everstep.state.values.tensors import host_bytes, local_tensor
from everstep.state.values.tree import join, references

__all__ = [
    "CompleteRank",
    "CompletedRank",
    "LoadedBase",
    "check_contents",
    "compare_ranks",
    "contents",
    "load_base",
    "load_ranks",
    "rank_contents",
    "sections_left_out",
    "sections_of_base",
]


class CompletedRank(Protocol):
    """One rank's files of a multi-step base, with every entry replayed to the step of the base.

    Attributes:
        updates: number of updates replayed.
        doubt: why the entries may differ from those of training; "" if they are exact.
    """

    @property
    def updates(self) -> int: ...

    @property
    def doubt(self) -> str: ...

    def digests(self) -> Mapping[str, str]:
        """Return the digests of all entries, by name."""
        ...

    def fill(self, fills: Iterable[Fill]) -> set[str]:
        """Copy pieces of these files to their destinations and return their names."""
        ...


CompleteRank = Callable[[OpenBase], CompletedRank]
"""Replays the redo file of one rank's files, so that all entries are of the step of the base."""

_ANEW = "to begin anew take another folder"
_HINT = f"build the same model and optimizer, or resume(strict=False) to load the rest; {_ANEW}"
_LOOK = "everstep.load(path) reads a run without taking it over"
_HINT_OF_SEVERAL = (
    "build the same model and optimizer on every rank; resume(strict=False) loads the rest where "
    f"ranks leave out the same of what they have in common; {_ANEW}"
)


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """What was restored.

    Attributes:
        marker: of this rank, or, if it is new, of the first one that was there.
        size_bytes: that were read.
        mismatches: what was left out, with ``strict=False``.
        notes: what could not be taken back, in words.
        shape: what it consists of (see :func:`everstep.state.layout.entries.shape_digest`); of one
            rank's base only.
        redone: updates that its parts had not seen, and that were replayed (:mod:`.whole`).
        rank_bytes: of ``size_bytes``, those from the files of each rank that wrote some.
        finite: names of parameters that were seen to hold nothing but numbers as they came.
        layout: of a base that another number of ranks has saved: who had what; of as many in
            another layout, once that shows.
        restrided: names of tensors that lie otherwise in memory than when they were saved.
        tied: in words: which are one here, and were several, or the other way round.
        aliases: other names of tensors, and those of their entries.
        names: of the entries of its tensors, sorted; of one rank's base only.
    """

    marker: Marker
    size_bytes: int
    entries: int
    mismatches: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    shape: str = ""
    redone: int = 0
    rank_bytes: Mapping[int, int] = field(default_factory=dict)
    finite: frozenset[str] = frozenset()
    layout: SavedLayout | None = None
    restrided: frozenset[str] = frozenset()
    tied: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def left_out(self) -> list[str]:
        """Names of the parts of the base that the live state does not have."""
        return sections_left_out(self.mismatches)


def sections_left_out(mismatches: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the parts of a base that the live state does not have.

    Args:
        mismatches: of the whole state, ``(name, why)``.
    """
    return [name for name, what in mismatches if what == NOT_IN_STATE]


def contents(opened: OpenBase) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Object trees by section, and entries by every name, which fit each other; of a base that
    was saved by one rank.

    Raises:
        DamageError, FormatError: they do not, or cannot be read.
    """
    trees, entries = rank_contents(opened)
    for tree in trees.values():
        missing = [name for name in references(tree) if name not in entries]
        if missing:
            raise FormatError(f"entry {missing[0]!r} is referred to but not there")
    _refuse_unused(opened, trees, entries)
    return trees, entries


def rank_contents(opened: OpenBase) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The same of one rank's files of any base: several ranks' trees name what others have written,
    too. Errors as of :func:`contents`."""
    return _objects(opened), opened.entries()


def check_contents(opened: Sequence[OpenBase]) -> None:
    """Check what the files of all ranks mean together: everything that trees refer to is there,
    whole and once, and nothing else is.

    Raises:
        DamageError, FormatError: it is not so.
    """
    if opened[0].marker.world == 1:
        contents(opened[0])
        return
    saved = SavedRanks(opened)
    used = set[str]()
    for rank in saved.ranks:
        view = saved.view_of_all(rank)
        holes = dict[str, str]()
        for name, pieces in view.pieces.items():
            shape = view.entries[name].global_shape
            box = Box((0,) * len(shape), shape)
            _, missing = fills(pieces, box, memoryview(b""))
            if missing:
                holes[name] = f"{missing} of {box.size} elements"
            used |= {piece.entry.name for piece in pieces}
        if holes:
            raise saved.hole(holes)
    for place in (place for one in opened for place in one.placed()):
        name = place.entry.name
        if name not in used and not name.startswith(OBJECT_PREFIX):
            raise FormatError(f"entry {name!r} is there, but nothing refers to it")


def sections_of_base(filesystem: FileSystem, base: BaseFound) -> frozenset[str]:
    """Return the names of the parts of the state that a base has; reads headers.

    Raises:
        DamageError, FormatError, OSError: as of :meth:`.opened.OpenBase.open`.
    """
    with open_ranks(filesystem, base) as opened:
        names = [place.entry.name for one in opened for place in one.placed()]
    return frozenset(n.removeprefix(OBJECT_PREFIX) for n in names if n.startswith(OBJECT_PREFIX))


def load_base(
    opened: OpenBase,
    state: State,
    ring: ChunkRing,
    *,
    strict: bool,
    timeout_s: float,
    progress: ProgressSink,
    on_touch: Any = lambda: None,
) -> LoadedBase:
    """:func:`load_ranks`, of a base that was saved by one rank."""
    return load_ranks(
        [opened],
        state,
        ring,
        strict=strict,
        timeout_s=timeout_s,
        progress=progress,
        on_touch=on_touch,
    )


def load_ranks(
    opened: Sequence[OpenBase],
    state: State,
    ring: ChunkRing,
    *,
    strict: bool,
    timeout_s: float,
    progress: ProgressSink,
    on_touch: Any = lambda: None,
    partly: bool = False,
    whole: CompleteRank | None = None,
) -> LoadedBase:
    """Restores this rank's part of ``state``, whatever ranks and layout saved the base.

    Only entries that have something of this rank's are read, each as a whole, as its digest is
    over all of it.

    Args:
        opened: the files of all ranks that saved the base, or of those that are needed.
        strict: refuse any difference in names, shapes or dtypes; otherwise the rest is loaded.
        on_touch: called once, just before the first byte of live state is overwritten.
        partly: the files of other ranks are gone, this rank's own perhaps, too: what they had in
            common with those that are given counts.
        whole: makes files whole that are of several updates; None: they stay as they are, for the
            one rank that there is.

    Raises:
        MismatchError: listing every difference; nothing has been touched.
        RecoveryError: files of other ranks are needed; nothing has been touched.
        FormatError: without ``whole``: files of several ranks are of several updates.
        DamageError: naming file and entry; live state may be partly overwritten. Listing entries
            of which a part is missing; nothing has been touched.
    """
    alone = opened[0].marker.world == 1
    fuzzy = [one.shards[0][3].parent for one in opened if one.redo is not None]
    if fuzzy and whole is None and not alone:
        raise FormatError(f"{fuzzy[0]}: its tensors are of several updates", path=fuzzy[0])
    saved = SavedRanks(opened, contents(opened[0])[0] if alone else None, partly=partly)
    ahead = () if fuzzy and whole is not None else opened
    with _read_ahead(ahead, ring, timeout_s) as reads:  # while all is planned and compared
        about = ring, strict, timeout_s, progress, on_touch, reads, whole
        return _load(saved, opened, state, *about)


def compare_ranks(
    opened: Sequence[OpenBase],
    state: State,
    *,
    strict: bool,
    partly: bool,
    whole: CompleteRank,
) -> SkippedState:
    """What :func:`load_ranks` would leave out; touches nothing. Arguments and errors as there."""
    alone = opened[0].marker.world == 1
    saved = SavedRanks(opened, contents(opened[0])[0] if alone else None, partly=partly)
    planned = _plan(saved, opened, state, strict, whole)
    taken = {name: planned.view.pieces[name][0].placement.text for name, _ in planned.apart}
    return SkippedState(planned.mismatches, state.left_out(planned.plans, taken))


def _read_ahead(
    opened: Sequence[OpenBase], ring: ChunkRing, timeout_s: float
) -> contextlib.AbstractContextManager[ReadsAhead | None]:
    """The first file of a base of one rank, which is read as a whole in any case; nothing of one
    that claims more than this machine holds, before it has been looked at."""
    if not opened or opened[0].marker.world != 1 or not opened[0].shards:
        return contextlib.nullcontext()
    file, record, header, path = opened[0].shards[0]
    if record.length > memory_available_bytes():
        return contextlib.nullcontext()
    reads = ReadsAhead(file, header, record, path, ring, timeout_s=timeout_s)
    reads.start()
    return reads


def _load(
    saved: SavedRanks,
    opened: Sequence[OpenBase],
    state: State,
    ring: ChunkRing,
    strict: bool,
    timeout_s: float,
    progress: ProgressSink,
    on_touch: Any,
    reads: ReadsAhead | None,
    whole: CompleteRank | None,
) -> LoadedBase:
    planned = _plan(saved, opened, state, strict, whole)
    view = planned.view
    plans = planned.plans
    fuzzy = planned.fuzzy
    targets = Targets.of(plans, view.entries)
    shared = overlapping_entries(view, targets)
    memory = targets.memory.items()
    asked = ((name, view.pieces[name], box, host_bytes(tensor)) for name, (tensor, box) in memory)
    wanted = fills_by_file(saved, asked)
    looks = FiniteCheck.of(state, targets, view)
    on_touch()
    made = _Made()
    if whole is not None:
        made.read(saved, fuzzy, wanted, whole)
    rank_bytes, entries = _read(saved, wanted, ring, timeout_s, progress, looks, reads, made)
    tensors = targets.finish()
    for name, expected in shared.items():
        flat = local_tensor(tensors[name]).resolve_conj().resolve_neg().contiguous().cpu()
        if digest(host_bytes(flat)) != expected:
            raise shared_memory_error(name)
    held = {name for plan in plans.values() for name in plan.in_place}
    held |= set(
        filter(state.coverage.is_plain, targets.tensors)
    )  # anew: the one that it was is not
    tied = tie_changes(view, targets, held)
    notes = [*view.notes, *made.doubts, *tied]
    for section in state.restore_order():
        plan = plans[section]
        if not plan.left_out:
            tree = join(plan.tree, tensors)
            notes += state.providers[section].restore(tree, strict=strict)
    notes += discard_gradients(state.stateful_objects, state.optimizers.values())
    notes += state.unsaved_reasons  # is not restored, and so nothing is exact, on any rank
    placed = {name: pieces[0].placement.ranks for name, pieces in view.pieces.items()}
    state.rank_local.restored(placed, saved.world, state.ranks.world)
    shape = ""
    names = list[str]()
    if saved.world == 1:
        aliases = {k: v for _, _, header, _ in opened[0].shards for k, v in header.aliases.items()}
        shape = shape_of_base(opened[0].placed(), aliases, view.trees)
        names = [place.entry.name for place in opened[0].placed()]
    layout = None
    if saved.world != state.ranks.world:
        layout = SavedLayout.of(saved, opened, state.optimizers)
    size_bytes = sum(rank_bytes.values())
    return LoadedBase(
        planned.marker,
        size_bytes,
        entries,
        planned.mismatches,
        tuple(notes),
        shape,
        made.updates,
        rank_bytes=rank_bytes,
        finite=frozenset(looks.finite),
        layout=layout,
        restrided=restrided(view, tensors),
        tied=tied,
        aliases={name: one.name for name, one in view.entries.items() if one.name != name},
        names=tuple(sorted(name for name in names if not name.startswith(OBJECT_PREFIX))),
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is going to be restored of a base.

    Attributes:
        mismatches: what is left out, or taken as it may not be meant.
        apart: of these the latter (:mod:`.versions`).
        fuzzy: files of several updates.
    """

    view: View
    plans: Mapping[str, RestorePlan]
    marker: Marker
    mismatches: tuple[tuple[str, str], ...]
    apart: Sequence[tuple[str, str]]
    fuzzy: Sequence[OpenBase]


def _plan(
    saved: SavedRanks,
    opened: Sequence[OpenBase],
    state: State,
    strict: bool,
    whole: CompleteRank | None,
) -> _Planned:
    """Compares all of it with the live state; touches nothing. Errors as of :func:`load_ranks`."""
    view = saved.view(state)
    apart = ambiguous_tensors(saved, state, view)
    fuzzy = [one for one in opened if one.redo is not None]
    if apart and fuzzy and whole is not None:  # they may be of different updates, and alike
        for one in fuzzy:
            saved.settle(one.marker, whole(one).digests())
        view = saved.view(state)
        apart = ambiguous_tensors(saved, state, view)
    plans = state.plan_restore(view.trees, view.entries, view.left_out)
    mismatches = tuple(item for plan in plans.values() for item in plan.mismatches)
    mismatches = (*mismatches, *apart)
    marker = next((o.marker for o in opened if o.marker.rank == state.ranks.rank), opened[0].marker)
    if mismatches and strict:
        listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
        raise MismatchError(
            f"the checkpoint and the live state differ in {len(mismatches)} place(s):\n{listed}",
            mismatches=mismatches,
            step=marker.step,
            path=next((path.parent for *_, path in opened[0].shards), None),
            hint=_hint(mismatches, state),
        )
    return _Planned(view, plans, marker, mismatches, apart, fuzzy)


def _hint(mismatches: Sequence[tuple[str, str]], state: State) -> str:
    """Return what to do about them."""
    here = [name for name, what in mismatches if what == NOT_IN_STATE]
    if here and len(here) == len(mismatches):
        return f"{_LOOK}; to train on, give the whole state, or resume(strict=False) without these"
    return _HINT if state.ranks.world == 1 else _HINT_OF_SEVERAL


def _objects(opened: OpenBase) -> dict[str, Any]:
    """The decoded object trees by section, each verified against its digest.

    Raises:
        DamageError: naming the entry.
        FormatError: for bytes that are no objects.
    """
    trees: dict[str, Any] = {}
    for file, _, header, path in opened.shards:
        for index, place in enumerate(header.placed):
            name = place.entry.name
            if name.startswith(OBJECT_PREFIX):
                trees[name.removeprefix(OBJECT_PREFIX)] = read_object(file, header, index, path)
    return trees


@dataclass(slots=True)
class _Made:
    """What was read of files that had to be made whole.

    Attributes:
        numbers: of these files.
        rank_bytes: by rank that wrote them.
        updates: that some of it had not seen.
        doubts: why it is not bit for bit what training had, in words.
    """

    numbers: set[int] = field(default_factory=set)
    rank_bytes: dict[int, int] = field(default_factory=dict)
    entries: int = 0
    updates: int = 0
    doubts: list[str] = field(default_factory=list)

    def read(
        self,
        saved: SavedRanks,
        fuzzy: Sequence[OpenBase],
        wanted: Mapping[int, Sequence[Fill]],
        whole: CompleteRank,
    ) -> None:
        """Reads the files of these ranks, one rank after the other, if anything of them is
        wanted."""
        for one in fuzzy:
            rank = one.marker.rank
            mine = saved.files_of(rank)
            self.numbers.update(mine)
            fills_of = [fill for number in mine for fill in wanted.get(number, ())]
            if not fills_of:
                continue
            made = whole(one)
            self.entries += len(made.fill(fills_of))
            self.rank_bytes[rank] = one.size_bytes
            self.updates = max(self.updates, made.updates)
            doubt = f"its parts were brought to one step here, and that is not exact: {made.doubt}"
            self.doubts += [doubt] if made.doubt and doubt not in self.doubts else []


def _read(
    saved: SavedRanks,
    wanted: Mapping[int, Sequence[Fill]],
    ring: ChunkRing,
    timeout_s: float,
    progress: ProgressSink,
    looks: FiniteCheck,
    ahead: ReadsAhead | None,
    made: _Made,
) -> tuple[dict[int, int], int]:
    """Reads, and returns how many bytes of each rank that wrote them, and how many entries; a base
    of one rank as a whole, so that the digests of its files are compared, too.

    Args:
        made: what was read already.
    """
    entries = made.entries
    rank_bytes = made.rank_bytes
    for number, (file, record, header, path) in enumerate(saved.files):
        if number in made.numbers:
            continue
        reads = PieceReads(header, wanted.get(number, ()), partial(looks.came, number))
        whole = saved.world == 1

        def entry_done(index: int, number: int = number, reads: PieceReads = reads) -> None:
            reads.entry_done(index)
            looks.entry_done(number, index)

        read_body(
            file,
            header,
            record,
            path,
            ring,
            timeout_s=timeout_s,
            progress=progress,
            sink=reads.sink,
            wanted=None if whole else reads.wanted,
            on_entry=entry_done,
            reads=None if number else ahead,
        )
        places = header.placed if whole else [header.placed[index] for index in reads.wanted]
        entries += len(places)
        size_bytes = record.length if whole else sum(p.end - p.begin for p in places)
        writer = header.identity.rank
        rank_bytes[writer] = rank_bytes.get(writer, 0) + size_bytes
    return rank_bytes, entries


def _refuse_unused(
    opened: OpenBase, trees: Mapping[str, Any], entries: Mapping[str, Entry]
) -> None:
    """An entry that nothing refers to is none of ours; a hostile one could be of any size."""
    used = {entries[name].name for tree in trees.values() for name in references(tree)}
    for place in opened.placed():
        name = place.entry.name
        if name not in used and not name.startswith(OBJECT_PREFIX):
            raise FormatError(f"entry {name!r} is there, but nothing refers to it")
