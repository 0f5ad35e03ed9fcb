"""Parameters inside of DistributedDataParallel: equal on all ranks, or rank-local.

DDP does not reduce gradients of parameters that were frozen when it was made. As long as no rank
trains them, they are equal on all ranks, and one rank writes them: a frozen backbone is most of a
model. Once a rank has trained one, it is rank-local and stays so: freezing it again does not make
it equal. A rank observes this only for itself, so the ranks exchange their observations at each
start, and before each base that is due (:mod:`everstep.trainer.session.step_consensus`).

Optimizer steps that would make replicas diverge are refused before they change anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from everstep.errors import UnsupportedStateError
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.provider import Provider
from everstep.state.survey.guards import canonical_key
from everstep.state.values.objects import join_path

if TYPE_CHECKING:
    from everstep.state.training_state import State

__all__ = [
    "RankLocalParameters",
    "ddp_ranks",
    "ddp_replicas",
    "find_ddp",
    "reduced_parameter_ids",
    "refuse_divergent_updates",
    "unreduced_parameters",
]


class RankLocalParameters:
    """Parameters that DDP does not reduce and that differ between ranks.

    Args:
        providers: providers by section; more may be added until the first call.
    """

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self._providers = providers
        self._own: set[str] = set()
        self._versions: dict[str, int] | None = None  # when all ranks had the same; None: not yet
        self._found: tuple[list[nn.Parameter], dict[str, nn.Parameter]] = [], {}
        self._ids: frozenset[int] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Return True if DDP reduces all its parameters."""
        return not unreduced_parameters(self._providers.values())

    def own(self) -> frozenset[int]:
        """Return the ids of the rank-local parameters, as of now."""
        named = self._named()
        found = {name for name, one in named.items() if self._is_own(name, one)}
        if not found <= self._own or len(self._ids) != len(found):
            self._own |= found
            self._ids = frozenset(id(named[name]) for name in found)
        return self._ids

    def names(self) -> list[str]:
        """Return their names, and the names reported by other ranks."""
        self.own()
        return sorted(self._own)

    def agree(self, names: Iterable[str]) -> bool:
        """Add names that another rank has reported; return True if some are new."""
        before = len(self._own)
        self._own.update(names)
        return len(self._own) > before

    def restored(
        self, placed: Mapping[str, Collection[int] | None], before: int, world: int
    ) -> None:
        """Take over rank-local parameters from a base that was restored.

        Args:
            placed: ranks that held the restored tensor in the base, by name; None: all of them.
            before: number of ranks that saved the base.
            world: number of ranks of this job.
        """
        for name in self._named():
            took = placed.get(name, ())  # nothing of it was there
            if took is None or set(took) >= set(range(before)):
                continue
            if before != world or not set(took) >= self._group(name):
                self._own.add(name)
        self.began()

    def trained(self, key: str, names: Collection[str]) -> None:
        """Add parameters of the optimizer ``key`` that a replay has updated, by their names
        there."""
        provider = self._providers.get(key)
        named = self._named()
        if not named or not isinstance(provider, OptimizerProvider):
            return
        taught = {id(tensor) for name, tensor in provider.named() if name in names}
        self._own |= {name for name, parameter in named.items() if id(parameter) in taught}

    def began(self) -> None:
        """Note that all other parameters are equal on all ranks now."""
        self._versions = {name: _version(one) for name, one in self._named().items()}

    def _is_own(self, name: str, parameter: nn.Parameter) -> bool:
        if name in self._own or parameter.requires_grad:
            return True
        return self._versions is not None and self._versions.get(name) != _version(parameter)

    def _named(self) -> dict[str, nn.Parameter]:
        """Return all parameters that DDP does not reduce, by name."""
        frozen = unreduced_parameters(self._providers.values())
        if len(frozen) != len(self._found[0]) or any(
            one is not other for one, other in zip(frozen, self._found[0], strict=True)
        ):
            ids = set(map(id, frozen))
            named = dict[str, nn.Parameter]()
            for provider in self._providers.values():
                if isinstance(provider, ModuleProvider):
                    for key, parameter in provider.named_parameters():
                        if id(parameter) in ids:
                            named[join_path(provider.section, key)] = parameter
            self._found = frozen, named
        return self._found[1]

    def _group(self, name: str) -> set[int]:
        provider = self._providers[name.partition("/")[0]]
        assert isinstance(provider, ModuleProvider)
        return set(ddp_ranks(provider.outer))


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version


def unreduced_parameters(providers: Iterable[Provider]) -> list[nn.Parameter]:
    """Return parameters inside of DDP whose gradients it never reduces because they were frozen
    when it was made.

    Parameters that DDP was told to ignore are not among them. All ranks have equal values until one
    trains them.
    """
    modules = [provider.outer for provider in providers if isinstance(provider, ModuleProvider)]
    return [parameter for module in modules for parameter in _unreduced(module)]


def ddp_ranks(module: nn.Module) -> tuple[int, ...]:
    """Return the ranks that keep a module's parameters equal; none if it is not in a DDP."""
    return ddp_replicas(module)[0] or ()


def ddp_replicas(module: nn.Module) -> tuple[tuple[int, ...] | None, frozenset[str]]:
    """Return the ranks that keep a module's parameters equal, and the keys of the parameters
    that DDP ignores."""
    ddp = find_ddp(module)
    if ddp is None:
        return None, frozenset()
    ranks = tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group)))
    # DDP has the names that torch uses, with the prefixes of wrappers inside the module.
    return ranks, frozenset(map(canonical_key, ddp.parameters_to_ignore))


def find_ddp(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the DDP wrapper, which may itself be compiled; None if there is none."""
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


def reduced_parameter_ids(ddp: nn.parallel.DistributedDataParallel) -> set[int]:
    """Return the ``id()`` of each parameter whose gradients a DDP reduces."""
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    return {id(parameter) for name, parameter in named if name not in ignored}


_UNREDUCED: WeakKeyDictionary[nn.Module, tuple[nn.Parameter, ...]] = WeakKeyDictionary()


def _unreduced(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """See :func:`unreduced_parameters`."""
    ddp = find_ddp(module)
    if ddp is None:
        return ()
    if ddp not in _UNREDUCED:
        ignored = ddp.parameters_to_ignore
        inside = [p for name, p in ddp.module.named_parameters() if name not in ignored]
        reduced = _reduced_by(ddp, len(inside))
        found = () if reduced is None else tuple(p for p in inside if id(p) not in reduced)
        _UNREDUCED[ddp] = found
    return _UNREDUCED[ddp]


def _reduced_by(ddp: Any, count: int) -> set[int] | None:
    """Return ids of the parameters in DDP's reducer; None: all ``count`` of them.

    The empty set for a torch without this information: each rank then saves its own values of all
    trained parameters.
    """
    try:
        if ddp._get_ddp_logging_data()["num_parameter_tensors"] == count:
            return None
        # This allocates gradients of zeros for a moment, but only for a partly frozen model.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    except (AttributeError, KeyError, RuntimeError):
        return set()


_LOCAL_SGD = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def refuse_divergent_updates(state: State, gate: Callable[[str], None]) -> Callable[[str], None]:
    """Return ``gate``, preceded by a check that refuses updates that would make DDP replicas
    diverge.

    One rank writes replicated state for all ranks. Once ranks consume different gradients their
    replicas differ, and a base would mix them. So such an update is refused before anything has
    changed. Detected are optimizer steps within ``no_sync()``, uneven inputs (``Join``) and local
    SGD (``post_localSGD_hook``); gradients that the program changes after DDP has reduced them are
    not.
    """
    if state.ranks.world == 1:
        return gate
    found = [(key, p.outer) for key, p in state.providers.items() if isinstance(p, ModuleProvider)]
    ddps = [(section, ddp) for section, module in found if (ddp := find_ddp(module)) is not None]
    if not ddps:
        return gate
    updated: dict[tuple[str, int], list[tuple[str, Any]]] = {}

    def look(key: str) -> None:
        groups = state.optimizers[key].param_groups
        if (at := (key, len(groups))) not in updated:
            theirs = {id(parameter) for group in groups for parameter in group["params"]}
            updated[at] = [
                one for one in ddps if not theirs.isdisjoint(reduced_parameter_ids(one[1]))
            ]
        for section, ddp in updated[at]:
            if (why := _divergence(ddp)) is not None:
                raise UnsupportedStateError(
                    f'the ranks would diverge: "{section}" is in '
                    f"DistributedDataParallel, and {why}; nothing was updated",
                    leaves=((section, why),),
                    rank=state.ranks.rank,
                    hint=f'put {{"{section}": ddp.module}} into the state: then each rank saves it',
                )
        gate(key)

    return look


def _divergence(ddp: nn.parallel.DistributedDataParallel) -> str | None:
    if not ddp.require_backward_grad_sync:
        return "its optimizer is called within no_sync()"
    join: Any = ddp._join_config
    if join.enable and not join.throw_on_early_termination:
        return (
            "inputs may be uneven (Join): a rank that runs out makes fewer updates (with "
            "throw_on_early_termination=True it ends the step of all)"
        )
    hooks = sys.modules.get(_LOCAL_SGD)  # not imported: not in use
    if hooks is not None and any(
        isinstance(kept, hooks.PostLocalSGDState) for _, kept in ddp._comm_hooks
    ):
        return "its gradients are reduced within groups of ranks only (post_localSGD_hook)"
    return None
