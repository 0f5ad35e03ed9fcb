"""Find data of the training that a state does not cover, so that a resume is not exact.

Such data is warned about once, and named in every base and recovery: a base from which training
cannot continue bit for bit is not called exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.state.ownership import Memory, OwnedMemory, memory_of, overlapping_pairs
from everstep.state.providers import (
    OptimizerProvider,
    SectionProvider,
    local_optimizer,
    named_parameters,
)
from everstep.state.providers.optimizers import unsaved_inner_optimizers
from everstep.state.providers.plain import PlainProvider
from everstep.state.ranks import DDPBuckets
from everstep.state.survey import Survey, same_objects
from everstep.state.values.tensors import address_of, local_tensor

_log = logging.getLogger("everstep")


class Coverage:
    """Data of the training that a state does not cover.

    Args:
        providers: all providers of the state, by section.
        optimizers: the optimizers of the state, by section.
        buckets: the order in which DDP sums gradients.
        held: returns a predicate: a module or optimizer of the state has the memory of a tensor.

    Attributes:
        descends_exactly: the restored state was exact; True if nothing was restored.
        descends_from: the reason why it was not, if known.
        unsaved: names of parameters that an optimizer trains and no section has, by optimizer.
        unsaved_frozen: names of its other parameters that no section has: they are frozen.
        unsaved_inputs: descriptions of other unsaved data that gradients depend on.
        unsaved_trainers: descriptions of optimizers and schedulers outside of the state that
            train parameters of it.
    """

    def __init__(
        self,
        providers: Mapping[str, SectionProvider],
        optimizers: Mapping[str, Optimizer],
        buckets: DDPBuckets,
        held: Callable[[], Callable[[torch.Tensor], bool]],
    ) -> None:
        self._providers = providers
        self._optimizers = optimizers
        self._buckets = buckets
        self._held = held
        self._optimizer_providers = [
            one for one in providers.values() if isinstance(one, OptimizerProvider)
        ]
        self.descends_exactly = True
        self.descends_from = ""
        self.unsaved: dict[str, list[str]] = {}
        self.unsaved_frozen: dict[str, list[str]] = {}
        self.unsaved_inputs: tuple[str, ...] = ()
        self.unsaved_trainers: list[str] = []
        self._holdings: tuple[OwnedMemory, ...] | None = None  # at the last update()
        self._frozen: list[torch.Tensor] = []
        self._altered: tuple[str, ...] = ()
        self._inner_optimizers: tuple[str, ...] = ()

    def check(self, survey: Survey) -> None:
        """Check the form of the state once, at the first survey; warn of losses."""
        self._altered = (*self._rounded_parameters(survey), *self._split_memory(survey))
        self._inner_optimizers = tuple(self._find_inner_optimizers())

    def update(self, survey: Survey, holdings: tuple[OwnedMemory, ...]) -> None:
        """Find parameters that an optimizer trains and no section has: a head, or a loss with
        weights of its own. Their moments would be restored, but not their values.

        Searches only if the memory that optimizers own has changed since the last search
        (``add_param_group()``), or if a parameter has been unfrozen since.
        """
        same = self._holdings is not None and same_objects(holdings, self._holdings)
        if same and not any(parameter.requires_grad for parameter in self._frozen):
            return  # the usual case
        copied = (address_of(parameter) for *_, parameter in self._copied(survey))
        # Address 0 stands for tensors without memory of their own, which cannot be looked up.
        saved = {0, *copied, *map(address_of, survey.tensors.values())}
        self._frozen = []
        self.unsaved_frozen = {}
        unsaved = dict[str, list[str]]()
        for provider in self._optimizer_providers:
            state = local_optimizer(provider.optimizer).state
            for name, tensor in provider.named():
                if address_of(tensor) in saved:
                    continue
                if tensor.requires_grad or tensor.grad is not None or state.get(tensor):
                    unsaved.setdefault(provider.section, []).append(name)
                else:
                    self.unsaved_frozen.setdefault(provider.section, []).append(name)
                    self._frozen.append(tensor)
        for section, names in unsaved.items():
            if names != self.unsaved.get(section):
                _log.warning(
                    "everstep: %r trains %d parameter(s) that are not in the state "
                    "(%s): their values are not saved, resume() leaves them as the program made "
                    "them, and nothing is called exact\n  hint: add the module or the tensors to "
                    "the state",
                    section,
                    len(names),
                    first_few(names),
                )
        self.unsaved = unsaved
        self._holdings = holdings

    @property
    def unsaved_reasons(self) -> tuple[str, ...]:
        """Descriptions of data that is neither saved nor restored."""
        trained = (
            f"{key!r} trains {len(names)} parameter(s) that are not in the state "
            f"({first_few(names)})"
            for key, names in self.unsaved.items()
        )
        return (
            *self._inner_optimizers,
            *trained,
            *self.unsaved_inputs,
            *self.unsaved_trainers,
        )

    def losses(self, *, trained: bool) -> tuple[str, ...]:
        """Return the reasons why a base taken now does not have all data of the training.

        Args:
            trained: a step has been taken in this process.
        """
        lossy = (
            f"the state_dict() of {one.section!r} does not keep all tensors bit for bit"
            for one in self._optimizer_providers
            if one.loses
        )
        late = ("a DistributedDataParallel was made after resume()",)
        missed = late if trained and self._buckets.missed() else ()
        return (*self._altered, *lossy, *self.unsaved_reasons, *missed)

    @property
    def encoded(self) -> list[str]:
        """Keys of the optimizers whose ``state_dict()`` returns another form of their state, as far
        as surveyed: only the optimizers themselves can continue from it."""
        return [one.section for one in self._optimizer_providers if one.encodes]

    def _copied(self, survey: Survey) -> Iterator[tuple[str, torch.Tensor, nn.Parameter]]:
        """Yield name, stored tensor and parameter of the parameters that a module's
        ``state_dict()`` returns as copies (through hooks)."""
        for name, parameter in named_parameters(self._providers):
            stored = survey.tensors.get(name)
            if stored is not None and address_of(stored) != address_of(parameter):
                yield name, stored, parameter

    def _rounded_parameters(self, survey: Survey) -> list[str]:
        """Describe copied parameters that are rounded, so that a restore changes them; warn."""
        found = list[str]()
        for name, stored, parameter in self._copied(survey):
            if stored.dtype != parameter.dtype:
                found.append(f"{name} ({parameter.dtype}, stored as {stored.dtype})")
            elif not _same_bits(stored, parameter):
                found.append(name)
        if found:
            _log.warning(
                "everstep: state_dict() does not keep %d parameter(s) bit for bit: %s; resume() "
                "restores the rounded values, and is not called exact",
                len(found),
                first_few(found),
            )
        return [f"state_dict() rounds {first_few(found)}"] if found else []

    def _split_memory(self, survey: Survey) -> list[str]:
        """Describe tensors in plain data that lie in the memory of others; warn.

        A restore gives each tensor memory of its own, so a write of the training to one of them no
        longer reaches the others.
        """
        held = self._held()
        places: dict[Memory, str] = {}
        for name, tensor in survey.tensors.items():
            memory = memory_of(tensor) if self.is_plain(name) else None
            if memory is not None and not held(tensor):
                places[memory] = name
        pairs = ((places[mine], places[other]) for mine, other in overlapping_pairs(places))
        # Two top-level tensors are read in place.
        found = [f"{mine} in {other}" for mine, other in pairs if "/" in mine + other]
        if found:
            _log.warning(
                "everstep: %d tensor(s) in plain data lie in the memory of others (%s): resume() "
                "gives each memory of its own, and is not called exact\n  hint: keep one of them "
                "in the state, and make the others from it after resume()",
                len(found),
                first_few(found),
            )
        return [f"tensors of plain data lie in others: {first_few(found)}"] if found else []

    def _find_inner_optimizers(self) -> Iterator[str]:
        """Describe optimizers inside of others (as in SAM) whose state no section has; warn."""
        for section, optimizer in self._optimizers.items():
            for name, inner in unsaved_inner_optimizers(optimizer):
                if any(inner is one for one in self._optimizers.values()):
                    continue
                holder = f"{section!r} holds another optimizer ({name})"
                reason = f"{holder}, which is not in the state"
                _log.warning(
                    "everstep: %s: its state is not saved, resume() loses it, and nothing "
                    "is called exact\n  hint: add it to the state, under a name of its own",
                    reason,
                )
                yield reason

    def is_plain(self, name: str) -> bool:
        """Return True if a tensor of this name is in plain data."""
        return isinstance(self._providers.get(name.split("/")[0]), PlainProvider)


def first_few(names: Sequence[str]) -> str:
    """Return the first few of many names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one dtype have the same bits on this rank."""
    mine = local_tensor(one).detach()
    theirs = local_tensor(other).detach()
    if mine.shape != theirs.shape or mine.device != theirs.device:
        return True  # the stored tensor is another shard: nothing to compare
    # As bytes: compared as floats, a NaN differs from itself, and -0.0 equals 0.0.
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (mine, theirs) if t.numel())
    return torch.equal(*flat) if mine.numel() else True
