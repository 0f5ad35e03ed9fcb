"""Notices NaN and infinity in the gradients that are recorded, behind training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from everstep.errors import NonFiniteError
from everstep.format.log import RecordHead
from everstep.link.channel import BackgroundChannel
from everstep.state.layout.names import GRADIENT
from everstep.state.layout.shards import ShardLayout
from everstep.state.values.tensors import torch_dtype

__all__ = ["NonFinite", "nonfinite_error"]


class NonFinite:
    """Looks at what optimizers have consumed.

    Args:
        watched: False: it does not.

    Attributes:
        first: of the first update since the state was restored that has consumed something that is
            not finite.
        given_up: nobody would go on from the last step because of it.
        tell: gets each that is found, in any thread.
    """

    def __init__(self, channel: BackgroundChannel, *, watched: bool) -> None:
        self._channel = channel
        self._watched = watched
        self.tell: Callable[[NonFiniteError], None] = self.report
        self.begin()

    def begin(self) -> None:
        """The state was restored, or training begins."""
        self.first: NonFiniteError | None = None
        self.given_up = False

    def report(self, error: NonFiniteError, *, first: bool = False) -> None:
        """The training thread hears of it at its next call.

        Args:
            first: before anything else.
        """
        self.first = self.first or error
        self._channel.post(error, first=first)

    def look(self, head: RecordHead, layout: ShardLayout, data: torch.Tensor) -> None:
        """At a record; not where a GradScaler does.

        Args:
            data: its block (flat ``uint8``).
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
                what = f"the gradient of {name} that step {head.step} consumed is not finite"
                self.tell(nonfinite_error(what, head.step))
                return


def nonfinite_error(what: str, step: int, rank: int | None = None) -> NonFiniteError:
    """An update of ``step`` has consumed ``what``.

    Args:
        rank: that has seen it; None: this process.
    """
    where = "" if rank is None else " on every rank"
    hint = f"ckpt.rewind({step - 1}){where}, skip the batch, train on"
    return NonFiniteError(what, step=step, rank=rank, hint=hint)
