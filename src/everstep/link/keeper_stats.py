"""Counters of a keeper, as it reports them to the trainer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class KeeperStats:
    """Counters of a keeper since its start.

    Attributes:
        committed: number of bases committed.
        failed: number of bases that failed.
        written_bytes: bytes of bases written.
        linked_bytes: bytes of static entries in files that were linked instead of written.
        persist_s: seconds from the start of writing to the commit, summed over bases.
        retain_s: seconds in retention, including read-backs.
        log_bytes: bytes of log segments written.
        log_batch_steps: steps of the next segment.
        cpu_s: processor time of the keeper process in seconds; 0 for a keeper thread.
        copied: number of copies of bases in other tiers.
        copied_bytes: bytes of these copies.
        copied_steps: steps of the log copied to other tiers.
        copied_log_bytes: bytes of these steps.
        copy_missed: steps of the log that will not be copied.
        peered: number of bases sent to the memory of another node.
        peered_bytes: bytes of these bases.
        peers_passed_over: number of bases not sent, as newer ones came too fast.
        held: number of bases that live in memory and were complete there.
        peered_steps: steps of the log sent to the memory of another node.
        peer_missed: steps of the log that will not be sent.
        durable_step: step of the newest durable base; None without one.
    """

    committed: int = 0
    failed: int = 0
    written_bytes: int = 0
    linked_bytes: int = 0
    persist_s: float = 0.0
    retain_s: float = 0.0
    log_bytes: int = 0
    log_batch_steps: int = 0
    cpu_s: float = 0.0
    copied: int = 0
    copied_bytes: int = 0
    copied_steps: int = 0
    copied_log_bytes: int = 0
    copy_missed: int = 0
    peered: int = 0
    peered_bytes: int = 0
    peers_passed_over: int = 0
    held: int = 0
    peered_steps: int = 0
    peer_missed: int = 0
    durable_step: int | None = None


# Values of the newer keeper instead of counters: they are not summed.
_NEWEST = ("durable_step", "log_batch_steps")
_COUNTS = [one.name for one in dataclasses.fields(KeeperStats) if one.name not in _NEWEST]


def add_stats(one: KeeperStats, other: KeeperStats) -> KeeperStats:
    """Return the sum of the counters of two keepers; ``other`` is the newer one."""
    both = KeeperStats(**{name: getattr(one, name) + getattr(other, name) for name in _COUNTS})
    both.durable_step = one.durable_step if other.durable_step is None else other.durable_step
    both.log_batch_steps = other.log_batch_steps or one.log_batch_steps
    return both
