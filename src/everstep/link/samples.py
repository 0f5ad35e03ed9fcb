"""Samples of the live state, to verify a state that a keeper has computed (I8).

A replica follows the log alone, and so does not see changes made without the optimizer. Therefore
the training process reads a few elements of each tensor that no step mark holds whenever it
requests a base, and the keeper compares them. No torch is needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everstep.errors import AuditError, FormatError
from everstep.format.plan import BasePlan
from everstep.link.capture import shard_offsets


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled elements of one width.

    Attributes:
        width_bytes: bytes per element: 1, 2, 4 or 8.
        where: positions in a base's block, in elements (int64).
        values: the elements.
    """

    width_bytes: int
    where: bytes
    values: bytes


def check_samples(
    samples: Sequence[Samples], plan: BasePlan, memory: memoryview, step: int
) -> None:
    """Compare a base in memory with samples of the live state.

    Args:
        plan: plan of a base of this layout.
        memory: block of the base.
        step: step of the state.

    Raises:
        AuditError: the base differs; the message names an entry.
        FormatError: the samples do not fit the layout.
    """
    for some in samples:
        kind = np.dtype(f"i{some.width_bytes}")
        # Compared as integers: NaNs and signed zeros must be equal bit for bit.
        whole = np.frombuffer(memory[: memory.nbytes // kind.itemsize * kind.itemsize], kind)
        where = np.frombuffer(some.where, np.int64)
        values = np.frombuffer(some.values, kind)
        inside = (where >= 0) & (where < whole.size)
        # Checked first: a position outside of the block would raise an unrelated error.
        if where.size != values.size or not inside.all():
            raise FormatError("samples that lie outside of the state")
        differs = np.flatnonzero(whole[where] != values)
        if differs.size:
            at = int(where[differs[0]]) * kind.itemsize
            raise AuditError(
                f"{_entry_at(plan, at)!r} differs from the replayed log: code other than the "
                "optimizer writes to it",
                step=step,
                hint="call before_update() and after_update() around updates that bypass "
                "optimizer.step() (CUDA graphs, for example)",
            )


def _entry_at(plan: BasePlan, position: int) -> str:
    """Return the name of the entry at a byte of the block."""
    for shard, offset in zip(plan.shards, shard_offsets(plan)[0], strict=True):
        for place in shard.layout.placed:
            if offset + place.begin <= position < offset + place.end:
                return place.entry.name
    return "?"
