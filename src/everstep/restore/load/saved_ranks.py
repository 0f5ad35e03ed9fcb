"""Files of a base that several ranks saved, and the view of them that a rank of this job restores.

The number of ranks may differ. A rank that existed before restores its own state. Tensors that
ranks shared, or that were sharded over them, are found by offset in whichever files hold them. A
new rank restores everything that was identical on all ranks. Per-rank state, such as random
generators and loaders, is not given to it; a note says that the new rank starts with the state its
program made.

Names are the same on all ranks. If ranks have different parameters of one name (as the stages of a
pipeline do), only the number of the rank tells which is meant. That works with as many ranks as
before and the same ranks sharing a tensor. Otherwise the tensor may belong to another stage: it
could have the right shape and be wrong (:func:`ambiguous_tensors`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from everstep.commit.job import Needs
from everstep.errors import DamageError, FormatError, RecoveryError
from everstep.format import Manifest, Marker, digest
from everstep.format.header import ShardHeader
from everstep.format.reader import OpenShard
from everstep.run import OpenBase
from everstep.run.tensors import shape_of_base
from everstep.seams import ReadFile
from everstep.state.layout import OBJECT_PREFIX, Box, Entry, Placement
from everstep.state.layout.entries import OBJECT_BYTES_MAX, RNG_SECTION
from everstep.state.providers import PARTITIONED, ModuleProvider, OptimizerProvider, ZeroProvider
from everstep.state.ranks import BUCKETS_SECTION, RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tree import references

_LISTED = 8


class HoleError(DamageError):
    """Elements are missing in the opened files; files of other ranks may have them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry in a file of a rank: an entire tensor, or one box of it.

    Attributes:
        file, index: number of the file in the base, and index of the entry in its header.
        rank: rank that wrote it.
    """

    file: int
    index: int
    rank: int
    entry: Entry
    digest: str
    placement: Placement

    @property
    def box(self) -> Box:
        """Box of the full tensor."""
        return Box(self.entry.global_offset, self.entry.shape)


@dataclass(slots=True)
class View:
    """State that one rank restores.

    Attributes:
        trees: decoded object trees by section.
        entries: of full tensors, by every name that the trees refer to.
        pieces: pieces of these tensors, by the same names.
        left_out: sections that keep the state the program made.
        notes: in words, everything that is not restored as it was.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    pieces: dict[str, Sequence[Piece]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def needs_of(state: State, shared: Sequence[bool] | None = None) -> Needs:
    """Return a function giving the ranks whose files of a base a rank may need, before headers are
    known.

    These are all ranks, unless the job has as many ranks as before and the rank shares no tensor
    with others: then only itself.

    Args:
        shared: by rank, True if it shares or shards tensors, as each rank reports; None: assume the
            same as this rank for all.
    """
    world = state.ranks.world
    each = [state.is_shared()] * world if shared is None else shared

    def needs(rank: int, manifest: Manifest) -> Collection[int]:
        before = len(manifest.markers)
        return (rank,) if before == world and not each[rank] else range(before)

    return needs


def read_object(file: ReadFile, header: ShardHeader, index: int, path: PurePath) -> Any:
    """Return the tree of a section, verified against its digest.

    Raises:
        DamageError: names the entry.
        FormatError: the bytes are not a valid object.
    """
    return decode(_object_bytes(file, header, index, path))


def _object_bytes(file: ReadFile, header: ShardHeader, index: int, path: PurePath) -> bytes:
    place = header.placed[index]
    expected = header.digests[index]
    name = place.entry.name
    # Checked before the allocation: a forged header may claim any size.
    if place.end - place.begin > OBJECT_BYTES_MAX:
        raise FormatError(f"{path}: {name!r} is too large for an object", path=path)
    data = bytearray(place.end - place.begin)
    got = file.read_into(memoryview(data), header.room_bytes + place.begin)
    if got != len(data) or digest(memoryview(data)) != expected:
        raise DamageError(
            f"{path}: entry {name!r} is damaged: its digest does not match",
            entry=name,
            path=path,
            step=header.identity.step,
            rank=header.identity.rank,
        )
    return bytes(data)


class SavedRanks:
    """Files of a base, of all ranks or of some, headers verified.

    Args:
        opened: one per rank, in any order.
        trees: decoded trees of the first of them, if available.
        partly: files of the other ranks are missing.

    Raises:
        FormatError: the files are not of one base.

    Attributes:
        world: number of ranks that saved the base.
        ranks: those whose files are given.
        files: files of all of them.
    """

    def __init__(
        self,
        opened: Sequence[OpenBase],
        trees: Mapping[str, Any] | None = None,
        *,
        partly: bool = False,
    ) -> None:
        self._partly = partly
        markers = {one.marker.rank: one.marker for one in opened}
        same = {(m.run, m.timeline, m.step, m.lsn, m.world) for m in markers.values()}
        if len(markers) != len(opened) or len(same) != 1:
            raise FormatError("the files do not belong to different ranks of one base")
        self.world = opened[0].marker.world
        self.ranks = sorted(markers)
        first = opened[0].marker.rank
        self._trees = {(first, section): tree for section, tree in (trees or {}).items()}
        self.files: list[OpenShard] = []
        self._objects: dict[int, dict[str, tuple[int, int, str]]] = {r: {} for r in markers}
        self._pieces: dict[str, list[Piece]] = {}
        self._own: dict[int, list[Piece]] = {rank: [] for rank in markers}
        self._files_of: dict[int, range] = {}
        for one in opened:
            begin = len(self.files)
            self._files_of[one.marker.rank] = range(begin, begin + len(one.shards))
            for shard in one.shards:
                self._add(shard[2], one.marker.rank)
                self.files.append(shard)

    def view(self, state: State) -> View:
        """Return the view that the rank of ``state`` restores.

        Raises:
            RecoveryError: files of a rank are needed and not given.
            DamageError, FormatError: objects cannot be read, or an entry is missing.
        """
        view = View()
        mine = state.ranks.rank
        if self._partly and mine < self.world and mine not in self.ranks:
            self._view_without_files(view, state)
        elif mine < self.world:
            self._require_files([mine])
            for section in self._objects[mine]:
                self._add_section(view, section, mine, state)
        else:
            self._view_of_new_rank(view, state)
        if state.ranks.world < self.world:
            self._note_dropped(view, state.ranks)
        if self._partly:
            view.notes.append(
                f"the files of rank(s) {_listed(self._missing_ranks)} are not here: their per-rank "
                "state is lost, and tensors that they shared are restored from other ranks"
            )
        return view

    def view_of_all(self, rank: int) -> View:
        """Return the entire state of ``rank``, for checks without a live state."""
        view = View()
        for section in self._objects[rank]:
            self._add_section(view, section, rank, None)
        return view

    def trees_of(
        self, rank: int, sections: Collection[str], known: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the object trees of some sections of a rank, of those that it has.

        Args:
            known: cache of trees by digest; added to.

        Raises:
            DamageError, FormatError: an object cannot be read.
        """
        found: dict[str, Any] = {}
        for section in sections:
            if section in self._objects[rank]:
                hex_ = self._objects[rank][section][2]
                if hex_ not in known:
                    known[hex_] = self._tree(rank, section)
                found[section] = known[hex_]
        return found

    def objects_of(self, rank: int) -> dict[str, bytes]:
        """Return the encoded objects of a rank, by section.

        Raises:
            DamageError, FormatError: an object cannot be read.
        """
        found: dict[str, bytes] = {}
        for section, (number, index, _) in self._objects[rank].items():
            file, _, header, path = self.files[number]
            found[section] = _object_bytes(file, header, index, path)
        return found

    def set_digests(self, marker: Marker, digests: Mapping[str, str]) -> None:
        """Set the digests that the entries of a rank have after its redo file was replayed.

        Args:
            marker: marker of the rank.
            digests: by entry name.
        """

        def settled(piece: Piece) -> Piece:
            if piece.rank != marker.rank:
                return piece
            entry = replace(piece.entry, lsn=marker.lsn)
            return replace(piece, entry=entry, digest=digests[entry.name])

        for pieces in (*self._pieces.values(), *self._own.values()):
            pieces[:] = map(settled, pieces)

    def files_of(self, rank: int) -> range:
        """Return the numbers of a rank's files."""
        return self._files_of[rank]

    def sections_of(self, rank: int) -> Collection[str]:
        """Return the sections that a rank had objects of."""
        return self._objects[rank].keys()

    def pieces_of(self, name: str, rank: int) -> Sequence[Piece]:
        """Return the pieces of the tensor that ``rank`` calls ``name``, each box once, preferring
        its own.

        The name of the first piece is authoritative: a rank whose shard of a tied weight is empty
        cannot detect the tie, and lists the weight under all of its names.

        Raises:
            FormatError: pieces contradict each other, or belong to different tensors.
        """
        found = [p for p in self._pieces.get(name, ()) if p.placement.holds(rank)]
        # Empty boxes come last, since their ranks cannot know of ties; of the others, own pieces
        # come first.
        found.sort(key=lambda piece: (not piece.box.size, piece.rank != rank))
        boxes: dict[Box, Piece] = {}
        for piece in found:
            first = found[0]
            entry = piece.entry
            same = (
                set(piece.placement.ranks or ()) == set(first.placement.ranks or ())
                and entry.global_shape == first.entry.global_shape
                and (entry.dtype, entry.logical_dtype)
                == (first.entry.dtype, first.entry.logical_dtype)
            )
            again = boxes.setdefault(piece.box, piece)
            # In a multi-step base, replicas may have been captured at different updates: then their
            # digests differ.
            differs = again.digest != piece.digest and again.entry.lsn == entry.lsn
            if not same or differs:
                raise FormatError(
                    f"entry {name!r} of rank {piece.rank} contradicts that of rank {first.rank}"
                )
        return list(boxes.values())

    def all_pieces(self, name: str) -> Sequence[Piece]:
        """Return the pieces of all tensors that any rank calls ``name``."""
        return self._pieces.get(name, ())

    def own_pieces(self, rank: int) -> Sequence[Piece]:
        """Return the tensors that only ``rank`` had."""
        return self._own[rank]

    def _add(self, header: ShardHeader, rank: int) -> None:
        file = len(self.files)
        others: dict[str, list[str]] = {}
        for other, name in header.aliases.items():
            others.setdefault(name, []).append(other)
        for index, (place, hex_) in enumerate(zip(header.placed, header.digests, strict=True)):
            name = place.entry.name
            if name.startswith(OBJECT_PREFIX):
                section = name.removeprefix(OBJECT_PREFIX)
                self._objects[rank][section] = (file, index, hex_)
                continue
            placement = Placement.parse(place.entry.placement)
            piece = Piece(file, index, rank, place.entry, hex_, placement)
            for each in (name, *others.get(name, ())):
                self._pieces.setdefault(each, []).append(piece)
            if placement.ranks == (rank,):
                self._own[rank].append(piece)

    def _add_section(self, view: View, section: str, rank: int, state: State | None) -> None:
        """Add a section to a view as ``rank`` had it."""
        tree = self._tree(rank, section)
        self._resolve(view, tree, rank)
        if isinstance(tree, dict) and PARTITIONED in tree:
            # A copy, as the tree may be the one in ``_trees``, which is used again.
            tree = dict(tree)
            spread = Placement.parse(tree.pop(PARTITIONED)).ranks
            ranks = range(self.world) if spread is None else spread
            if not (state and self._owns_same(state, section, ranks, tree)):
                self._require_files(ranks)
                for other in ranks:
                    part = self._tree(other, section)["state"]
                    self._resolve(view, part, other)
                    tree["state"] = {**part, **tree["state"]}
        view.trees[section] = tree

    def _owns_same(
        self, state: State, section: str, ranks: Sequence[int], tree: Mapping[str, Any]
    ) -> bool:
        """Return True if this rank owns the same optimizer state as before, so needs no other
        rank's share.

        Ownership follows from the parameters and the number of ranks.
        """
        provider = state.providers.get(section)
        return (
            state.ranks.world == self.world
            and isinstance(provider, ZeroProvider)
            and provider.ranks == tuple(ranks)
            and provider.owned() >= tree["state"].keys()
        )

    def _tree(self, rank: int, section: str) -> Any:
        known = self._trees.get((rank, section))
        if known is not None:
            return known
        if section not in self._objects[rank]:
            raise FormatError(f"rank {rank} has no objects of {section!r}")
        number, index, _ = self._objects[rank][section]
        file, _, header, path = self.files[number]
        return read_object(file, header, index, path)

    def _resolve(self, view: View, tree: Any, rank: int) -> None:
        for name in references(tree):
            pieces = self.pieces_of(name, rank)
            if not pieces:
                message = f"entry {name!r} of rank {rank} is referenced but missing"
                if len(self.ranks) < self.world:
                    raise HoleError(message + self._missing_text(), entry=name)
                raise FormatError(message)
            entry = pieces[0].entry
            view.pieces[name] = pieces
            view.entries[name] = Entry.whole(
                entry.name,
                entry.dtype,
                entry.global_shape,
                stride=entry.stride if entry.shape == entry.global_shape else None,
                logical_dtype=entry.logical_dtype,
                lsn=entry.lsn,
            )

    def _view_of_new_rank(self, view: View, state: State) -> None:
        mine = state.ranks.rank
        like = self._matching_rank(state)
        for section, ranks in self._ranks_by_section().items():
            provider = state.providers.get(section)
            if provider is None and like is not None:
                continue  # the matching rank did not have it either
            identical = self._is_identical(section, ranks)
            whole = isinstance(provider, ModuleProvider | OptimizerProvider)
            # What a single rank saved is always identical. Its generators are not given to a second
            # rank: both would draw the same numbers.
            if (identical and (section != RNG_SECTION or self.world > 1)) or whole:
                source = like if like in ranks else ranks[mine % len(ranks)]
                self._add_section(view, section, source, state)
                if not identical and not self._is_partitioned(section, source):
                    view.notes.append(
                        f"{section}: rank {mine} is new and starts with that of rank {source}"
                    )
                continue
            view.left_out.append(section)
            view.notes.append(
                f"{section}: rank {mine} is new and starts with the state its program made; "
                f"each of {self.world} rank(s) had its own"
            )

    def _matching_rank(self, state: State) -> int | None:
        """Return a rank whose modules and optimizers fit those of this new rank, and which had no
        other sections; None if there is none.

        The search starts at this rank modulo the number of saved ranks.
        """
        first = state.ranks.rank % len(self.ranks)
        known = state.providers
        wanted = [s for s, p in known.items() if isinstance(p, ModuleProvider | OptimizerProvider)]
        others = known.keys() - wanted
        for rank in (*self.ranks[first:], *self.ranks[:first]):
            theirs = self._objects[rank].keys() - {BUCKETS_SECTION}
            if wanted and known.keys() >= theirs >= set(wanted):
                view = View()
                for section in wanted:
                    self._add_section(view, section, rank, state)
                plans = state.plan_restore(view.trees, view.entries, others)
                if not any(plan.mismatches for plan in plans.values()):
                    return rank
        return None

    def _view_without_files(self, view: View, state: State) -> None:
        """Fill the view of a rank whose own files are missing.

        Tensors that it shared with the given ranks are restored. Of modules and optimizers nothing
        else is acceptable: tensors of another rank are not its own.
        """
        mine = state.ranks.rank
        for section, ranks in self._ranks_by_section().items():
            source = ranks[mine % len(ranks)]
            provider = state.providers.get(section)
            if isinstance(provider, ModuleProvider | OptimizerProvider):
                tree = self._tree(source, section)
                if isinstance(tree, dict) and PARTITIONED in tree:
                    self._require_files([mine])
                self._resolve(view, tree, mine)
                view.trees[section] = tree
            elif section != RNG_SECTION and self._is_identical(section, ranks):
                self._add_section(view, section, source, state)
                view.notes.append(f"{section}: rank {mine} starts with that of rank {source}")
            else:
                view.left_out.append(section)
                view.notes.append(f"{section}: rank {mine} starts with the state its program made")

    @property
    def _missing_ranks(self) -> list[int]:
        return sorted(set(range(self.world)) - set(self.ranks))

    def _ranks_by_section(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            for section in self._objects[rank]:
                found.setdefault(section, []).append(rank)
        return found

    def _is_identical(self, section: str, ranks: Sequence[int]) -> bool:
        """Return True if all ranks had the same per-rank content in a section."""
        return len({self._fingerprint(section, rank) for rank in ranks}) == 1

    def _fingerprint(self, section: str, rank: int) -> tuple[str, ...]:
        front = f"{section}/"
        own = [p for p in self._own[rank] if p.entry.name.startswith(front)]
        tensors = sorted(f"{piece.entry.name} {piece.digest}" for piece in own)
        return (self._objects[rank][section][2], *tensors)

    def _is_partitioned(self, section: str, rank: int) -> bool:
        tree = self._tree(rank, section)
        return isinstance(tree, dict) and PARTITIONED in tree

    def _note_dropped(self, view: View, ranks: RankInfo) -> None:
        """Note the per-rank state of ranks that no longer exist."""
        for section, having in self._ranks_by_section().items():
            dropped = [rank for rank in having if rank >= ranks.world]
            if not dropped or self._is_identical(section, having):
                continue
            if not self._is_partitioned(section, dropped[0]):
                view.notes.append(
                    f"{section}: per-rank state of rank(s) {_listed(dropped)} is left out; "
                    f"this job has {ranks.world} rank(s)"
                )

    def _require_files(self, ranks: Iterable[int]) -> None:
        missing = sorted(set(ranks) - set(self.ranks))
        if missing:
            raise RecoveryError(
                f"the files of rank(s) {_listed(missing)} are needed but not available",
                hint="make the run folders of the hosts that wrote them readable on this host",
            )

    def _missing_text(self) -> str:
        missing = self._missing_ranks
        return f"; the files of rank(s) {_listed(missing)} are not here" if missing else ""

    def hole(self, holes: Mapping[str, str]) -> HoleError:
        """Return the error that lists missing elements: ``name -> description``."""
        listed = [f"  {name}: {problem}" for name, problem in list(holes.items())[:_LISTED]]
        more = len(holes) - len(listed)
        return HoleError(
            f"{len(holes)} entries have a hole{self._missing_text()}:\n"
            + "\n".join([*listed, *([f"  and {more} more"] if more > 0 else [])]),
            entry=next(iter(holes)),
        )


def _listed(ranks: Sequence[int]) -> str:
    more = len(ranks) - _LISTED
    return ", ".join(map(str, ranks[:_LISTED])) + (f" and {more} more" if more > 0 else "")


_Ranks = frozenset[int]


def ambiguous_tensors(saved: SavedRanks, state: State, view: View) -> list[tuple[str, str]]:
    """Return parameters and optimizer state of which ranks had different versions, if it is unknown
    which one this rank means: ``(name, reason)``.

    Other entries, such as buffers and random generators, differ between ranks by nature and are not
    checked.

    Args:
        view: view that this rank would restore.

    Raises:
        RecoveryError: files of other ranks are needed to decide.
    """
    if saved.world == 1:
        return []
    here = state.holders()
    found = list[tuple[str, str]]()
    for name, pieces in view.pieces.items():
        held = here(name)
        if held is None:
            continue
        unit, now = held
        took = _ranks(pieces[0], saved.world)
        # Optimizer state is meant for this rank if its parameter is.
        sure = took, _ranks(view.pieces.get(unit, pieces)[0], saved.world)
        if saved.world == state.ranks.world and any(now <= ranks for ranks in sure):
            continue
        others = _other_version(saved, name, pieces)
        if others is not None:
            found.append(
                (
                    name,
                    f"rank(s) {_text(took)} had one version, {others} another; rank(s) "
                    f"{_text(now)} of {state.ranks.world} may mean either",
                )
            )
    return found


def _other_version(saved: SavedRanks, name: str, pieces: Sequence[Piece]) -> str | None:
    """Return the ranks that had another tensor of that name, in words; None if there are none."""
    mine = {piece.box: piece.digest for piece in pieces}
    versions: dict[tuple[int, ...] | None, dict[Box, str]] = {}
    for piece in saved.all_pieces(name):
        versions.setdefault(piece.placement.ranks, {})[piece.box] = piece.digest
    for ranks, version in versions.items():
        if version != mine and ranks is not None:
            return f"rank(s) {_text(ranks)}"
    known = {rank for ranks in versions for rank in ranks or range(saved.world)}
    # Ranks without files here may have had another version of that name.
    hidden = set(range(saved.world)) - known - set(saved.ranks)
    if hidden:
        raise RecoveryError(
            f"rank(s) {_text(_ranks(pieces[0], saved.world))} had their own {name!r}; "
            f"the files of rank(s) {_text(hidden)} are needed to decide which one is "
            "meant, and are not available",
            hint="make the run folders of the hosts that wrote them readable on this host",
        )
    return None


def _ranks(piece: Piece, world: int) -> _Ranks:
    ranks = piece.placement.ranks
    return frozenset(range(world) if ranks is None else ranks)


def _text(ranks: Iterable[int]) -> str:
    return Placement(tuple(sorted(ranks))).text.partition("@")[2]


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """Distribution of tensors over the ranks that saved a base, from its headers; nothing else is
    read.

    Attributes:
        opened: closed files of each rank.
        saved: the same, combined.
        shapes: shape digest of each rank's state, as in its log.
        groups: names of the parameters of each optimizer, as the first rank had them.
    """

    opened: Mapping[int, OpenBase]
    saved: SavedRanks
    shapes: Mapping[int, str]
    groups: Mapping[str, Sequence[Sequence[str]]]

    @classmethod
    def of(
        cls, saved: SavedRanks, opened: Sequence[OpenBase], optimizers: Collection[str]
    ) -> SavedLayout | None:
        """Return the layout of a base; None if files of some ranks are missing.

        Args:
            optimizers: sections of optimizers.

        Raises:
            DamageError, FormatError: objects cannot be read.
        """
        if len(opened) < saved.world:
            return None
        shapes: dict[int, str] = {}
        known: dict[str, Any] = {}
        groups: dict[str, Sequence[Sequence[str]]] = {}
        for one in opened:
            rank = one.marker.rank
            trees = saved.trees_of(rank, optimizers, known)
            aliases = {k: v for _, _, header, _ in one.shards for k, v in header.aliases.items()}
            shapes[rank] = shape_of_base(one.placed(), aliases, trees)
            for key, tree in trees.items():
                groups.setdefault(key, OptimizerProvider.groups_of(tree) or [])
        return cls({one.marker.rank: one for one in opened}, saved, shapes, groups)

    @property
    def world(self) -> int:
        """Number of ranks that saved the base."""
        return self.saved.world

    def entries(self, rank: int) -> dict[str, Entry]:
        """Return the tensor entries that a rank wrote, in bases and in marks of its log, by
        name."""
        placed = self.opened[rank].placed()
        return {p.entry.name: p.entry for p in placed if not p.entry.name.startswith(OBJECT_PREFIX)}
