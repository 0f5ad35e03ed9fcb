"""Approximate copies of log records, made by the keeper from exact ones.

The result equals, bit for bit, what training would have recorded with ``log="adaptive"`` (TierCheck
section 3.2): the elements that are kept, and their rounding, depend only on the gradient and the
ratio.

Only updates with dense gradients need torch, which is imported when the first one is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.format.log import LogRecord
from everstep.tiers import PeerOptions, TierOptions


def shrinking(options: TierOptions | PeerOptions) -> Callable[[LogRecord], LogRecord] | None:
    """Return the function that makes records approximate for a place; None: records are copied
    exactly.
    """
    if options.log != "adaptive":
        return None
    return partial(lossy_record, ratio=options.log_ratio, int8_below=options.log_int8_below)


def lossy_record(record: LogRecord, ratio: float, int8_below: int = 100_000) -> LogRecord:
    """Return a copy with approximate gradients, in memory of its own.

    Everything else is copied bit for bit: the head, hyperparameters, and gradients that have no
    approximate form (:mod:`everstep.compress.lossy`). The same holds for step marks, declared
    updates, and updates of which training consumed a compressed gradient: these are small and
    exact.

    Args:
        record: record of an update, or one rank's share of an update; its digest was verified.
        ratio: fraction of the elements of a large gradient that is kept, in (0, 1].
        int8_below: gradients with fewer elements than this are small.

    Raises:
        OptionError: the ratio is out of range.
        FormatError: it is not the record of an update.
        DamageError: an entry lies outside the record.
    """
    if record.head.kind == "update" and not record.head.declared:
        # Importing torch takes seconds; only this thread waits for it.
        from everstep.keeper.replica.lossy_update import lossy_update

        found = lossy_update(record, ratio, int8_below)
        if found is not None:
            return found
    # A copy: records that were read together share one block, and each would keep all of it alive.
    data = memoryview(bytearray(record.data))
    return LogRecord(record.head, record.layout, dict(record.objects), data, record.digest)
