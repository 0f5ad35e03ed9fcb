"""The user's state dict as a whole: surveyed at each save, and restored."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from everstep.errors import OptionError, StateError, UnsupportedStateError
from everstep.state.layout.entries import Entry
from everstep.state.layout.names import (
    RESERVED,
    RNG_SECTION,
    is_reserved,
)
from everstep.state.layout.replica_digest import ReplicaDigest
from everstep.state.loaders.positions import POSITIONS, is_followed, loader_within
from everstep.state.providers.modules import ModuleProvider, ParameterNames
from everstep.state.providers.optimizers import (
    OptimizerProvider,
    unsaved_inner_optimizers,
    unwrap_optimizer,
)
from everstep.state.providers.plain import Occurrences, PlainProvider, RngProvider
from everstep.state.providers.provider import Provider, RestorePlan, Saved
from everstep.state.providers.stateful import LoaderProvider, Stateful, StatefulProvider
from everstep.state.providers.zero import ZeroProvider, is_zero, local_optimizer
from everstep.state.ranks.ddp_buckets import BUCKETS_SECTION, DDPBuckets
from everstep.state.ranks.rank_info import ONE_RANK, RankInfo
from everstep.state.ranks.rank_share import RankShare
from everstep.state.ranks.writers import WriterAssignment
from everstep.state.survey.ownership import (
    DeclaredUpdate,
    Memory,
    OwnedMemory,
    OwnershipRules,
    memory_of,
)
from everstep.state.survey.survey import (
    SectionContents,
    Survey,
    SurveyBuilder,
    same_objects,
    unsupported,
)
from everstep.state.values.objects import join_path
from everstep.state.values.refusals import copied_state_dict_owner
from everstep.state.values.tensors import local_tensor
from everstep.state.values.tree import references, split

__all__ = ["NOT_IN_STATE", "NOT_SAVED", "State", "first_few"]


NOT_SAVED = "not in the checkpoint"
"""What differs of a part of the state that a base does not have."""

NOT_IN_STATE = "in the checkpoint, not in the state"
"""What differs of a part of a base that the state does not have."""

_log = logging.getLogger("everstep")


class State:
    """The user's state dict, with a provider for each value, and the RNGs.

    Args:
        values: the state dict; kept by reference, plain data is read from it at each save.
        declared: patterns on names of entries that a declared update covers (see
            :class:`.owners.OwnershipRules`), perhaps with the functions that replay runs.
        static: patterns on names of entries that do not change.
        ranks: which rank of which job this is; a survey lists what this rank writes.
        rng: the random generators of the process are part of the state.

    Raises:
        OptionError: for a state dict that is no dict of named values, and for patterns that
            match nothing, or what an optimizer owns.
        UnsupportedStateError: listing every leaf that cannot be stored.

    Attributes:
        told: the patterns, and the functions.
        replaying: one of the functions is being run by replay.
        ranks: as given.
        replays_fast: replay may use kernels whose last bits are not those of training.
        descends_exactly: what was restored is exact; nothing was, so far.
        descends_from: why it is not, in words, where that is known.
        lost_beside: what gradients depend on and is in no part of the state, in words.
        layout: of the entries that were surveyed last; another object once they are others.
        strangers: optimizers and schedulers that train what the state has, and are in no part of
            it, in words.
        trains_in: the thread that has ended the last step; None: there was none.
        unsaved: by optimizer: what it trains, and no part of the state has.
        unsaved_frozen: by optimizer: what it has, too, and would train if it were not frozen.
        apart: which parameters inside of DDP are each rank's own.
        said: what was said of the data since the last resume.
        buckets: the order in which DDP sums gradients.
    """

    def __init__(
        self,
        values: MutableMapping[str, Any],
        *,
        declared: Sequence[str] | Mapping[str, DeclaredUpdate | None] = (),
        static: Sequence[str] = (),
        ranks: RankInfo = ONE_RANK,
        rng: bool = True,
    ) -> None:
        if not isinstance(values, MutableMapping):
            raise OptionError(
                f"the state must be a dict of named values, not {type(values).__name__}",
                hint='for example {"model": model, "optimizer": optimizer}',
            )
        if not values and ranks.world == 1:  # of several, one may have nothing of its own
            raise OptionError(
                "the state is empty: nothing but the random generators would be saved, and the "
                "parts of a state are told once, when the Checkpointer is made",
                hint='for example {"model": model, "optimizer": optimizer}',
            )
        for name in values:
            usable = isinstance(name, str) and name and "/" not in name
            if not usable or name in (RESERVED, "__metadata__"):
                raise OptionError(
                    f"{name!r} cannot name a part of the state",
                    hint=f'names are non-empty strings without "/", other than "{RESERVED}"',
                )
        self.ownership_rules = rules = OwnershipRules.of(declared, static)
        self.replaying = False
        self.ranks = ranks
        self._follow(values.values())
        self.replays_fast = False
        self.trains_in: int | None = None
        self.descends_exactly = True
        self.descends_from = ""
        self.unsaved: dict[str, list[str]] = {}
        self.unsaved_frozen: dict[str, list[str]] = {}
        self.unsaved_inputs: tuple[str, ...] = ()
        self.unsaved_trainers: list[str] = []
        self.layout: tuple[Entry, ...] = ()
        self._tensors: Mapping[str, torch.Tensor] = {}  # surveyed last
        self._holdings: tuple[OwnedMemory, ...] | None = None  # when unsaved was looked for last
        self._frozen: list[torch.Tensor] = []
        self.said: set[str] = set()
        modules: dict[str, ModuleProvider] = {}
        names = self._names = ParameterNames(modules)
        self.optimizers: dict[str, Optimizer] = {}
        self.providers: dict[str, Provider] = {}
        for key, value in values.items():
            provider: Provider
            if isinstance(value, nn.Module):
                provider = modules[key] = ModuleProvider(key, value)
            elif isinstance(value, Optimizer):
                self.optimizers[key] = optimizer = unwrap_optimizer(value)
                kind = ZeroProvider if is_zero(optimizer) else OptimizerProvider
                provider = kind(key, optimizer, names)
            elif isinstance(value, Stateful) and not isinstance(value, type):
                kind_of = LoaderProvider if LoaderProvider.takes(value) else StatefulProvider
                provider = kind_of(key, value)
            else:
                if whose := copied_state_dict_owner(value):
                    name = whose.split()[1]
                    raise OptionError(
                        f"{key!r} holds what the state_dict() of {whose} gave: training does not "
                        "change that copy, and resume() could not give it back",
                        hint=f'the object itself, in a place of its own: {{"{name}": {name}}}',
                    )
                provider = PlainProvider(key, values, self._held, lambda: self._places)
            self.providers[key] = provider
        if any(isinstance(p, ZeroProvider) and len(p.ranks) > 1 for p in self.providers.values()):
            # A rank that replays has not yet what the others update: functions would read that.
            self.ownership_rules = rules = replace(rules, replays=False)
        found = self.providers.values()
        self._optimizer_providers = [one for one in found if isinstance(one, OptimizerProvider)]
        self._keys = frozenset(self.providers)
        self.buckets = DDPBuckets(self.providers)
        if rng and self.buckets.are_saved:
            self.providers[BUCKETS_SECTION] = self.buckets
        if rng:
            self.providers[RNG_SECTION] = RngProvider()
        self._values = values
        self._places = Occurrences()
        self._objects = {
            key: value
            for key, value in values.items()
            if not isinstance(self.providers[key], PlainProvider)
        }
        self._inspection_order = [*modules, *(key for key in self.providers if key not in modules)]
        self._survey_builder = SurveyBuilder(rules)
        self._share = RankShare(ranks, self.providers)
        self.rank_local = self._share.rank_local
        # Refuses what cannot be stored now, rather than at the first save.
        survey = self._survey()
        self._share.of(survey)
        shape = survey.shape
        rules.check_used(name for name in (*shape.owners, *shape.aliases) if not is_reserved(name))
        self._loses = (*self._warn_of_rounded(survey), *self._warn_of_split_memory(survey))
        self._inside = self._warn_of_inner_optimizers()

    def _follow(self, values: Iterable[object]) -> None:
        """Complete what loaders save, as long as this state is in use."""
        POSITIONS.open(*filter(is_followed, map(loader_within, values)))
        self._unfollow = weakref.finalize(self, POSITIONS.close)
        self._unfollow.atexit = False
        POSITIONS.listen(self)

    def close(self) -> None:
        """Leave loaders as they are without a Checkpointer."""
        self._unfollow()

    def lose(self, why: str, hint: str) -> None:
        """Say why what was restored is not what training had; nothing that descends from it is
        called exact."""
        self.say(f"{why}; what is saved from here on is not called exact", hint)
        self.descends_exactly = False
        self.descends_from = why

    def say(self, what: str, hint: str) -> None:
        """Warn of something about the data, once after each resume."""
        if what not in self.said:
            self.said.add(what)
            _log.warning("everstep: %s\n  hint: %s", what, hint)

    def at_end_of_epoch(self) -> None:
        """Warn where plain data may count epochs: a counter must agree with a loader that gives no
        batch to the first loop after the resume, or that loop leaves an epoch out."""
        if any(isinstance(one, PlainProvider) for one in self.providers.values()):
            self.say(
                "a loader goes on at the end of an epoch: its first iteration gives no batch",
                "a counter of epochs in the state must agree with that: advance it after the "
                "loop over the loader, not before ckpt.step(), or an epoch is left out",
            )

    @property
    def data(self) -> list[str]:
        """Sections that a position in the data has come back with."""
        found = self.providers.items()
        return [
            key for key, one in found if isinstance(one, StatefulProvider) and one.restored_data
        ]

    def has_data(self, fresh: bool) -> bool:
        """Return whether a position in the data has come back, or, in a ``fresh`` run, begins."""
        found = (one for one in self.providers.values() if isinstance(one, StatefulProvider))
        return any(one.is_data for one in found) if fresh else bool(self.data)

    def _copied(self, survey: Survey) -> Iterator[tuple[str, torch.Tensor, nn.Parameter]]:
        """Yield name, stored tensor and parameter of the parameters that a module's
        ``state_dict()`` gives copies of (hooks of its own do that)."""
        for name, parameter in self._named_parameters():
            stored = survey.tensors.get(name)
            if stored is not None and _address_of(stored) != _address_of(parameter):
                yield name, stored, parameter

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for section, provider in self.providers.items():
            if isinstance(provider, ModuleProvider):
                for key, parameter in provider.named_parameters():
                    yield join_path(section, key), parameter

    def _warn_of_rounded(self, survey: Survey) -> list[str]:
        """Return which of those copies are rounded, so that what comes back is not what training
        had, in words."""
        found = list[str]()
        for name, stored, parameter in self._copied(survey):
            if stored.dtype != parameter.dtype:
                found.append(f"{name} ({parameter.dtype}, stored as {stored.dtype})")
            elif not _same_bits(stored, parameter):
                found.append(name)
        if found:
            _log.warning(
                "everstep: state_dict() gives %d parameter(s) otherwise than training has them: "
                "%s; what resume() gives back is rounded, and is not called exact",
                len(found),
                first_few(found),
            )
        return [f"state_dict() rounds {first_few(found)}"] if found else []

    def _warn_of_split_memory(self, survey: Survey) -> list[str]:
        """Tensors in plain data may lie in the memory of others: each comes back in its own, and
        what training writes to one of them the others do not get. Return which do, in words."""
        held = self._held()
        places = dict[str, Memory]()
        for name, tensor in survey.tensors.items():
            memory = memory_of(tensor) if self.is_plain(name) else None
            if memory is not None and not held(tensor):
                places[name] = memory
        found: list[str] = []
        reached = ""  # whose end is the largest so far
        for name in sorted(places, key=lambda name: (str(places[name].device), places[name].begin)):
            mine = places[name]
            other = places.get(reached)
            meet = other is not None and mine.device == other.device and mine.begin < other.end
            if meet and "/" in name + reached:  # two tensors of the state itself are read in place
                found.append(f"{name} in {reached}")
            if not meet or other is None or mine.end > other.end:
                reached = name
        if found:
            _log.warning(
                "everstep: %d tensor(s) in plain data lie in the memory of others (%s): resume() "
                "gives each memory of its own, and is not called exact\n  hint: keep one of them "
                "in the state, and make the others of it behind resume()",
                len(found),
                first_few(found),
            )
        return [f"tensors of plain data lie in others: {first_few(found)}"] if found else []

    def _find_unsaved(self, survey: Survey, holdings: tuple[OwnedMemory, ...]) -> None:
        """Find the parameters that an optimizer trains and no part of the state has: a head, a loss
        with weights of its own. Their moments would come back, and they would not.

        Done where what optimizers own has changed since the last look (``add_param_group()``), or
        where a parameter has been unfrozen since.
        """
        same = self._holdings is not None and same_objects(holdings, self._holdings)
        if same and not any(parameter.requires_grad for parameter in self._frozen):
            return  # mostly
        copied = (_address_of(parameter) for *_, parameter in self._copied(survey))
        saved = {0, *copied, *map(_address_of, survey.tensors.values())}
        self._frozen = []
        self.unsaved_frozen = {}
        unsaved = dict[str, list[str]]()
        for provider in self._optimizer_providers:
            state = local_optimizer(provider.optimizer).state
            for name, tensor in provider.named():
                if _address_of(tensor) in saved:
                    continue
                if tensor.requires_grad or tensor.grad is not None or state.get(tensor):
                    unsaved.setdefault(provider.section, []).append(name)
                else:
                    self.unsaved_frozen.setdefault(provider.section, []).append(name)
                    self._frozen.append(tensor)
        for section, lost in unsaved.items():
            if lost != self.unsaved.get(section):
                _log.warning(
                    "everstep: %r trains %d parameter(s) that are in no part of the state "
                    "(%s): their values are not saved, resume() leaves them as the program made "
                    "them, and nothing is called exact\n  hint: add the module or the tensors to "
                    "the state",
                    section,
                    len(lost),
                    first_few(lost),
                )
        self.unsaved = unsaved
        self._holdings = holdings

    def _warn_of_inner_optimizers(self) -> list[str]:
        """Return, in words, which optimizers hold another one (SAM does) whose state is in no part
        of the state."""
        found = list[str]()
        for section, optimizer in self.optimizers.items():
            for name, inner in unsaved_inner_optimizers(optimizer):
                if not any(inner is one for one in self.optimizers.values()):
                    what = f"{section!r} holds another optimizer ({name})"
                    found.append(f"{what}, which is in no part of the state")
                    _log.warning(
                        "everstep: %s: what it keeps is not saved, resume() loses it, and nothing "
                        "is called exact\n  hint: add it to the state, under a name of its own",
                        found[-1],
                    )
        return found

    def is_plain(self, name: str) -> bool:
        """Whether a tensor of this name is in plain data."""
        return isinstance(self.providers.get(name.split("/")[0]), PlainProvider)

    def _held(self) -> Callable[[torch.Tensor], bool]:
        """Tells whether a module or an optimizer of the state has the memory of a tensor: as a
        parameter, or as an option of a group (a rate that the loop sets)."""
        found: list[torch.Tensor] = []
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                found += group["params"]
                options = chain.from_iterable(
                    value if isinstance(value, (tuple, list)) else (value,)
                    for key, value in group.items()
                    if key != "params"
                )
                found += (one for one in options if isinstance(one, torch.Tensor))
        for provider in self.providers.values():
            if isinstance(provider, ModuleProvider):
                found += (tensor for _, tensor in provider.memory())
        held = set(map(_address_of, found)) - {0}
        return lambda tensor: _address_of(tensor) in held

    @property
    def unsaved_reasons(self) -> tuple[str, ...]:
        """What training has and no part of the state has, in words: it is neither saved nor
        restored."""
        trained = (
            f"{key!r} trains {len(names)} parameter(s) that are in no part of the state "
            f"({first_few(names)})"
            for key, names in self.unsaved.items()
        )
        return (*self._inside, *trained, *self.unsaved_inputs, *self.unsaved_trainers)

    @property
    def losses(self) -> tuple[str, ...]:
        """Why what is saved now is not all that training has, in words."""
        lossy = (
            f"the state_dict() of {one.section!r} gives tensors otherwise than training has them"
            for one in self._optimizer_providers
            if one.loses
        )
        late = ("a DistributedDataParallel was made after resume()",)
        missed = late if self.trains_in is not None and self.buckets.missed() else ()
        return (*self._loses, *lossy, *self.unsaved_reasons, *missed)

    @property
    def exact(self) -> bool:
        """Whether what was surveyed last, and what it descends from, is all that training had."""
        return self.descends_exactly and not self.losses

    @property
    def why_inexact(self) -> str:
        """Why it is not, in words, as far as that is known; "" if it is."""
        return "; ".join(filter(None, dict.fromkeys((self.descends_from, *self.losses))))

    @property
    def encoded(self) -> list[str]:
        """Keys of the optimizers whose ``state_dict()`` gives another form of what they train
        with, as far as has been surveyed: nothing but they themselves could go on from that."""
        return [one.section for one in self._optimizer_providers if one.encodes]

    def seen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of all that training may write to: parameters of modules as they
        are now, wherever they have been moved to, and all entries as they were surveyed last."""
        yield from self._named_parameters()
        yield from ((name, one) for name, one in self._tensors.items() if not is_reserved(name))

    @property
    def values(self) -> Mapping[str, Any]:
        """The user's state dict."""
        return self._values

    def survey(self) -> Survey:
        """The state as it is now: live tensors, their descriptions, and copies of objects; of
        several ranks' state what this rank writes, and all of its objects.

        By one thread at a time. In another than the one that trains, who has a gradient is as it
        was found last: backward may be writing to them, and torch guards nothing of that. What was
        found is kept until the next survey, and with it the memory of tensors that have been
        replaced since.

        Raises:
            UnsupportedStateError: listing every leaf that cannot be stored.
            StateError: when the state dict has other keys or objects than at construction, or
                a pattern of ``declared`` or ``static`` claims what an optimizer owns.
        """
        return self._share.of(self._survey())

    def _survey(self) -> Survey:
        """All that this rank holds."""
        self._names.asks_gradients = self.trains_in in (None, threading.get_ident())
        self._check_unchanged()
        found: dict[str, SectionContents] = {}
        leaves: dict[str, tuple[tuple[str, str], ...]] = {}
        for section in self._inspection_order:
            try:
                found[section] = self.providers[section].look()
            except UnsupportedStateError as error:
                leaves[section] = error.leaves
        if leaves:  # of all sections
            raise unsupported([leaf for key in self.providers for leaf in leaves.get(key, ())])
        survey = self._survey_builder.survey(
            {section: found[section] for section in self.providers}
        )
        holdings = tuple(part.holding for part in found.values() if part.holding is not None)
        self._find_unsaved(survey, holdings)
        self.layout = survey.shape.entries
        self._tensors = survey.tensors
        return survey

    def _check_unchanged(self) -> None:
        """The dict may get new plain values, but no other keys, and no other objects."""
        values = self._values
        objects = self._objects
        if values.keys() == self._keys and all(
            map(is_, map(values.get, objects), objects.values())
        ):
            return
        changed = sorted(self._keys.symmetric_difference(values))
        changed += [k for k, v in objects.items() if values.get(k) is not v]
        raise StateError(
            f"the state dict has changed since the Checkpointer was made: {', '.join(changed)}",
            hint="close it and make a new one for the new state",
        )

    def has_known_parameters(self, optimizer: str | None) -> bool:
        """Whether an optimizer, by its key, has the parameters that it had at the last survey, as
        far as that can be proven; None: whoever updates may have any."""
        provider = None if optimizer is None else self.providers.get(optimizer)
        return isinstance(provider, OptimizerProvider) and provider.has_its_parameters

    @property
    def sharing(self) -> WriterAssignment | None:
        """Who writes what, of the state as it was surveyed last; None: this rank is alone."""
        return self._share.sharing

    def is_shared(self) -> bool:
        """Whether other ranks have, or write, any of what this rank holds."""
        return self._share.is_shared(self._survey())

    def holders(self) -> Callable[[str], tuple[str, frozenset[int]] | None]:
        """A parameter's entry, and which ranks have it in common, by its name, or that of an entry
        of an optimizer's state for it; None for all other entries."""
        return self._share.holders(self._survey())

    def left_out(
        self, plans: Mapping[str, RestorePlan], taken: Mapping[str, str]
    ) -> tuple[ReplicaDigest, ...]:
        """What is not restored of what this rank has in common with others.

        Args:
            plans: of :meth:`plan_restore`.
            taken: entries that ranks had different ones of -> whose this one takes.
        """
        return self._share.left_out(self._survey(), plans, taken)

    def sync_zero_parameters(self) -> None:
        """Replay has brought each rank's own parameters to a step: hands them to those that train
        them as copies. To be called by all ranks."""
        for provider in self.providers.values():
            if isinstance(provider, ZeroProvider):
                provider.sync_parameters()

    @property
    def stateful_objects(self) -> list[object]:
        """What is saved by its own ``state_dict()``, whatever it has within it."""
        found = self.providers.values()
        return [one.value for one in found if isinstance(one, StatefulProvider)]

    def restore_order(self) -> list[str]:
        """Sections in the order of restoring: modules, optimizers, the rest, RNG last, so that
        nothing done while restoring disturbs what was restored before."""
        ranks: dict[type, int] = {
            ModuleProvider: 0,
            OptimizerProvider: 1,
            ZeroProvider: 1,
            RngProvider: 3,
        }
        return sorted(self.providers, key=lambda name: ranks.get(type(self.providers[name]), 2))

    def plan_restore(
        self,
        trees: Mapping[str, Any],
        entries: Mapping[str, Entry],
        left_out: Collection[str] = (),
    ) -> dict[str, RestorePlan]:
        """Compares every section with what a base holds; touches nothing.

        Args:
            trees: decoded object trees by section.
            entries: entries by every name, aliases included, of whole tensors.
            left_out: sections that stay as the program made them.
        """
        plans: dict[str, RestorePlan] = {}
        for provider in self.providers.values():
            if isinstance(provider, StatefulProvider):
                provider.restored_data = False
        plain = (one for one in self.providers.values() if isinstance(one, PlainProvider))
        self._places = Occurrences([one.collect() for one in plain])
        names = Counter(entry.name for entry in entries.values())
        tied = frozenset(name for name, count in names.items() if count > 1)
        for section, provider in self.providers.items():
            if section in left_out:
                plans[section] = RestorePlan.without()
                continue
            if section not in trees and provider is self.buckets:
                plans[section] = RestorePlan(None)  # of an older version; settle() says so
                continue
            if section not in trees:
                plans[section] = RestorePlan.without([(section, NOT_SAVED)])
                continue
            if isinstance(provider, StatefulProvider) and OptimizerProvider.groups_of(
                trees[section]
            ):
                what = "an optimizer in the checkpoint, an object with state_dict() in the state"
                plans[section] = RestorePlan.without([(section, what)])
                continue
            live: dict[str, torch.Tensor] = {}
            split(provider.collect(), section, live)
            used = {name: entries[name] for name in references(trees[section])}
            plans[section] = provider.plan(Saved(trees[section], used, tied), live)
        for section in trees:
            if section not in self.providers:
                unexpected = [(section, NOT_IN_STATE)]
                if section == BUCKETS_SECTION:  # of no use without DDP
                    unexpected = []
                plans[section] = RestorePlan.without(unexpected)
        return plans


def first_few(names: Sequence[str]) -> str:
    """The first few of many names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _address_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none yet, or none of its own."""
    local = local_tensor(tensor)
    if is_lazy(local) or local.layout is not torch.strided:
        return 0
    return local.untyped_storage().data_ptr()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits; as far as they lie here."""
    mine = local_tensor(one).detach()
    theirs = local_tensor(other).detach()
    if mine.shape != theirs.shape or mine.device != theirs.device:
        return True  # what is stored is another part of it, as sharding has it
    parts = (t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, theirs) if t.numel())
    return torch.equal(*parts) if mine.numel() else True
