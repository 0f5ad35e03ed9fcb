"""States of all ranks of a job, without the program that trained them (``docs/design/audit.md``).

Each rank replays its own log, with the shares of updates that other ranks recorded, over the
tensors that it held: so the bits are those of training, whatever the layout and the optimizer.
State shared by several ranks is computed once, by one of them; a rank with nothing left to compute
is as the base and the last mark of its log have it. For a ZeroRedundancyOptimizer one rank computes
the parameters that each of them updated for all, with the gradients that all of them recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from everstep.capture.mark_samples import MarkComparison
from everstep.errors import FormatError, ReplayError, UnsupportedStateError
from everstep.format.digests import digest
from everstep.format.log import LogRecord
from everstep.format.records import Marker
from everstep.replay.exactness import Exactness
from everstep.restore.load.pieces import fills
from everstep.restore.load.saved_ranks import Piece, SavedRanks
from everstep.restore.offline.state import OfflineState
from everstep.restore.redo.driver import divergence_error, sampled_difference
from everstep.restore.redo.marks import MarkEntries, dropped_from_marks
from everstep.restore.redo.owned import owned_entries
from everstep.restore.redo.zero_objects import RankObjects, merge_zero_objects
from everstep.run.tensors import tensor_of
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import HYPER, OBJECT_PREFIX, PART_OBJECT, SAMPLE
from everstep.state.layout.placement import Box, Placement
from everstep.state.layout.shards import Placed
from everstep.state.values.objects import decode, encode
from everstep.state.values.tensors import empty_like_entry, host_bytes
from everstep.state.values.tree import references

__all__ = ["JobState", "JobStep", "TensorKey", "UnreplayedRank", "rank_entry_name", "tensor_key"]

JobStep = Mapping[int, tuple[Sequence[LogRecord], LogRecord]]
"""Of one step, by rank: its updates in order, and its mark."""

_LISTED = 8


class TensorKey(NamedTuple):
    """A tensor, or a part of one: the same wherever ranks have the same."""

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
class UnreplayedRank:
    """Rank whose optimizers are not replayed: other ranks compute the same state.

    Attributes:
        tensors: by entry name: what no other rank holds.
        objects: encoded, by entry name.
    """

    tensors: dict[str, torch.Tensor]
    objects: dict[str, bytes]
    shape: str
    held: MarkEntries = ()
    last: LogRecord | None = None

    def advance(self, mark: LogRecord, held: MarkEntries) -> None:
        """Takes one step: what marks of several ranks hold of it, as of its own one."""
        self._put(dropped_from_marks(self.held, held))
        self.held = held
        self.last = mark

    def _put(self, held: MarkEntries) -> None:
        for mark, place in held:
            self.tensors[place.entry.name].copy_(tensor_of(mark, place))

    def finish(self, objects: Mapping[str, bytes]) -> None:
        """Puts everything as the last mark has it.

        Args:
            objects: instead of those of the mark that have the same names.
        """
        self._put(self.held)
        if self.last is not None:
            self.objects = {**self.last.objects, **objects}


class JobState:
    """States of all ranks of a job in host memory, brought forward by their logs.

    Args:
        markers: of the base, by rank.
        saved: its headers; nothing of it is read any more.
        computed: by rank: those that replay their log.
        resting: the other ones.
        written: by rank: entries in its files, by name.
        keeper: the rank of which a tensor is taken, where several have it.
        parts: objects of optimizers of which each rank has a part (ZeRO), as they are in its file.
        apart: names of parameters of those of which ranks had different copies.
        doubt: see below.

    Attributes:
        step, lsn: of the newest step that was applied.
        doubt: why it is not what training had, by what made a base over several steps whole; ""
            if it is, or that was not needed.
    """

    def __init__(
        self,
        markers: Sequence[Marker],
        saved: SavedRanks,
        computed: Mapping[int, OfflineState],
        resting: Mapping[int, UnreplayedRank],
        written: Mapping[int, Mapping[str, Entry]],
        keeper: Mapping[TensorKey, int],
        parts: RankObjects,
        apart: Sequence[str] = (),
        doubt: str = "",
    ) -> None:
        self.marker = replace(markers[0], exact=all(marker.exact for marker in markers))
        self.step = self.marker.step
        self.lsn = self.marker.lsn
        self._saved = saved
        self._computed = computed
        self._resting = resting
        self._written = written
        self._keeper = keeper
        self._parts = parts
        self._apart = apart
        self.doubt = doubt
        self._comparisons = {rank: MarkComparison() for rank in written}
        self._marks: dict[int, LogRecord] = {}

    # What replay asks for.

    @property
    def surprises(self) -> list[str]:
        """Differences between replay and the last marks, as text."""
        return [f"rank {rank}: {one}" for rank, s in self._computed.items() for one in s.surprises]

    @property
    def exactness(self) -> Exactness:
        """Exactness of the optimizers of all ranks together."""
        found = (state.exactness for state in self._computed.values())
        return next((one for one in found if not one.exact), Exactness(True, ""))

    def take(self, step: JobStep, *, drop: bool = False) -> None:
        """Apply one step: all of it, or nothing (I3). :meth:`finish` completes it.

        Args:
            step: verified records.
            drop: leave the updates out.

        Raises:
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
        """
        if self._apart:  # each rank knows its own ones alone, which it has handed to the others
            name = self._apart[0]
            raise UnsupportedStateError(
                f"ranks of a ZeroRedundancyOptimizer had different copies of {name!r} before its "
                "update: without the program that trained them, it cannot be replayed",
                leaves=((name, "ranks had different copies"),),
                step=step[min(step)][1].head.step,
                hint="resume(step=...) in that program replays it; bases are restored",
            )
        self._check(step)
        held: dict[int, list[tuple[LogRecord, Placed]]] = {rank: [] for rank in step}
        for rank, (_, mark) in step.items():
            for place in mark.layout.placed:
                if place.entry.name.startswith(SAMPLE):
                    continue
                entry = self._written[rank].get(place.entry.name)
                if entry is None or _form(entry) != _form(place.entry):
                    raise FormatError(f"rank {rank}, {mark.head}: another {place.entry.name!r}")
                owner = self._keeper[tensor_key(entry)]
                if owner != rank or owner in self._resting:  # else it looks at its own mark itself
                    held[owner].append((mark, place))
        for rank, state in self._computed.items():
            updates, mark = step[rank]
            mine = (
                () if drop else [_with_parts(one, n, rank, step) for n, one in enumerate(updates)]
            )
            state.advance(list(mine), mark, held[rank])
        for rank, one in self._resting.items():
            one.advance(step[rank][1], held[rank])
        self._marks = {rank: mark for rank, (_, mark) in step.items()}
        any_mark = next(iter(self._marks.values()))
        self.step = any_mark.head.step
        self.lsn = any_mark.head.lsn

    def finish(self, *, counterfactual: bool = False) -> None:
        """Applies what is waiting, and puts everything else as the last marks have it.

        Raises:
            FormatError, ReplayError: a mark does not fit the state.
        """
        whole: RankObjects = {}
        if self._marks:
            whole, self._parts = merge_zero_objects(self._marks)
        for rank, state in self._computed.items():
            state.finish(counterfactual=counterfactual, objects=whole.get(rank))
        for rank, one in self._resting.items():
            one.finish(whole.get(rank, {}))

    def compare(self) -> None:
        """Compares what replay gives with the samples in the last marks, if it must give the bits
        that training had.

        Raises:
            AuditError: something else; names an entry.
            FormatError: a mark is of another state.
        """
        for rank, mark in self._marks.items() if self.exactness.exact else ():
            tensors = {n: self._tensor(tensor_key(e))[0] for n, e in self._written[rank].items()}
            name = sampled_difference(self._comparisons[rank], mark, tensors)
            if name is not None:
                raise divergence_error(name, mark.head.step)

    # What an audit asks for: every entry of every rank's files, by its name there.

    @property
    def entries(self) -> dict[str, Entry]:
        """Tensors' entries."""
        return {
            rank_entry_name(name, rank): entry
            for rank, written in self._written.items()
            for name, entry in written.items()
        }

    @property
    def from_mark(self) -> set[str]:
        """Names of everything taken from the last marks: entries that they hold in full, and all
        objects."""
        held = {
            rank_entry_name(place.entry.name, rank)
            for rank, mark in self._marks.items()
            for place in mark.layout.placed
        }
        return held | {rank_entry_name(n, r) for r in self._written for n in self._objects(r)}

    @property
    def replayed(self) -> set[str]:
        """Entries that an optimizer has computed here."""
        return self._named(lambda state: state.replayed)

    @property
    def unlogged(self) -> set[str]:
        """As of :class:`OfflineState`."""
        return self._named(lambda state: state.unlogged)

    def digests(self) -> dict[str, str]:
        """The digest of every entry, objects included, as the files of a base of this state have
        them."""
        found: dict[str, str] = {}
        for rank, written in self._written.items():
            for name, entry in written.items():
                found[rank_entry_name(name, rank)] = self._digest(tensor_key(entry))
            for name, data in {**self._objects(rank), **self._parts.get(rank, {})}.items():
                found[rank_entry_name(name, rank)] = digest(data)
        return found

    # What is made of it.

    def whole(self) -> tuple[OfflineState, dict[str, str]]:
        """Return the state that one process would restore (``docs/design/ranks.md``), and the
        sections left out, with descriptions: of rank-local state it has that of the first rank.

        Raises:
            UnsupportedStateError: ranks had different parameters of one name.
        """
        trees = dict[str, Any]()
        objects = dict[str, bytes]()
        givers = dict[str, int]()
        for rank in self._saved.ranks:
            for name, data in self._objects(rank).items():
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
                pieces = self._saved.pieces_of(name, givers[section])
                first = pieces[0]
                canonical = first.entry.name
                ranks = first.placement.ranks
                if name != canonical:
                    aliases[name] = canonical
                if taken.setdefault(canonical, ranks) != ranks:
                    unclear[canonical] = f"rank(s) {_text(ranks)} and {_text(taken[canonical])}"
                if canonical in entries:
                    continue
                entries[canonical], tensors[canonical] = self._gathered(pieces)
        for name in owned_entries(trees, lambda name: aliases.get(name, name)):
            others = self._others(name, taken.get(name))
            if others is not None:
                unclear[name] = f"rank(s) {_text(taken.get(name))} and {others}"
        if unclear:
            leaves = tuple(
                (name, f"{who} had different ones") for name, who in sorted(unclear.items())
            )
            listed = "\n".join(f"  {name}: {why}" for name, why in leaves[:_LISTED])
            raise UnsupportedStateError(
                f"ranks had different parameters of one name, which a state of one process cannot "
                f"hold:\n{listed}",
                leaves=leaves,
                step=self.step,
                hint="resume(step=...) in a job of as many ranks goes back to it",
            )
        marker = replace(self.marker, rank=0, world=1, step=self.step, lsn=self.lsn)
        state = OfflineState(marker, entries, tensors, aliases, objects, trees, "")
        return state, self._left_out(givers)

    def _gathered(self, pieces: Sequence[Piece]) -> tuple[Entry, torch.Tensor]:
        """All of a tensor."""
        first = pieces[0].entry
        entry = Entry.whole(
            first.name,
            first.dtype,
            first.global_shape,
            stride=first.stride if first.shape == first.global_shape else None,
            logical_dtype=first.logical_dtype,
        )
        if first.shape == first.global_shape:
            return entry, self._tensor(tensor_key(first))[0]
        tensor = empty_like_entry(entry)
        box = Box((0,) * len(entry.shape), entry.shape)
        found, missing = fills(pieces, box, host_bytes(tensor))
        assert not missing, "looked at when it was loaded"
        for fill in found:
            fill.copy(self._bytes(tensor_key(fill.piece.entry)))
        return entry, tensor

    def _others(self, name: str, ranks: tuple[int, ...] | None) -> str | None:
        """Return the ranks that had another parameter of that name; None if there are none."""
        versions: dict[tuple[int, ...] | None, dict[Box, str]] = {}
        for piece in self._saved.all_pieces(name):
            if piece.entry.name == name:
                found = versions.setdefault(piece.placement.ranks, {})
                found[piece.box] = self._digest(tensor_key(piece.entry))
        mine = versions.get(ranks)
        return next((_text(of) for of, each in versions.items() if each != mine), None)

    def _left_out(self, givers: Mapping[str, int]) -> dict[str, str]:
        """Describe the rank-local state that is left out, as it differs from that of the chosen
        rank."""
        found = dict[str, str]()
        for section, giver in givers.items():
            mine = self._own(section, giver)
            lost = [
                rank
                for rank in self._saved.ranks
                if OBJECT_PREFIX + section in self._objects(rank)
                and self._own(section, rank) != mine
            ]
            if lost:
                ranks = ", ".join(map(str, lost[:_LISTED])) + (", ..." if lost[_LISTED:] else "")
                found[section] = (
                    f"{section}: that of rank {giver}; what rank(s) {ranks} had for themselves "
                    "is left out"
                )
        return found

    def _own(self, section: str, rank: int) -> dict[str, str]:
        """Digests of what one rank has for itself in a section."""
        found = {"": digest(self._objects(rank)[OBJECT_PREFIX + section])}
        for name, entry in self._written[rank].items():
            key = tensor_key(entry)
            if key.ranks == (rank,) and name.startswith(f"{section}/"):
                found[name] = self._digest(key)
        return found

    # Where things are.

    def _tensor(self, key: TensorKey) -> tuple[torch.Tensor, int]:
        rank = self._keeper[key]
        state: OfflineState | UnreplayedRank = (
            self._computed[rank] if rank in self._computed else self._resting[rank]
        )
        return state.tensors[key.name], rank

    def _bytes(self, key: TensorKey) -> memoryview:
        tensor, _ = self._tensor(key)
        return memoryview(bytes(host_bytes(tensor.contiguous())))

    def _digest(self, key: TensorKey) -> str:
        tensor, _ = self._tensor(key)
        flat = tensor.contiguous()
        return digest(host_bytes(flat))

    def _objects(self, rank: int) -> Mapping[str, bytes]:
        state = self._computed.get(rank)
        return self._resting[rank].objects if state is None else state.objects

    def _named(self, of: Callable[[OfflineState], set[str]]) -> set[str]:
        """Entries of all files, of which a state says something by name."""
        said = {rank: of(state) for rank, state in self._computed.items()}
        return {
            rank_entry_name(name, rank)
            for rank, written in self._written.items()
            for name, entry in written.items()
            if name in said.get(self._keeper[tensor_key(entry)], ())
        }

    def _check(self, step: JobStep) -> None:
        """Raises:
        FormatError, ReplayError: records of one rank do not go with those of the others.
        """
        first = step[min(step)]
        heads = [one.head for one in (*first[0], first[1])]
        for rank, (updates, mark) in step.items():
            mine = [one.head for one in (*updates, mark)]
            if [_place(one) for one in mine] != [_place(one) for one in heads]:
                raise FormatError(f"rank {rank} has {mark.head} and other updates before it")
            resting = self._resting.get(rank)
            if resting is not None and mark.head.shape != resting.shape:
                raise ReplayError(
                    f"rank {rank}: {mark.head} belongs to a state of another composition"
                )


def _place(head: Any) -> tuple[Any, ...]:
    return head.kind, head.timeline, head.step, head.lsn


def _form(entry: Entry) -> tuple[Any, ...]:
    return entry.dtype, entry.shape, entry.logical_dtype


def _text(ranks: tuple[int, ...] | None) -> str:
    return "all" if ranks is None else Placement(tuple(sorted(ranks))).text.partition("@")[2]


def _with_parts(record: LogRecord, number: int, rank: int, step: JobStep) -> LogRecord:
    """An update with what other ranks have recorded of it.

    Raises:
        UnsupportedStateError: each rank has updated its parameters with other hyperparameters.
    """
    if PART_OBJECT not in record.objects:
        return record
    found = replace(record, parts={r: step[r][0][number] for r in step if r != rank})
    about: Any = decode(record.objects[PART_OBJECT])
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
