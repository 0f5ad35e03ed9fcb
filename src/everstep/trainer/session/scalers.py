"""Notices that a step is said to be over before a ``GradScaler`` has heard of it: what it found in
the gradients is no part of its ``state_dict()``, and a resume goes on with the scale of before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.amp.grad_scaler import GradScaler

from everstep.errors import StateError
from everstep.state.providers.stateful import has_inspected_gradients

__all__ = ["Scalers"]


class Scalers:
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
            if has_inspected_gradients(scaler):
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
