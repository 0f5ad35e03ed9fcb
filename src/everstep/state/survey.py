"""Survey of the state at one moment: tensors by reference, objects as copies.

A survey is taken in the training thread, at every save. Most of a state is the same tensors each
time, with other values in them. So each section's provider (:mod:`everstep.state.providers`) keeps
its last contents, with a guard (:mod:`.guards`) that tells whether inspecting the section again
would give the same. Without a guard, or if it fails, the section is inspected again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from types import MappingProxyType

import torch

from everstep.errors import OptionError, StateError, UnsupportedStateError
from everstep.state.layout import OBJECT_PREFIX, Entry, ReplicaDigest
from everstep.state.layout.entries import OBJECT_BYTES_MAX, is_reserved
from everstep.state.ownership import (
    Memory,
    OwnedMemory,
    Owner,
    OwnershipIndex,
    OwnershipRules,
    assign_owners,
    memory_of,
)
from everstep.state.values.objects import FIXED, Encoded, encode, encode_plain, unsupported_leaves
from everstep.state.values.tensors import (
    LocalShard,
    is_dtensor,
    shard_entry,
    tensor_entry,
    why_not_storable,
)
from everstep.state.values.tree import split

# A layout stays valid while objects grow or shrink by less than this, or by less than a quarter.
_DRIFT_BYTES = 4096
_DRIFT_SHARE = 4
_LONG_LIST_ITEMS = 65_536

Identity = Memory | str
"""Memory of a tensor; the name of a tensor without memory, which equals no other identity."""

_Row = tuple[str, torch.Tensor, Identity, Entry]
_NO_FORMS: Mapping[str, Entry] = MappingProxyType({})

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types without behaviour of their own beside that of a tensor."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Structure of a surveyed state; a layout is computed from it.

    Two surveys have the same object if and only if nothing about it has changed.

    Attributes:
        entries: entries of all tensors, one per distinct memory, in canonical order, with LSN 0.
        aliases: ``other name -> entry name`` for tensors that share all of their memory.
        owners: owner of each entry, by name.
        objects_bytes: approximate sizes of the encoded objects, by entry name.
        common: digests of the tensors that this rank shares with others; empty for one rank.
    """

    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    owners: Mapping[str, Owner]
    objects_bytes: Mapping[str, int]
    common: tuple[ReplicaDigest, ...] = ()

    @property
    def static(self) -> frozenset[str]:
        """Names of the entries that were declared static."""
        return frozenset(name for name, owner in self.owners.items() if owner.kind == "static")

    @property
    def static_bytes(self) -> int:
        """Bytes of the static entries."""
        static = self.static
        return sum(entry.size_bytes for entry in self.entries if entry.name in static)

    @property
    def size_bytes(self) -> int:
        """Bytes of tensors, and approximate bytes of objects."""
        return sum(entry.size_bytes for entry in self.entries) + sum(self.objects_bytes.values())


@dataclass(slots=True)
class Survey:
    """The state at one moment: tensors by reference, objects copied.

    Attributes:
        shape: structure of the tensors and objects.
        tensors: live tensors by entry name, in canonical order; unchanged ones are the same Python
            objects as in the previous survey.
    """

    shape: Shape
    tensors: Mapping[str, torch.Tensor]
    _trees: Mapping[str, object] = field(repr=False)
    _sizes: dict[str, int] = field(repr=False)

    def objects(self) -> dict[str, bytes]:
        """Encode the objects, as they were when the survey was taken, by entry name.

        May be called from another thread, and while training goes on.

        Raises:
            UnsupportedStateError: objects are too large.
        """
        encoded = self.encoded()
        too_large = [
            (section, "objects of more than 1 GiB; use torch tensors")
            for section, tree in encoded.items()
            if len(tree.data) > OBJECT_BYTES_MAX
        ]
        if too_large:
            raise unsupported(too_large)
        objects = {OBJECT_PREFIX + section: tree.data for section, tree in encoded.items()}
        self._sizes.update((name, len(data)) for name, data in objects.items())
        return objects

    def measure(self) -> None:
        """Encode the objects only to update their sizes, for the shape of the next survey; in
        any thread."""
        self.objects()

    def encoded(self) -> dict[str, Encoded]:
        """Return the encoded objects by section; the survey keeps them in this form."""
        encoded = {section: _encoded(tree, section) for section, tree in self._trees.items()}
        self._trees = encoded
        return encoded


@dataclass(frozen=True, slots=True)
class DeferredTree:
    """Object tree that is built when it is encoded, from data copied when it was surveyed.

    Encoding mostly happens in the copying thread, so training does not wait for it.
    """

    tree: Callable[[], object]


def _encoded(tree: object, section: str) -> Encoded:
    if type(tree) is Encoded:
        return tree
    made = tree.tree() if type(tree) is DeferredTree else tree
    return Encoded(encode(made, section, checked=True))


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """Tensors of one section, or of one component of it, in canonical order, as detached views.

    Attributes:
        names: names of the tensors.
        tensors: detached views of the live tensors.
        identities: memory of each tensor, or its name if it has none.
        entries: entry of each tensor, with LSN 0.
    """

    names: tuple[str, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()
    identities: tuple[Identity, ...] = ()
    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(
        cls,
        named: Mapping[str, torch.Tensor],
        before: Sequence[TensorBlock],
        forms: Mapping[str, Entry] = _NO_FORMS,
    ) -> TensorBlock:
        """Create a block of storable tensors.

        Tensors, and the block itself, are taken from ``before`` where they are the same.

        Args:
            named: storable tensors by name.
            before: blocks of the last inspection.
            forms: entries of the tensors that are shards of a DTensor.
        """
        if not named:
            return _EMPTY
        known = {row[0]: row for block in before for row in block.rows() if row[0] in named}
        rows: list[_Row] = []
        for name, tensor in named.items():
            identity = memory_of(tensor) or name
            row = known.get(name)
            if row is None or row[2] != identity or not _is_same_memory(tensor, row[1]):
                row = (name, tensor, identity, forms.get(name) or tensor_entry(name, tensor))
            elif name in forms and forms[name] != row[3]:
                row = (*row[:3], forms[name])
            rows.append(row)
        new = cls(*zip(*rows, strict=True))
        for block in before:
            same = block.names == new.names and same_objects(block.tensors, new.tensors)
            if same and (not forms or block.entries == new.entries):
                return block
        return new

    def first(self, count: int) -> TensorBlock:
        """Return a block of the first ``count`` tensors."""
        return TensorBlock(
            self.names[:count], self.tensors[:count], self.identities[:count], self.entries[:count]
        )

    def rows(self) -> Iterator[_Row]:
        """Yield name, tensor, identity and entry of each tensor."""
        return zip(self.names, self.tensors, self.identities, self.entries, strict=True)


_EMPTY = TensorBlock()


@dataclass(frozen=True, slots=True)
class SectionContents:
    """Contents of one section of the state.

    Attributes:
        blocks: the tensors; a block in which nothing has changed is the same object as before.
        tree: the objects, copied, with references to the tensors.
        holding: memory that an optimizer owns; the same object as before if unchanged. None: no
            optimizer.
    """

    blocks: tuple[TensorBlock, ...]
    tree: object
    holding: OwnedMemory | None = None


def inspect_plain(value: object, section: str, before: Sequence[TensorBlock]) -> SectionContents:
    """Return the contents of ``value``, as :func:`inspect_tree` does, but encoded if there are no
    tensors: compiled code copies and encodes plain data at once."""
    if _has_long_list(value):
        return inspect_tree(value, section, before)
    if (data := encode_plain(value)) is not None:
        return SectionContents((_EMPTY,), Encoded(data))
    named: dict[str, torch.Tensor] = {}
    tree = split(value, section, named)
    if not named and (data := encode_plain(tree, owned=True)) is not None:
        return SectionContents((_EMPTY,), Encoded(data))
    return SectionContents((storable_block(tree, named, section, before),), tree)


def _has_long_list(value: object) -> bool:
    """Return True if a value is, or a dict with, a long list of numbers. It is copied faster than
    it is encoded, which another thread does."""
    parts = value.values() if type(value) is dict else (value,)
    return any(
        type(part) is list and len(part) >= _LONG_LIST_ITEMS and type(part[0]) in FIXED
        for part in list(parts)
    )


def inspect_tree(value: object, section: str, before: Sequence[TensorBlock]) -> SectionContents:
    """Return the contents of ``value``, without shortcuts.

    Args:
        value: nested state.
        section: its key in the state dict.
        before: blocks of the last inspection.

    Raises:
        UnsupportedStateError: some leaves cannot be stored; lists all of them.
    """
    named: dict[str, torch.Tensor] = {}
    tree = split(value, section, named)
    return SectionContents((storable_block(tree, named, section, before),), tree)


def storable_block(
    tree: object, named: Mapping[str, torch.Tensor], section: str, before: Sequence[TensorBlock]
) -> TensorBlock:
    """Return the block of the tensors ``named``, if they and the rest of ``tree`` can be stored.

    Raises:
        UnsupportedStateError: some leaves cannot be stored; lists all of them.
    """
    if not named:  # the usual case of plain data, at every save
        if leaves := unsupported_leaves(tree, section):
            raise unsupported(leaves)
        return _EMPTY
    spread = {name: tensor for name, tensor in named.items() if is_dtensor(tensor)}
    parts: dict[str, LocalShard] = {}
    leaves = []
    for name, tensor in spread.items():
        try:
            parts[name] = LocalShard.of(tensor)
        except ValueError as error:
            leaves.append((name, f"a DTensor whose local shard cannot be determined: {error}"))
    if spread and not leaves:
        named = {**named, **{name: part.local for name, part in parts.items()}}
    leaves += [
        (name, why)
        for name, tensor in named.items()
        if not is_dtensor(tensor) and (why := why_not_storable(tensor))
    ]
    leaves += unsupported_leaves(tree, section)
    if leaves:
        raise unsupported(leaves)
    forms = {name: shard_entry(name, spread[name], part) for name, part in parts.items()}
    return TensorBlock.of(named, before, forms)


def unsupported(leaves: Sequence[tuple[str, str]]) -> UnsupportedStateError:
    """Create the error that lists ``leaves``, pairs of a name and a reason."""
    listed = "\n".join(f"  {name}: {reason}" for name, reason in leaves)
    hint = (
        "a copy of an object's data is not updated automatically: copy the data into the state "
        "before each ckpt.step(), and back into the object after resume(); or put an object with "
        "state_dict() and load_state_dict() into the state"
    )
    return UnsupportedStateError(
        f"{len(leaves)} leaf value(s) of the state cannot be stored:\n{listed}",
        leaves=tuple(leaves),
        hint=hint if any("store " in reason for _, reason in leaves) else None,
    )


def drift_bytes(size_bytes: int) -> int:
    """Return by how much encoded objects of this size may change before they are measured again."""
    return max(_DRIFT_BYTES, size_bytes // _DRIFT_SHARE)


def same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return True if both sequences hold the very same objects. (``==`` would compare tensors by
    value.)"""
    return len(one) == len(other) and all(map(is_, one, other))


def _is_same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if a tensor has the memory of a view: storage, offset, shape and strides."""
    if type(tensor) not in PLAIN_TENSORS or tensor.dtype != view.dtype:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False  # is_set_to would compare copies
    try:
        return tensor.is_set_to(view)
    except RuntimeError:
        return False


class SurveyBuilder:
    """Builder of surveys from sections; reuses unchanged structures of the previous survey.

    Args:
        rules: the user's rules on ownership.
    """

    def __init__(self, rules: OwnershipRules) -> None:
        self._rules = rules
        self._known: _TensorIndex | None = None
        self._shape: Shape | None = None
        self._sizes: dict[str, int] = {}

    def survey(self, parts: Mapping[str, SectionContents]) -> Survey:
        """Return the survey of a state with these sections.

        Raises:
            UnsupportedStateError: objects are too large.
            StateError: a pattern claims an entry that an optimizer owns; an OptionError the first
                time.
        """
        trees: Mapping[str, object] = {section: part.tree for section, part in parts.items()}
        blocks = tuple(block for part in parts.values() for block in part.blocks)
        holdings = tuple(part.holding for part in parts.values() if part.holding is not None)
        known = self._known
        shape = self._shape
        if known is None or shape is None or not known.follow(blocks, holdings):
            known = _TensorIndex(blocks, holdings)
            new = self._shape_of(known)
            if shape is None or replace(new, objects_bytes=shape.objects_bytes) != shape:
                # A new layout will be planned from this shape, so it needs the current sizes.
                survey = Survey(new, {}, trees, self._sizes)
                shape = replace(new, objects_bytes=_sizes_of(survey.objects()))
                trees = survey.encoded()
        shape = self._resized(shape)
        # Set at the end: after an error above the next survey compares with the previous one.
        self._known = known
        self._shape = shape
        return Survey(shape, known.tensors, trees, self._sizes)

    def _shape_of(self, known: _TensorIndex) -> Shape:
        names = {name: [] if is_reserved(name) else [name] for name in known.tensors}
        for other, name in known.aliases.items():
            names[name].append(other)
        owners = assign_owners(
            names,
            {name: key for key, name in known.names.items() if isinstance(key, Memory)},
            known.claims,
            self._rules,
            error=OptionError if self._shape is None else StateError,
        )
        aliases = MappingProxyType(known.aliases)
        return Shape(known.entries, aliases, MappingProxyType(owners), MappingProxyType({}))

    def _resized(self, shape: Shape) -> Shape:
        """Return the shape with current sizes of objects, if the sizes have drifted too far."""
        for name, size in shape.objects_bytes.items():
            now = self._sizes[name]
            if abs(now - size) > drift_bytes(size):
                return replace(shape, objects_bytes=MappingProxyType(dict(self._sizes)))
        return shape


class _TensorIndex:
    """All tensors of the last survey, and the names that share memory.

    Attributes:
        claims: memory that optimizers own.
        names: entry name by identity.
        aliases: ``other name -> entry name``.
        tensors: live tensors by entry name, read-only.
        entries: entries in canonical order.
    """

    def __init__(self, blocks: tuple[TensorBlock, ...], holdings: tuple[OwnedMemory, ...]) -> None:
        self._blocks = blocks
        self._holdings = holdings
        self.claims = OwnershipIndex(holdings)
        self.names: dict[Identity, str] = {}
        self.aliases: dict[str, str] = {}
        self._tied: set[Identity] = set()
        tensors: dict[str, torch.Tensor] = {}
        entries: list[Entry] = []
        for block in blocks:
            for name, tensor, identity, entry in block.rows():
                first = self.names.setdefault(identity, name)
                if first == name:
                    tensors[name] = tensor
                    entries.append(entry)
                else:
                    self.aliases[name] = first
                    self._tied.add(identity)
        self.tensors: Mapping[str, torch.Tensor] = MappingProxyType(tensors)
        self.entries = tuple(entries)

    def follow(self, blocks: tuple[TensorBlock, ...], holdings: tuple[OwnedMemory, ...]) -> bool:
        """Take over ``blocks`` if nothing changed but the memory of tensors that share no memory
        with other tensors or optimizers, neither before nor now.

        Names, entries, aliases and owners stay valid then. Otherwise return False and change
        nothing.
        """
        if len(blocks) != len(self._blocks) or not same_objects(holdings, self._holdings):
            return False
        if same_objects(blocks, self._blocks):
            return True  # the usual case
        moved: dict[Identity, tuple[str, Identity]] = {}  # by old identity
        fresh: dict[str, torch.Tensor] = {}
        for old, new in zip(self._blocks, blocks, strict=True):
            if new is old:
                continue
            if new.entries != old.entries or new.names != old.names:
                return False
            for name, tensor, was, now in zip(
                new.names, new.tensors, old.identities, new.identities, strict=True
            ):
                fresh[name] = tensor
                if was != now:
                    # Two names had the same memory, and may now have separate ones.
                    if was in moved:
                        return False
                    moved[was] = (name, now)
        if not self._share_no_memory(moved):
            return False
        for was in moved:
            del self.names[was]
        self.names.update((now, name) for name, now in moved.values())
        if fresh:
            self.tensors = MappingProxyType(
                {name: fresh.get(name, tensor) for name, tensor in self.tensors.items()}
            )
        self._blocks = blocks
        return True

    def _share_no_memory(self, moved: Mapping[Identity, tuple[str, Identity]]) -> bool:
        """Return True if the moved tensors overlap no other tensor and no optimizer's memory."""
        new = {now for _, now in moved.values()}
        if len(new) < len(moved) or not self._tied.isdisjoint(moved):
            return False
        if any(identity in self.names and identity not in moved for identity in new):
            return False
        return not any(
            isinstance(identity, Memory) and self.claims.own_part_of(identity)
            for identity in (*moved, *new)
        )


def _sizes_of(objects: Mapping[str, bytes]) -> Mapping[str, int]:
    return MappingProxyType({name: len(data) for name, data in objects.items()})
