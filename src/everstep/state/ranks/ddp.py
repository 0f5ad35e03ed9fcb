"""Which parameters inside of DistributedDataParallel each rank has its own of.

DDP reduces no gradients of what was frozen when it was made. As long as nobody trains it, all ranks
have the same, and one of them writes it: a frozen backbone is most of a model. Once a rank has
trained it, it is that rank's own, and stays so: frozen again it is as different as before. A rank
sees that only of itself, so all of them go by what any has seen: they tell each other at each
start, and before each base that is due (:mod:`everstep.trainer.session.step_consensus`).
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
    """Of the parameters that DDP does not reduce, those that are each rank's own.

    Args:
        providers: by section; may get more until it is asked.
    """

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self._providers = providers
        self._own: set[str] = set()
        self._versions: dict[str, int] | None = None  # when all ranks had the same; None: not yet
        self._found: tuple[list[nn.Parameter], dict[str, nn.Parameter]] = [], {}
        self._ids: frozenset[int] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether DDP reduces all that it has."""
        return not unreduced_parameters(self._providers.values())

    def own(self) -> frozenset[int]:
        """Ids of the parameters, as of now."""
        named = self._named()
        found = {name for name, one in named.items() if self._is_own(name, one)}
        if not found <= self._own or len(self._ids) != len(found):
            self._own |= found
            self._ids = frozenset(id(named[name]) for name in found)
        return self._ids

    def names(self) -> list[str]:
        """Their names, and those of what others have told of."""
        self.own()
        return sorted(self._own)

    def agree(self, names: Iterable[str]) -> bool:
        """Some rank has these of its own, so all have. Returns whether that is news."""
        before = len(self._own)
        self._own.update(names)
        return len(self._own) > before

    def restored(
        self, placed: Mapping[str, Collection[int] | None], before: int, world: int
    ) -> None:
        """A base has been restored: what ranks had of their own there is their own here.

        Args:
            placed: which ranks had the tensors that this one took, by name; None: all of them.
            before, world: number of ranks that saved it, and of this job.
        """
        for name in self._named():
            took = placed.get(name, ())  # nothing of it was there
            if took is None or set(took) >= set(range(before)):
                continue
            if before != world or not set(took) >= self._group(name):
                self._own.add(name)
        self.began()

    def trained(self, key: str, names: Collection[str]) -> None:
        """Replay has updated parameters of the optimizer ``key``, by their names there."""
        provider = self._providers.get(key)
        named = self._named()
        if not named or not isinstance(provider, OptimizerProvider):
            return
        taught = {id(tensor) for name, tensor in provider.named() if name in names}
        self._own |= {name for name, parameter in named.items() if id(parameter) in taught}

    def began(self) -> None:
        """Apart from those, all ranks have the same from now on."""
        self._versions = {name: _version(one) for name, one in self._named().items()}

    def _is_own(self, name: str, parameter: nn.Parameter) -> bool:
        if name in self._own or parameter.requires_grad:
            return True
        return self._versions is not None and self._versions.get(name) != _version(parameter)

    def _named(self) -> dict[str, nn.Parameter]:
        """All that DDP does not reduce, by name."""
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
    """Parameters inside of DistributedDataParallel whose gradients it never reduces, though it was
    not told to ignore them: they were frozen when it was made. Until one is trained, all ranks have
    the same."""
    modules = [provider.outer for provider in providers if isinstance(provider, ModuleProvider)]
    return [parameter for module in modules for parameter in _unreduced(module)]


def ddp_ranks(module: nn.Module) -> tuple[int, ...]:
    """The ranks that keep a module's parameters equal; none, if it is in no DDP."""
    return ddp_replicas(module)[0] or ()


def ddp_replicas(module: nn.Module) -> tuple[tuple[int, ...] | None, frozenset[str]]:
    """Ranks that keep a module's parameters equal, and the keys of those that they do not."""
    ddp = find_ddp(module)
    if ddp is None:
        return None, frozenset()
    ranks = tuple(sorted(torch.distributed.get_process_group_ranks(ddp.process_group)))
    # As torch names them, wrappers of blocks in it included.
    return ranks, frozenset(map(canonical_key, ddp.parameters_to_ignore))


def find_ddp(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The wrapper, which may itself be compiled; None if there is none."""
    while not isinstance(module, nn.parallel.DistributedDataParallel):
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module


def reduced_parameter_ids(ddp: nn.parallel.DistributedDataParallel) -> set[int]:
    """``id()`` of the parameters whose gradients it reduces."""
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
    """Ids of the parameters that DDP's reducer has; None: all ``count`` of them. A torch that does
    not tell: none, so each rank keeps its own of what is trained."""
    try:
        if ddp._get_ddp_logging_data()["num_parameter_tensors"] == count:
            return None
        # Gradients in zeros, for a moment; only of a model that is frozen in part.
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    except (AttributeError, KeyError, RuntimeError):
        return set()


_LOCAL_SGD = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"


def refuse_divergent_updates(state: State, gate: Callable[[str], None]) -> Callable[[str], None]:
    """``gate``, and before it a look at what DDP is about to let each rank update by itself.

    One rank writes for all what ranks under DDP have in common; once they consume different
    gradients they have nothing in common, and a base would mix what several of them hold. So such
    an update is refused, with nothing changed. Seen are optimizer steps within ``no_sync()``,
    uneven inputs (``Join``) and local SGD (``post_localSGD_hook``); what a program does to
    gradients behind DDP's back is not.
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
                    f'the ranks would part from each other: "{section}" is in '
                    f"DistributedDataParallel, and {why}; nothing was updated",
                    leaves=((section, why),),
                    rank=state.ranks.rank,
                    hint=f'give {{"{section}": ddp.module}}: each rank saves its own then',
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
    hooks = sys.modules.get(_LOCAL_SGD)  # not loaded: nobody uses it
    if hooks is not None and any(
        isinstance(kept, hooks.PostLocalSGDState) for _, kept in ddp._comm_hooks
    ):
        return "its gradients are reduced within groups of ranks only (post_localSGD_hook)"
    return None
