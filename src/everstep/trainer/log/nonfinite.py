"""Detect NaN and infinity in recorded gradients, in the lane's thread."""

from __future__ import annotations

from collections import deque

import torch

from everstep.errors import NonFiniteError
from everstep.format.log import RecordHead
from everstep.link import BackgroundChannel
from everstep.state.layout import GRADIENT, ShardLayout
from everstep.state.values.tensors import torch_dtype


class NonFiniteCheck:
    """Check of the gradients that optimizers have consumed.

    Args:
        channel: reports errors to the training thread.
        watched: False to check nothing.

    Attributes:
        first: error of the first update since the state was restored that consumed a value that is
            not finite; None if there is none.
        given_up: True if the final base was left out because the parameters are not finite.
    """

    def __init__(self, channel: BackgroundChannel, *, watched: bool) -> None:
        self._channel = channel
        self._watched = watched
        self._collected: deque[NonFiniteError] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget earlier findings: training begins, or the state was restored."""
        self.first: NonFiniteError | None = None
        self.given_up = False

    def collect(self, found: deque[NonFiniteError]) -> None:
        """Append errors to ``found`` instead of reporting them (several ranks raise together)."""
        self._collected = found

    def report(self, error: NonFiniteError, *, first: bool = False) -> None:
        """Raise ``error`` in the training thread at its next call.

        Args:
            error: the finding.
            first: raise it before any other pending error.
        """
        self.first = self.first or error
        self._channel.post(error, first=first)

    def check(self, head: RecordHead, layout: ShardLayout, data: torch.Tensor) -> None:
        """Check the gradients of a record; not if a GradScaler checks them (``found_inf``).

        Args:
            head: header of the record.
            layout: layout of ``data``.
            data: block of the record (flat ``uint8``).
        """
        if not self._watched or head.kind != "update" or head.declared:
            return
        if any(place.entry.name == "found_inf" for place in layout.placed):
            return
        for place in layout.placed:
            dtype = torch_dtype(place.entry.dtype)
            if not (dtype.is_floating_point or dtype.is_complex) or place.begin == place.end:
                continue
            if not bool(torch.isfinite(data[place.begin : place.end].view(dtype)).all()):
                name = place.entry.name.removeprefix(GRADIENT)
                description = f"the gradient of {name} consumed by step {head.step} is not finite"
                error = nonfinite_error(description, head.step)
                if self._collected is None:
                    self.report(error)
                else:
                    # In the lane's thread; the training thread removes it. Both operations of a
                    # deque are atomic.
                    self._collected.append(error)
                return


def nonfinite_error(description: str, step: int, rank: int | None = None) -> NonFiniteError:
    """Return the error for an update of ``step`` that consumed a value that is not finite.

    Args:
        description: the value, in words.
        step: step of the update.
        rank: rank that found it; None for this process.
    """
    where = "" if rank is None else " on every rank"
    hint = f"call ckpt.rewind({step - 1}){where}, skip the batch, and continue training"
    return NonFiniteError(description, step=step, rank=rank, hint=hint)
