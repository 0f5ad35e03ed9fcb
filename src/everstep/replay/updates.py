"""Redo records as tensors: what one call of an optimizer's ``step()`` consumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.errors import ReplayError
from everstep.replay.packed import Gradient

__all__ = ["Update", "check_complete"]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One call of an optimizer's ``step()``: what it consumed (I2).

    Replay never writes to these tensors.

    Attributes:
        lsn: the state's LSN after this call; the record's number.
        optimizer: key of the optimizer in the state.
        groups: hyperparameters of each parameter group as they were in that call, without
            ``"params"``. Values may be 0-dim tensors (a tensor learning rate).
        gradients: by parameter name, in the parameter's shape and with the strides that the
            gradient had; compressed ones in the form in which training consumed them. A
            parameter that is absent had ``grad is None``: its step counter does not move, so
            that is not a zero gradient. To bring only some parameters up to a later LSN (a
            fuzzy base), leave the others out.
        grad_scale: what a ``GradScaler`` handed to a fused optimizer. The kernel divides the
            gradients by it: ``gradients`` are then the *scaled* ones.
        found_inf: likewise; a fused kernel does nothing where it is 1.
        lossy: the gradients are not those that training consumed, but lossy copies: what this
            update gives is an approximation (I9).
        kind: name of the class whose ``step()`` it was; "" where the record does not say.
        default_dtype: torch's, in training, which ASGD computes its factors in and all get their
            step counters in; None where the record does not say: replay leaves it as it is.
    """

    lsn: int
    optimizer: str
    groups: tuple[Mapping[str, Any], ...]
    gradients: Mapping[str, Gradient]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    lossy: bool = False
    kind: str = ""
    default_dtype: torch.dtype | None = None

    @property
    def skipped(self) -> bool:
        """Whether a ``GradScaler`` found infinities or NaNs, so that nothing was updated.

        torch's kernels compare with 1: where parameters lie on several devices, ``found_inf``
        is the sum of what was found on each, and at 2 they do *not* skip. An optimizer that is
        not fused is not called at all when there is something to skip: it has no such update.
        """
        return self.found_inf is not None and bool(self.found_inf.item() == 1)


def check_complete(updates: Iterable[Update], *, after: int) -> None:
    """Refuses a log with a hole (I4).

    Several optimizers share the numbers: a hole shows only in the updates of *all* of them,
    so a :class:`~everstep.replay.engine.Replayer`, which sees one, cannot look for it.

    Args:
        updates: of all optimizers, in order.
        after: LSN of the state that they are to be applied to.

    Raises:
        ReplayError: a record is missing, doubled or out of order.
    """
    expected = after + 1
    for update in updates:
        if update.lsn != expected:
            missing = update.lsn > expected
            raise ReplayError(
                f"the log goes from record {expected - 1} to {update.lsn}"
                + (f": {update.lsn - expected} missing" if missing else ""),
                hint="replay can go no further than the last record before that",
            )
        expected += 1
