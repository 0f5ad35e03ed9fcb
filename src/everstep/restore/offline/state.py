"""A state without the program that trained it: a base in host memory, brought forward by the log;
or of several ranks' base what one of them writes, by its own log (``docs/design/log.md``).

What :class:`~everstep.restore.redo.redo.Redo` does to live objects is done here to plain tensors on
the CPU. The object trees of a base say all that is needed: which parameters an optimizer has, by
name, which entries its state consists of, and its hyperparameters. Everything that no optimizer
replays comes from the last step mark, which holds all of it (I8).
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
from everstep.restore.redo.marks import MarkEntries, dropped_from_marks
from everstep.restore.redo.owned import owned_entries, parameter_names
from everstep.restore.redo.redo import compare, tensor_of
from everstep.restore.redo.updates import own_share, update_from_record
from everstep.run.tensors import with_strides
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX, PART_OBJECT, SAMPLE, UPDATE_OBJECT
from everstep.state.layout.shards import Placed
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.zero import PARTITIONED
from everstep.state.values.objects import TensorRef, decode, encode
from everstep.state.values.tensors import host_bytes
from everstep.state.values.tree import join, references

__all__ = ["OfflineState"]

_BATCH = 8  # updates of one optimizer that are replayed in one go


@dataclass(slots=True, eq=False)
class _Replayed:
    """One optimizer.

    Attributes:
        kind: name of its class, as the log has it.
        names: of the parameters that it updates here.
        waiting: updates that have been accepted and not yet applied.
    """

    kind: str
    names: Collection[str]
    replayer: Replayer
    waiting: list[Update] = field(default_factory=list)
    last: Update | None = None

    def work_off(self) -> None:
        """Applies what is waiting."""
        waiting = self.waiting
        self.waiting = []
        self.replayer.apply(waiting)
        self.last = waiting[-1] if waiting else self.last


class OfflineState:
    """All entries of a state as CPU tensors, and its objects.

    Args:
        marker: of the base.
        entries: tensors' entries by name, in the order of the base's files.
        tensors: their values, contiguous.
        aliases: ``other name -> entry name``.
        objects: encoded objects by entry name.
        trees: the same, decoded, by section.
        threads: Python threads that share the work of replay.
        training_threads: number of torch's threads in training, if it is known.

    Attributes:
        shape: what the state consists of (see :mod:`everstep.state.layout.entries`).
        step, lsn: of the newest step that was applied.
        replayed: entries that an optimizer has computed here.
        unlogged: hyperparameters that are tensors and not in the marks: they are as the last
            update had them, but a scheduler may have changed them since.
        surprises: what replay gave otherwise than the last mark says, in words.
        doubt: why it is not what training had, by what made a base over several steps whole; ""
            if it is, or that was not needed.
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
        """What is as the last mark has it: entries that it holds in full, and all objects."""
        return self._marked | set(self.objects)

    @property
    def exactness(self) -> Exactness:
        """Of all replayed optimizers together."""
        for optimizer in self._optimizers.values():
            if not optimizer.replayer.exact.exact:
                return optimizer.replayer.exact
        if self.unlogged:
            return Exactness(
                False,
                f"the log does not hold {min(self.unlogged)!r}, a hyperparameter that is a tensor, "
                "as it was at the end of the step",
            )
        return Exactness(True, "")

    @property
    def size_bytes(self) -> int:
        """Of all tensors and objects."""
        tensors = sum(entry.size_bytes for entry in self.entries.values())
        return tensors + sum(map(len, self.objects.values()))

    def take(
        self, step: Mapping[int, tuple[Sequence[LogRecord], LogRecord]], *, drop: bool = False
    ) -> None:
        """Takes one step as :meth:`advance` does.

        Args:
            step: updates and mark, of the one rank that there is.
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
        """Takes one step: all of it, or nothing (I3). :meth:`finish` completes it.

        Args:
            updates: in order; without those that are to be left out.
            others: what marks of other ranks, which are verified, hold of this state.

        Raises:
            DamageError: a record is damaged; nothing of the step was applied.
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
        """
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
                optimizer.work_off()
        for one, place in doubtful:  # what two optimizers, or views, may have changed in turn
            self._put(one, place)
        self._last = mark
        self.step = mark.head.step
        self.lsn = mark.head.lsn
        self._held = held
        self._marked = {place.entry.name for _, place in held}

    def work_off(self) -> None:
        """Applies what is waiting: from now on no record of the steps taken so far is read.

        Raises:
            ReplayError: an update failed half-way; the state is of no use then.
        """
        for one in self._optimizers.values():
            one.work_off()

    def finish(
        self, *, counterfactual: bool = False, objects: Mapping[str, bytes] | None = None
    ) -> None:
        """Applies what is waiting, and puts everything else as the last mark has it.

        Args:
            counterfactual: some updates were left out, so that an optimizer's plain values (a
                count of its steps) are those of replay, and not those of the mark.
            objects: instead of those of the mark that have the same names.

        Raises:
            FormatError, ReplayError: the mark does not fit the state.
        """
        self.work_off()
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
                    raise FormatError(f"{mark.head} refers to {name!r}, which is not there")
            optimizer = self._optimizers.get(section)
            if optimizer is not None:
                self._settle(section, tree, optimizer, logged, counterfactual)
            if OptimizerProvider.groups_of(tree) is not None:
                self._take_options(tree, None if optimizer is None else optimizer.last, logged)
        self._trees = trees
        self.objects = found
        if counterfactual:
            for section in self._optimizers:
                self.objects[OBJECT_PREFIX + section] = encode(trees[section], section)

    def compare(self) -> None:
        """Compares what replay gives with the samples in the last mark, if it must give the bits
        that training had; after :meth:`work_off`. Whether it was trained under the same
        conditions is for the caller to know.

        Raises:
            AuditError: something else; names an entry.
            FormatError: the mark is of another state.
        """
        if self._last is not None and self.exactness.exact:
            compare(self._comparison, self._last, self.tensors)

    def digests(self) -> dict[str, str]:
        """The digest of every entry, objects included, as a base of this state has them."""
        found = {name: digest(self.bytes_of(name)) for name in self.entries}
        return found | {name: digest(data) for name, data in self.objects.items()}

    def bytes_of(self, name: str) -> memoryview:
        """The bytes of a tensor's entry, in row-major order; of no use once the tensor is gone."""
        tensor = self.tensors[name]
        if not tensor.is_contiguous():
            flat = tensor.contiguous()  # must live until its bytes are copied
            return memoryview(bytes(host_bytes(flat)))
        return host_bytes(tensor)

    def _canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def _put(self, mark: LogRecord, place: Placed) -> None:
        """Gives an entry the value that a mark holds."""
        entry = self.entries.get(place.entry.name)
        forms = [(e.dtype, e.shape, e.logical_dtype) for e in (entry, place.entry) if e]
        if len(set(forms)) != 1 or len(forms) != 2:
            raise FormatError(f"{mark.head}: {place.entry.name!r} is not as in the base")
        self.tensors[place.entry.name].copy_(tensor_of(mark, place))

    def _optimizer(self, key: str, record: LogRecord) -> _Replayed:
        """The optimizer that an update is of; made at its first.

        Raises:
            UnsupportedStateError: it cannot be replayed without the program that trained it.
        """
        in_parts = PART_OBJECT in record.objects
        about: Any = decode(record.objects[PART_OBJECT if in_parts else UPDATE_OBJECT])
        kind = about.get("kind")
        if not isinstance(kind, str):
            raise UnsupportedStateError(
                f"{record.head} does not say of which class the optimizer {key!r} is",
                leaves=((key, "a log without classes of optimizers"),),
                step=record.head.step,
                hint="resume(step=...) in the program that trained it replays it all the same",
            )
        known = self._optimizers.get(key)
        if known is None:
            known = self._optimizers[key] = self._replayed(key, kind, record)
        if known.kind != kind:
            raise ReplayError(f"{record.head}: {key!r} was a {known.kind}, now it is a {kind}")
        return known

    def _replayed(self, key: str, kind: str, record: LogRecord) -> _Replayed:
        found = replay_kind(kind)
        if found is None:
            raise UnsupportedStateError(
                f"the optimizer {key!r} is a {kind}: without the program that declares it, its "
                "updates cannot be replayed",
                leaves=((key, f"a {kind}"),),
                step=record.head.step,
                hint="resume(step=...) in the program that trained it replays it all the same",
            )
        tree = self._trees.get(key)
        groups = OptimizerProvider.groups_of(tree)
        if groups is None:
            raise FormatError(f"{record.head} is of {key!r}, which is no optimizer in the base")
        assert isinstance(tree, dict)
        names = {name: self._entry_of(key, name) for group in groups for name in group}
        values = tree["state"]
        lookup = _Lookup(self.tensors, self._canonical)
        options = [
            {k: join(v, lookup) for k, v in group.items() if k != "params"}
            for group in tree["param_groups"]
        ]
        if self.marker.world > 1:
            names, values = self._mine(key, names, values)
        if PARTITIONED in tree and makes_state_when_built(found, options):
            names = {n: e for n, e in names.items() if n in values}  # others update the rest
        for group in tree["param_groups"]:
            for name, shape in ((n, shape) for n, shape in group["params"] if n in names):
                entry = self.entries[names[name]]  # perhaps of a part of it
                if tuple(shape) != entry.global_shape[: self.tensors[entry.name].dim()]:
                    raise FormatError(f"{key}: {name!r} has another shape than its entry")
                if entry.shape != entry.global_shape and not is_elementwise(found):
                    raise ReplayError(
                        f"{key} is a {kind}, which does not act element by element, and {name!r} "
                        "is spread over ranks"
                    )
        states = {self._canonical(name) for name in references(values)}
        mine = {*names.values(), *states}
        for name in mine - self.replayed:
            self._as_it_lay(name)
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

    def _mine(
        self, key: str, names: Mapping[str, str], values: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Of an optimizer's parameters and their state, what this rank writes.

        Raises:
            FormatError: of the two it has only one.
        """
        mine = {name: entry for name, entry in names.items() if entry in self.tensors}
        for name, value in values.items():
            entries = {self._canonical(other) for other in references(value)}
            there = entries & self.tensors.keys()
            if there != (entries if name in mine else set()):
                raise FormatError(f"{key}: another rank writes a part of the state of {name!r}")
        return mine, {n: v for n, v in values.items() if n in mine or n not in names}

    def _entry_of(self, key: str, name: str) -> str:
        """The entry that holds a parameter."""
        found = self._parameters.get(name, set())
        if len(found) == 1:
            return next(iter(found))
        why = "two entries could be it" if found else "it lies in no module of the state"
        raise UnsupportedStateError(
            f"the base does not say which entry is the parameter {name!r} of {key!r}: {why}",
            leaves=((f"{key}: {name}", why),),
            hint="resume(step=...) in the program that trained it replays it all the same",
        )

    def _as_it_lay(self, name: str) -> None:
        """Gives a tensor the strides that it had, gaps and all: kernels choose their way by them,
        and some round otherwise."""
        entry = self.entries[name]
        tensor = self.tensors[name]
        if entry.stride is None or len(entry.stride) != tensor.dim() or not tensor.numel():
            return
        if all(entry.stride):  # else nothing could have updated it in place
            self.tensors[name] = with_strides(tensor, entry.stride)

    def _settle(
        self,
        section: str,
        tree: Any,
        optimizer: _Replayed,
        logged: set[str],
        counterfactual: bool,
    ) -> None:
        """Brings together what replay gave for an optimizer's state and what the mark says."""
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
                    continue  # its first update was left out
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
            raise ReplayError(f"replay gives state of {missing[0]!r}, which {section!r} had not")

    def _take_options(self, tree: Any, last: Update | None, logged: set[str]) -> None:
        """Tensors among an optimizer's hyperparameters, where the mark has them not."""
        for number, group in enumerate(tree["param_groups"]):
            for key, value in group.items():
                missing = {self._canonical(name) for name in references(value)} - logged
                self.unlogged |= missing
                if last is None or not missing or not isinstance(value, TensorRef):
                    continue
                found = last.groups[number].get(key) if number < len(last.groups) else None
                if isinstance(found, torch.Tensor):
                    self._take(self._canonical(value.name), found, f"{key} of group {number}")

    def _take(self, entry: str, found: Any, what: str) -> None:
        """Makes what an optimizer has bound anew the value of its entry."""
        target = self.tensors[entry]
        form = (target.shape, target.dtype)
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != form:
            raise ReplayError(f"replay gives {what} in another form")
        if found is not target:
            target.copy_(found)


def _refuse_declared(record: LogRecord) -> None:
    """Raises:
    UnsupportedStateError: only a function of the program that trained it can redo the record.
    """
    pattern = record.head.declared
    if pattern:
        raise UnsupportedStateError(
            f"{record.head}: what {pattern!r} declares is updated by a function, which takes the "
            "program that trained it",
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
    """Whether two plain values are the same to the bit."""
    try:
        return encode(one) == encode(other)
    except UnsupportedStateError:
        return False
