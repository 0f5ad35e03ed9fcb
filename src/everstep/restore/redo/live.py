"""Live state of a training process, replayed by its own optimizers.

The live optimizers run the updates over the logged gradients, or an optimizer of the recorded class
does where that is another one. Entries without an owner are restored from the last step mark, which
holds all of them.

With sharded parameters each rank replays its own shards. An optimizer that works element by element
does the same to a plain tensor as to the local shard of a DTensor, with the same kernels. So a rank
replays over plain tensors: its shards of parameters and state, and the shards of the gradients, as
its log holds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.capture import MarkComparison
from everstep.errors import FormatError, MismatchError
from everstep.format.log import LogRecord
from everstep.replay import Exactness, Replayer, ReplayOptions, Update
from everstep.restore.redo.driver import MarkEntries, Step, sampled_difference
from everstep.restore.redo.updates import DeclaredRedo, UnknownClassError, replay_class
from everstep.run.tensors import copy_into, tensor_of
from everstep.seams.processes import available_cores
from everstep.state.layout import OBJECT_PREFIX, SAMPLE, Entry
from everstep.state.providers import OptimizerProvider, RestorePlan, local_optimizer
from everstep.state.survey import same_objects
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tensors import dtensor_over, is_dtensor, local_tensor, tensor_entry
from everstep.state.values.tree import join, references, split

_Surveyed = tuple[Sequence[torch.Tensor], Sequence[int], Mapping[str, torch.Tensor]]
"""Tensors of the optimizers, their addresses, and all tensors of the state by entry name."""


@dataclass(slots=True, eq=False)
class _Program:
    """Facts about the program that recorded the steps; all change when another one continues.

    Attributes:
        kinds: class name of each optimizer in the log.
        classes: class that replays each optimizer.
        replayers: replayer of each optimizer.
        live: all tensors of the state, by the names that object trees use.
        doubtful: names of logged entries that an optimizer updates as well; None before the first
            mark.
        surveyed: last survey of the state.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    classes: dict[str, type[Optimizer]] = field(default_factory=dict)
    replayers: dict[str, Replayer] = field(default_factory=dict)
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    doubtful: frozenset[str] | None = None
    surveyed: _Surveyed | None = None


class LiveMemory:
    """Live state that updates are applied to (see :class:`~everstep.restore.redo.driver.Memory`).

    Args:
        state: live state, restored from a base.
        relaid: entries whose memory layout differs from that of the saved tensors.
        aliases: entry names by the other names of their tensors.
        names: sorted names of all entries of the base, and so of the states that its log describes;
            empty if the live state has the same. Some objects show part of their tensors only while
            they run; entries that no optimizer replays are restored from the last mark.
    """

    def __init__(
        self,
        state: State,
        relaid: Collection[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
        names: Sequence[str] = (),
    ) -> None:
        self.declared: DeclaredRedo | None = DeclaredRedo(state)
        self._state = state
        self._relaid = relaid
        self._aliases = aliases
        self._names = names
        self._comparison = MarkComparison()
        self._inexact = Exactness(True, "")  # reasons that outlive a program's replayers
        self._program = _Program()

    @property
    def exactness(self) -> Exactness:
        """Exactness of all optimizers together."""
        replayers = self._program.replayers.values()
        found = (self._inexact, *(replayer.exact for replayer in replayers))
        return next((one for one in found if not one.exact), self._inexact)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors of the state by entry name. Replay updates in place, so a survey stays
        valid while the optimizers hold the same tensors at the same addresses."""
        owned = [tensor for one in self._state.optimizers.values() for tensor in _owned(one)]
        places = [local_tensor(tensor).data_ptr() for tensor in owned]
        known = self._program.surveyed
        if known is None or known[1] != places or not same_objects(owned, known[0]):
            survey = self._state.survey()
            tensors = dict(survey.tensors)
            # An entry of the base may be an alias of an entry in the live state.
            if self._names:
                others = survey.shape.aliases.items()
                tensors |= {name: tensors[first] for name, first in others if first in tensors}
            known = self._program.surveyed = owned, places, tensors
        return known[2]

    def check(self, step: Step) -> Sequence[Update | None]:
        """Return the updates of a step, for each of which there is a class.

        Raises:
            UnknownClassError: a class is not available.
        """
        self._find_classes(step)
        return [update for _, update in step.updates]

    def must_start_over(self, step: Step, last: LogRecord) -> bool:
        """Return True if another program made this step: it logs less, or one of its optimizers has
        another class, and starts from everything that the last mark holds."""
        return self._changes_class(step) or mark_holds_less(step.mark, than=last)

    def start_over(self) -> None:
        """Forget the replayers: everything is now as the last mark holds it."""
        # Read before the replayers are dropped: a state stays inexact (I9).
        self._inexact = self.exactness
        self._program = _Program()

    def begin(self, step: Step) -> MarkEntries:
        """Take note of the optimizer classes of a step; return the logged entries that an optimizer
        updates as well."""
        program = self._program
        # Found again: the optimizers of another program have classes of their own.
        program.classes |= self._find_classes(step)
        program.kinds |= {one.optimizer: one.kind for _, one in step.updates if one is not None}
        return self._doubtful_entries(step.mark)

    def apply(self, key: str, updates: Sequence[Update]) -> None:
        """Apply updates of one optimizer.

        Raises:
            FormatError, ReplayError, UnsupportedStateError: they do not fit the state.
        """
        replayer = self._program.replayers.get(key)
        if replayer is None:
            replayer = self._program.replayers[key] = self._replayer(key)
        replayer.apply(updates)

    def put(self, entries: MarkEntries) -> None:
        """Copy entries of marks into the live tensors."""
        for mark, place in entries:
            live = self._program.live[place.entry.name]
            copy_into(local_tensor(live), tensor_of(mark, place))

    def first_difference(self, mark: LogRecord) -> str | None:
        """Return the name of an entry that differs from its sample in the mark, None if there is
        none."""
        return sampled_difference(self._comparison, mark, self.tensors(), self._names)

    def restore(self, mark: LogRecord) -> list[str]:
        """Restore everything that the mark holds; return notes on objects that could not be
        restored.

        Raises:
            MismatchError, FormatError: the mark does not fit the state.
        """
        logged = {place.entry.name: tensor_of(mark, place) for place in mark.layout.placed}
        trees = {
            name.removeprefix(OBJECT_PREFIX): decode(data) for name, data in mark.objects.items()
        }
        live = live_tensors(self._state)
        entries = self._entries(mark, trees, live, logged)
        # All sections are planned before the first is restored.
        plans = self._state.plan_restore(trees, entries)
        require_fit(f"{mark.head} does", plans)
        for plan in plans.values():
            for name, template in plan.like.items():
                if name in logged and name not in plan.in_place:
                    logged[name] = dtensor_over(template, logged[name])
        # Updates changed the first of tied tensors; its other names get the same tensor.
        for name, first in self._aliases.items():
            if name in live and first in live and name not in logged:
                live[name] = live[first]
        return restore_from_mark(self._state, plans, logged, live)

    def _entries(
        self,
        mark: LogRecord,
        trees: Mapping[str, Any],
        live: Mapping[str, torch.Tensor],
        logged: dict[str, torch.Tensor],
    ) -> dict[str, Entry]:
        """Return the entries of all tensors that object trees of a mark refer to; add the other
        names of logged tensors to ``logged``.

        Raises:
            FormatError: the state does not have one of them.
        """
        kept = {place.entry.name: place.entry for place in mark.layout.placed}
        entries: dict[str, Entry] = {}
        for name in (name for tree in trees.values() for name in references(tree)):
            first = self._aliases.get(name, name)
            if name not in kept and first in kept:
                kept[name] = kept[first]
                logged[name] = logged[first]
            if name in kept:
                entries[name] = _live_entry(kept[name], live.get(name))
            elif name in live:
                entries[name] = tensor_entry(name, live[name])
            else:
                raise FormatError(f"{mark.head} refers to {name!r}, which is not in the state")
        return entries

    def _find_classes(self, step: Step) -> dict[str, type[Optimizer]]:
        """Return the classes that replay the updates of a step, for optimizers whose class is not
        yet known.

        Raises:
            UnknownClassError: a class is not available.
        """
        found: dict[str, type[Optimizer]] = {}
        for update in (one for _, one in step.updates if one is not None):
            key = update.optimizer
            optimizer = self._state.optimizers.get(key)
            if optimizer is None or self._program.kinds.get(key) == update.kind:
                continue
            kind, why = replay_class(update, type(local_optimizer(optimizer)))
            if kind is None:
                why += ": the log can only be replayed by an optimizer of the recorded class"
                raise UnknownClassError(why, step=step.mark.head.step, optimizer=key)
            if why:
                self._inexact = Exactness(False, why)
            found[key] = kind
        return found

    def _changes_class(self, step: Step) -> bool:
        """Return True if an optimizer has another class than in the steps before."""
        kinds = self._program.kinds
        updates = (one for _, one in step.updates if one is not None)
        return any(kinds.get(one.optimizer, one.kind) != one.kind for one in updates)

    def _doubtful_entries(self, mark: LogRecord) -> MarkEntries:
        program = self._program
        if program.doubtful is None:
            # Compared by address: views of one memory have names that say nothing of it.
            program.live = live_tensors(self._state)
            spans = sorted(
                (tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes())
                for optimizer in self._state.optimizers.values()
                for tensor in map(local_tensor, _owned(optimizer))
            )
            names = [place.entry.name for place in mark.layout.placed]
            program.doubtful = frozenset(
                name
                for name in names
                if name in program.live
                and _inside(local_tensor(program.live[name]).data_ptr(), spans)
            )
        places = mark.layout.placed if program.doubtful else ()
        return [(mark, place) for place in places if place.entry.name in program.doubtful]

    def _replayer(self, key: str) -> Replayer:
        optimizer = self._state.optimizers.get(key)
        provider = self._state.providers.get(key)
        if optimizer is None or not isinstance(provider, OptimizerProvider):
            raise FormatError(
                f"the log has updates of {key!r}, which is not an optimizer of this state"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [name for group in provider.groups() for name in group]
        known = {id(p): name for p, name in zip(parameters, names, strict=True)}
        own = local_optimizer(optimizer)
        return make_replayer(
            own,
            known,
            kind=self._program.classes.get(key),
            options=ReplayOptions(
                # Training is not running: a second core is free even if torch has one thread only.
                threads=max(torch.get_num_threads(), min(2, len(available_cores()))),
                training_threads=torch.get_num_threads(),
                relaid=self._relaid_of(own, known) if self._relaid else {},
            ),
        )

    def _relaid_of(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, str]:
        """Return the entries whose layout differs from training's, by the parameter that they are
        or belong to."""
        there = self.tensors()
        lie = {local_tensor(there[name]).data_ptr(): name for name in self._relaid if name in there}
        found: dict[str, str] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            values = optimizer.state.get(parameter, {}).values()
            for tensor in (parameter, *(v for v in values if isinstance(v, torch.Tensor))):
                if (entry := lie.get(local_tensor(tensor).data_ptr())) is not None:
                    found.setdefault(names[id(parameter)], entry)
        return found


def mark_holds_less(mark: LogRecord, *, than: LogRecord) -> bool:
    """Return True if a mark lacks an entry that the earlier mark ``than`` holds.

    Each program declares for itself which entries nothing changes (I8). When a program continues
    the log of another one, its marks may hold fewer entries: an entry that only the earlier marks
    hold keeps its value from the last of them.
    """
    before, now = (
        {p.entry.name for p in one.layout.placed if not p.entry.name.startswith(SAMPLE)}
        for one in (than, mark)
    )
    return not before <= now


def live_tensors(state: State) -> dict[str, torch.Tensor]:
    """Return all tensors of this rank, by the names that object trees use."""
    found: dict[str, torch.Tensor] = {}
    for section, provider in state.providers.items():
        split(provider.collect(), section, found)
    return found


def require_fit(what: str, plans: Mapping[str, RestorePlan]) -> None:
    """Refuse restore plans with mismatches.

    Args:
        what: subject and verb of the message.
        plans: restore plan of each section.

    Raises:
        MismatchError: lists the mismatches.
    """
    mismatches = tuple(item for plan in plans.values() for item in plan.mismatches)
    if mismatches:
        listed = "\n".join(f"  {name}: {problem}" for name, problem in mismatches)
        raise MismatchError(f"{what} not fit the state:\n{listed}", mismatches=mismatches)


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


def _owned(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    optimizer = local_optimizer(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _inside(address: int, spans: Sequence[tuple[int, int]]) -> bool:
    return bool(address) and any(begin <= address < end for begin, end in spans)


def make_replayer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    *,
    kind: type[Optimizer] | None = None,
    options: ReplayOptions,
) -> Replayer:
    """Return a replayer that updates a live optimizer's tensors in place.

    Args:
        optimizer: live optimizer.
        names: names of all its parameters, by ``id(parameter)``.
        kind: class that made the updates; None: the optimizer's own class.
        options: options of the replay.

    Raises:
        UnsupportedStateError: the optimizer cannot be replayed, with the reason.
        ReplayError: parameters and state do not fit together.
    """
    members = [list(group["params"]) for group in optimizer.param_groups]
    parameters = [parameter for group in members for parameter in group]
    kind = kind or type(optimizer)
    # The live optimizer itself, where it can be: state that it makes during replay is its own.
    if kind is type(optimizer) and not any(map(is_dtensor, parameters)):
        return Replayer.of(optimizer, names, options)
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
        options,
    )


def _live_entry(logged: Entry, live: torch.Tensor | None) -> Entry:
    """Return the entry of the complete tensor of which a mark holds this rank's shard."""
    if live is None or not is_dtensor(live):
        return logged
    part = tensor_entry(logged.name, local_tensor(live))
    fits = (part.shape, part.dtype) == (logged.shape, logged.dtype)
    return tensor_entry(logged.name, live) if fits else logged
