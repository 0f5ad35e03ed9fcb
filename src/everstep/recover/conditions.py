"""Under which conditions replay gives the bits of training (I9)."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.format.records import TimelineRecord
from everstep.seams.fingerprint import fingerprint

__all__ = ["conditions"]


def conditions(records: Iterable[TimelineRecord | None]) -> tuple[int | None, str]:
    """What the bits of updates depend on besides the optimizer (I9).

    Args:
        records: of the timelines whose updates are replayed.

    Returns:
        The number of torch's threads in training, None if it is not known or not always the
        same; and why replay on this machine need not give the same bits, ``""`` if it must.
    """
    mine, threads = fingerprint(), set()
    for record in {id(record): record for record in records}.values():
        if record is None:
            return None, "the record that says where it was trained is damaged"
        theirs = record.fingerprint
        for key in ("torch", "machine", "processor", "system", "denormals"):
            if theirs.get(key) != mine.get(key):
                found, here = theirs.get(key, "unknown"), mine.get(key, "kept")
                return None, f"trained with {key} {found}, replayed with {here}"
        if "cuda" in theirs or "device" in theirs:
            device = theirs.get("device", "a GPU")
            return None, f"trained on {device}, replayed on the CPU"
        if "parameters" in theirs:  # on a device that is not CUDA's
            return None, f"trained on {theirs['parameters']}, replayed on the CPU"
        threads.add(theirs.get("threads", ""))
    (only,) = threads if len(threads) == 1 else ("",)
    return (int(only) if only.isdigit() and int(only) else None), ""
