"""Notices that a step is said to be over while gradients wait to be consumed: they are no part of
the state, and a resume at that step goes on without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch.optim import Optimizer

from everstep.capture.updates import UpdateHooks
from everstep.errors import StateError
from everstep.state.dtensors import local_of

__all__ = ["Accumulated"]


class Accumulated:
    """Looks at gradients where a step ends in which nothing was updated, and once more before the
    next update. At other steps it does nothing.

    Args:
        updates: whose handles hold the hooks.
        tell: called once, with what the user should know.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        updates: UpdateHooks,
        tell: Callable[[StateError], None],
    ) -> None:
        self._optimizers, self._updates, self._tell = optimizers, updates, tell
        self._at_mark: dict[str, tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = {}
        self._watched: set[str] = set()
        self._told = False

    def marked(self, step: int) -> None:
        """Step ``step`` is over, and nothing was updated in it."""
        if self._told:
            return
        for key, optimizer in self._optimizers.items():
            if (found := _waiting(optimizer)) is not None:
                parameter, gradient = found
                self._at_mark[key] = parameter, weakref.ref(gradient), step
                if key not in self._watched:
                    self._watch(key, optimizer)

    def _watch(self, key: str, optimizer: Optimizer) -> None:
        """For good: hooks cannot be removed while they are called."""

        def look(*_: object) -> None:
            if key not in self._at_mark:
                return
            parameter, gradient, step = self._at_mark.pop(key)
            if self._told or parameter.grad is None or parameter.grad is not gradient():
                return  # set to None meanwhile: nobody wanted it, as where a GradScaler skips
            self._told = True
            self._tell(
                StateError(
                    f"ckpt.step() was called while gradients of {key!r} waited for an update: they "
                    "are no part of the state, and a resume at that step goes on without them",
                    step=step,
                    hint="call ckpt.step() behind optimizer.step(), once for all of its "
                    "micro-batches (nothing is lost where they were zeroed in between)",
                )
            )

        look.looks_on = True  # type: ignore[attr-defined]
        self._updates.handles.append(optimizer.register_step_pre_hook(look))
        self._watched.add(key)


def _waiting(optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The first parameter with a gradient that is to be consumed, and that: zeros are spent."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            own = local_of(gradient.detach())  # no rank waits for the others
            if own.layout != torch.strided or bool(own.any()):
                return parameter, gradient
    return None
