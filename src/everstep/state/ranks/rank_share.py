"""This rank's share of a survey, and the replicated state that a partial restore skips.

Each rank compares its own state with a base. If several ranks keep some state equal, all of them
must restore it, or none: if one begins with fresh moments and the others continue with saved ones,
their replicas diverge at the next update, and later bases would mix both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.optim.lr_scheduler import LRScheduler

from everstep.state.layout import Placement, ReplicaDigest
from everstep.state.layout.placement import WHOLE, replica_digests
from everstep.state.providers import (
    ModuleProvider,
    OptimizerProvider,
    RestorePlan,
    SectionProvider,
    StatefulProvider,
    named_parameters,
    unwrap_optimizer,
)
from everstep.state.ranks.writers import RankInfo, WriterAssignment, find_replication
from everstep.state.survey import Shape, Survey, unsupported
from everstep.state.values.objects import join_path

_Ranks = tuple[int, ...]
_LISTED = 3
_FSDP1 = "FullyShardedDataParallel is not supported; use torch.distributed.fsdp.fully_shard"


@dataclass(frozen=True, slots=True)
class SkippedState:
    """State that one rank would not restore.

    Attributes:
        mismatches: all skipped state, and state restored with a doubtful match: ``(name, why)``.
        common: digests of the replicated state among it, which must be equal on all its ranks.
    """

    mismatches: tuple[tuple[str, str], ...]
    common: tuple[ReplicaDigest, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The first few of them in words, for messages to other ranks."""
        return tuple(f"{name}: {problem}" for name, problem in self.mismatches[:_LISTED])


def _ranks_scheduled_by(
    value: object, updated: Mapping[int, set[frozenset[int]]]
) -> set[frozenset[int]]:
    """Return the sets of ranks that share parameters whose updates depend on a scheduler or a
    scaler."""
    if isinstance(value, LRScheduler):
        return updated.get(id(unwrap_optimizer(value.optimizer)), set())
    if isinstance(value, torch.amp.GradScaler):
        return set().union(*updated.values())
    return set()


class RankShare:
    """Select this rank's share of surveys: the entries that it writes. A job of one rank writes
    everything.

    Args:
        ranks: this rank of the job.
        providers: providers by section; more may be added until the first call.

    Attributes:
        sharing: writers of the entries surveyed last; None: a job of one rank.
    """

    def __init__(self, ranks: RankInfo, providers: Mapping[str, SectionProvider]) -> None:
        self._ranks = ranks
        self._providers = providers
        self._shapes: tuple[Shape, Shape] | None = None  # of everything, of the share; seen last
        self._tensors: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
        self.sharing: WriterAssignment | None = None

    def of(self, survey: Survey) -> Survey:
        """Return this rank's share of a survey.

        Its shape and tensors are the same objects as last time if those of the full survey are.

        Raises:
            UnsupportedStateError: tensors on ranks outside of this job, or modules whose state
                several ranks cannot save.
        """
        shapes = self._shapes
        tensors = self._tensors
        if shapes is None or shapes[0] is not survey.shape:
            shapes = (survey.shape, self._share_of(survey.shape))
            tensors = None
            self._shapes = shapes
        if shapes[1] is shapes[0]:
            return survey
        if tensors is None or tensors[0] is not survey.tensors:
            mine = {entry.name: survey.tensors[entry.name] for entry in shapes[1].entries}
            tensors = (survey.tensors, MappingProxyType(mine))
            self._tensors = tensors
        return replace(survey, shape=shapes[1], tensors=tensors[1])

    def is_shared(self, survey: Survey) -> bool:
        """Return True if other ranks hold or write any entry of the survey."""
        if self._ranks.world == 1:
            return False
        return self._sharing(survey.shape).is_shared()

    def holders(self, survey: Survey) -> Callable[[str], tuple[str, frozenset[int]] | None]:
        """See :meth:`everstep.state.training_state.State.holders`."""
        aliases = survey.shape.aliases
        providers = self._providers
        sharing = self._sharing(survey.shape)
        parameters = {aliases.get(name, name) for name, _ in named_parameters(providers)}
        alone = frozenset({self._ranks.rank})

        def of(name: str) -> tuple[str, frozenset[int]] | None:
            unit = sharing.unit_of(aliases.get(name, name))
            if unit in parameters:
                return unit, sharing.ranks_of(unit)
            section, kind, *_ = (*name.split("/", 2), "")
            of_optimizer = isinstance(providers.get(section), OptimizerProvider)
            own = name, alone
            return own if of_optimizer and kind == "state" else None

        return of

    def left_out(
        self, survey: Survey, plans: Mapping[str, RestorePlan], taken: Mapping[str, str]
    ) -> tuple[ReplicaDigest, ...]:
        """Return digests of skipped parameters and optimizers that are replicated, with all objects
        that set their rates.

        Args:
            survey: the survey.
            plans: restore plans by section.
            taken: entries for which ranks had saved different values -> the saved rank that this
                one restores.
        """
        sharing = self._sharing(survey.shape)
        aliases = survey.shape.aliases
        lines: dict[tuple[_Ranks, str], list[str]] = {}

        def say(ranks: frozenset[int], section: str, line: str) -> None:
            if len(ranks) > 1:
                lines.setdefault((tuple(sorted(ranks)), section), []).append(line)

        holders: dict[int, frozenset[int]] = {}  # by id of a parameter
        for section, provider in self._providers.items():
            if not isinstance(provider, ModuleProvider):
                continue
            plan = plans[section]
            for key, parameter in provider.named_parameters():
                name = join_path(section, key)
                ranks = holders.setdefault(id(parameter), sharing.ranks_of(aliases.get(name, name)))
                if plan.left_out or key not in plan.tree:
                    say(ranks, section, name)
        updated: dict[int, set[frozenset[int]]] = {}  # by id of an optimizer
        for section, provider in self._providers.items():
            if not isinstance(provider, OptimizerProvider):
                continue
            groups = updated.setdefault(id(provider.optimizer), set())
            for name, trained in provider.named():
                ranks = holders.get(id(trained), frozenset())
                groups.add(ranks)
                if plans[section].left_out:
                    say(ranks, section, name)
        for section, provider in self._providers.items():
            # A new rank starts without rank-local state of its own: that is not a mismatch.
            if isinstance(provider, StatefulProvider) and plans[section].mismatches:
                for ranks in _ranks_scheduled_by(provider.value, updated):
                    say(ranks, section, section)
        for name, whose in taken.items():
            ranks = sharing.ranks_of(sharing.unit_of(aliases.get(name, name)))
            say(ranks, name.partition("/")[0], f"{name} {whose}")
        return replica_digests(lines)

    def _share_of(self, shape: Shape) -> Shape:
        self._refuse(shape)
        if self._ranks.world == 1:
            return shape
        self.sharing = self._sharing(shape)
        mine = self.sharing.mine()
        return Shape(
            tuple(mine[entry.name] for entry in shape.entries if entry.name in mine),
            MappingProxyType({o: name for o, name in shape.aliases.items() if name in mine}),
            MappingProxyType({n: owner for n, owner in shape.owners.items() if n in mine}),
            shape.objects_bytes,
            self.sharing.replica_digests(shape.aliases),
        )

    def _sharing(self, shape: Shape) -> WriterAssignment:
        """Assign the writers. With a log, each rank writes all entries that its marks hold,
        since it restores them from its own log only (frozen parameters inside of DDP that follow
        others, say)."""
        common = find_replication(self._providers.values(), shape.aliases)
        marked = (name for name, owner in shape.owners.items() if owner.in_marks)
        alone = frozenset(marked if self._ranks.logged else ())
        return WriterAssignment(self._ranks, shape.entries, common, alone)

    def _refuse(self, shape: Shape) -> None:
        world = self._ranks.world
        leaves = []
        for entry in shape.entries:
            ranks = None if entry.placement == WHOLE else Placement.parse(entry.placement).ranks
            if ranks is not None and max(ranks) >= world:
                where = f"distributed over {len(ranks)} ranks, up to rank {max(ranks)}"
                leaves.append((entry.name, f"{where}; everstep was given {world} rank(s)"))
        fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not in use
        if world > 1 and fsdp is not None:
            leaves += [
                (section, _FSDP1)
                for section, provider in self._providers.items()
                if isinstance(provider, ModuleProvider)
                and any(
                    isinstance(part, fsdp.FullyShardedDataParallel)
                    for part in provider.outer.modules()
                )
            ]
        if leaves:
            raise unsupported(leaves)
