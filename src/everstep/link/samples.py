"""A few elements of a live state, to compare what a replica has with what training has (I8).

A replica goes by the log alone: what something has changed behind the optimizer's back, it does
not see. So the training process reads some elements of each tensor that no mark of the log holds,
whenever it asks for a base, and the keeper compares them. Without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everstep.errors import AuditError, FormatError
from everstep.format.plan import BasePlan
from everstep.link.capture import shard_offsets

__all__ = ["Samples", "check_samples"]


@dataclass(frozen=True, slots=True)
class Samples:
    """Elements of one width.

    Attributes:
        width_bytes: of an element: 1, 2, 4 or 8.
        where: their places in a base's block, in elements (int64).
        values: the elements.
    """

    width_bytes: int
    where: bytes
    values: bytes


def check_samples(
    samples: Sequence[Samples], plan: BasePlan, memory: memoryview, step: int
) -> None:
    """Compares a base in memory with samples of the state that it should be.

    Args:
        plan: of a base of this layout.
        memory: its block.
        step: that the state is of.

    Raises:
        AuditError: it is not that state; names an entry.
        FormatError: samples of no such base.
    """
    for some in samples:
        kind = np.dtype(f"i{some.width_bytes}")
        whole = np.frombuffer(memory[: memory.nbytes // kind.itemsize * kind.itemsize], kind)
        where = np.frombuffer(some.where, np.int64)
        values = np.frombuffer(some.values, kind)
        inside = (where >= 0) & (where < whole.size)
        if where.size != values.size or not inside.all():
            raise FormatError("samples that lie outside of the state")
        differs = np.flatnonzero(whole[where] != values)
        if differs.size:
            at = int(where[differs[0]]) * kind.itemsize
            raise AuditError(
                f"{_entry_at(plan, at)!r} is not what replay of the log gives: something writes "
                "to it behind the optimizer's back",
                step=step,
                hint="call before_update() and after_update() around updates that go past "
                "optimizer.step(), CUDA graphs among them",
            )


def _entry_at(plan: BasePlan, position: int) -> str:
    """The entry that has a byte of the block."""
    for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
        for place in shard.layout.placed:
            if offset + place.begin <= position < offset + place.end:
                return place.entry.name
    return "?"
