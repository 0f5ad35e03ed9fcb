"""What of a base saved by several ranks one rank of this job restores, however many there are now.

A rank that was there takes what it had. What ranks had in common, and what was spread over them,
is found by its offsets in whichever files hold it. A rank that is new takes what all ranks had
alike; what each had for itself (random generators, loaders) is nobody's to give away, and it is
said that the rank begins with what its program made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from everstep.commit.job.offers import Needs
from everstep.errors import DamageError, FormatError, RecoveryError
from everstep.format.digests import digest
from everstep.format.header import ShardHeader
from everstep.format.records import FileRecord, Manifest, Marker
from everstep.run.open_base import OpenBase
from everstep.run.shape import shape_of_base
from everstep.seams.files.filesystem import ReadFile
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_BYTES_MAX, OBJECT_PREFIX, RNG_SECTION
from everstep.state.layout.placement import Box, Placement
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import PARTITIONED, ZeroProvider
from everstep.state.ranks.ddp_buckets import BUCKETS_SECTION
from everstep.state.ranks.rank_info import RankInfo
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tree import references

__all__ = [
    "HoleError",
    "Piece",
    "SavedLayout",
    "SavedRanks",
    "View",
    "ambiguous_tensors",
    "needs_of",
    "read_object",
]

_LISTED = 8


class HoleError(DamageError):
    """What is wanted is not all in the files that were opened: perhaps other ranks' have it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry in a rank's file: a whole tensor, or one box of it.

    Attributes:
        file, index: which file of the base, which entry of its header.
        rank: that wrote it.
    """

    file: int
    index: int
    rank: int
    entry: Entry
    digest: str
    placement: Placement

    @property
    def box(self) -> Box:
        return Box(self.entry.global_offset, self.entry.shape)


@dataclass(slots=True)
class View:
    """What one rank restores.

    Attributes:
        trees: decoded object trees by section.
        entries: of whole tensors, by every name that trees refer to.
        pieces: where their bytes are, by the same names.
        left_out: sections that stay as the program made them.
        notes: what is not as it was, in words.
    """

    trees: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    pieces: dict[str, Sequence[Piece]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def needs_of(state: State, shared: Sequence[bool] | None = None) -> Needs:
    """Says which ranks' files of a base a rank needs at most; headers are not known by then.

    All of them, but where the job has as many ranks as before and nothing that this rank holds
    is shared or spread over others: then its own.

    Args:
        shared: by rank: whether anything that it holds is, as each says of itself; None: as with
            this one, on all of them.
    """
    world = state.ranks.world
    each = [state.is_shared()] * world if shared is None else shared

    def needs(rank: int, manifest: Manifest) -> Collection[int]:
        before = len(manifest.markers)
        return (rank,) if before == world and not each[rank] else range(before)

    return needs


def read_object(file: ReadFile, header: ShardHeader, index: int, path: PurePath) -> Any:
    """One section's tree, verified against its digest.

    Raises:
        DamageError: naming the entry.
        FormatError: for bytes that are no objects.
    """
    return decode(_object_bytes(file, header, index, path))


def _object_bytes(file: ReadFile, header: ShardHeader, index: int, path: PurePath) -> bytes:
    place = header.placed[index]
    expected = header.digests[index]
    name = place.entry.name
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
    """The files of a base, of all ranks or of some, headers verified.

    Args:
        opened: one per rank, in any order.
        trees: of the first of them, where they have been decoded already.
        partly: those of the other ranks are gone.

    Raises:
        FormatError: they are not of one base.

    Attributes:
        world: number of ranks that saved it.
        files: of all of them.
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
            raise FormatError("the files given are not those of different ranks of one base")
        self.world = opened[0].marker.world
        self.ranks = sorted(markers)
        first = opened[0].marker.rank
        self._trees = {(first, section): tree for section, tree in (trees or {}).items()}
        self.files: list[tuple[ReadFile, FileRecord, ShardHeader, PurePath]] = []
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
        """What ``state``'s rank restores.

        Raises:
            RecoveryError: the files of a rank are needed and not given.
            DamageError, FormatError: objects cannot be read; an entry is missing.
        """
        view = View()
        mine = state.ranks.rank
        if self._partly and mine < self.world and mine not in self.ranks:
            self._for_a_rank_without_files(view, state)
        elif mine < self.world:
            self._check_there([mine])
            for section in self._objects[mine]:
                self._take(view, section, mine, state)
        else:
            self._for_a_new_rank(view, state)
        if state.ranks.world < self.world:
            self._note_what_is_left(view, state.ranks)
        if self._partly:
            view.notes.append(
                f"the files of rank(s) {_listed(self._gone)} are not here: what these had for "
                "themselves is lost, and what they had in common with others is taken from those"
            )
        return view

    def view_of_all(self, rank: int) -> View:
        """All that ``rank`` had; for looking at it without a state."""
        view = View()
        for section in self._objects[rank]:
            self._take(view, section, rank, None)
        return view

    def trees_of(
        self, rank: int, sections: Collection[str], known: dict[str, Any]
    ) -> dict[str, Any]:
        """Object trees of some sections of a rank, as far as it has them.

        Args:
            known: by digest: what was read before, which is added to.

        Raises:
            DamageError, FormatError: they cannot be read.
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
        """The encoded objects of a rank, by section.

        Raises:
            DamageError, FormatError: they cannot be read.
        """
        found: dict[str, bytes] = {}
        for section, (number, index, _) in self._objects[rank].items():
            file, _, header, path = self.files[number]
            found[section] = _object_bytes(file, header, index, path)
        return found

    def settle(self, marker: Marker, digests: Mapping[str, str]) -> None:
        """What a rank has written, of several updates, is known as it is at the base's.

        Args:
            marker: of that rank.
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
        """Numbers of a rank's files."""
        return self._files_of[rank]

    def sections_of(self, rank: int) -> Collection[str]:
        """Sections that a rank had objects of."""
        return self._objects[rank].keys()

    def pieces_of(self, name: str, rank: int) -> Sequence[Piece]:
        """The parts of what ``rank`` calls ``name``, each once, and its own ones where it has any.

        The first one says what it is called: a rank whose part of a tied weight is empty has no
        memory by which to tell that it is tied, and calls it by all of its names.

        Raises:
            FormatError: it can be more than one tensor, or the parts are of different ones.
        """
        found = [p for p in self._pieces.get(name, ()) if p.placement.holds(rank)]
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
            differs = again.digest != piece.digest and again.entry.lsn == entry.lsn
            if not same or differs:
                raise FormatError(
                    f"entry {name!r} of rank {piece.rank} contradicts that of rank {first.rank}"
                )
        return list(boxes.values())

    def all_pieces(self, name: str) -> Sequence[Piece]:
        """The parts of all that any rank calls ``name``."""
        return self._pieces.get(name, ())

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

    def _take(self, view: View, section: str, rank: int, state: State | None) -> None:
        """Takes a section as ``rank`` had it."""
        tree = self._tree(rank, section)
        self._resolve(view, tree, rank)
        if isinstance(tree, dict) and PARTITIONED in tree:
            tree = dict(tree)
            spread = Placement.parse(tree.pop(PARTITIONED)).ranks
            ranks = range(self.world) if spread is None else spread
            if not (state and self._owns_the_same(state, section, ranks, tree)):
                self._check_there(ranks)
                for other in ranks:
                    part = self._tree(other, section)["state"]
                    self._resolve(view, part, other)
                    tree["state"] = {**part, **tree["state"]}
        view.trees[section] = tree

    def _owns_the_same(
        self, state: State, section: str, ranks: Sequence[int], tree: Mapping[str, Any]
    ) -> bool:
        """Whether this rank owns of an optimizer what it owned, so that it needs no other's part:
        who owns what follows from the parameters and the number of ranks."""
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
                message = f"entry {name!r} of rank {rank} is referred to but not there"
                if len(self.ranks) < self.world:
                    raise HoleError(message + self._absent(), entry=name)
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

    def _for_a_new_rank(self, view: View, state: State) -> None:
        mine = state.ranks.rank
        like = self._like(state)
        sections = list(dict.fromkeys(s for rank in self.ranks for s in self._objects[rank]))
        for section in sections:
            ranks = [rank for rank in self.ranks if section in self._objects[rank]]
            provider = state.providers.get(section)
            if provider is None and like is not None:
                continue  # that one had not, either
            alike = self._is_alike(section, ranks)
            whole = isinstance(provider, ModuleProvider | OptimizerProvider)
            if (alike and (section != RNG_SECTION or self.world > 1)) or whole:
                giver = like if like in ranks else ranks[mine % len(ranks)]
                self._take(view, section, giver, state)
                if not alike and not self._is_partitioned(section, giver):
                    view.notes.append(
                        f"{section}: rank {mine} is new and begins with that of rank {giver}"
                    )
                continue
            view.left_out.append(section)
            view.notes.append(
                f"{section}: rank {mine} is new and begins with what its program made; each of "
                f"{self.world} rank(s) had its own"
            )

    def _like(self, state: State) -> int | None:
        """The first rank, from r mod W' on, whose modules and optimizers fit those that this one
        has, which is new, and that had no other sections; None: there is none."""
        first = state.ranks.rank % len(self.ranks)
        known = state.providers
        wanted = [s for s, p in known.items() if isinstance(p, ModuleProvider | OptimizerProvider)]
        others = known.keys() - wanted
        for rank in (*self.ranks[first:], *self.ranks[:first]):
            theirs = self._objects[rank].keys() - {BUCKETS_SECTION}
            if wanted and known.keys() >= theirs >= set(wanted):
                view = View()
                for section in wanted:
                    self._take(view, section, rank, state)
                plans = state.plan_restore(view.trees, view.entries, others)
                if not any(plan.mismatches for plan in plans.values()):
                    return rank
        return None

    def _for_a_rank_without_files(self, view: View, state: State) -> None:
        """Takes what this rank had in common with those whose files are there. Of modules and
        optimizers nothing else will do: another rank's own tensors are none of its."""
        mine = state.ranks.rank
        for section in dict.fromkeys(s for rank in self.ranks for s in self._objects[rank]):
            ranks = [rank for rank in self.ranks if section in self._objects[rank]]
            giver = ranks[mine % len(ranks)]
            provider = state.providers.get(section)
            if isinstance(provider, ModuleProvider | OptimizerProvider):
                tree = self._tree(giver, section)
                if isinstance(tree, dict) and PARTITIONED in tree:
                    self._check_there([mine])
                self._resolve(view, tree, mine)
                view.trees[section] = tree
            elif section != RNG_SECTION and self._is_alike(section, ranks):
                self._take(view, section, giver, state)
                view.notes.append(f"{section}: rank {mine} begins with that of rank {giver}")
            else:
                view.left_out.append(section)
                view.notes.append(f"{section}: rank {mine} begins with what its program made")

    @property
    def _gone(self) -> list[int]:
        return sorted(set(range(self.world)) - set(self.ranks))

    def _is_alike(self, section: str, ranks: Sequence[int]) -> bool:
        """Whether all ranks had the same in it, as far as each had it for itself."""
        return len({self._fingerprint(section, rank) for rank in ranks}) == 1

    def _fingerprint(self, section: str, rank: int) -> tuple[str, ...]:
        front = f"{section}/"
        own = [p for p in self._own[rank] if p.entry.name.startswith(front)]
        tensors = sorted(f"{piece.entry.name} {piece.digest}" for piece in own)
        return (self._objects[rank][section][2], *tensors)

    def _is_partitioned(self, section: str, rank: int) -> bool:
        tree = self._tree(rank, section)
        return isinstance(tree, dict) and PARTITIONED in tree

    def _note_what_is_left(self, view: View, ranks: RankInfo) -> None:
        """With fewer ranks than before, what the others had for themselves is nobody's."""
        for section in dict.fromkeys(s for rank in self.ranks for s in self._objects[rank]):
            having = [rank for rank in self.ranks if section in self._objects[rank]]
            gone = [rank for rank in having if rank >= ranks.world]
            if not gone or self._is_alike(section, having):
                continue
            if not self._is_partitioned(section, gone[0]):
                view.notes.append(
                    f"{section}: what rank(s) {_listed(gone)} had for themselves is left out; "
                    f"this job has {ranks.world}"
                )

    def _check_there(self, ranks: Iterable[int]) -> None:
        missing = sorted(set(ranks) - set(self.ranks))
        if missing:
            raise RecoveryError(
                f"the files of rank(s) {_listed(missing)} are needed, and not here",
                hint="make the run folders of the hosts that had them readable here",
            )

    def _absent(self) -> str:
        missing = self._gone
        return f"; the files of rank(s) {_listed(missing)} are not here" if missing else ""

    def hole(self, holes: Mapping[str, str]) -> HoleError:
        """The error that lists what nobody has written: ``name -> what``."""
        listed = [f"  {name}: {what}" for name, what in list(holes.items())[:_LISTED]]
        more = len(holes) - len(listed)
        return HoleError(
            f"{len(holes)} entries have a hole{self._absent()}:\n"
            + "\n".join([*listed, *([f"  and {more} more"] if more > 0 else [])]),
            entry=next(iter(holes)),
        )


def _listed(ranks: Sequence[int]) -> str:
    more = len(ranks) - _LISTED
    return ", ".join(map(str, ranks[:_LISTED])) + (f" and {more} more" if more > 0 else "")


_Ranks = frozenset[int]


def ambiguous_tensors(saved: SavedRanks, state: State, view: View) -> list[tuple[str, str]]:
    """Parameters, and what optimizers keep for them, of which ranks had different ones, where it
    cannot be told which of them this rank means: ``(name, why)``.

    Not other entries: buffers, random generators and the like are each rank's own by nature.

    Args:
        view: what this rank would restore.

    Raises:
        RecoveryError: the files of other ranks are needed to know.
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
        # What an optimizer has for a parameter this rank means where it means that.
        sure = took, _ranks(view.pieces.get(unit, pieces)[0], saved.world)
        if saved.world == state.ranks.world and any(now <= ranks for ranks in sure):
            continue
        others = _different(saved, name, pieces)
        if others is not None:
            found.append(
                (
                    name,
                    f"rank(s) {_text(took)} had one, {others} another; rank(s) "
                    f"{_text(now)} of {state.ranks.world} may mean either",
                )
            )
    return found


def _different(saved: SavedRanks, name: str, pieces: Sequence[Piece]) -> str | None:
    """Who had another tensor of that name; None: nobody."""
    mine = {piece.box: piece.digest for piece in pieces}
    versions: dict[tuple[int, ...] | None, dict[Box, str]] = {}
    for piece in saved.all_pieces(name):
        versions.setdefault(piece.placement.ranks, {})[piece.box] = piece.digest
    for ranks, version in versions.items():
        if version != mine and ranks is not None:
            return f"rank(s) {_text(ranks)}"
    known = {rank for ranks in versions for rank in ranks or range(saved.world)}
    hidden = set(range(saved.world)) - known - set(saved.ranks)
    if hidden:
        raise RecoveryError(
            f"rank(s) {_text(_ranks(pieces[0], saved.world))} had {name!r} alone; what rank(s) "
            f"{_text(hidden)} had of that name is needed to know whose it is now, and not here",
            hint="make the run folders of the hosts that had them readable here",
        )
    return None


def _ranks(piece: Piece, world: int) -> _Ranks:
    ranks = piece.placement.ranks
    return frozenset(range(world) if ranks is None else ranks)


def _text(ranks: Iterable[int]) -> str:
    return Placement(tuple(sorted(ranks))).text.partition("@")[2]


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """What the headers of a base say; nothing of it is read any more.

    Attributes:
        opened: of each rank that saved it, with files that are closed.
        saved: the same together.
        shapes: by rank: digest of what its state consisted of, as its log has it.
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
        """Of a base that is open; None: the files of some ranks are not.

        Args:
            optimizers: their sections.

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
        """How many ranks saved it."""
        return self.saved.world

    def entries(self, rank: int) -> dict[str, Entry]:
        """What of tensors a rank wrote of bases, and of marks of its log, by name."""
        placed = self.opened[rank].placed()
        return {p.entry.name: p.entry for p in placed if not p.entry.name.startswith(OBJECT_PREFIX)}
