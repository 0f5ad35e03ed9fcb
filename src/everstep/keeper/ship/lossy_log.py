"""Lossy copies of log records, made of dense ones in the keeper; training has no part in it.

What comes out is what ``log="adaptive"`` would have recorded (TierCheck section 3.2), to the bit:
which elements are kept, and how they are rounded, follows from a gradient's bits and the ratio
alone, whoever computes it.

Only an update of dense gradients needs torch, which is imported when there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from everstep.format.log import LogRecord
from everstep.tiers.options import PeerOptions, TierOptions

__all__ = ["lossy_record", "shrinking"]


def shrinking(options: TierOptions | PeerOptions) -> Callable[[LogRecord], LogRecord] | None:
    """What makes a record lossy, for a place; None: nothing does."""
    if options.log != "adaptive":
        return None
    return partial(lossy_record, ratio=options.log_ratio, int8_below=options.log_int8_below)


def lossy_record(record: LogRecord, ratio: float, int8_below: int = 100_000) -> LogRecord:
    """A copy in memory of its own, with lossy gradients in the place of dense ones.

    Everything else is there bit for bit: the head, hyperparameters, gradients that have no lossy
    copy (:mod:`everstep.compress.lossy`). So are step marks, declared updates, and updates of
    which training consumed a gradient compressed, as a whole: those are small already, and exact.

    Args:
        record: compared with its digest before; an update, or one rank's part of one, without
            the parts of others.
        ratio: the share of a large gradient's elements that is kept, in (0, 1].
        int8_below: of fewer elements is a small one.

    Raises:
        OptionError: for a ratio that cannot be.
        FormatError: it is no record of an update.
        DamageError: an entry lies where none can.
    """
    if record.head.kind == "update" and not record.head.declared:
        # Takes seconds the first time; other threads go on meanwhile.
        from everstep.keeper.replica.lossy_update import lossy_update

        found = lossy_update(record, ratio, int8_below)
        if found is not None:
            return found
    # Of its own, too: records that came together share their memory, and any would keep all of it.
    data = memoryview(bytearray(record.data))
    return LogRecord(record.head, record.layout, dict(record.objects), data, record.digest)
