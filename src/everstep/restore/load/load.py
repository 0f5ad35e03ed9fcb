"""Load a base into live objects, verifying every byte.

Records, headers and objects are read first and compared with the live state; until then nothing is
modified. Then tensors are streamed straight into live memory if dtype and shape match. A damaged
entry is detected only at its end. The caller then loads the next older base, or raises.

State of a restore in progress: a base, and the steps of the log replayed on it.

Check that the parameters of a state are finite.

A non-finite parameter is restored like any other, but the user is warned about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from everstep.commit import BaseId
from everstep.errors import FormatError, MismatchError
from everstep.format import Marker, digest
from everstep.format.reader import OpenShard, read_body
from everstep.format.writer import ChunkRing
from everstep.restore.load.saved_ranks import (
    SavedLayout,
    SavedRanks,
    View,
    ambiguous_tensors,
    read_object,
)
from everstep.restore.load.targets import (
    Fill,
    PieceReads,
    Targets,
    fills,
    fills_by_file,
    overlapping_entries,
    restrided,
    shared_memory_error,
    tie_changes,
)
from everstep.run import BaseFound, OpenBase, Skipped
from everstep.run.open_base import open_ranks
from everstep.run.tensors import shape_of_base
from everstep.seams import FileSystem
from everstep.seams.progress import ProgressSink, silent
from everstep.state.layout import OBJECT_PREFIX, Box, Entry
from everstep.state.providers import OptimizerProvider, RestorePlan
from everstep.state.providers.gradients import discard_gradients
from everstep.state.ranks import SkippedState
from everstep.state.training_state import NOT_IN_STATE, State
from everstep.state.values.tensors import host_bytes, local_tensor
from everstep.state.values.tree import join, references

if TYPE_CHECKING:
    from everstep.restore.offline.rank_files import CompletedFiles


@dataclass(frozen=True, slots=True)
class Reads:
    """Buffers, timeout and progress of reading files.

    Attributes:
        ring: buffers for reading.
        timeout_s: a read that takes longer counts as hung.
        progress: notified of bytes read.
    """

    ring: ChunkRing
    timeout_s: float
    progress: ProgressSink = silent

    def body(
        self,
        shard: OpenShard,
        *,
        sink: Callable[[int, memoryview], None],
        wanted: Sequence[int] | None = None,
        on_entry: Callable[[int], None] | None = None,
    ) -> None:
        """Read the body of an opened file; see :func:`.reader.read_body`."""
        read_body(
            shard,
            self.ring,
            timeout_s=self.timeout_s,
            progress=self.progress,
            sink=sink,
            wanted=wanted,
            on_entry=on_entry,
        )


CompleteRank = Callable[[OpenBase], "CompletedFiles"]
"""Replays the redo file of one rank's files, so that all entries are of the step of the base."""

_HINT_NEW_FOLDER = "to start over use another folder"
_HINT = (
    "build the same model and optimizer, or resume(strict=False) to load the rest; "
    f"{_HINT_NEW_FOLDER}"
)
_HINT_LOAD = "everstep.load(path) reads a run without taking it over"
_HINT_OF_SEVERAL = (
    "build the same model and optimizer on every rank; resume(strict=False) loads the rest where "
    f"ranks leave out the same of what they have in common; {_HINT_NEW_FOLDER}"
)


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """Result of loading a base.

    Attributes:
        marker: marker of this rank; for a new rank, of the first rank available.
        size_bytes: bytes read.
        entries: number of entries read.
        mismatches: ``(name, difference)`` left out because of ``strict=False``.
        notes: in words, everything that could not be restored.
        shape: shape digest (see :mod:`everstep.state.layout.entries`); only for a base of one rank.
        redone: number of updates replayed to bring all parts to the step of the base
            (:mod:`everstep.restore.offline.rank_files`).
        layout: distribution of the tensors over the ranks that saved the base; only if it is
            another one than now.
        restrided: names of tensors whose strides differ from those when they were saved.
        tied: in words, tensors that share memory now and did not before, or the other way round.
        aliases: other names of tensors, and the names of their entries.
        names: sorted names of the entries of its tensors; only for a base of one rank.
    """

    marker: Marker
    size_bytes: int
    entries: int
    mismatches: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    shape: str = ""
    redone: int = 0
    layout: SavedLayout | None = None
    restrided: frozenset[str] = frozenset()
    tied: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()

    @property
    def left_out(self) -> list[str]:
        """Names of the sections of the base that the live state does not have."""
        return sections_left_out(self.mismatches)


def sections_left_out(mismatches: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the sections of a base that the live state does not have.

    Args:
        mismatches: ``(name, difference)`` of the entire state.
    """
    return [name for name, problem in mismatches if problem == NOT_IN_STATE]


def contents(opened: OpenBase) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return object trees by section, and entries by every name, of a base saved by one rank.

    Raises:
        DamageError, FormatError: they do not fit each other, or cannot be read.
    """
    trees, entries = rank_contents(opened)
    for tree in trees.values():
        missing = [name for name in references(tree) if name not in entries]
        if missing:
            raise FormatError(f"entry {missing[0]!r} is referenced but missing")
    _refuse_unused(opened, trees, entries)
    return trees, entries


def rank_contents(opened: OpenBase) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return the same of one rank's files of any base.

    Trees of one of several ranks also refer to entries in the files of other ranks. Errors as of
    :func:`contents`; each tree is verified against its digest.
    """
    trees: dict[str, Any] = {}
    for file, _, header, path in opened.shards:
        for index, place in enumerate(header.placed):
            name = place.entry.name
            if name.startswith(OBJECT_PREFIX):
                trees[name.removeprefix(OBJECT_PREFIX)] = read_object(file, header, index, path)
    return trees, opened.entries()


def check_contents(opened: Sequence[OpenBase]) -> None:
    """Check the files of all ranks together: every entry that a tree refers to exists, completely
    and once, and there are no others.

    Raises:
        DamageError, FormatError: the check failed.
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
            # Only boxes are compared here; nothing is copied, so no memory is needed.
            _, missing = fills(pieces, box, memoryview(b""))
            if missing:
                holes[name] = f"{missing} of {box.size} elements"
            used |= {piece.entry.name for piece in pieces}
        if holes:
            raise saved.hole(holes)
    for place in (place for one in opened for place in one.placed()):
        name = place.entry.name
        if name not in used and not name.startswith(OBJECT_PREFIX):
            raise FormatError(f"entry {name!r} is not referenced by any object")


def sections_of_base(filesystem: FileSystem, base: BaseFound) -> frozenset[str]:
    """Return the names of the sections of a base; reads headers only.

    Raises:
        DamageError, FormatError, OSError: as of :meth:`.open_base.OpenBase.open`.
    """
    with open_ranks(filesystem, base) as opened:
        names = [place.entry.name for one in opened for place in one.placed()]
    return frozenset(n.removeprefix(OBJECT_PREFIX) for n in names if n.startswith(OBJECT_PREFIX))


def load_ranks(
    opened: Sequence[OpenBase],
    state: State,
    reads: Reads,
    *,
    strict: bool,
    on_touch: Callable[[], None] = lambda: None,
    partly: bool = False,
    complete: CompleteRank | None = None,
) -> LoadedBase:
    """Restore this rank's share of ``state``, regardless of the ranks and layout that saved the
    base.

    Only entries that concern this rank are read, each completely, since its digest covers all of
    it.

    Args:
        opened: files of all ranks that saved the base, or of those that are needed.
        reads: how to read.
        strict: refuse any difference in names, shapes or dtypes; otherwise load the rest.
        on_touch: called once, just before the first byte of live state is overwritten.
        partly: files of other ranks, perhaps of this one, are missing; tensors that those ranks
            shared with the given ones are restored.
        complete: replays the redo file of a rank's files. None: entries stay at their own updates,
            for the caller; only for a base of one rank.

    Raises:
        MismatchError: lists every difference; nothing was modified.
        RecoveryError: files of other ranks are needed; nothing was modified.
        FormatError: without ``complete``, several ranks' files have redo files.
        DamageError: with file and entry, live state may be partly overwritten; if it lists entries
            with missing pieces, nothing was modified.
    """
    single_rank = opened[0].marker.world == 1
    with_redo = [one.shards[0][3].parent for one in opened if one.redo is not None]
    if with_redo and complete is None and not single_rank:
        raise FormatError(
            f"{with_redo[0]}: its entries are at different updates", path=with_redo[0]
        )
    saved = SavedRanks(opened, contents(opened[0])[0] if single_rank else None, partly=partly)
    planned = _plan(saved, opened, state, strict, complete)
    return _load(saved, opened, state, reads, planned, on_touch, complete, strict=strict)


def compare_ranks(
    opened: Sequence[OpenBase],
    state: State,
    *,
    strict: bool,
    partly: bool,
    complete: CompleteRank,
) -> SkippedState:
    """Return the sections and tensors that :func:`load_ranks` would leave out; modifies nothing.

    Arguments and errors as there.
    """
    single_rank = opened[0].marker.world == 1
    saved = SavedRanks(opened, contents(opened[0])[0] if single_rank else None, partly=partly)
    planned = _plan(saved, opened, state, strict, complete)
    taken = {name: planned.view.pieces[name][0].placement.text for name, _ in planned.apart}
    return SkippedState(planned.mismatches, state.left_out(planned.plans, taken))


def _load(
    saved: SavedRanks,
    opened: Sequence[OpenBase],
    state: State,
    reads: Reads,
    planned: _Planned,
    on_touch: Callable[[], None],
    complete: CompleteRank | None,
    *,
    strict: bool,
) -> LoadedBase:
    view = planned.view
    plans = planned.plans
    with_redo = planned.with_redo
    targets = Targets.of(plans, view.entries)
    shared = overlapping_entries(view, targets)
    memory = targets.memory.items()
    asked = ((name, view.pieces[name], box, host_bytes(tensor)) for name, (tensor, box) in memory)
    wanted = fills_by_file(saved, asked)
    # From here on live state is overwritten: everything that can be refused was refused above.
    on_touch()
    made = _Completed()
    if complete is not None:
        made.read(saved, with_redo, wanted, complete)
    size_bytes, entries = _read(saved, wanted, reads, made)
    tensors = targets.finish()
    for name, expected in shared.items():
        # Lazy conjugation and negation are resolved, as the digest is of the stored bytes. cpu()
        # also waits for copies to the device.
        flat = local_tensor(tensors[name]).resolve_conj().resolve_neg().contiguous().cpu()
        if digest(host_bytes(flat)) != expected:
            raise shared_memory_error(name)
    held = {name for plan in plans.values() for name in plan.in_place}
    # Plain tensors are created anew, and count as tensors that the program holds.
    held |= set(filter(state.coverage.is_plain, targets.tensors))
    tied = tie_changes(view, targets, held)
    notes = [*view.notes, *made.doubts, *tied]
    for section in state.restore_order():
        plan = plans[section]
        if not plan.left_out:
            tree = join(plan.tree, tensors)
            notes += state.providers[section].restore(tree, strict=strict)
    notes += discard_gradients(state.stateful_objects, state.optimizers.values())
    # State outside the sections is not restored, so the result is not exact on any rank.
    notes += state.unsaved_reasons
    shape = ""
    names = list[str]()
    if saved.world == 1:
        aliases = {k: v for _, _, header, _ in opened[0].shards for k, v in header.aliases.items()}
        shape = shape_of_base(opened[0].placed(), aliases, view.trees)
        names = [place.entry.name for place in opened[0].placed()]
    layout = None
    if saved.world != state.ranks.world:
        layout = SavedLayout.of(saved, opened, state.optimizers)
    return LoadedBase(
        planned.marker,
        size_bytes,
        entries,
        planned.mismatches,
        tuple(notes),
        shape,
        made.updates,
        layout=layout,
        restrided=restrided(view, tensors),
        tied=tied,
        aliases={name: one.name for name, one in view.entries.items() if one.name != name},
        names=tuple(sorted(name for name in names if not name.startswith(OBJECT_PREFIX))),
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """Plan of a restore.

    Attributes:
        mismatches: entries that are left out, or restored although they may be meant for other
            ranks.
        apart: the latter (:func:`.saved_ranks.ambiguous_tensors`).
        with_redo: files with redo files.
    """

    view: View
    plans: Mapping[str, RestorePlan]
    marker: Marker
    mismatches: tuple[tuple[str, str], ...]
    apart: Sequence[tuple[str, str]]
    with_redo: Sequence[OpenBase]


def _plan(
    saved: SavedRanks,
    opened: Sequence[OpenBase],
    state: State,
    strict: bool,
    complete: CompleteRank | None,
) -> _Planned:
    """Compare the base with the live state; modifies nothing. Errors as of :func:`load_ranks`."""
    view = saved.view(state)
    apart = ambiguous_tensors(saved, state, view)
    with_redo = [one for one in opened if one.redo is not None]
    # Entries at different updates cannot be compared by digest. Replay the redo files first.
    if apart and with_redo and complete is not None:
        for one in with_redo:
            saved.set_digests(one.marker, complete(one).digests())
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
    return _Planned(view, plans, marker, mismatches, apart, with_redo)


def _hint(mismatches: Sequence[tuple[str, str]], state: State) -> str:
    """Return advice about mismatches."""
    here = [name for name, problem in mismatches if problem == NOT_IN_STATE]
    if here and len(here) == len(mismatches):
        return (
            f"{_HINT_LOAD}; to continue training give the complete state, or use "
            "resume(strict=False) without these"
        )
    return _HINT if state.ranks.world == 1 else _HINT_OF_SEVERAL


@dataclass(slots=True)
class _Completed:
    """Totals of the files whose redo files were replayed.

    Attributes:
        numbers: of these files.
        size_bytes: bytes read.
        updates: number of updates replayed.
        doubts: reasons why the result may differ from training, in words.
    """

    numbers: set[int] = field(default_factory=set)
    size_bytes: int = 0
    entries: int = 0
    updates: int = 0
    doubts: list[str] = field(default_factory=list)

    def read(
        self,
        saved: SavedRanks,
        with_redo: Sequence[OpenBase],
        wanted: Mapping[int, Sequence[Fill]],
        complete: CompleteRank,
    ) -> None:
        """Replay and read the files of these ranks, one rank after another, so that one rank's
        files at a time are in memory."""
        for one in with_redo:
            mine = saved.files_of(one.marker.rank)
            # Also without fills: _read() must skip these files, whose entries are of different
            # updates.
            self.numbers.update(mine)
            fills_of = [fill for number in mine for fill in wanted.get(number, ())]
            if not fills_of:
                continue
            made = complete(one)
            self.entries += len(made.fill(fills_of))
            self.size_bytes += one.size_bytes
            self.updates = max(self.updates, made.updates)
            doubt = f"its redo file was replayed here, which is not exact: {made.doubt}"
            self.doubts += [doubt] if made.doubt and doubt not in self.doubts else []


def _read(
    saved: SavedRanks,
    wanted: Mapping[int, Sequence[Fill]],
    reads: Reads,
    made: _Completed,
) -> tuple[int, int]:
    """Read the remaining files; return the number of bytes and of entries.

    A base of one rank is read completely, so that the digests of its files are verified, too.

    Args:
        made: totals of the files read before.
    """
    entries = made.entries
    size_bytes = made.size_bytes
    for number, shard in enumerate(saved.files):
        if number in made.numbers:
            continue
        header = shard.header
        pieces = PieceReads(header, wanted.get(number, ()))
        # Of several ranks only the needed entries are read, each verified by its own digest.
        entire_file = saved.world == 1
        reads.body(
            shard,
            sink=pieces.sink,
            wanted=None if entire_file else pieces.wanted,
            on_entry=pieces.entry_done,
        )
        places = header.placed if entire_file else [header.placed[index] for index in pieces.wanted]
        entries += len(places)
        size_bytes += shard.record.length if entire_file else sum(p.end - p.begin for p in places)
    return size_bytes, entries


def _refuse_unused(
    opened: OpenBase, trees: Mapping[str, Any], entries: Mapping[str, Entry]
) -> None:
    """Refuse entries that nothing refers to: a forged one could have any size."""
    used = {entries[name].name for tree in trees.values() for name in references(tree)}
    for place in opened.placed():
        name = place.entry.name
        if name not in used and not name.startswith(OBJECT_PREFIX):
            raise FormatError(f"entry {name!r} is not referenced by any object")


OTHER_STATE = "the log after it belongs to a state of another composition"
"""Reason why a log is not replayed on a state."""


@dataclass(slots=True)
class Restored:
    """Live state while a restore proceeds.

    Attributes:
        base, loaded: None on a fresh start.
        end: timeline and step of the state.
        lsn: LSN of the state.
        replayed: number of steps replayed.
        inexact: why replay is not exact; "" if it is exact, or nothing was replayed.
        load_s, replay_s: seconds spent loading the base and replaying the log.
        skipped: bases and steps that were skipped.
        unreplayed: last step of the log that could not be replayed, and why; None if there is none.
        passed_over: message about a newer base that was passed over because it lacks sections of
            the state.
    """

    base: BaseFound | None = None
    loaded: LoadedBase | None = None
    end: BaseId | None = None
    lsn: int = 0
    replayed: int = 0
    inexact: str = ""
    load_s: float = 0.0
    replay_s: float = 0.0
    skipped: list[Skipped] = field(default_factory=list)
    unreplayed: tuple[BaseId, str] | None = None
    passed_over: str = ""


def nonfinite_parameter(state: State) -> str | None:
    """Return the name of an optimized parameter that holds NaN or infinity; None if all are finite.

    One pass over all parameters. Of a DTensor only the local shard is checked, since ranks need not
    call this at the same time.
    """
    for key, optimizer in state.optimizers.items():
        provider = state.providers[key]
        assert isinstance(provider, OptimizerProvider)
        names = [name for group in provider.groups() for name in group]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, parameter in zip(names, parameters, strict=True):
            if not is_finite(local_tensor(parameter.detach())):
                return name
    return None


def nonfinite_notice(state: State, end: BaseId | None) -> tuple[str, ...]:
    """Return the warning about a restored parameter that is not finite; empty if all are finite.

    Args:
        end: timeline and step of the state.
    """
    name = nonfinite_parameter(state)
    if name is None:
        return ()
    step = "" if end is None else f" of step {end.step}"
    return (
        f"the state{step} is not finite: {name!r} holds NaN or infinity. Training had this state; "
        "resume(step=...) restores an earlier step (everstep ls lists them)",
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite."""
    if tensor.is_complex():
        # view_as_real() does not accept a lazily conjugated tensor.
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return True  # one-byte floats have no kernels for it
    # A sum takes one pass and no memory; only if it is not finite, which an overflow may be, each
    # element is looked at.
    # On a GPU each bool() waits for the device; the second one is rarely needed.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
