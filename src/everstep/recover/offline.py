"""A state without the program that trained it: a base in host memory, brought forward by the log.

What :class:`~everstep.recover.redo.Redo` does to live objects is done here to plain tensors on
the CPU. The object trees of a base say all that is needed: which parameters an optimizer has, by
name, which entries its state consists of, and its hyperparameters. Everything that no optimizer
replays comes from the last step mark, which holds all of it (I8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.capture.spots import Comparison
from everstep.errors import (
    FormatError,
    ReplayError,
    UnsupportedStateError,
)
from everstep.format.digests import digest
from everstep.format.log import LogRecord
from everstep.format.records import Marker
from everstep.recover.redo import compare, tensor_of, update_of
from everstep.replay.engine import Replayer
from everstep.replay.exactness import Exactness, replay_kind
from everstep.replay.updates import Update
from everstep.state.entries import Entry
from everstep.state.image import OBJECT_PREFIX
from everstep.state.layout import Placed
from everstep.state.log import SAMPLE, UPDATE_OBJECT
from everstep.state.objects import TensorRef, decode, encode
from everstep.state.optimizers import OptimizerProvider
from everstep.state.tensors import host_bytes
from everstep.state.tree import join, references

__all__ = ["OfflineState", "parameter_names"]

_BATCH = 8  # updates of one optimizer that are replayed in one go


@dataclass(slots=True, eq=False)
class _Replayed:
    """One optimizer.

    Attributes:
        kind: name of its class, as the log has it.
        waiting: updates that have been accepted and not yet applied.
    """

    kind: str
    replayer: Replayer
    waiting: list[Update] = field(default_factory=list)
    last: Update | None = None

    def work_off(self) -> None:
        """Applies what is waiting."""
        waiting, self.waiting = self.waiting, []
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
        shape: what the state consists of (see :mod:`everstep.state.shapes`).
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
        self.entries, self.tensors, self.aliases = dict(entries), tensors, dict(aliases)
        self.objects, self.shape = dict(objects), shape
        self.step, self.lsn = marker.step, marker.lsn
        self.replayed: set[str] = set()
        self.unlogged: set[str] = set()
        self.surprises: list[str] = []
        self.doubt = ""
        self._trees = dict(trees)
        self._threads, self._training_threads = threads, training_threads
        self._optimizers: dict[str, _Replayed] = {}
        self._last: LogRecord | None = None
        self._comparison = Comparison()
        self._parameters = parameter_names(self._trees, self._canonical)
        self._owned = self._owned_entries()

    @property
    def from_mark(self) -> set[str]:
        """What is as the last mark has it: entries that it holds in full, and all objects."""
        placed = () if self._last is None else self._last.layout.placed
        return {place.entry.name for place in placed} | set(self.objects)

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

    def advance(self, updates: Sequence[LogRecord], mark: LogRecord) -> None:
        """Takes one step: all of it, or nothing (I3). :meth:`finish` completes it.

        Args:
            updates: in order; without those that are to be left out.

        Raises:
            DamageError: a record is damaged; nothing of the step was applied.
            FormatError, ReplayError, UnsupportedStateError: a record does not fit the state.
        """
        for record in (*updates, mark):
            record.verify()
            _refuse_declared(record)
        if mark.head.shape != self.shape:
            raise ReplayError(
                f"{mark.head} is of a state that consists of something else", step=mark.head.step
            )
        found = [(update_of(record), record) for record in updates]
        optimizers = [self._optimizer(update.optimizer, record) for update, record in found]
        doubtful = [p for p in mark.layout.placed if p.entry.name in self._owned]
        for (update, _), optimizer in zip(found, optimizers, strict=True):
            optimizer.waiting.append(update)
            if doubtful or len(optimizer.waiting) >= _BATCH:
                optimizer.work_off()
        for place in doubtful:  # what two optimizers, or views, may have changed in turn
            self._put(mark, place)
        self._last, self.step, self.lsn = mark, mark.head.step, mark.head.lsn

    def work_off(self) -> None:
        """Applies what is waiting: from now on no record of the steps taken so far is read.

        Raises:
            ReplayError: an update failed half-way; the state is of no use then.
        """
        for one in self._optimizers.values():
            one.work_off()

    def finish(self, *, counterfactual: bool = False) -> None:
        """Applies what is waiting, and puts everything else as the last mark has it.

        Args:
            counterfactual: some updates were left out, so that an optimizer's plain values (a
                count of its steps) are those of replay, and not those of the mark.

        Raises:
            FormatError, ReplayError: the mark does not fit the state.
        """
        self.work_off()
        mark = self._last
        if mark is None:
            return
        for place in mark.layout.placed:
            if not place.entry.name.startswith(SAMPLE):
                self._put(mark, place)
        logged = {place.entry.name for place in mark.layout.placed}
        trees = {
            name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in mark.objects.items()
        }
        for section, tree in trees.items():
            for name in references(tree):
                if self._canonical(name) not in self.tensors:
                    raise FormatError(f"{mark.head} refers to {name!r}, which is not there")
            optimizer = self._optimizers.get(section)
            if optimizer is not None:
                self._settle(section, tree, optimizer.replayer, logged, counterfactual)
            if OptimizerProvider.groups_of(tree) is not None:
                self._take_options(tree, None if optimizer is None else optimizer.last, logged)
        self._trees, self.objects = trees, dict(mark.objects)
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
        about: Any = decode(record.objects[UPDATE_OBJECT])
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
            known = self._optimizers[key] = _Replayed(kind, self._replayer(key, kind, record))
        if known.kind != kind:
            raise ReplayError(f"{record.head}: {key!r} was a {known.kind}, now it is a {kind}")
        return known

    def _replayer(self, key: str, kind: str, record: LogRecord) -> Replayer:
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
        for group in tree["param_groups"]:
            for name, shape in group["params"]:
                if tuple(shape) != tuple(self.tensors[names[name]].shape):
                    raise FormatError(f"{key}: {name!r} has another shape than its entry")
        states = {self._canonical(name) for name in references(tree["state"])}
        mine = {*names.values(), *states}
        for name in mine - self.replayed:
            self._as_it_lay(name)
        self.replayed |= mine
        lookup = _Lookup(self.tensors, self._canonical)
        options = [
            {k: join(v, lookup) for k, v in group.items() if k != "params"}
            for group in tree["param_groups"]
        ]
        state: Any = join(tree["state"], lookup)
        return Replayer(
            found,
            groups,
            {name: self.tensors[entry] for name, entry in names.items()},
            state,
            options,
            threads=self._threads,
            training_threads=self._training_threads,
        )

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
        """Gives a tensor the strides that it had, if they leave no gaps: kernels choose their
        way by them."""
        entry, tensor = self.entries[name], self.tensors[name]
        if entry.stride is None or len(entry.stride) != tensor.dim() or not tensor.numel():
            return
        steps = zip(tensor.shape, entry.stride, strict=True)
        if 1 + sum((n - 1) * step for n, step in steps) == tensor.numel() and all(entry.stride):
            strided = torch.empty_strided(tuple(tensor.shape), entry.stride, dtype=tensor.dtype)
            self.tensors[name] = strided.copy_(tensor)

    def _owned_entries(self) -> set[str]:
        """Entries that are a parameter or state of any optimizer."""
        found: set[str] = set()
        for tree in self._trees.values():
            groups = OptimizerProvider.groups_of(tree)
            if groups is not None:
                for group in groups:
                    for name in group:
                        found |= self._parameters.get(name, set())
                found |= {self._canonical(name) for name in references(tree["state"])}
        return found

    def _settle(
        self,
        section: str,
        tree: Any,
        replayer: Replayer,
        logged: set[str],
        counterfactual: bool,
    ) -> None:
        """Brings together what replay gave for an optimizer's state and what the mark says."""
        if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
            raise FormatError(f"the mark of step {self.step} has no state of {section!r}")
        for name, values in tree["state"].items():
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
        self._tensors, self._canonical = tensors, canonical

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


def parameter_names(
    trees: Mapping[str, Any], canonical: Callable[[str], str]
) -> dict[str, set[str]]:
    """Entries by the names under which optimizers know parameters: ``"section.key"``.

    Args:
        trees: of modules and optimizers, by section.
        canonical: the entry that has a name.
    """
    found: dict[str, set[str]] = {}
    for section, tree in trees.items():
        if not isinstance(tree, dict) or OptimizerProvider.groups_of(tree) is not None:
            continue
        for key, value in tree.items():
            if isinstance(key, str) and isinstance(value, TensorRef):
                found.setdefault(f"{section}.{key}", set()).add(canonical(value.name))
    return found
