"""State of one rank in host memory, brought forward by the log without the program that trained it
(``docs/design/log.md``).

The object trees of a base hold everything needed: the parameters of each optimizer by name, the
entries of its state, and its hyperparameters. Entries that no optimizer replays come from the last
step mark, which holds all of them (I8). Of a base of several ranks it is the share that one of them
writes, with that rank's own log.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.capture.mark_samples import MarkComparison
from everstep.errors import (
    FormatError,
    ReplayError,
    UnsupportedStateError,
)
from everstep.format.digests import digest
from everstep.format.log import LogRecord
from everstep.format.records import Marker
from everstep.replay.engine import Replayer
from everstep.replay.exactness import Exactness, is_elementwise, replay_kind
from everstep.replay.optimizer_step import makes_state_when_built
from everstep.replay.updates import Update
from everstep.restore.redo.driver import divergence_error, sampled_difference
from everstep.restore.redo.marks import MarkEntries, dropped_from_marks
from everstep.restore.redo.owned import owned_entries, parameter_names
from everstep.restore.redo.updates import own_share, update_from_record
from everstep.run.tensors import tensor_of, with_strides
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX, PART_OBJECT, SAMPLE, UPDATE_OBJECT
from everstep.state.layout.shards import Placed
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import PARTITIONED
from everstep.state.values.objects import TensorRef, decode, encode
from everstep.state.values.tensors import host_bytes
from everstep.state.values.tree import join, references

__all__ = ["OfflineState"]

_BATCH = 8  # updates of one optimizer replayed in one call


@dataclass(slots=True, eq=False)
class _Replayed:
    """One optimizer and its replayer.

    Attributes:
        kind: name of its class in the log.
        names: names of the parameters that it updates here.
        replayer: applies updates to the tensors.
        waiting: updates that were accepted and not yet applied.
        last: newest update that was applied.
    """

    kind: str
    names: Collection[str]
    replayer: Replayer
    waiting: list[Update] = field(default_factory=list)
    last: Update | None = None

    def apply_waiting(self) -> None:
        """Apply the waiting updates."""
        waiting = self.waiting
        self.waiting = []
        self.replayer.apply(waiting)
        self.last = waiting[-1] if waiting else self.last


class OfflineState:
    """Entries of a state as CPU tensors, and its objects.

    Args:
        marker: marker of the base.
        entries: entries of tensors by name, in the order of the base's files.
        tensors: values by name, contiguous.
        aliases: ``other name -> entry name``.
        objects: encoded objects by entry name.
        trees: the same, decoded, by section.
        shape: shape of the state (see :mod:`everstep.state.layout.entries`).
        threads: Python threads that share the work of replay.
        training_threads: number of torch's threads in training, if known.

    Attributes:
        step, lsn: of the newest step that was applied.
        replayed: entries that an optimizer computed here.
        unlogged: hyperparameters that are tensors and not in the marks: they have the values of the
            last update, but a scheduler may have changed them since.
        surprises: differences between replay and the last mark, as text.
        doubt: why completing a multi-step base was inexact; "" if it was exact or not needed.
    """

    def __init__(
        self,
        marker: Marker,
        entries: Mapping[str, Entry],
        tensors: dict[str, torch.Tensor],
        aliases: Mapping[str, str],
        objects: Mapping[str, bytes],
        trees: Mapping[str, Any],
        shape: str,
        *,
        threads: int = 1,
        training_threads: int | None = None,
    ) -> None:
        self.marker = marker
        self.entries = dict(entries)
        self.tensors = tensors
        self.aliases = dict(aliases)
        self.objects = dict(objects)
        self.shape = shape
        self.step = marker.step
        self.lsn = marker.lsn
        self.replayed: set[str] = set()
        self.unlogged: set[str] = set()
        self.surprises: list[str] = []
        self.doubt = ""
        self._trees = dict(trees)
        self._threads = threads
        self._training_threads = training_threads
        self._optimizers: dict[str, _Replayed] = {}
        self._last: LogRecord | None = None
        self._held: MarkEntries = []  # by the last step's marks, until it is put
        self._marked: set[str] = set()
        self._comparison = MarkComparison()
        self._parameters = parameter_names(self._trees, self._canonical)
        self._owned = owned_entries(self._trees, self._canonical)

    @property
    def from_mark(self) -> set[str]:
        """Names of everything taken from the last mark: entries that it holds in full, and all
        objects."""
        return self._marked | set(self.objects)

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

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors and objects."""
        tensors = sum(entry.size_bytes for entry in self.entries.values())
        return tensors + sum(map(len, self.objects.values()))

    def take(
        self, step: Mapping[int, tuple[Sequence[LogRecord], LogRecord]], *, drop: bool = False
    ) -> None:
        """Apply one step, as :meth:`advance` does.

        Args:
            step: updates and mark, of the only rank.
            drop: leave the updates out.
        """
        updates, mark = step[0]
        self.advance(() if drop else updates, mark)

    def advance(
        self,
        updates: Sequence[LogRecord],
        mark: LogRecord,
        others: MarkEntries = (),
    ) -> None:
        """Apply one step: all of it, or nothing (I3). :meth:`finish` completes it.

        Args:
            updates: records in order, without those to leave out.
            mark: step mark.
            others: verified entries of this state that marks of other ranks hold.

        Raises:
            DamageError: a record is damaged; nothing of the step was applied.
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
        """
        # All records are checked before the first change: a step is applied completely or not at
        # all (I3).
        for record in (*updates, mark):
            record.verify()
            _refuse_declared(record)
        if mark.head.shape != self.shape:
            raise ReplayError(
                f"{mark.head} belongs to a state of another composition", step=mark.head.step
            )
        several = self.marker.world > 1
        found = [(update_from_record(record, own=several), record) for record in updates]
        optimizers = [self._optimizer(update.optimizer, record) for update, record in found]
        if several:
            names = [optimizer.names for optimizer in optimizers]
            found = [(own_share(u, r, mine), r) for (u, r), mine in zip(found, names, strict=True)]
        own = ((mark, p) for p in mark.layout.placed if not p.entry.name.startswith(SAMPLE))
        held = [*own, *others]
        for one, place in dropped_from_marks(self._held, held):
            self._put(one, place)
        doubtful = [(one, place) for one, place in held if place.entry.name in self._owned]
        for (update, _), optimizer in zip(found, optimizers, strict=True):
            optimizer.waiting.append(update)
            if doubtful or len(optimizer.waiting) >= _BATCH:
                optimizer.apply_waiting()
        # Tensors with two owners, or views of one memory: replay cannot order their updates.
        for one, place in doubtful:
            self._put(one, place)
        self._last = mark
        self.step = mark.head.step
        self.lsn = mark.head.lsn
        self._held = held
        self._marked = {place.entry.name for _, place in held}

    def apply_waiting(self) -> None:
        """Apply the waiting updates, so that no record of the steps so far is read any more.

        Raises:
            ReplayError: an update failed half-way; the state is unusable then.
        """
        for one in self._optimizers.values():
            one.apply_waiting()

    def finish(
        self, *, counterfactual: bool = False, objects: Mapping[str, bytes] | None = None
    ) -> None:
        """Apply the waiting updates, and restore everything else from the last mark.

        Args:
            counterfactual: some updates were left out, so that an optimizer's plain values (its
                step count)
                are taken from replay instead of the mark.
            objects: replacements for objects of the mark, by name.

        Raises:
            FormatError, ReplayError: the mark does not fit the state.
        """
        self.apply_waiting()
        mark = self._last
        if mark is None:
            return
        for one, place in self._held:
            self._put(one, place)
        self._held = []
        logged = self._marked
        found = {**mark.objects, **(objects or {})}
        trees = {name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in found.items()}
        for section, tree in trees.items():
            for name in references(tree):
                if self._canonical(name) not in self.tensors and self.marker.world == 1:
                    raise FormatError(f"{mark.head} refers to {name!r}, which is not in the base")
            optimizer = self._optimizers.get(section)
            if optimizer is not None:
                self._reconcile(section, tree, optimizer, logged, counterfactual)
            if OptimizerProvider.groups_of(tree) is not None:
                self._take_options(tree, None if optimizer is None else optimizer.last, logged)
        self._trees = trees
        self.objects = found
        if counterfactual:
            for section in self._optimizers:
                self.objects[OBJECT_PREFIX + section] = encode(trees[section], section)

    def compare(self) -> None:
        """Compare replayed values with the samples in the last mark, if replay must give the bits
        of training. Call after :meth:`apply_waiting`; the caller decides if the conditions of
        training allow it.

        Raises:
            AuditError: an entry differs; the error names it.
            FormatError: the mark belongs to another state.
        """
        if self._last is not None and self.exactness.exact:
            name = sampled_difference(self._comparison, self._last, self.tensors)
            if name is not None:
                raise divergence_error(name, self.step)

    def digests(self) -> dict[str, str]:
        """Return the digest of every entry, objects included, as a base of this state has them."""
        found = {name: digest(self.bytes_of(name)) for name in self.entries}
        return found | {name: digest(data) for name, data in self.objects.items()}

    def bytes_of(self, name: str) -> memoryview:
        """Return the bytes of a tensor's entry in row-major order, valid while the tensor
        exists."""
        tensor = self.tensors[name]
        if not tensor.is_contiguous():
            flat = tensor.contiguous()  # must live until its bytes are copied
            return memoryview(bytes(host_bytes(flat)))
        return host_bytes(tensor)

    def _canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def _put(self, mark: LogRecord, place: Placed) -> None:
        """Copy the value that a mark holds into an entry."""
        entry = self.entries.get(place.entry.name)
        forms = [(e.dtype, e.shape, e.logical_dtype) for e in (entry, place.entry) if e]
        if len(set(forms)) != 1 or len(forms) != 2:
            raise FormatError(
                f"{mark.head}: shape or dtype of {place.entry.name!r} differs from the base"
            )
        self.tensors[place.entry.name].copy_(tensor_of(mark, place))

    def _optimizer(self, key: str, record: LogRecord) -> _Replayed:
        """Return the optimizer of an update, made at its first one.

        Raises:
            UnsupportedStateError: replay needs the program that trained it.
        """
        in_shares = PART_OBJECT in record.objects
        about: Any = decode(record.objects[PART_OBJECT if in_shares else UPDATE_OBJECT])
        kind = about.get("kind")
        if not isinstance(kind, str):
            raise UnsupportedStateError(
                f"{record.head} does not name the class of the optimizer {key!r}",
                leaves=((key, "the log does not name optimizer classes"),),
                step=record.head.step,
                hint="resume(step=...) in the program that trained it can replay it",
            )
        known = self._optimizers.get(key)
        if known is None:
            known = self._optimizers[key] = self._replayed(key, kind, record)
        if known.kind != kind:
            raise ReplayError(
                f"{record.head}: the class of {key!r} changes from {known.kind} to {kind}"
            )
        return known

    def _replayed(self, key: str, kind: str, record: LogRecord) -> _Replayed:
        found = replay_kind(kind)
        if found is None:
            raise UnsupportedStateError(
                f"the optimizer {key!r} is a {kind}: without the program that declares it, its "
                "updates cannot be replayed",
                leaves=((key, f"a {kind}"),),
                step=record.head.step,
                hint="resume(step=...) in the program that trained it can replay it",
            )
        tree = self._trees.get(key)
        groups = OptimizerProvider.groups_of(tree)
        if groups is None:
            raise FormatError(
                f"{record.head} updates {key!r}, which is not an optimizer of the base"
            )
        assert isinstance(tree, dict)
        names = {name: self._entry_of(key, name) for group in groups for name in group}
        values = tree["state"]
        lookup = _Lookup(self.tensors, self._canonical)
        options = [
            {k: join(v, lookup) for k, v in group.items() if k != "params"}
            for group in tree["param_groups"]
        ]
        if self.marker.world > 1:
            names, values = self._own_parameters(key, names, values)
        if PARTITIONED in tree and makes_state_when_built(found, options):
            names = {n: e for n, e in names.items() if n in values}  # other ranks update the rest
        for group in tree["param_groups"]:
            for name, shape in ((n, shape) for n, shape in group["params"] if n in names):
                entry = self.entries[names[name]]  # may be a shard
                if tuple(shape) != entry.global_shape[: self.tensors[entry.name].dim()]:
                    raise FormatError(f"{key}: {name!r} has another shape than its entry")
                if entry.shape != entry.global_shape and not is_elementwise(found):
                    raise ReplayError(
                        f"{key} is a {kind}, which does not work element by element, and {name!r} "
                        "is sharded over ranks"
                    )
        states = {self._canonical(name) for name in references(values)}
        mine = {*names.values(), *states}
        for name in mine - self.replayed:
            self._restore_strides(name)
        self.replayed |= mine
        state: Any = join(values, lookup)
        replayer = Replayer(
            found,
            [[name for name in group if name in names] for group in groups],
            {name: self.tensors[entry] for name, entry in names.items()},
            state,
            options,
            threads=self._threads,
            training_threads=self._training_threads,
        )
        return _Replayed(kind, frozenset(names), replayer)

    def _own_parameters(
        self, key: str, names: Mapping[str, str], values: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the parameters that this rank writes, and their optimizer state.

        Raises:
            FormatError: it has only one of the two.
        """
        mine = {name: entry for name, entry in names.items() if entry in self.tensors}
        for name, value in values.items():
            entries = {self._canonical(other) for other in references(value)}
            there = entries & self.tensors.keys()
            if there != (entries if name in mine else set()):
                raise FormatError(f"{key}: another rank writes some of the state of {name!r}")
        return mine, {n: v for n, v in values.items() if n in mine or n not in names}

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
        entry = self.entries[name]
        tensor = self.tensors[name]
        if entry.stride is None or len(entry.stride) != tensor.dim() or not tensor.numel():
            return
        if all(entry.stride):  # a stride of 0 (expanded) cannot have been updated in place
            self.tensors[name] = with_strides(tensor, entry.stride)

    def _reconcile(
        self,
        section: str,
        tree: Any,
        optimizer: _Replayed,
        logged: set[str],
        counterfactual: bool,
    ) -> None:
        """Reconcile an optimizer's replayed state with the mark."""
        if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
            raise FormatError(f"the mark of step {self.step} has no state of {section!r}")
        replayer = optimizer.replayer
        for name, values in tree["state"].items():
            if self.marker.world > 1 and name not in optimizer.names:
                continue
            mine = replayer.state.get(name, {})
            if not isinstance(values, dict) or not (counterfactual or mine.keys() == values.keys()):
                raise ReplayError(f"replay gives other state of {name!r} than {section!r} had")
            for key, value in values.items():
                if key not in mine:
                    continue  # state made by an update that was left out
                found = mine[key]
                if isinstance(value, TensorRef):
                    entry = self._canonical(value.name)
                    if entry not in logged:
                        self._take(entry, found, f"{key} of {name!r}")
                elif any(references(value)):
                    raise FormatError(f"{section}: {key} of {name!r} is neither tensor nor plain")
                elif counterfactual:
                    values[key] = found
                elif not _same(found, value):
                    self.surprises.append(
                        f"{section}: {key} of {name} is {value!r}, by replay {found!r}"
                    )
        if missing := sorted(set(replayer.state) - set(tree["state"])):
            raise ReplayError(
                f"replay gives state of {missing[0]!r}, which {section!r} did not have"
            )

    def _take_options(self, tree: Any, last: Update | None, logged: set[str]) -> None:
        """Take tensors among an optimizer's hyperparameters from its last update where the mark
        does not hold them."""
        for number, group in enumerate(tree["param_groups"]):
            for key, value in group.items():
                missing = {self._canonical(name) for name in references(value)} - logged
                self.unlogged |= missing
                if last is None or not missing or not isinstance(value, TensorRef):
                    continue
                found = last.groups[number].get(key) if number < len(last.groups) else None
                if isinstance(found, torch.Tensor):
                    self._take(self._canonical(value.name), found, f"{key} of group {number}")

    def _take(self, entry: str, found: Any, label: str) -> None:
        """Copy a tensor that an optimizer bound anew into its entry."""
        target = self.tensors[entry]
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


class _Lookup(Mapping[str, torch.Tensor]):
    """Tensors by every name, aliases included."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], canonical: Any) -> None:
        self._tensors = tensors
        self._canonical = canonical

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._canonical(name)]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _same(one: Any, other: Any) -> bool:
    """Return True if two plain values are equal to the bit."""
    try:
        return encode(one) == encode(other)
    except UnsupportedStateError:
        return False
