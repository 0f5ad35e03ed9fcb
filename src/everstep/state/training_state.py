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
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.errors import OptionError, StateError, UnsupportedStateError
from everstep.state.coverage import Coverage
from everstep.state.layout import Entry, ReplicaDigest
from everstep.state.layout.entries import RESERVED, RNG_SECTION, is_reserved
from everstep.state.ownership import DeclaredUpdate, OwnershipRules
from everstep.state.positions import POSITIONS, is_followed, loader_within
from everstep.state.providers import (
    ModuleProvider,
    OptimizerProvider,
    RestorePlan,
    SectionProvider,
    StatefulProvider,
    ZeroProvider,
    named_parameters,
    unwrap_optimizer,
)
from everstep.state.providers.chunks import ChunkedProvider, Provider
from everstep.state.providers.modules import ParameterNames
from everstep.state.providers.optimizers import is_zero
from everstep.state.providers.plain import Occurrences, PlainProvider, RngProvider, held_memory
from everstep.state.providers.provider import Saved
from everstep.state.providers.stateful import LoaderProvider, Stateful
from everstep.state.ranks import BUCKETS_SECTION, ONE_RANK, DDPBuckets, RankInfo
from everstep.state.ranks.rank_share import RankShare
from everstep.state.ranks.writers import WriterAssignment
from everstep.state.survey import SectionContents, Survey, SurveyBuilder, unsupported
from everstep.state.values.objects import copied_state_dict_owner, registered_names
from everstep.state.values.registered import is_registered
from everstep.state.values.tree import references, split

NOT_SAVED = "not in the checkpoint"
"""Mismatch of a section of the state that a base does not have."""

NOT_IN_STATE = "in the checkpoint, not in the state"
"""Mismatch of a section of a base that the state does not have."""

_log = logging.getLogger("everstep")


class _FixedObjects:
    """Objects of a state dict, which must stay the same; its plain values may change.

    Args:
        values: the state dict.
        providers: provider of each of its values.
    """

    def __init__(self, values: Mapping[str, Any], providers: Mapping[str, SectionProvider]) -> None:
        self._values = values
        self._keys = frozenset(values)
        self._objects = {
            key: value
            for key, value in values.items()
            if not isinstance(providers[key], PlainProvider)
        }

    def check(self) -> None:
        """Check that the dict has the same keys and objects.

        Raises:
            StateError: it does not.
        """
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


class _Surveyor:
    """Survey of all sections of a state, and the entries of the last one.

    Args:
        providers: provider of each section.
        names: names of parameters, by which optimizers list them.
        rules: the user's rules on ownership.
        objects: objects of the state dict, which must stay the same.

    Attributes:
        entries: entries of the last survey; another object once they change.
        tensors: its tensors.
    """

    def __init__(
        self,
        providers: Mapping[str, SectionProvider],
        names: ParameterNames,
        rules: OwnershipRules,
        objects: _FixedObjects,
    ) -> None:
        self._providers = providers
        # Modules first: their guards prove the names.
        self._order = sorted(providers, key=lambda k: not isinstance(providers[k], ModuleProvider))
        self._names = names
        self._builder = SurveyBuilder(rules)
        self._objects = objects
        self.entries: tuple[Entry, ...] = ()
        self.tensors: Mapping[str, torch.Tensor] = {}

    def survey(self, coverage: Coverage, *, asks_gradients: bool) -> Survey:
        """Survey all entries that this rank holds.

        Args:
            coverage: takes the result.
            asks_gradients: it is safe to look for parameters with a gradient now.
        """
        self._objects.check()
        self._names.asks_gradients = asks_gradients
        found: dict[str, SectionContents] = {}
        leaves: dict[str, tuple[tuple[str, str], ...]] = {}
        for section in self._order:
            try:
                found[section] = self._providers[section].look()
            except UnsupportedStateError as error:
                leaves[section] = error.leaves
        if leaves:  # list the leaves of all sections in one error
            raise unsupported([leaf for key in self._providers for leaf in leaves.get(key, ())])
        survey = self._builder.survey({section: found[section] for section in self._providers})
        holdings = tuple(part.holding for part in found.values() if part.holding is not None)
        coverage.update(survey, holdings)
        self.entries = survey.shape.entries
        self.tensors = survey.tensors
        return survey


class State:
    """The user's state dict, with a provider for each value, and the process's random generators.

    At a save, :meth:`survey` returns live tensors and copies of objects. At a restore,
    :meth:`plan_restore` compares the sections with a base, and the providers take the loaded trees
    in :meth:`restore_order`. It also receives the findings of :class:`.LoaderPositions` about
    loaders.

    Args:
        values: the state dict; kept by reference, plain data is read from it at each save.
        declared: patterns on names of entries that a declared update covers (see
            :class:`.OwnershipRules`), optionally with the functions that replay runs.
        static: patterns on names of entries that do not change.
        ranks: this rank of the job; a survey lists the entries that this rank writes.
        rng: the random generators of the process are part of the state.

    Raises:
        OptionError: the state dict is not a dict of named values, or a pattern matches no entry, or
            one that an optimizer owns.
        UnsupportedStateError: some leaves cannot be stored; lists all of them.

    Attributes:
        providers: provider of each section; reserved sections after those of the state dict.
        optimizers: the optimizers of the state, unwrapped, by section.
        ownership_rules: the patterns, and the functions.
        coverage: data of the training that the state does not cover.
        replaying: replay is running one of the functions.
        ranks: as given, or as of :meth:`become`.
        values: as given.
        trains_in: thread that has ended the last step; None: there was none.
        said: warnings about the data since the last resume.
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
        _check_values(values, ranks)
        self.ownership_rules = rules = OwnershipRules.of(declared, static)
        self.replaying = False
        self.ranks = ranks
        # Before the providers, which follow iterators that exist already: that needs completed
        # classes.
        self._follow(values.values())
        self.trains_in: int | None = None
        self.said: set[str] = set()
        modules: dict[str, ModuleProvider] = {}
        names = ParameterNames(modules)
        self.values: Mapping[str, Any] = values
        self._places = Occurrences()
        self.optimizers: dict[str, Optimizer] = {}
        self.providers: dict[str, SectionProvider] = {}
        for key, value in values.items():
            if isinstance(value, Optimizer):
                self.optimizers[key] = unwrap_optimizer(value)
            provider = self._provider_of(key, values, names)
            if isinstance(provider, ModuleProvider):
                modules[key] = provider
            self.providers[key] = provider
        if any(isinstance(p, ZeroProvider) and len(p.ranks) > 1 for p in self.providers.values()):
            # During replay a rank does not have the parameters that other ranks update yet, so a
            # function would read old values.
            self.ownership_rules = rules = replace(rules, replays=False)
        objects = _FixedObjects(values, self.providers)
        self.buckets = DDPBuckets(self.providers)
        if rng and self.buckets.are_saved:
            self.providers[BUCKETS_SECTION] = self.buckets
        if rng:
            self.providers[RNG_SECTION] = RngProvider()
        self.coverage = Coverage(self.providers, self.optimizers, self.buckets, self._held)
        self._surveyor = _Surveyor(self.providers, names, rules, objects)
        self._share = RankShare(ranks, self.providers)
        # Survey once now: leaves that cannot be stored are refused here, not at the first save.
        survey = self._survey()
        self._share.of(survey)
        shape = survey.shape
        rules.check_used(name for name in (*shape.owners, *shape.aliases) if not is_reserved(name))
        self.coverage.check(survey)

    def _provider_of(
        self, key: str, values: MutableMapping[str, Any], names: ParameterNames
    ) -> SectionProvider:
        """Create the provider of one value of the state dict."""
        value = values[key]
        if isinstance(value, Provider) and isinstance(value, (nn.Module, Optimizer)):
            raise OptionError(
                f"{key!r} is an everstep.Provider and a {type(value).__name__}: only one of the "
                "two would be saved",
                hint="put the module or optimizer, and a provider for the rest, into the state",
            )
        if isinstance(value, nn.Module):
            return ModuleProvider(key, value)
        if isinstance(value, Optimizer):
            optimizer = self.optimizers[key]
            kind = ZeroProvider if is_zero(optimizer) else OptimizerProvider
            return kind(key, optimizer, names)
        if isinstance(value, Provider):
            return ChunkedProvider(key, value, self._held)
        if isinstance(value, Stateful) and not isinstance(value, type):
            kind_of = LoaderProvider if LoaderProvider.takes(value) else StatefulProvider
            return kind_of(key, value)
        if owner := copied_state_dict_owner(value):
            name = owner.split()[1]
            raise OptionError(
                f"{key!r} is a copy from the state_dict() of {owner}: training does not change "
                "that copy, and resume() could not restore its owner",
                hint=f'put the object itself into the state: {{"{name}": {name}}}',
            )
        return PlainProvider(key, values, self._held, lambda: self._places)

    def _follow(self, values: Iterable[object]) -> None:
        """Complete the positions of loaders as long as this state is in use."""
        POSITIONS.open(self, *filter(is_followed, map(loader_within, values)))
        self._unfollow = weakref.finalize(self, POSITIONS.close)
        self._unfollow.atexit = False

    def become(self, ranks: RankInfo) -> None:
        """Take other facts about this rank of the job, before training begins."""
        self.ranks = ranks
        self._share = RankShare(ranks, self.providers)

    def close(self) -> None:
        """Restore the loaders' classes, if no other state is in use."""
        self._unfollow()

    def lose(self, why: str, hint: str) -> None:
        """Record the reason why the restored state differs from that of the training; bases from
        now on are not exact."""
        self.say(f"{why}; bases from now on are not called exact", hint)
        self.coverage.descends_exactly = False
        self.coverage.descends_from = why

    def say(self, message: str, hint: str) -> None:
        """Warn about the data, once after each resume."""
        if message not in self.said:
            self.said.add(message)
            _log.warning("everstep: %s\n  hint: %s", message, hint)

    def at_end_of_epoch(self) -> None:
        """Warn that plain data may count epochs, if a restored loader was at the end of one.

        Such a loader gives no batch to the first loop after the resume. A counter that does not
        agree with that would skip an epoch.
        """
        if any(isinstance(one, PlainProvider) for one in self.providers.values()):
            self.say(
                "a loader continues at the end of an epoch: its first iteration gives no batch",
                "a counter of epochs in the state must agree with that: advance it after the "
                "loop over the loader, not before ckpt.step(), or an epoch is skipped",
            )

    @property
    def data(self) -> list[str]:
        """Sections with a restored position in the data."""
        found = self.providers.items()
        return [
            key for key, one in found if isinstance(one, StatefulProvider) and one.restored_data
        ]

    def has_data(self, fresh: bool) -> bool:
        """Return True if a position in the data was restored, or, in a ``fresh`` run, begins."""
        found = (one for one in self.providers.values() if isinstance(one, StatefulProvider))
        return any(one.is_data for one in found) if fresh else bool(self.data)

    def _held(self) -> Callable[[torch.Tensor], bool]:
        """Return a predicate: a module or an optimizer of the state has the memory of a tensor,
        as a parameter, or as an option of a group (a rate that the loop sets)."""
        found = [group for one in self.optimizers.values() for group in one.param_groups]
        modules = (one for one in self.providers.values() if isinstance(one, ModuleProvider))
        return held_memory(found, (tensor for one in modules for _, tensor in one.memory()))

    @property
    def unsaved_reasons(self) -> tuple[str, ...]:
        """Descriptions of data of the training that is neither saved nor restored."""
        return self.coverage.unsaved_reasons

    @property
    def _losses(self) -> tuple[str, ...]:
        return self.coverage.losses(trained=self.trains_in is not None)

    @property
    def exact(self) -> bool:
        """True if the last survey, and the restored state before it, cover the whole training."""
        return self.coverage.descends_exactly and not self._losses

    @property
    def why_inexact(self) -> str:
        """Known reasons why the state is not exact; "" if it is."""
        reasons = (self.coverage.descends_from, *self._losses)
        return "; ".join(filter(None, dict.fromkeys(reasons)))

    def seen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of all memory that training may write to: current parameters of
        modules, wherever they have been moved, and all entries of the last survey."""
        yield from named_parameters(self.providers)
        tensors = self._surveyor.tensors.items()
        yield from ((name, one) for name, one in tensors if not is_reserved(name))

    @property
    def layout(self) -> tuple[Entry, ...]:
        """Entries of the last survey; another object once they change."""
        return self._surveyor.entries

    def survey(self) -> Survey:
        """Survey the current state: live tensors, their descriptions, and copies of objects. Of
        several ranks: the entries that this rank writes, and all its objects.

        Must not run in two threads at a time. In another thread than the training thread, the list
        of parameters with a gradient is that of the last survey: backward may be writing gradients,
        and torch does not lock them. The result is kept until the next survey, and with it the
        memory of tensors that have been replaced since.

        Raises:
            UnsupportedStateError: some leaves cannot be stored; lists all of them.
            StateError: the state dict has other keys or objects than at construction, or a pattern
                of ``declared`` or ``static`` matches an entry that an optimizer owns.
        """
        return self._share.of(self._survey())

    def _survey(self) -> Survey:
        """Survey all entries that this rank holds."""
        asks_gradients = self.trains_in in (None, threading.get_ident())
        return self._surveyor.survey(self.coverage, asks_gradients=asks_gradients)

    def has_known_parameters(self, optimizer: str | None) -> bool:
        """Return True if an optimizer provably has the parameters of the last survey.

        Args:
            optimizer: its key; None: an unknown optimizer, for which nothing is proven.
        """
        provider = None if optimizer is None else self.providers.get(optimizer)
        return isinstance(provider, OptimizerProvider) and provider.has_its_parameters

    @property
    def sharing(self) -> WriterAssignment | None:
        """Writers of the entries surveyed last; None: a job of one rank."""
        return self._share.sharing

    def is_shared(self) -> bool:
        """Return True if other ranks hold or write any entry of this rank."""
        return self._share.is_shared(self._survey())

    def holders(self) -> Callable[[str], tuple[str, frozenset[int]] | None]:
        """Return a function from the name of a parameter, or of its optimizer state, to the
        parameter's entry and the ranks that hold replicas of it; None for all other entries."""
        return self._share.holders(self._survey())

    def left_out(
        self, plans: Mapping[str, RestorePlan], taken: Mapping[str, str]
    ) -> tuple[ReplicaDigest, ...]:
        """Return digests of the replicated state that is not restored.

        Args:
            plans: the result of :meth:`plan_restore`.
            taken: entries for which ranks had saved different values -> the saved rank that this
                one restores.
        """
        if self.ranks.world == 1:
            return ()
        return self._share.left_out(self._survey(), plans, taken)

    def sync_zero_parameters(self) -> None:
        """Broadcast parameters that replay has updated on their own ranks (ZeRO). All ranks must
        call it."""
        for provider in self.providers.values():
            if isinstance(provider, ZeroProvider):
                provider.sync_parameters()

    @property
    def stateful_objects(self) -> list[object]:
        """Objects that are saved by their own ``state_dict()``."""
        found = self.providers.values()
        return [one.value for one in found if isinstance(one, StatefulProvider)]

    def restore_order(self) -> list[str]:
        """Return the sections in the order of restoring.

        Modules come first, then optimizers, the rest, and random generators last, so that no
        restore disturbs an earlier one.
        """
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
        """Compare every section with a base; change nothing.

        Args:
            trees: decoded object trees by section.
            entries: entries by every name, aliases included, of unsharded tensors.
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
                plans[section] = RestorePlan(
                    None
                )  # an older base without bucket orders; settle() reports it
                continue
            if section not in trees:
                plans[section] = RestorePlan.without([(section, NOT_SAVED)])
                continue
            if why := _why_of_another_kind(provider, trees[section]):
                plans[section] = RestorePlan.without([(section, why)])
                continue
            live: dict[str, torch.Tensor] = {}
            split(provider.collect(), section, live)
            used = {name: entries[name] for name in references(trees[section])}
            plans[section] = provider.plan(Saved(trees[section], used, tied), live)
        for section in trees:
            if section not in self.providers:
                unexpected = [(section, NOT_IN_STATE)]
                if section == BUCKETS_SECTION:  # not needed without DDP
                    unexpected = []
                plans[section] = RestorePlan.without(unexpected)
        return plans


def _why_of_another_kind(provider: SectionProvider, tree: Any) -> str:
    """Return why a saved section cannot be a provider's, whatever its tensors; "" if it can."""
    others = (StatefulProvider, ChunkedProvider)
    if isinstance(provider, others) and OptimizerProvider.groups_of(tree):
        return "the checkpoint has an optimizer here, the state another kind of object"
    unknown = sorted(name for name in registered_names(tree) if not is_registered(name))
    if not unknown:
        return ""
    return f"values of {', '.join(unknown)}: call everstep.data.register_type for the class"


def _check_values(values: object, ranks: RankInfo) -> None:
    """Check that a state dict is a dict of named values, and not empty.

    Raises:
        OptionError: it is not.
    """
    if not isinstance(values, MutableMapping):
        raise OptionError(
            f"the state must be a dict of named values, not {type(values).__name__}",
            hint='for example {"model": model, "optimizer": optimizer}',
        )
    if not values and ranks.world == 1:  # one of several ranks may have no state of its own
        raise OptionError(
            "the state is empty: only the random generators would be saved, and values cannot "
            "be added after the Checkpointer is made",
            hint='for example {"model": model, "optimizer": optimizer}',
        )
    for name in values:
        usable = isinstance(name, str) and name and "/" not in name
        if not usable or name in (RESERVED, "__metadata__"):
            raise OptionError(
                f"{name!r} cannot be a key of the state dict",
                hint=f'names are non-empty strings without "/", other than "{RESERVED}"',
            )
