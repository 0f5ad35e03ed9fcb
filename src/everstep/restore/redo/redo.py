"""Bring a state that was restored from a base to a later step, by the log.

The live optimizers run the updates over the logged gradients, or an optimizer of the recorded class
does where that is another one. Entries without an owner are restored from the last step mark, which
holds all of them.

With sharded parameters each rank replays its own shards. An optimizer that works element by element
does the same to a plain tensor as to the local shard of a DTensor, with the same kernels. So a rank
replays over plain tensors: its shards of parameters and state, and the shards of the gradients, as
its log holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.capture.mark_samples import MarkComparison
from everstep.errors import AuditError, DamageError, EverstepError, FormatError, MismatchError
from everstep.format.log import LogRecord
from everstep.replay.engine import Replayer
from everstep.replay.exactness import Exactness
from everstep.replay.optimizer_step import default_dtype
from everstep.replay.updates import Update
from everstep.restore.redo.declared import DeclaredRedo
from everstep.restore.redo.marks import mark_holds_less
from everstep.restore.redo.updates import UnknownClassError, replay_class, update_from_record
from everstep.run.tensors import copy_into, tensor_of
from everstep.seams.machine import memory_available_bytes
from everstep.seams.processes.processes import available_cores
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import OBJECT_PREFIX, SPOT
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.provider import RestorePlan
from everstep.state.providers.zero import local_optimizer
from everstep.state.survey.survey import same_objects
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tensors import dtensor_like, is_dtensor, local_tensor, tensor_entry
from everstep.state.values.tree import join, references, split

__all__ = [
    "STEPS_AT_ONCE",
    "Redo",
    "Step",
    "compare",
    "divergence_error",
    "live_entry",
    "make_replayer",
    "restore_from_mark",
    "tensor_of",
    "verified_steps",
]

STEPS_AT_ONCE = 5
"""Largest number of steps replayed in one pass over the state; more gain nothing."""

_Surveyed = tuple[Sequence[torch.Tensor], Sequence[int], Mapping[str, torch.Tensor]]
"""Tensors of the optimizers, their addresses, and all tensors of the state by entry name."""

_SHARE_OF_MEMORY = 8  # of available memory, for gradients that were read and wait for replay
_READ_BYTES_MAX = 256 << 20
"""Upper limit of the same. Reading further ahead than the next step gains nothing: replay and
reading are about as fast. Fresh memory is slow to get, above all on virtual machines: reading five
steps of 370 MB each into fresh memory took longer than everything else together."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One verified step of the log.

    Attributes:
        updates: records in order, each with its decoded update; None if a registered function
            computes it.
        mark: step mark that ends the step.
    """

    updates: tuple[tuple[LogRecord, Update | None], ...]
    mark: LogRecord

    @property
    def read_bytes(self) -> int:
        """Bytes of memory taken to read the step; 0 for records that lie in a keeper's memory."""
        records = (self.mark, *(record for record, _ in self.updates))
        return sum(record.size_bytes for record in records if record.path is not None)


def verified_steps(
    steps: Iterable[tuple[Sequence[LogRecord], LogRecord | EverstepError]],
    sound: Callable[[LogRecord], LogRecord],
) -> Generator[Step | EverstepError, None, None]:
    """Verify and decode steps of the log. Needs no live state, so any thread may run it.

    Args:
        steps: updates and mark of each step, in order; an error in place of a mark that cannot be
            read.
        sound: verifies a record, or returns a sound copy of it.

    Yields:
        Verified steps. Where a record is damaged, the error in place of the step, and nothing
        after it.

    Raises:
        FormatError: a record is intact but not a valid update.
    """
    for updates, mark in steps:
        if isinstance(mark, EverstepError):
            yield mark
            return
        try:
            updates = [sound(record) for record in updates]
            mark = sound(mark)
        except DamageError as error:
            yield error
            return
        found = tuple((r, None if r.head.declared else update_from_record(r)) for r in updates)
        # Only the step may hold references: the memory of its records is then reused for the next.
        del updates
        step = Step(found, mark)
        del found, mark
        yield step
        del step


class Redo:
    """Apply records to a live state, in order.

    Args:
        state: live state, restored from a base.
        relaid: entries whose memory layout differs from that of the saved tensors.
        aliases: entry names by the other names of their tensors.
        names: sorted names of all entries of the base, and so of the states that its log describes;
            empty if the live state has the same. Some objects show part of their tensors only while
            they run; entries that no optimizer replays are restored from the last mark.

    Attributes:
        limit_bytes: limit of records that were read from disk and wait to be applied; one step
            always
            may wait.
        compares: replay must give the bits of training, as far as the conditions of training are
            known:
            results are compared with the samples in the marks.
    """

    def __init__(
        self,
        state: State,
        relaid: Collection[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        names: Sequence[str] = (),
    ) -> None:
        self._state = state
        self._relaid = relaid
        self._aliases = aliases
        self._names = names
        self._replayers: dict[str, Replayer] = {}
        self._pending: dict[str, list[Update]] = {}
        self._waiting = self._waiting_bytes = 0
        self.limit_bytes = min(_READ_BYTES_MAX, memory_available_bytes() // _SHARE_OF_MEMORY)
        self._doubtful: list[str] | None = None  # set at the first mark
        self._live: dict[str, torch.Tensor] = {}
        self._last: LogRecord | None = None
        self._compared: LogRecord | None = None
        self._comparison = MarkComparison()
        self._surveyed: _Surveyed | None = None
        self._declared = DeclaredRedo(state)
        self._inexact = Exactness(True, "")  # reasons from replayers that were dropped
        self._kinds: dict[str, str] = {}  # class name of each optimizer in the log
        self._classes: dict[str, type[torch.optim.Optimizer]] = {}
        self._notes: list[str] = []
        self.compares = False

    @property
    def last(self) -> LogRecord | None:
        """Mark of the newest step that was applied."""
        return self._last

    @property
    def waiting_bytes(self) -> int:
        """Bytes of records that were read and wait to be applied."""
        return self._waiting_bytes

    @property
    def exactness(self) -> Exactness:
        """Exactness of all optimizers together."""
        if not self._inexact.exact:
            return self._inexact
        for replayer in self._replayers.values():
            if not replayer.exact.exact:
                return replayer.exact
        return self._declared.exactness

    def step(self, step: Step) -> None:
        """Replay one step: all of it, or nothing (I3).

        Raises:
            FormatError, ReplayError: a record does not fit the state.
            UnknownClassError: the class of an optimizer that made an update is not available.
            AuditError: this step, or one that was replayed together with it, gives other values
                than
                training had.
        """
        mark = step.mark
        # Raises before anything changes: a step is applied completely or not at all (I3).
        classes = self._find_classes(step)
        self._turn_over(mark, self._changes_class(step))
        self._classes |= classes
        self._kinds |= {one.optimizer: one.kind for _, one in step.updates if one is not None}
        doubtful = self._find_doubtful(mark)
        dtype = None
        for record, update in step.updates:
            if update is not None:
                dtype = update.default_dtype
                self._pending.setdefault(update.optimizer, []).append(update)
            if doubtful or update is None:
                self._apply()
            if update is None:
                # Records of declared updates do not name the default dtype.
                with default_dtype(dtype):
                    self._declared.run(record)
        self._last = mark
        self._waiting += 1
        self._waiting_bytes += step.read_bytes
        if doubtful:
            self._put(mark, doubtful)
        # Several steps are applied in one pass, as long as their records fit in memory.
        elif self._waiting >= STEPS_AT_ONCE or self._waiting_bytes >= self.limit_bytes:
            self._apply()
        self._declared.settle(mark)
        if not self._pending:
            self._compare()

    def idle(self) -> None:
        """Apply the waiting steps without collecting more of them, since there is nothing else to
        do.

        Raises:
            ReplayError, AuditError: as :meth:`step`.
        """
        if self._pending:
            self._apply()
            self._compare()

    def finish(self) -> list[str]:
        """Restore everything that the last mark holds; return notes on objects that could not be
        restored.

        Raises:
            MismatchError, FormatError: the mark does not fit the state.
            AuditError: replay gives other values than training had.
        """
        mark = self._last
        state = self._state
        if mark is None:
            return self._notes
        self._apply()
        self._compare()
        logged = {place.entry.name: tensor_of(mark, place) for place in mark.layout.placed}
        trees = {
            name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in mark.objects.items()
        }
        live: dict[str, torch.Tensor] = {}
        for section, provider in state.providers.items():
            split(provider.collect(), section, live)
        kept = {place.entry.name: place.entry for place in mark.layout.placed}
        entries: dict[str, Entry] = {}
        for tree in trees.values():
            for name in references(tree):
                first = self._aliases.get(name, name)
                if name not in kept and first in kept:
                    kept[name] = kept[first]
                    logged[name] = logged[first]
                if name in kept:
                    entries[name] = live_entry(kept[name], live.get(name))
                elif name in live:
                    entries[name] = tensor_entry(name, live[name])
                else:
                    raise FormatError(f"{mark.head} refers to {name!r}, which is not in the state")
        plans = state.plan_restore(trees, entries)
        mismatches = tuple(item for plan in plans.values() for item in plan.mismatches)
        if mismatches:
            listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
            raise MismatchError(
                f"{mark.head} does not fit the state:\n{listed}", mismatches=mismatches
            )
        for plan in plans.values():
            for name, template in plan.like.items():
                if name in logged and name not in plan.in_place:
                    logged[name] = dtensor_like(template, entries[name], logged[name])
        # Updates changed the first of tied tensors; its other names get the same tensor.
        for name, first in self._aliases.items():
            if name in live and first in live and name not in logged:
                live[name] = live[first]
        return list(dict.fromkeys((*self._notes, *restore_from_mark(state, plans, logged, live))))

    def _find_classes(self, step: Step) -> dict[str, type[torch.optim.Optimizer]]:
        """Return the classes that replay the updates of a step, for optimizers whose class is not
        yet known.

        Raises:
            UnknownClassError: a class is not available.
        """
        found: dict[str, type[torch.optim.Optimizer]] = {}
        for update in (one for _, one in step.updates if one is not None):
            key = update.optimizer
            at = step.mark.head.step
            optimizer = self._state.optimizers.get(key)
            if optimizer is None or self._kinds.get(key) == update.kind:
                continue
            kind, why = replay_class(update, type(local_optimizer(optimizer)))
            if kind is None:
                why += ": the log can only be replayed by an optimizer of the recorded class"
                raise UnknownClassError(why, step=at, optimizer=key)
            if why:
                self._inexact = Exactness(False, why)
            found[key] = kind
        return found

    def _changes_class(self, step: Step) -> bool:
        """Return True if another program made this step: one of its optimizers has another class,
        and starts from everything that the last mark holds."""
        updates = (one for _, one in step.updates if one is not None)
        return any(self._kinds.get(one.optimizer, one.kind) != one.kind for one in updates)

    def _turn_over(self, mark: LogRecord, changes: bool) -> None:
        """Start over from the last mark if another program made the step: if less is logged from
        here on, entries that only the previous mark holds are restored from it, and with them
        everything else, as it was when that program started.

        Args:
            mark: mark of the step.
            changes: an optimizer has another class, whatever is logged.
        """
        if self._last is not None and (changes or mark_holds_less(mark, than=self._last)):
            self._notes = self.finish()
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the replayers: everything is now as the last mark holds it."""
        self._inexact = self.exactness
        self._replayers = {}
        self._surveyed = None
        self._doubtful = None
        self._live = {}
        self._kinds = {}
        self._classes = {}

    def _find_doubtful(self, mark: LogRecord) -> list[str]:
        """Return the logged entries that an optimizer updates as well: tensors with two owners, or
        views of one memory. Their replayed values are not used, and the next update reads the
        logged ones."""
        if self._doubtful is None:
            for section, provider in self._state.providers.items():
                split(provider.collect(), section, self._live)
            spans = sorted(
                (tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes())
                for optimizer in self._state.optimizers.values()
                for tensor in map(local_tensor, _owned(optimizer))
            )
            names = [place.entry.name for place in mark.layout.placed]
            self._doubtful = [
                name
                for name in names
                if name in self._live and _inside(local_tensor(self._live[name]).data_ptr(), spans)
            ]
        return self._doubtful

    def _put(self, mark: LogRecord, names: Sequence[str]) -> None:
        for place in mark.layout.placed:
            if place.entry.name in names:
                copy_into(local_tensor(self._live[place.entry.name]), tensor_of(mark, place))

    def _apply(self) -> None:
        """Apply several steps at once, so that the state is read once for all of them. Optimizers
        share nothing: tensors with two owners are logged."""
        pending = self._pending
        self._pending = {}
        self._waiting = self._waiting_bytes = 0
        for key, updates in pending.items():
            self._replayer(key).apply(updates)
            self._state.rank_local.trained(key, {name for one in updates for name in one.gradients})

    def _compare(self) -> None:
        """Compare with the last mark. Everything up to its step has been applied."""
        mark = self._last
        done = self._compared
        if mark is not None and mark is not done and self.compares and self.exactness.exact:
            compare(self._comparison, mark, self._tensors(), self._names)
        self._compared = mark

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors of the state by entry name. Replay updates in place, so a survey stays
        valid while the optimizers hold the same tensors at the same addresses."""
        owned = [tensor for one in self._state.optimizers.values() for tensor in _owned(one)]
        places = [local_tensor(tensor).data_ptr() for tensor in owned]
        known = self._surveyed
        if known is None or known[1] != places or not same_objects(owned, known[0]):
            survey = self._state.survey()
            tensors = dict(survey.tensors)
            # An entry of the base may be an alias of an entry in the live state.
            if self._names:
                others = survey.shape.aliases.items()
                tensors |= {name: tensors[first] for name, first in others if first in tensors}
            known = self._surveyed = owned, places, tensors
        return known[2]

    def _replayer(self, key: str) -> Replayer:
        replayer = self._replayers.get(key)
        if replayer is None:
            optimizer = self._state.optimizers.get(key)
            provider = self._state.providers.get(key)
            if optimizer is None or not isinstance(provider, OptimizerProvider):
                raise FormatError(
                    f"the log has updates of {key!r}, which is not an optimizer of this state"
                )
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            names = [name for group in provider.groups() for name in group]
            known = {id(p): name for p, name in zip(parameters, names, strict=True)}
            # Training is not running: a second core is free even if torch is limited to one thread.
            threads = max(torch.get_num_threads(), min(2, len(available_cores())))
            own = local_optimizer(optimizer)
            replayer = self._replayers[key] = make_replayer(
                own,
                known,
                kind=self._classes.get(key),
                threads=threads,
                fast=self._state.replays_fast,
                relaid=self._relaid_of(own, known) if self._relaid else {},
            )
        return replayer

    def _relaid_of(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> dict[str, str]:
        """Return the entries whose layout differs from training's, by the parameter that they are
        or belong to."""
        there = self._tensors()
        lie = {local_tensor(there[name]).data_ptr(): name for name in self._relaid if name in there}
        found: dict[str, str] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            values = optimizer.state.get(parameter, {}).values()
            for tensor in (parameter, *(v for v in values if isinstance(v, torch.Tensor))):
                if (entry := lie.get(local_tensor(tensor).data_ptr())) is not None:
                    found.setdefault(names[id(parameter)], entry)
        return found


def restore_from_mark(
    state: State,
    plans: Mapping[str, RestorePlan],
    logged: Mapping[str, torch.Tensor],
    live: Mapping[str, torch.Tensor],
) -> list[str]:
    """Restore objects and tensors of a mark; return notes on objects that could not be restored.

    Args:
        state: live state.
        plans: restore plan of each section, without mismatches.
        logged: this rank's tensors from the marks, by the names that the object trees use.
        live: all tensors of the state, by the same names.
    """
    notes: list[str] = []
    copies: dict[int, torch.Tensor] = {}
    for section in state.restore_order():
        plan = plans[section]
        if plan.left_out:
            continue
        tensors = {}
        for name in references(plan.tree):
            target = plan.in_place.get(name)
            source = logged.get(name)
            if target is None:
                if source is not None and id(source) not in copies:
                    # A copy: training writes to the tensor, and records may be read again. One copy
                    # each, so that tied tensors stay tied.
                    copies[id(source)] = source.clone()
                tensors[name] = live[name] if source is None else copies[id(source)]
                continue
            if source is not None:
                copy_into(local_tensor(target), source)
            tensors[name] = target
        notes += state.providers[section].restore(join(plan.tree, tensors), strict=True)
    return notes


def compare(
    comparison: MarkComparison,
    mark: LogRecord,
    tensors: Mapping[str, torch.Tensor],
    names: Sequence[str] = (),
) -> None:
    """Compare replayed values with the samples in the mark of that step
    (:mod:`everstep.capture.mark_samples`), where replay must give the bits of training.

    Args:
        comparison: sampler, reused from step to step.
        mark: mark of the step.
        tensors: all tensors of the state, by entry name.
        names: as of :meth:`.MarkComparison.other`.

    Raises:
        AuditError: an entry differs; the error names it.
        FormatError: the mark belongs to another state.
    """
    logged = {
        place.entry.name: tensor_of(mark, place)
        for place in mark.layout.placed
        if place.entry.name.startswith(SPOT)
    }
    name = comparison.other(logged, tensors, mark.head.step, names)
    if name is not None:
        raise divergence_error(name, mark.head.step)


def divergence_error(name: str, step: int) -> AuditError:
    """Return the error for an entry whose replayed value differs from the sample in a mark."""
    return AuditError(
        f"replay up to step {step} gives another {name!r} than training had: it was "
        "written to outside the optimizer",
        step=step,
        hint="call ckpt.before_update() and ckpt.after_update() around such writes",
    )


def _owned(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    optimizer = local_optimizer(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _inside(address: int, spans: Sequence[tuple[int, int]]) -> bool:
    return bool(address) and any(begin <= address < end for begin, end in spans)


_NONE: Mapping[str, str] = MappingProxyType({})


def make_replayer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    *,
    kind: type[Optimizer] | None = None,
    threads: int,
    fast: bool = False,
    relaid: Mapping[str, str] = _NONE,
) -> Replayer:
    """Return a replayer that updates a live optimizer's tensors in place.

    Args:
        optimizer: live optimizer.
        names: names of all its parameters, by ``id(parameter)``.
        kind: class that made the updates; None: the optimizer's own class.
        threads, fast, relaid: as for :class:`~everstep.replay.engine.Replayer`.

    Raises:
        UnsupportedStateError: the optimizer cannot be replayed, with the reason.
        ReplayError: parameters and state do not fit together.
    """
    members = [list(group["params"]) for group in optimizer.param_groups]
    parameters = [parameter for group in members for parameter in group]
    kind = kind or type(optimizer)
    if kind is type(optimizer) and not any(map(is_dtensor, parameters)):
        return Replayer.of(optimizer, names, threads=threads, fast=fast, relaid=relaid)
    state: dict[str, dict[str, Any]] = {}
    for parameter in parameters:
        values = optimizer.state.get(parameter, {})
        state[names[id(parameter)]] = {
            key: local_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
    return Replayer(
        kind,
        [[names[id(parameter)] for parameter in group] for group in members],
        {names[id(parameter)]: local_tensor(parameter) for parameter in parameters},
        state,
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        threads=threads,
        training_threads=torch.get_num_threads(),
        fast=fast,
        relaid=relaid,
    )


def live_entry(logged: Entry, live: torch.Tensor | None) -> Entry:
    """Return the entry of the complete tensor of which a mark holds this rank's shard."""
    if live is None or not is_dtensor(live):
        return logged
    part = tensor_entry(logged.name, local_tensor(live))
    fits = (part.shape, part.dtype) == (logged.shape, logged.dtype)
    return tensor_entry(logged.name, live) if fits else logged
