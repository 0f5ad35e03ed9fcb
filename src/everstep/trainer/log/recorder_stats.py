"""What the log has cost and done."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RecorderStats"]


@dataclass(slots=True)
class RecorderStats:
    """What the log has cost and done.

    Attributes:
        records, record_bytes, marks: so far.
        holes: updates and marks that could not be recorded; behind each a new base is due.
        stall_s: seconds of the training thread.
    """

    records: int = 0
    record_bytes: int = 0
    marks: int = 0
    holes: int = 0
    stall_s: float = 0.0
