"""Notices that a step is said to be over while gradients wait to be consumed: they are no part of
the state, and a resume at that step goes on without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.capture.updates import UpdateHooks
from everstep.errors import StateError
from everstep.state.providers.gradients import unreduced_gradients
from everstep.state.providers.modules import ModuleProvider
from everstep.state.providers.stateful import has_begun
from everstep.state.ranks.ddp import ddp_in, reduced_in
from everstep.state.training_state import State
from everstep.state.values.tensors import is_dtensor, local_of

__all__ = [
    "PendingGradients",
    "PendingScalers",
]


class PendingGradients:
    """Looks at gradients where a step ends in which nothing was updated, and at the same once more
    at the next mark of that kind, or before the next update. At other steps it does nothing.

    Where a gradient was written to once at most meanwhile, it was not zeroed and computed anew (as
    behind a step that a GradScaler has skipped), but waited, and was perhaps added to. (DDP writes
    to it once more, as it puts back what was reduced.) What FSDP2 has not reduced yet waits in any
    case: ``zero_grad()`` does not see it.

    Args:
        updates: whose handles hold the hooks.
        tell: called once, with what the user should know.
    """

    def __init__(
        self, state: State, updates: UpdateHooks, tell: Callable[[StateError], None]
    ) -> None:
        self._optimizers = state.optimizers
        self._updates = updates
        self._tell = tell
        modules = (one for one in state.providers.values() if isinstance(one, ModuleProvider))
        self._modules = [one.outer for one in modules]
        self._waiting: dict[str, _Gradient] = {}
        self._state_watch: set[str] = set()
        self._told = False

    def marked(self, step: int) -> None:
        """Step ``step`` is over, and nothing was updated in it."""
        if self._told:
            return
        pairs = (pair for module in self._modules for pair in unreduced_gradients(module))
        unreduced = {id(parameter): gradient for parameter, gradient in pairs}
        for key, optimizer in self._optimizers.items():
            self._look(key, writes_min=1)  # with none it was no step at all
            beside = (unreduced.get(id(parameter)) for parameter in _parameters(optimizer))
            if not self._told and any(one is not None and not _is_zero(one) for one in beside):
                self._say(key, step)
            if self._told:
                return
            if (found := _Gradient.of(optimizer, step, self._writes_max)) is not None:
                self._waiting[key] = found
                if key not in self._state_watch:
                    self._watch(key, optimizer)

    def _writes_max(self, parameter: torch.Tensor) -> int:
        """How often its gradient is written to as a backward adds to it."""
        ddps = (ddp for module in self._modules if (ddp := ddp_in(module)) is not None)
        return 2 if any(id(parameter) in reduced_in(ddp) for ddp in ddps) else 1

    def _watch(self, key: str, optimizer: Optimizer) -> None:
        """For good: hooks cannot be removed while they are called."""

        def look(*_: object) -> None:
            self._look(key)

        look.looks_on = True  # type: ignore[attr-defined]
        self._updates.handles.append(optimizer.register_step_pre_hook(look))
        self._state_watch.add(key)

    def _look(self, key: str, writes_min: int = 0) -> None:
        before = self._waiting.pop(key, None)
        if before is not None and not self._told and before.has_waited(writes_min):
            self._say(key, before.step)

    def _say(self, key: str, step: int) -> None:
        self._told = True
        self._tell(
            StateError(
                f"ckpt.step() was called while gradients of {key!r} waited for an update: they "
                "are no part of the state, and a resume at that step goes on without them",
                step=step,
                hint="call ckpt.step() behind optimizer.step(), once for all of its micro-batches",
            )
        )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """One of those that a mark of ``step`` has found, as it was."""

    parameter: torch.Tensor
    tensor: weakref.ref[torch.Tensor]
    versions: tuple[int, int]
    step: int
    writes_max: int

    @classmethod
    def of(
        cls, optimizer: Optimizer, step: int, writes_max: Callable[[torch.Tensor], int]
    ) -> _Gradient | None:
        """The first one that is to be consumed; zeros are spent."""
        for parameter in _parameters(optimizer):
            found = parameter.grad
            if found is not None and not _is_zero(found):
                about = weakref.ref(found), _versions(found), step, writes_max(parameter)
                return cls(parameter, *about)
        return None

    def has_waited(self, writes_min: int) -> bool:
        there = self.parameter.grad
        if there is None or there is not self.tensor():
            return False
        now, local = _versions(there)
        # FSDP2 adds to what is in a DTensor, past it, as often as it likes.
        writes = now - self.versions[0] + (local != self.versions[1])
        return writes_min <= writes <= self.writes_max and not _is_zero(there)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """How often it was written to, and of a DTensor what is in it."""
    return gradient._version, local_of(gradient)._version if is_dtensor(gradient) else 0


def _is_zero(gradient: torch.Tensor) -> bool:
    own = local_of(gradient.detach())  # no rank waits for the others
    return own.layout == torch.strided and not bool(own.any())


class PendingScalers:
    """The scalers of a state, looked at where a step ends.

    Args:
        tell: called once, with what the user should know.
    """

    def __init__(self, values: Mapping[str, Any], tell: Callable[[StateError], None]) -> None:
        self._scalers = {k: value for k, value in values.items() if isinstance(value, GradScaler)}
        self._tell = tell

    def marked(self, step: int) -> None:
        """Step ``step`` is over."""
        for key, scaler in self._scalers.items():
            if has_begun(scaler):
                self._scalers = {}  # once
                self._tell(
                    StateError(
                        f"ckpt.step() was called before the update() of {key!r}: whether its "
                        "gradients were finite is no part of the state, and a resume at that step "
                        "goes on with the scale of before",
                        step=step,
                        hint="call ckpt.step() behind the scaler's update()",
                    )
                )
                return
