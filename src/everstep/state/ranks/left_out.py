"""What a rank leaves out of a base, of what it has in common with others.

Each rank compares its own state with a base. What several of them keep equal, all of these have to
restore, or none: where one begins anew with moments that the others go on with, their replicas part
with the next update, and bases would hold some of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LRScheduler

from everstep.state.layout.replica_digest import InCommon, in_common
from everstep.state.providers.optimizers import OptimizerProvider, unwrapped
from everstep.state.providers.provider import ModuleProvider, Provider, StatefulProvider
from everstep.state.providers.restoring import RestorePlan
from everstep.state.ranks.writers import Sharing
from everstep.state.values.objects import join_path

__all__ = ["LeftOut", "left_out_in_common"]

_Ranks = tuple[int, ...]
_LISTED = 3


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What one rank would leave out.

    Attributes:
        mismatches: all of it, and what it would take as it may not be meant: ``(name, why)``.
        common: of what it has in common with others: has to be the same on all of these.
    """

    mismatches: tuple[tuple[str, str], ...]
    common: tuple[InCommon, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The first of them, for other ranks."""
        return tuple(f"{name}: {problem}" for name, problem in self.mismatches[:_LISTED])


def left_out_in_common(
    providers: Mapping[str, Provider],
    sharing: Sharing,
    aliases: Mapping[str, str],
    plans: Mapping[str, RestorePlan],
    taken: Mapping[str, str],
) -> tuple[InCommon, ...]:
    """Parameters, and the optimizers that update them, with all that sets their rates.

    Args:
        providers: by section.
        aliases: ``other name -> entry name``.
        taken: entries that ranks had different ones of -> whose this one takes.
    """
    lines: dict[tuple[_Ranks, str], list[str]] = {}

    def say(ranks: frozenset[int], section: str, line: str) -> None:
        if len(ranks) > 1:
            lines.setdefault((tuple(sorted(ranks)), section), []).append(line)

    holders: dict[int, frozenset[int]] = {}  # by id of a parameter
    for section, provider in providers.items():
        if not isinstance(provider, ModuleProvider):
            continue
        plan = plans[section]
        for key, parameter in provider.named_parameters():
            name = join_path(section, key)
            ranks = holders.setdefault(id(parameter), sharing.ranks_of(aliases.get(name, name)))
            if plan.left_out or key not in plan.tree:
                say(ranks, section, name)
    updated: dict[int, set[frozenset[int]]] = {}  # by id of an optimizer
    for section, provider in providers.items():
        if not isinstance(provider, OptimizerProvider):
            continue
        groups = updated.setdefault(id(provider.optimizer), set())
        for name, trained in provider.named():
            ranks = holders.get(id(trained), frozenset())
            groups.add(ranks)
            if plans[section].left_out:
                say(ranks, section, name)
    for section, provider in providers.items():
        # A new rank begins without what each had for itself: that is no mismatch.
        if isinstance(provider, StatefulProvider) and plans[section].mismatches:
            for ranks in _scaled_by(provider.value, updated):
                say(ranks, section, section)
    for name, whose in taken.items():
        ranks = sharing.ranks_of(sharing.unit_of(aliases.get(name, name)))
        say(ranks, name.partition("/")[0], f"{name} {whose}")
    return in_common(lines)


def _scaled_by(value: object, updated: Mapping[int, set[frozenset[int]]]) -> set[frozenset[int]]:
    """Ranks that have parameters in common whose updates depend on a scheduler, or a scaler."""
    if isinstance(value, LRScheduler):
        return updated.get(id(unwrapped(value.optimizer)), set())
    if isinstance(value, torch.amp.GradScaler):
        return set().union(*updated.values())
    return set()
