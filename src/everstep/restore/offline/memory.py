"""Host memory, to which the log is replayed without the program that trained the state
(``docs/design/log.md``).

The object trees of a base hold everything needed: the parameters of each optimizer by name, the
entries of its state, and its hyperparameters. Entries that no optimizer replays come from the last
step mark, which holds all of them (I8). Of a base of several ranks it is the share that one of them
writes, with that rank's own log.

State of one rank in host memory, without the program that trained it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.capture import MarkComparison
from everstep.errors import FormatError, ReplayError, UnsupportedStateError
from everstep.format import Marker, digest
from everstep.format.log import LogRecord
from everstep.replay import (
    ONE_THREAD,
    Exactness,
    Replayer,
    ReplayOptions,
    Update,
    is_elementwise,
    replay_kind,
)
from everstep.replay.optimizer_step import makes_state_when_built
from everstep.restore.redo import (
    MarkEntries,
    Step,
    owned_entries,
    parameter_names,
    sampled_difference,
)
from everstep.restore.redo.updates import DeclaredRedo, own_share
from everstep.run.tensors import tensor_of, with_strides
from everstep.state.layout import OBJECT_PREFIX, Entry
from everstep.state.providers import PARTITIONED, OptimizerProvider
from everstep.state.values.objects import TensorRef, decode, encode
from everstep.state.values.tensors import host_bytes
from everstep.state.values.tree import join, references


@dataclass(slots=True, eq=False)
class OfflineState:
    """Entries of a state as CPU tensors, and its objects.

    Of a base of several ranks it is the share that one of them writes, or the state that one
    process would restore.

    Attributes:
        marker: marker of the base.
        entries: entries of tensors by name, in the order of the base's files.
        tensors: values by name, contiguous.
        aliases: ``other name -> entry name``.
        objects: encoded objects by entry name.
        shape: shape of the state (see :mod:`everstep.state.layout.entries`).
        step, lsn: of the state; those of the base before anything was replayed.
    """

    marker: Marker
    entries: dict[str, Entry]
    tensors: dict[str, torch.Tensor]
    aliases: Mapping[str, str]
    objects: dict[str, bytes]
    shape: str
    step: int = field(init=False)
    lsn: int = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.marker.step
        self.lsn = self.marker.lsn

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors and objects."""
        tensors = sum(entry.size_bytes for entry in self.entries.values())
        return tensors + sum(map(len, self.objects.values()))

    def canonical(self, name: str) -> str:
        """Return the name of the entry that any name of a tensor stands for."""
        return self.aliases.get(name, name)

    def digests(self) -> dict[str, str]:
        """Return the digest of every entry, objects included, as a base of this state has them."""
        found = {name: self.digest_of(name) for name in self.entries}
        return found | {name: digest(data) for name, data in self.objects.items()}

    def digest_of(self, name: str) -> str:
        """Return the digest of a tensor's entry."""
        flat = self.tensors[name].contiguous()  # must live until its bytes are digested
        return digest(host_bytes(flat))

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of a tensor's entry in row-major order, valid while the tensor
        exists."""
        tensor = self.tensors[name]
        if not tensor.is_contiguous():
            flat = tensor.contiguous()  # must live until its bytes are copied
            return memoryview(bytes(host_bytes(flat)))
        return host_bytes(tensor)


@dataclass(slots=True, eq=False)
class _Optimizer:
    """One optimizer and its replayer.

    Attributes:
        kind: name of its class in the log.
        names: names of the parameters that it updates here.
        replayer: applies updates to the tensors.
        last: newest update that was applied.
    """

    kind: str
    names: Collection[str]
    replayer: Replayer
    last: Update | None = None


class HostMemory:
    """State in host memory that updates are applied to (see
    :class:`~everstep.restore.redo.driver.Memory`).

    Args:
        state: state of a base; updated in place.
        trees: decoded objects of the base, by section; empty if nothing is replayed here, because
            other ranks compute the same state.
        options: options of the replay.

    Attributes:
        replayed: entries that an optimizer computed here.
        unlogged: hyperparameters that are tensors and not in the marks: they have the values of the
            last update, but a scheduler may have changed them since.
        surprises: differences between replay and the last mark, as text.
    """

    def __init__(
        self,
        state: OfflineState,
        trees: Mapping[str, Any],
        options: ReplayOptions = ONE_THREAD,
    ) -> None:
        self.declared: DeclaredRedo | None = None
        self.state = state
        self.replayed: set[str] = set()
        self.unlogged: set[str] = set()
        self.surprises: list[str] = []
        self._trees = dict(trees)
        self._options = options
        self._optimizers: dict[str, _Optimizer] = {}
        self._held: MarkEntries = ()  # by the last step's marks, until they are put
        self._marked: set[str] = set()  # names of these, also after that
        self._comparison = MarkComparison()
        self._parameters = parameter_names(trees, state.canonical)
        self._owned = owned_entries(trees, state.canonical)

    @property
    def replays(self) -> bool:
        """False if other ranks compute what the optimizers of this one would."""
        return bool(self._trees)

    @property
    def exactness(self) -> Exactness:
        """Exactness of all replayed optimizers together."""
        for optimizer in self._optimizers.values():
            if not optimizer.replayer.exact.exact:
                return optimizer.replayer.exact
        if self.unlogged:
            return Exactness(
                False,
                f"the log does not hold the value of {min(self.unlogged)!r}, a hyperparameter "
                "that is a tensor, at the end of the step",
            )
        return Exactness(True, "")

    def check(self, step: Step) -> Sequence[Update]:
        """Return the updates of this rank's own parameters, for each of which there is an
        optimizer.

        Raises:
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
        """
        # Everything is checked before the driver queues the first update (I3).
        for record, _ in step.updates:
            _refuse_declared(record)
        if step.mark.head.shape != self.state.shape:
            raise ReplayError(
                f"{step.mark.head} belongs to a state of another composition",
                step=step.mark.head.step,
            )
        updates: list[Update] = []
        for record, update in step.updates:
            assert update is not None
            names = self._optimizer(update, record).names
            several = self.state.marker.world > 1
            updates.append(own_share(update, record, names) if several else update)
        return updates

    def must_start_over(self, step: Step, last: LogRecord) -> bool:
        """Return False: of another program only the entries that it does not log are put, and
        another class is refused."""
        return False

    def start_over(self) -> None:
        """Do nothing, see :meth:`must_start_over`."""

    def begin(self, step: Step) -> MarkEntries:
        """Put what only the marks of the step before hold; return the entries of the marks that an
        optimizer updates as well."""
        held = step.entries
        marked = {place.entry.name for _, place in held}
        # Another program may log less (I8): an entry that only the marks before hold keeps its
        # value from the last of them.
        self.put([one for one in self._held if one[1].entry.name not in marked])
        self._held = held
        self._marked = marked
        return [(mark, place) for mark, place in held if place.entry.name in self._owned]

    def apply(self, key: str, updates: Sequence[Update]) -> None:
        """Apply updates of one optimizer.

        Raises:
            ReplayError: one failed half-way; the state is unusable then.
        """
        optimizer = self._optimizers[key]
        optimizer.replayer.apply(updates)
        optimizer.last = updates[-1]

    def put(self, entries: MarkEntries) -> None:
        """Copy the values that marks hold into entries.

        Raises:
            FormatError: one has another form than the base's.
        """
        for mark, place in entries:
            entry = self.state.entries.get(place.entry.name)
            forms = [(e.dtype, e.shape, e.logical_dtype) for e in (entry, place.entry) if e]
            if len(set(forms)) != 1 or len(forms) != 2:
                raise FormatError(
                    f"{mark.head}: shape or dtype of {place.entry.name!r} differs from the base"
                )
            self.state.tensors[place.entry.name].copy_(tensor_of(mark, place))

    def first_difference(self, mark: LogRecord) -> str | None:
        """Return the name of an entry that differs from its sample in the mark, None if there is
        none."""
        return sampled_difference(self._comparison, mark, self.state.tensors)

    def restore(
        self,
        mark: LogRecord,
        *,
        merged: Mapping[str, bytes] | None = None,
    ) -> list[str]:
        """Restore everything that the last marks hold; return no notes.

        Args:
            mark: mark of this rank.
            merged: objects of the mark, merged with those of other ranks, by name.

        Raises:
            FormatError, ReplayError: the mark does not fit the state.
        """
        state = self.state
        # After the last update: replay reads no entry that only marks restore.
        self.put(self._held)
        self._held = ()  # the memory of the marks may be reused from here on
        state.step = mark.head.step
        state.lsn = mark.head.lsn
        state.objects = {**mark.objects, **(merged or {})}
        if not self.replays:
            return []
        trees = {n.removeprefix(OBJECT_PREFIX): decode(data) for n, data in state.objects.items()}
        for section, tree in trees.items():
            for name in references(tree):
                # Trees of one of several ranks also refer to entries in other ranks' files.
                if state.canonical(name) not in state.tensors and state.marker.world == 1:
                    raise FormatError(f"{mark.head} refers to {name!r}, which is not in the base")
            optimizer = self._optimizers.get(section)
            if optimizer is not None:
                self._reconcile(section, tree, optimizer)
            if OptimizerProvider.groups_of(tree) is not None:
                self._take_options(tree, None if optimizer is None else optimizer.last)
        self._trees = trees
        return []

    def _optimizer(self, update: Update, record: LogRecord) -> _Optimizer:
        """Return the optimizer of an update, made at its first one.

        Raises:
            UnsupportedStateError: replay needs the program that trained it.
        """
        key = update.optimizer
        if not update.kind:
            raise UnsupportedStateError(
                f"{record.head} does not name the class of the optimizer {key!r}",
                leaves=((key, "the log does not name optimizer classes"),),
                step=record.head.step,
                hint="resume(step=...) in the program that trained it can replay it",
            )
        known = self._optimizers.get(key)
        if known is None:
            known = self._optimizers[key] = self._new_optimizer(update, record)
        if known.kind != update.kind:
            raise ReplayError(
                f"{record.head}: the class of {key!r} changes from {known.kind} to {update.kind}"
            )
        return known

    def _new_optimizer(self, update: Update, record: LogRecord) -> _Optimizer:
        key = update.optimizer
        kind = _kind_of(update, record)
        tree = self._trees.get(key)
        groups = OptimizerProvider.groups_of(tree)
        if groups is None:
            raise FormatError(
                f"{record.head} updates {key!r}, which is not an optimizer of the base"
            )
        assert isinstance(tree, dict)
        names = {name: self._entry_of(key, name) for group in groups for name in group}
        values = tree["state"]
        named = self._named()
        groups_at_base = [
            {k: join(v, named) for k, v in group.items() if k != "params"}
            for group in tree["param_groups"]
        ]
        # A rank's files hold only some parameters of an optimizer.
        if self.state.marker.world > 1:
            names, values = self._own_parameters(key, names, values)
        if PARTITIONED in tree and makes_state_when_built(kind, groups_at_base):
            names = {n: e for n, e in names.items() if n in values}  # other ranks update the rest
        self._check_parameters(update, tree, names, elementwise=is_elementwise(kind))
        states = {self.state.canonical(name) for name in references(values)}
        mine = {*names.values(), *states}
        # Once: a second optimizer that shares a tensor must update the same memory.
        for name in mine - self.replayed:
            self._restore_strides(name)
        self.replayed |= mine
        state: Any = join(values, self._named())
        replayer = Replayer(
            kind,
            [[name for name in group if name in names] for group in groups],
            {name: self.state.tensors[entry] for name, entry in names.items()},
            state,
            groups_at_base,
            self._options,
        )
        return _Optimizer(update.kind, frozenset(names), replayer)

    def _check_parameters(
        self,
        update: Update,
        tree: Mapping[str, Any],
        names: Mapping[str, str],
        *,
        elementwise: bool,
    ) -> None:
        """Refuse parameters whose entries do not fit the optimizer."""
        key = update.optimizer
        for group in tree["param_groups"]:
            for name, shape in ((n, shape) for n, shape in group["params"] if n in names):
                entry = self.state.entries[names[name]]  # may be a shard
                dimensions = self.state.tensors[entry.name].dim()
                if tuple(shape) != entry.global_shape[:dimensions]:
                    raise FormatError(f"{key}: {name!r} has another shape than its entry")
                if entry.shape != entry.global_shape and not elementwise:
                    raise ReplayError(
                        f"{key} is a {update.kind}, which does not work element by element, and "
                        f"{name!r} is sharded over ranks"
                    )

    def _own_parameters(
        self, key: str, names: Mapping[str, str], values: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the parameters that this rank writes, and their optimizer state.

        Raises:
            FormatError: it has only one of the two.
        """
        mine = {name: entry for name, entry in names.items() if entry in self.state.tensors}
        for name, value in values.items():
            entries = {self.state.canonical(other) for other in references(value)}
            there = entries & self.state.tensors.keys()
            if there != (entries if name in mine else set()):
                raise FormatError(f"{key}: another rank writes some of the state of {name!r}")
        return mine, {n: v for n, v in values.items() if n in mine or n not in names}

    def _named(self) -> dict[str, torch.Tensor]:
        """Return the tensors by every name, aliases included."""
        tensors = self.state.tensors
        others = self.state.aliases.items()
        return tensors | {name: tensors[entry] for name, entry in others if entry in tensors}

    def _entry_of(self, key: str, name: str) -> str:
        """Return the entry that holds a parameter."""
        found = self._parameters.get(name, set())
        if len(found) == 1:
            return next(iter(found))
        why = "two entries match" if found else "no module of the state has it"
        raise UnsupportedStateError(
            f"the base does not say which entry is the parameter {name!r} of {key!r}: {why}",
            leaves=((f"{key}: {name}", why),),
            hint="resume(step=...) in the program that trained it can replay it",
        )

    def _restore_strides(self, name: str) -> None:
        """Give a tensor the strides that it had in training, gaps included: kernels are chosen by
        them, and some round differently."""
        entry = self.state.entries[name]
        tensor = self.state.tensors[name]
        if entry.stride is None or len(entry.stride) != tensor.dim() or not tensor.numel():
            return
        if all(entry.stride):  # a stride of 0 (expanded) cannot have been updated in place
            self.state.tensors[name] = with_strides(tensor, entry.stride)

    def _reconcile(self, section: str, tree: Any, optimizer: _Optimizer) -> None:
        """Reconcile an optimizer's replayed state with the mark."""
        if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
            raise FormatError(f"the mark of step {self.state.step} has no state of {section!r}")
        replayed = optimizer.replayer.state
        for name, values in tree["state"].items():
            if self.state.marker.world > 1 and name not in optimizer.names:
                continue
            mine = replayed.get(name, {})
            if not isinstance(values, dict) or mine.keys() != values.keys():
                raise ReplayError(f"replay gives other state of {name!r} than {section!r} had")
            self._reconcile_parameter(section, name, values, mine)
        if missing := sorted(set(replayed) - set(tree["state"])):
            raise ReplayError(
                f"replay gives state of {missing[0]!r}, which {section!r} did not have"
            )

    def _reconcile_parameter(
        self,
        section: str,
        name: str,
        values: dict[str, Any],
        mine: Mapping[str, Any],
    ) -> None:
        for key, value in values.items():
            found = mine[key]
            if isinstance(value, TensorRef):
                entry = self.state.canonical(value.name)
                # A logged entry already has the value of the mark.
                if entry not in self._marked:
                    self._take(entry, found, f"{key} of {name!r}")
            elif any(references(value)):
                raise FormatError(f"{section}: {key} of {name!r} is neither tensor nor plain")
            elif not _same(found, value):
                self.surprises.append(
                    f"{section}: {key} of {name} is {value!r}, by replay {found!r}"
                )

    def _take_options(self, tree: Any, last: Update | None) -> None:
        """Take tensors among an optimizer's hyperparameters from its last update where the mark
        does not hold them."""
        for number, group in enumerate(tree["param_groups"]):
            for key, value in group.items():
                missing = {self.state.canonical(name) for name in references(value)} - self._marked
                self.unlogged |= missing
                if last is None or not missing or not isinstance(value, TensorRef):
                    continue
                found = last.groups[number].get(key) if number < len(last.groups) else None
                if isinstance(found, torch.Tensor):
                    self._take(self.state.canonical(value.name), found, f"{key} of group {number}")

    def _take(self, entry: str, found: Any, label: str) -> None:
        """Copy a tensor that an optimizer bound anew into its entry."""
        target = self.state.tensors[entry]
        form = (target.shape, target.dtype)
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != form:
            raise ReplayError(f"replay gives {label} with another shape or dtype")
        if found is not target:
            target.copy_(found)


def _refuse_declared(record: LogRecord) -> None:
    """Refuse a declared update.

    Raises:
        UnsupportedStateError: only a function of the program that trained it can replay it.
    """
    pattern = record.head.declared
    if pattern:
        raise UnsupportedStateError(
            f"{record.head}: entries matching {pattern!r} are updated by a function that only the "
            "program that trained them has",
            leaves=((pattern, "a declared update"),),
            step=record.head.step,
            hint="resume(step=...) in that program replays it",
        )


def _kind_of(update: Update, record: LogRecord) -> type[Optimizer]:
    """Return the class of the optimizer that made an update.

    Raises:
        UnsupportedStateError: only the program that trained it has the class.
    """
    kind = replay_kind(update.kind)
    if kind is None:
        raise UnsupportedStateError(
            f"the optimizer {update.optimizer!r} is a {update.kind}: without the program that "
            "declares it, its updates cannot be replayed",
            leaves=((update.optimizer, f"a {update.kind}"),),
            step=record.head.step,
            hint="resume(step=...) in the program that trained it can replay it",
        )
    return kind


def _same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal to the bit."""
    try:
        return encode(one) == encode(other)
    except UnsupportedStateError:
        return False
