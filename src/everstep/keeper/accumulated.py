"""Notices that a step is said to be over while gradients wait to be consumed: they are no part of
the state, and a resume at that step goes on without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import torch
from torch.optim import Optimizer

from everstep.capture.updates import UpdateHooks
from everstep.errors import StateError

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
        self._at_mark: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._watched: set[str] = set()
        self._told = False

    def marked(self, step: int) -> None:
        """Step ``step`` is over, and nothing was updated in it."""
        if self._told:
            return
        for key, optimizer in self._optimizers.items():
            waiting = _waiting(optimizer)
            if waiting is not None:
                self._at_mark[key] = weakref.ref(waiting), step
                if key not in self._watched:
                    self._watch(key, optimizer)

    def _watch(self, key: str, optimizer: Optimizer) -> None:
        """For good: hooks cannot be removed while they are called."""

        def look(*_: object) -> None:
            there, step = self._at_mark.pop(key, (None, 0))
            waited = None if there is None else there()
            if waited is None or self._told or _waiting(optimizer) is not waited:
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


def _waiting(optimizer: Optimizer) -> torch.Tensor | None:
    """The first gradient that an update would consume."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                found: torch.Tensor = parameter.grad
                return found
    return None
