"""Conditions under which replay gives the bits of training (I9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.format import TimelineRecord
from everstep.seams.fingerprint import (
    describe_threads,
    fingerprint,
    thread_count_fixed,
    threads_disagree,
)


def replay_conditions(records: Iterable[TimelineRecord | None]) -> tuple[int | None, str]:
    """Compare the conditions that the bits of updates depend on, besides the optimizer (I9).

    Args:
        records: timeline records of the updates to replay; None for a damaged record.

    Returns:
        The number of torch's threads in training, None if unknown or not constant; and the reason
        why replay on this machine may be inexact, ``""`` if it must be exact.
    """
    mine = fingerprint()
    threads = set()
    # Thousands of steps share few records, and records are not hashable: each is compared once.
    for record in {id(record): record for record in records}.values():
        if record is None:
            return None, "the timeline record, which names the machine of training, is damaged"
        theirs = record.fingerprint
        if why := denormal_mismatch(theirs, mine):
            return None, why
        for key in ("torch", "machine", "processor", "system", "denormals"):
            if theirs.get(key) != mine.get(key):
                found = theirs.get(key, "unknown")
                here = mine.get(key, "kept")
                return None, f"trained with {key} {found}, replayed with {here}"
        if "cuda" in theirs or "device" in theirs:
            device = theirs.get("device", "a GPU")
            return None, f"trained on {device}, replayed on the CPU"
        if "parameters" in theirs:  # on a device that is not CUDA's
            return None, f"trained on {theirs['parameters']}, replayed on the CPU"
        threads.add(theirs.get("threads", ""))
    (only,) = threads if len(threads) == 1 else ("",)
    # torch may give fewer threads than it was asked for; only a number that is reproducible here is
    # used.
    known = only.isdigit() and int(only) > 0 and describe_threads(int(only)) == only
    return (int(only) if known else None), ""


def denormal_mismatch(theirs: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """Return the reason why denormals may differ although the fingerprints are equal; "" if they
    cannot.

    Args:
        theirs: fingerprint of training.
        mine: fingerprint of this process.
    """
    for activity, found in (("trained", theirs), ("replayed", mine)):
        if threads_disagree(found):
            return (
                f"{activity} with denormals flushed by some of torch's threads and kept by others: "
                "call torch.set_flush_denormal(True) at the start of the program"
            )
    return ""


def fingerprint_difference(records: Iterable[TimelineRecord | None]) -> str:
    """Return the first difference from the conditions of training that may change bits (I9); "" if
    there is none. Unlike :func:`replay_conditions`, it compares the devices as well: the updates
    are replayed where the live optimizers are.

    Args:
        records: timeline records of the updates to replay; None for a damaged record.
    """
    mine = fingerprint()
    for record in {id(record): record for record in records}.values():
        if record is None:
            return "the timeline record, which names the machine of training, is damaged"
        if why := denormal_mismatch(record.fingerprint, mine):
            return why
        # The excluded keys identify a process or a start, or have no influence on the bits of
        # torch.
        for key in sorted({*mine, *record.fingerprint} - {"process", "python", "session"}):
            theirs = record.fingerprint.get(key, "none")
            here = mine.get(key, "none")
            if theirs != here:
                return f"trained with {key} {theirs}, replayed with {here}"
        if not thread_count_fixed(record.fingerprint):
            return f"trained with threads {record.fingerprint['threads']}"
    return ""
