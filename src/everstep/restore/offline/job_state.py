"""States of all ranks of a job, without the program that trained them (``docs/design/audit.md``);
of one rank, too.

Each rank replays its own log, with the shares of updates that other ranks recorded, over the
tensors that it held: so the bits are those of training, whatever the layout and the optimizer.
State shared by several ranks is computed once, by one of them; a rank with nothing left to compute
is as the base and the last mark of its log have it. For a ZeroRedundancyOptimizer one rank computes
the parameters that each of them updated for all, with the gradients that all of them recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from everstep.capture import MarkComparison
from everstep.errors import FormatError, UnsupportedStateError
from everstep.format import Marker, digest
from everstep.format.log import LogRecord, RecordHead
from everstep.replay import Exactness
from everstep.restore.load import SavedRanks
from everstep.restore.load.saved_ranks import Piece
from everstep.restore.load.targets import fills
from everstep.restore.offline.memory import HostMemory, OfflineState
from everstep.restore.redo import MarkEntries, ReplayDriver, Step, owned_entries, sampled_difference
from everstep.restore.redo.driver import divergence_error
from everstep.restore.redo.owned import RankObjects, merge_zero_objects
from everstep.restore.redo.updates import place_in_log
from everstep.state.layout import OBJECT_PREFIX, SAMPLE, Box, Entry, Placed, Placement
from everstep.state.layout.entries import HYPER, PART_OBJECT
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import empty_like_entry, host_bytes
from everstep.state.values.tree import references

JobStep = Mapping[int, tuple[Sequence[LogRecord], LogRecord]]
"""Updates of a step in order, and its mark, by rank."""

_LISTED = 8


class TensorKey(NamedTuple):
    """Tensor or shard, equal for ranks that have the same one."""

    name: str
    ranks: tuple[int, ...] | None
    box: Box


def tensor_key(entry: Entry) -> TensorKey:
    """Return the key of a tensor, or of a shard, as a rank held it."""
    ranks = Placement.parse(entry.placement).ranks
    return TensorKey(entry.name, ranks, Box(entry.global_offset, entry.shape))


def rank_entry_name(name: str, rank: int) -> str:
    """Return the display name of an entry of a rank's file."""
    return f"{name} of rank {rank}"


@dataclass(slots=True, eq=False)
class RankReplay:
    """State of one rank, and the driver that replays the rank's log to it.

    Attributes:
        memory: tensors that no earlier rank holds as well, or everything if it is replayed here.
        written: entries in the rank's files, by name.
        unmerged: objects of which each rank has a share (ZeRO), as they are in the rank's file.
    """

    memory: HostMemory
    written: Mapping[str, Entry]
    unmerged: Mapping[str, bytes] = field(default_factory=dict)
    driver: ReplayDriver = field(init=False)

    def __post_init__(self) -> None:
        self.driver = ReplayDriver(self.memory)

    @property
    def state(self) -> OfflineState:
        """State of the rank."""
        return self.memory.state

    @property
    def mark(self) -> LogRecord | None:
        """Newest mark of the rank's log."""
        return self.driver.last


@dataclass(frozen=True, slots=True, eq=False)
class Sharing:
    """State that several ranks of a job have in common.

    Attributes:
        saved: headers of the base.
        owners: rank that a tensor is taken from, where several have it.
        diverged: names of parameters of which the ranks of a ZeroRedundancyOptimizer had different
            copies.
    """

    saved: SavedRanks
    owners: Mapping[TensorKey, int]
    diverged: Sequence[str] = ()


class JobState:
    """States of all ranks of a job in host memory, brought forward by their logs.

    Args:
        marker: marker of the base.
        ranks: states by rank; of one rank it is the entire state.
        sharing: state that they have in common; None for one rank.
        doubt: reason why completing a multi-step base was inexact; "" if it was exact or not
            needed.
    """

    def __init__(
        self,
        marker: Marker,
        ranks: Mapping[int, RankReplay],
        sharing: Sharing | None = None,
        doubt: str = "",
    ) -> None:
        self.marker = marker
        self.doubt = doubt
        self._ranks = ranks
        self._sharing = sharing

    @property
    def step(self) -> int:
        """Newest step that was taken."""
        return self._head.step

    @property
    def lsn(self) -> int:
        """LSN of that step."""
        return self._head.lsn

    @property
    def surprises(self) -> list[str]:
        """Differences between replay and the last marks, as text."""
        found = [(rank, text) for rank, one in self._ranks.items() for text in one.memory.surprises]
        return [text if self._sharing is None else f"rank {rank}: {text}" for rank, text in found]

    @property
    def exactness(self) -> Exactness:
        """Exactness of the optimizers of all ranks together."""
        found = (one.memory.exactness for one in self._ranks.values())
        return next((one for one in found if not one.exact), Exactness(True, ""))

    def take(self, step: JobStep) -> None:
        """Apply one step: all of it, or nothing (I3). :meth:`finish` completes it.

        Args:
            step: verified records.

        Raises:
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
        """
        held = None if self._sharing is None else self._held(self._sharing, step)
        for rank, one in self._ranks.items():
            updates, mark = step[rank]
            if not one.memory.replays:
                updates = ()
            elif self._sharing is not None:
                updates = [_with_parts(u, n, rank, step) for n, u in enumerate(updates)]
            found = Step.of(updates, mark)
            one.driver.step(found if held is None else replace(found, held=held[rank]))

    def finish(self) -> None:
        """Apply the waiting updates, and restore everything else from the last marks.

        Raises:
            FormatError, ReplayError: a mark does not fit the state.
        """
        marks = {rank: one.mark for rank, one in self._ranks.items() if one.mark is not None}
        merged: RankObjects = {}
        if self._sharing is not None and marks:
            merged, unmerged = merge_zero_objects(marks)
            for rank, objects in unmerged.items():
                self._ranks[rank].unmerged = objects
        for rank, mark in marks.items():
            one = self._ranks[rank]
            # Not driver.finish(): the objects of a mark may have to be merged with other ranks'.
            one.driver.idle()
            one.memory.restore(mark, merged=merged.get(rank))

    def compare(self) -> None:
        """Compare the states with the samples in the last marks, if replay must give the bits of
        training. The caller decides if the conditions of training allow it.

        Raises:
            AuditError: an entry differs; the error names it.
            FormatError: a mark belongs to another state.
        """
        if not self.exactness.exact:
            return
        for rank, one in self._ranks.items():
            if one.mark is None:
                continue
            tensors = {n: self._holder(e, rank).tensors[e.name] for n, e in one.written.items()}
            # A rank's samples are of all tensors in its files, which other ranks may compute.
            name = sampled_difference(MarkComparison(), one.mark, tensors)
            if name is not None:
                raise divergence_error(name, one.mark.head.step)

    # An audit compares the entries of all files, by their names there.

    @property
    def entries(self) -> dict[str, Entry]:
        """Entries of tensors."""
        return {
            self._name(name, rank): entry
            for rank, one in self._ranks.items()
            for name, entry in one.written.items()
        }

    @property
    def from_mark(self) -> set[str]:
        """Names of everything taken from the last marks: entries that they hold in full, and all
        objects."""
        found = set[str]()
        for rank, one in self._ranks.items():
            placed = () if one.mark is None else one.mark.layout.placed
            names = (*(place.entry.name for place in placed), *one.state.objects)
            found.update(self._name(name, rank) for name in names)
        return found

    @property
    def replayed(self) -> set[str]:
        """Entries that an optimizer computed here."""
        return self._named(lambda memory: memory.replayed)

    @property
    def unlogged(self) -> set[str]:
        """Hyperparameters of :attr:`.HostMemory.unlogged`."""
        return self._named(lambda memory: memory.unlogged)

    def digests(self) -> dict[str, str]:
        """Return the digest of every entry, objects included, as the files of a base of this state
        have them."""
        found: dict[str, str] = {}
        for rank, one in self._ranks.items():
            for name, entry in one.written.items():
                found[self._name(name, rank)] = self._holder(entry, rank).digest_of(entry.name)
            # A rank's file has its own share of a distributed object, not the merged one.
            for name, data in {**one.state.objects, **one.unmerged}.items():
                found[self._name(name, rank)] = digest(data)
        return found

    def whole(self) -> tuple[OfflineState, dict[str, str]]:
        """Return the state that one process would restore (``docs/design/ranks.md``), and the
        sections left out, with descriptions: of rank-local state it has that of the first rank.
        Of tensors that were not loaded it has only the entries.

        Raises:
            UnsupportedStateError: ranks had different parameters of one name.
        """
        sharing = self._sharing
        if sharing is None:
            (only,) = self._ranks.values()
            return only.state, {}
        saved = sharing.saved
        trees = dict[str, Any]()
        objects = dict[str, bytes]()
        givers = dict[str, int]()
        for rank in saved.ranks:
            for name, data in self._ranks[rank].state.objects.items():
                section = name.removeprefix(OBJECT_PREFIX)
                if givers.setdefault(section, rank) == rank:
                    trees[section] = decode(data)
                    objects[name] = data
        entries = dict[str, Entry]()
        tensors = dict[str, torch.Tensor]()
        aliases = dict[str, str]()
        unclear: dict[str, str] = {}
        taken: dict[str, tuple[int, ...] | None] = {}
        for section, tree in trees.items():
            for name in references(tree):
                pieces = saved.pieces_of(name, givers[section])
                first = pieces[0]
                canonical = first.entry.name
                ranks = first.placement.ranks
                if name != canonical:
                    aliases[name] = canonical
                if taken.setdefault(canonical, ranks) != ranks:
                    unclear[canonical] = f"rank(s) {_text(ranks)} and {_text(taken[canonical])}"
                if canonical in entries:
                    continue
                entries[canonical], tensor = self._gathered(pieces)
                if tensor is not None:
                    tensors[canonical] = tensor
        for name in owned_entries(trees, lambda name: aliases.get(name, name)):
            others = self._others(saved, name, taken.get(name))
            if others is not None:
                unclear[name] = f"rank(s) {_text(taken.get(name))} and {others}"
        if unclear:
            raise self._unclear_error(unclear)
        marker = replace(self.marker, rank=0, world=1, step=self.step, lsn=self.lsn)
        state = OfflineState(marker, entries, tensors, aliases, objects, shape="")
        return state, self._left_out(saved, givers)

    def _unclear_error(self, unclear: Mapping[str, str]) -> UnsupportedStateError:
        leaves = tuple((name, f"{who} had different ones") for name, who in sorted(unclear.items()))
        listed = "\n".join(f"  {name}: {why}" for name, why in leaves[:_LISTED])
        return UnsupportedStateError(
            f"ranks had different parameters of one name, which a state of one process cannot "
            f"hold:\n{listed}",
            leaves=leaves,
            step=self.step,
            hint="resume(step=...) in a job of as many ranks restores it",
        )

    def _gathered(self, pieces: Sequence[Piece]) -> tuple[Entry, torch.Tensor | None]:
        """Return a complete tensor, None if it was not loaded, and its entry."""
        first = pieces[0].entry
        entry = Entry.whole(
            first.name,
            first.dtype,
            first.global_shape,
            stride=first.stride if first.shape == first.global_shape else None,
            logical_dtype=first.logical_dtype,
        )
        if first.shape == first.global_shape:
            return entry, self._holder(first).tensors.get(first.name)
        assert self._sharing is not None
        box = Box((0,) * len(entry.shape), entry.shape)
        key = TensorKey(first.name, pieces[0].placement.ranks, box)
        # Of slices in any layout the tensor was put together when it was loaded.
        if key in self._sharing.owners:
            return entry, self._ranks[self._sharing.owners[key]].state.tensors.get(first.name)
        filled = [piece.entry for piece in pieces if piece.box.size]
        if not all(one.name in self._holder(one).tensors for one in filled):
            return entry, None
        tensor = empty_like_entry(entry)
        found, missing = fills(pieces, box, host_bytes(tensor))
        assert not missing, "checked when the base was loaded"
        for fill in found:
            piece = fill.piece.entry
            fill.copy(self._holder(piece).bytes_of(piece.name))
        return entry, tensor

    def _others(self, saved: SavedRanks, name: str, ranks: tuple[int, ...] | None) -> str | None:
        """Return the ranks that had another parameter of that name; None if there are none."""
        versions: dict[tuple[int, ...] | None, dict[Box, str]] = {}
        for piece in saved.all_pieces(name):
            if piece.entry.name == name:
                found = versions.setdefault(piece.placement.ranks, {})
                found[piece.box] = self._digest_of(piece)
        mine = versions.get(ranks)
        return next((_text(of) for of, each in versions.items() if each != mine), None)

    def _left_out(self, saved: SavedRanks, givers: Mapping[str, int]) -> dict[str, str]:
        """Describe the rank-local state that is left out, as it differs from that of the chosen
        rank."""
        found = dict[str, str]()
        for section, giver in givers.items():
            mine = self._own(saved, section, giver)
            lost = [
                rank
                for rank in saved.ranks
                if OBJECT_PREFIX + section in self._ranks[rank].state.objects
                and self._own(saved, section, rank) != mine
            ]
            if lost:
                ranks = ", ".join(map(str, lost[:_LISTED])) + (", ..." if lost[_LISTED:] else "")
                found[section] = (
                    f"{section}: that of rank {giver}; what rank(s) {ranks} had for themselves "
                    "is left out"
                )
        return found

    def _own(self, saved: SavedRanks, section: str, rank: int) -> dict[str, str]:
        """Return the digests of a section's rank-local state."""
        found = {"": digest(self._ranks[rank].state.objects[OBJECT_PREFIX + section])}
        for piece in saved.own_pieces(rank):
            if piece.entry.name.startswith(f"{section}/"):
                found[piece.entry.name] = self._digest_of(piece)
        return found

    def _digest_of(self, piece: Piece) -> str:
        """Return the digest of a piece now; that in its file if it was not loaded."""
        holder = self._holder(piece.entry)
        name = piece.entry.name
        return holder.digest_of(name) if name in holder.tensors else piece.digest

    @property
    def _head(self) -> Marker | RecordHead:
        *_, last = self._ranks.values()  # that takes a step after all others
        return self.marker if last.mark is None else last.mark.head

    def _name(self, name: str, rank: int) -> str:
        """Return the display name of an entry of a rank's file."""
        return name if self._sharing is None else rank_entry_name(name, rank)

    def _holder(self, entry: Entry, rank: int = 0) -> OfflineState:
        """Return the state that holds the tensor of an entry in the files of a rank."""
        if self._sharing is not None:
            rank = self._sharing.owners[tensor_key(entry)]
        return self._ranks[rank].state

    def _named(self, of: Callable[[HostMemory], set[str]]) -> set[str]:
        """Return the entries of all files that their owner's memory names."""
        names = {id(one.state): of(one.memory) for one in self._ranks.values()}
        return {
            self._name(name, rank)
            for rank, one in self._ranks.items()
            for name, entry in one.written.items()
            if entry.name in names[id(self._holder(entry, rank))]
        }

    def _held(self, sharing: Sharing, step: JobStep) -> Mapping[int, MarkEntries]:
        """Return by rank the entries of its state that the marks of all ranks hold.

        Raises:
            FormatError: records of one rank do not go with those of the others.
            UnsupportedStateError: no rank can replay an optimizer.
        """
        if sharing.diverged:  # each rank updated its own copy, and sent it to the others
            name = sharing.diverged[0]
            raise UnsupportedStateError(
                f"ranks of a ZeroRedundancyOptimizer had different copies of {name!r} before its "
                "update: without the program that trained them, it cannot be replayed",
                leaves=((name, "ranks had different copies"),),
                step=step[min(step)][1].head.step,
                hint="resume(step=...) in that program replays it; bases are restored",
            )
        # Before any rank takes the step: ranks at different updates have no state in common (I3).
        _check_same_updates(step)
        held: dict[int, list[tuple[LogRecord, Placed]]] = {rank: [] for rank in step}
        for rank, (_, mark) in step.items():
            one = self._ranks[rank]
            for place in mark.layout.placed:
                if place.entry.name.startswith(SAMPLE):
                    continue
                entry = one.written.get(place.entry.name)
                if entry is None or _form(entry) != _form(place.entry):
                    raise FormatError(
                        f"rank {rank}, {mark.head}: shape or dtype of {place.entry.name!r} differs "
                        "from the base"
                    )
                owner = sharing.owners[tensor_key(entry)]
                # A rank that replays has all of its state, whichever rank owns it.
                for holder in {owner, rank} if one.memory.replays else {owner}:
                    held[holder].append((mark, place))
        return held


def _check_same_updates(step: JobStep) -> None:
    """Refuse a step in which ranks made different updates.

    Raises:
        FormatError: a rank did.
    """
    first = step[min(step)]
    heads = [place_in_log(one.head) for one in (*first[0], first[1])]
    for rank, (updates, mark) in step.items():
        if [place_in_log(one.head) for one in (*updates, mark)] != heads:
            raise FormatError(f"rank {rank} made other updates before {mark.head} than other ranks")


def _form(entry: Entry) -> tuple[Any, ...]:
    return entry.dtype, entry.shape, entry.logical_dtype


def _text(ranks: tuple[int, ...] | None) -> str:
    return "all" if ranks is None else Placement(tuple(sorted(ranks))).text.partition("@")[2]


def _with_parts(record: LogRecord, number: int, rank: int, step: JobStep) -> LogRecord:
    """Return an update with the shares of it that other ranks recorded.

    Raises:
        UnsupportedStateError: a rank updated its parameters with other hyperparameters.
    """
    if PART_OBJECT not in record.objects:
        return record
    found = replace(record, parts={r: step[r][0][number] for r in step if r != rank})
    about: Any = decode(record.objects[PART_OBJECT])
    # Each rank updated its own parameters: one replay does it for all, with one set of options.
    if isinstance(about, dict) and about.get("spread"):
        mine = _beside_gradients(record)
        for other in {r for ranks, *_ in about["shared"] for r in ranks} & found.parts.keys():
            if _beside_gradients(found.parts[other]) != mine:
                raise UnsupportedStateError(
                    f"{record.head}: rank {other} has updated its parameters of "
                    f"{about.get('optimizer')!r} with other hyperparameters than rank {rank}: "
                    "without the program that trained them, that cannot be replayed",
                    leaves=((str(about.get("optimizer")), "hyperparameters of each rank's own"),),
                    step=record.head.step,
                    hint="resume(step=...) in that program replays it",
                )
    return found


def _beside_gradients(record: LogRecord) -> tuple[bytes, dict[str, bytes]]:
    """Return the inputs of an update other than gradients: hyperparameters, and the tensors of a
    scaler."""
    about: Any = decode(record.objects.get(PART_OBJECT, b""))
    tensors = {
        place.entry.name: bytes(record.data[place.begin : place.end])
        for place in record.layout.placed
        if place.entry.name.startswith(f"{HYPER}/") or "/" not in place.entry.name
    }
    return encode(about.get("groups") if isinstance(about, dict) else None), tensors
