"""Which parameters inside of DistributedDataParallel each rank has its own of.

DDP reduces no gradients of what was frozen when it was made. As long as nobody trains it, all ranks
have the same, and one of them writes it: a frozen backbone is most of a model. Once a rank has
trained it, it is that rank's own, and stays so: frozen again it is as different as before. A rank
sees that only of itself, so all of them go by what any has seen: they tell each other at each
start, and before each base that is due (:mod:`everstep.trainer.session.step_consensus`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from everstep.state.providers.optimizers import OptimizerProvider
from everstep.state.providers.providers import ModuleProvider, Provider
from everstep.state.ranks.common import frozen_for_ddp, ranks_of_ddp
from everstep.state.values.objects import join_path

__all__ = ["Apart"]


class Apart:
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
        return not frozen_for_ddp(self._providers.values())

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
        frozen = frozen_for_ddp(self._providers.values())
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
        return set(ranks_of_ddp(provider.outer))


def _version(parameter: nn.Parameter) -> int:
    return 0 if parameter.is_inference() else parameter._version
