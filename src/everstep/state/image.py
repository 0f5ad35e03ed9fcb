"""The whole state at one moment: entries, live tensors and encoded objects."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.errors import FormatError, OptionError, StateError, UnsupportedStateError
from everstep.state.entries import Entry, stored_form, why_not_storable
from everstep.state.objects import encode, unsupported_leaves
from everstep.state.optimizers import OptimizerProvider
from everstep.state.providers import (
    ModuleProvider,
    PlainProvider,
    Provider,
    RestorePlan,
    Saved,
    Stateful,
    StatefulProvider,
    named_parameters,
)
from everstep.state.rng import collect_rng, restore_rng
from everstep.state.tree import references, split

__all__ = ["OBJECT_BYTES_MAX", "OBJECT_PREFIX", "RNG_SECTION", "State", "StateImage"]

RESERVED = "everstep"
OBJECT_PREFIX = f"{RESERVED}/objects/"
"""Entries under this prefix hold a section's objects, encoded (see :mod:`.objects`)."""

OBJECT_BYTES_MAX = 1 << 30
"""A section's objects, encoded; what is larger belongs into tensors."""

RNG_SECTION = f"{RESERVED}/rng"


@dataclass(frozen=True, slots=True)
class StateImage:
    """The state at one moment, seen through references to live tensors.

    Attributes:
        tensors: live tensors by entry name, in canonical order; one per distinct memory.
        entries: their descriptions, in the same order.
        aliases: ``other name -> entry name`` for tensors that share all of their memory.
        objects: encoded object trees by entry name.
    """

    tensors: Mapping[str, torch.Tensor]
    entries: tuple[Entry, ...]
    aliases: Mapping[str, str]
    objects: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        """Bytes of tensors and objects."""
        tensors = sum(entry.size_bytes for entry in self.entries)
        return tensors + sum(len(data) for data in self.objects.values())


class State:
    """The user's state dict, with a provider for each value, and the RNGs.

    Args:
        values: the state dict; kept by reference, plain data is read from it at each save.

    Raises:
        OptionError: for a state dict that is no dict of named values.
        UnsupportedStateError: listing every leaf that cannot be stored.
    """

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        if not isinstance(values, MutableMapping):
            raise OptionError(
                f"the state must be a dict of named values, not {type(values).__name__}",
                hint='for example {"model": model, "optimizer": optimizer}',
            )
        for name in values:
            usable = isinstance(name, str) and name and "/" not in name
            if not usable or name in (RESERVED, "__metadata__"):
                raise OptionError(
                    f"{name!r} cannot name a part of the state",
                    hint=f'names are non-empty strings without "/", other than "{RESERVED}"',
                )
        modules = {key: value for key, value in values.items() if isinstance(value, nn.Module)}
        self.optimizers: dict[str, Optimizer] = {}
        self.providers: dict[str, Provider] = {}
        for key, value in values.items():
            provider: Provider
            if isinstance(value, nn.Module):
                provider = ModuleProvider(key, value)
            elif isinstance(value, Optimizer):
                self.optimizers[key] = value
                provider = OptimizerProvider(key, value, lambda: named_parameters(modules))
            elif isinstance(value, Stateful) and not isinstance(value, type):
                provider = StatefulProvider(key, value)
            else:
                provider = PlainProvider(key, values)
            self.providers[key] = provider
        self.providers[RNG_SECTION] = _RngProvider()
        self._values = values
        self._objects = {
            key: value
            for key, value in values.items()
            if not isinstance(self.providers[key], PlainProvider)
        }
        self.image(lsn=0)  # refuses what cannot be stored, now rather than at the first save

    def image(self, *, lsn: int) -> StateImage:
        """The state as it is now.

        Args:
            lsn: number of optimizer updates so far, noted on every entry.

        Raises:
            UnsupportedStateError: listing every leaf that cannot be stored.
        """
        self._check_unchanged()
        named: dict[str, torch.Tensor] = {}
        trees = {
            section: split(provider.collect(), section, named)
            for section, provider in self.providers.items()
        }
        problems = [(name, why) for name, t in named.items() if (why := why_not_storable(t))]
        objects: dict[str, bytes] = {}
        try:
            for section, tree in trees.items():
                objects[OBJECT_PREFIX + section] = encode(tree)
        except UnsupportedStateError:
            for section, tree in trees.items():  # of all sections, by name
                problems += unsupported_leaves(tree, section)
        if problems:
            raise _unsupported(tuple(problems))
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        seen: dict[object, str] = {}
        for name, tensor in named.items():
            first = seen.setdefault(_identity(name, tensor), name)
            if first == name:
                tensors[name] = tensor
            else:
                aliases[name] = first
        entries = tuple(stored_form(name, tensor, lsn) for name, tensor in tensors.items())
        too_large = tuple(
            (name.removeprefix(OBJECT_PREFIX), "objects of more than 1 GiB; use torch tensors")
            for name, data in objects.items()
            if len(data) > OBJECT_BYTES_MAX
        )
        if too_large:
            raise _unsupported(too_large)
        return StateImage(tensors, entries, aliases, objects)

    def _check_unchanged(self) -> None:
        """The dict may get new plain values, but no other keys, and no other objects."""
        known = set(self.providers) - {RNG_SECTION}
        changed = sorted(known.symmetric_difference(self._values))
        changed += [k for k, v in self._objects.items() if self._values.get(k) is not v]
        if changed:
            raise StateError(
                f"the state dict has changed since the Checkpointer was made: {', '.join(changed)}",
                hint="close it and make a new one for the new state",
            )

    def restore_order(self) -> list[str]:
        """Sections in the order of restoring: modules, optimizers, the rest, RNG last, so that
        nothing done while restoring disturbs what was restored before."""
        ranks: dict[type, int] = {ModuleProvider: 0, OptimizerProvider: 1, _RngProvider: 3}
        return sorted(self.providers, key=lambda name: ranks.get(type(self.providers[name]), 2))

    def plan_restore(
        self, trees: Mapping[str, Any], entries: Mapping[str, Entry]
    ) -> dict[str, RestorePlan]:
        """Compares every section with what a base holds; touches nothing.

        Args:
            trees: decoded object trees by section.
            entries: entries by every name, aliases included.
        """
        plans: dict[str, RestorePlan] = {}
        for section, provider in self.providers.items():
            if section not in trees:
                missing = [(section, "not in the checkpoint")]
                plans[section] = RestorePlan(None, mismatches=missing)
                continue
            live: dict[str, torch.Tensor] = {}
            split(provider.collect(), section, live)
            used = {name: entries[name] for name in references(trees[section])}
            plans[section] = provider.plan(Saved(trees[section], used), live)
        for section in trees:
            if section not in self.providers:
                unexpected = [(section, "in the checkpoint, not in the state")]
                plans[section] = RestorePlan(None, mismatches=unexpected)
        return plans


class _RngProvider:
    section = RNG_SECTION

    def collect(self) -> Any:
        return collect_rng()

    def plan(self, saved: Saved, live: Mapping[str, torch.Tensor]) -> RestorePlan:
        return RestorePlan(saved.tree)

    def restore(self, tree: Any, *, strict: bool) -> list[str]:
        try:
            return restore_rng(tree)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as e:
            raise FormatError(f"{RNG_SECTION} holds no state of random generators: {e!r}") from e


def _unsupported(leaves: tuple[tuple[str, str], ...]) -> UnsupportedStateError:
    listed = "\n".join(f"  {name}: {reason}" for name, reason in leaves)
    return UnsupportedStateError(
        f"{len(leaves)} part(s) of the state cannot be stored:\n{listed}", leaves=leaves
    )


def _identity(name: str, tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same memory read the same way."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return name
    return (
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        str(tensor.device),
        tensor.is_conj(),
        tensor.is_neg(),
    )
