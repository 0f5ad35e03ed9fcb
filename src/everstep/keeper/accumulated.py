"""Notices that a step is said to be over while gradients wait to be consumed: they are no part of
the state, and a resume at that step goes on without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from everstep.capture.updates import UpdateHooks
from everstep.errors import StateError
from everstep.state.dtensors import local_of

__all__ = ["Accumulated"]


class Accumulated:
    """Looks at gradients where a step ends in which nothing was updated, and at the same once more
    at the next mark of that kind, or before the next update. At other steps it does nothing.

    Where a gradient was written to once at most meanwhile, it was not zeroed and computed anew (as
    behind a step that a GradScaler has skipped), but waited, and was perhaps added to.

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
        self._waiting: dict[str, _Gradient] = {}
        self._watched: set[str] = set()
        self._told = False

    def marked(self, step: int) -> None:
        """Step ``step`` is over, and nothing was updated in it."""
        for key, optimizer in self._optimizers.items():
            self._look(key, writes_min=1)  # with none it was no step at all
            if self._told:
                return
            if (found := _Gradient.of(optimizer, step)) is not None:
                self._waiting[key] = found
                if key not in self._watched:
                    self._watch(key, optimizer)

    def _watch(self, key: str, optimizer: Optimizer) -> None:
        """For good: hooks cannot be removed while they are called."""

        def look(*_: object) -> None:
            self._look(key)

        look.looks_on = True  # type: ignore[attr-defined]
        self._updates.handles.append(optimizer.register_step_pre_hook(look))
        self._watched.add(key)

    def _look(self, key: str, writes_min: int = 0) -> None:
        before = self._waiting.pop(key, None)
        if before is None or self._told or not before.has_waited(writes_min):
            return
        self._told = True
        self._tell(
            StateError(
                f"ckpt.step() was called while gradients of {key!r} waited for an update: they "
                "are no part of the state, and a resume at that step goes on without them",
                step=before.step,
                hint="call ckpt.step() behind optimizer.step(), once for all of its micro-batches",
            )
        )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """One of those that a mark of ``step`` has found, as it was."""

    parameter: torch.Tensor
    tensor: weakref.ref[torch.Tensor]
    version: int
    step: int

    @classmethod
    def of(cls, optimizer: Optimizer, step: int) -> _Gradient | None:
        """The first one that is to be consumed; zeros are spent."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found = parameter.grad
                if found is not None and not _is_zero(found):
                    return cls(parameter, weakref.ref(found), found._version, step)
        return None

    def has_waited(self, writes_min: int) -> bool:
        there = self.parameter.grad
        if there is None or there is not self.tensor():
            return False
        return writes_min <= there._version - self.version <= 1 and not _is_zero(there)


def _is_zero(gradient: torch.Tensor) -> bool:
    own = local_of(gradient.detach())  # no rank waits for the others
    return own.layout == torch.strided and not bool(own.any())
