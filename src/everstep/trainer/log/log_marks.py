"""What a mark of the log needs from a device: that its copies were really made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from everstep.capture.lanes.batches import plan_batches
from everstep.capture.lanes.cuda import on_cuda
from everstep.capture.lanes.lane import Lane
from everstep.errors import DeadlineError, EverstepError
from everstep.state.layout.shards import ShardLayout

__all__ = ["Objects", "copy_now"]

Objects = Callable[[], Mapping[str, bytes]]


def copy_now(
    lane: Lane,
    layout: ShardLayout,
    named: Mapping[str, torch.Tensor],
    block: torch.Tensor,
    objects: Objects,
    wait_s: float,
) -> Objects:
    """Copies tensors that may change at once. Returns ``objects``, which raise in the lane's
    thread where these copies were not made: a device that has failed leaves in ``block`` what was
    there before.

    Args:
        wait_s: for the copies.
    """
    lane.mark(plan_batches(layout, named, named.keys()), block)
    if not any(map(on_cuda, named.values())):
        return objects
    transfer = lane.submit((), block, lambda end: None)

    def behind() -> Mapping[str, bytes]:
        try:
            there = transfer.wait(wait_s)
        except RuntimeError as error:
            raise EverstepError(f"the mark of a step was not copied: {error}") from error
        if not there:
            raise DeadlineError("copying the mark of a step hangs")
        return objects()

    return behind
