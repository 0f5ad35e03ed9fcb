"""What records of the log take of host memory; nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.arena import PAGE_BYTES

__all__ = ["RECORD_BYTES", "memory_bytes"]

RECORD_BYTES = 2048
"""What Python takes for a record besides its bytes: measured (CPython 3.11) about 1250 in the
keeper, and 400 in the training process."""


def memory_bytes(tensors_bytes: int, objects: Mapping[str, bytes]) -> int:
    """Of a record: whole pages of the arena, and what lies beside it."""
    pages = -(-max(1, tensors_bytes) // PAGE_BYTES)
    return pages * PAGE_BYTES + sum(map(len, objects.values())) + RECORD_BYTES
