"""Warns when ``ckpt.step()`` is called before the step is complete.

Gradients that wait for an update, and results that a ``GradScaler`` has not processed yet, are not
part of the state. A resume at such a step mark would continue without them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from everstep.capture import UpdateHooks
from everstep.errors import StateError
from everstep.state.providers import ModuleProvider
from everstep.state.providers.gradients import unreduced_gradients
from everstep.state.providers.stateful import has_inspected_gradients
from everstep.state.ranks import find_ddp, reduced_parameter_ids
from everstep.state.training_state import State
from everstep.state.values.tensors import is_dtensor, local_tensor


class PendingGradients:
    """Detect gradients that wait for an update at a step mark.

    Gradients are examined only at step marks without an update, and once more at the next such mark
    or before the next update. A gradient that was written to at most once in between has waited: it
    was not zeroed and computed again (as after a step that a GradScaler has skipped), though a
    backward may have added to it. DDP writes once more, when it copies the reduced gradients back.
    Gradients that FSDP2 has not reduced yet always wait, as ``zero_grad()`` does not reach them.

    Args:
        updates: hooks of the state; holds the handles of the hooks made here.
        tell: called once with the warning.
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
        self._hooked: set[str] = set()
        self._reported = False

    def marked(self, step: int) -> None:
        """Examine gradients at the mark of a ``step`` without an update."""
        if self._reported:
            return
        pairs = (pair for module in self._modules for pair in unreduced_gradients(module))
        unreduced = {id(parameter): gradient for parameter, gradient in pairs}
        for key, optimizer in self._optimizers.items():
            self._examine(key, writes_min=1)  # without a write there was no backward, and no step
            beside = (unreduced.get(id(parameter)) for parameter in _parameters(optimizer))
            if not self._reported and any(one is not None and not _is_zero(one) for one in beside):
                self._report(key, step)
            if self._reported:
                return
            if (found := _Gradient.of(optimizer, step, self._writes_max)) is not None:
                self._waiting[key] = found
                if key not in self._hooked:
                    self._watch(key, optimizer)

    def _writes_max(self, parameter: torch.Tensor) -> int:
        """Return how often a backward writes to the parameter's gradient."""
        ddps = (ddp for module in self._modules if (ddp := find_ddp(module)) is not None)
        return 2 if any(id(parameter) in reduced_parameter_ids(ddp) for ddp in ddps) else 1

    def _watch(self, key: str, optimizer: Optimizer) -> None:
        """Examine gradients before each update, permanently: a hook cannot remove itself."""

        def look(*_: object) -> None:
            self._examine(key)

        # It only observes, so it may run after the last hook of the log (update_hooks._is_last).
        look.looks_on = True  # type: ignore[attr-defined]
        self._updates.handles.append(optimizer.register_step_pre_hook(look))
        self._hooked.add(key)

    def _examine(self, key: str, writes_min: int = 0) -> None:
        before = self._waiting.pop(key, None)
        if before is not None and not self._reported and before.has_waited(writes_min):
            self._report(key, before.step)

    def _report(self, key: str, step: int) -> None:
        self._reported = True
        self._tell(
            StateError(
                f"ckpt.step() was called while gradients of {key!r} waited for an update: they "
                "are not part of the state, and a resume at that step continues without them",
                step=step,
                hint="call ckpt.step() after optimizer.step(), once for all of its micro-batches",
            )
        )


@dataclass(frozen=True, slots=True)
class _Gradient:
    """Gradient found at a step mark, with its version counters then."""

    parameter: torch.Tensor
    tensor: weakref.ref[torch.Tensor]
    versions: tuple[int, int]
    step: int
    writes_max: int

    @classmethod
    def of(
        cls, optimizer: Optimizer, step: int, writes_max: Callable[[torch.Tensor], int]
    ) -> _Gradient | None:
        """Return the first gradient that is not zero; None without one."""
        for parameter in _parameters(optimizer):
            found = parameter.grad
            if found is not None and not _is_zero(found):
                return cls(
                    parameter=parameter,
                    # Weak: a reference would keep the memory of the gradient after zero_grad().
                    tensor=weakref.ref(found),
                    versions=_versions(found),
                    step=step,
                    writes_max=writes_max(parameter),
                )
        return None

    def has_waited(self, writes_min: int) -> bool:
        """Return True if the gradient was written to a number of times that a backward explains."""
        there = self.parameter.grad
        if there is None or there is not self.tensor():
            return False
        now, local = _versions(there)
        # FSDP2 writes to the local tensor of a DTensor any number of times.
        writes = now - self.versions[0] + (local != self.versions[1])
        return writes_min <= writes <= self.writes_max and not _is_zero(there)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _versions(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the version of the gradient, and that of a DTensor's local tensor."""
    return gradient._version, local_tensor(gradient)._version if is_dtensor(gradient) else 0


def _is_zero(gradient: torch.Tensor) -> bool:
    own = local_tensor(gradient.detach())  # local: a collective call would wait for other ranks
    # Waits for the device; called only around steps without an update.
    return own.layout == torch.strided and not bool(own.any())


class PendingScalers:
    """Detect gradient scalers of the state whose ``update()`` was not called before a step mark.

    Args:
        tell: called once with the warning.
    """

    def __init__(self, values: Mapping[str, Any], tell: Callable[[StateError], None]) -> None:
        self._scalers = {k: value for k, value in values.items() if isinstance(value, GradScaler)}
        self._tell = tell

    def marked(self, step: int) -> None:
        """Examine the scalers at a step mark."""
        for key, scaler in self._scalers.items():
            if has_inspected_gradients(scaler):
                self._scalers = {}  # once
                self._tell(
                    StateError(
                        f"ckpt.step() was called before the update() of {key!r}: the result of its "
                        "check for non-finite gradients is not part of the state, and a resume at "
                        "that step continues with the old scale",
                        step=step,
                        hint="call ckpt.step() after the scaler's update()",
                    )
                )
                return
