"""What a keeper has done so far, as it says itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = [
    "KeeperStats",
    "add_stats",
]


@dataclass(slots=True)
class KeeperStats:
    """What the keeper has done so far.

    Attributes:
        linked_bytes: of static entries, in files that bases link to instead of writing them again.
        persist_s: seconds from the beginning of writing to the commit, all bases together.
        retain_s: seconds in retention, read-backs included.
        log_bytes, log_batch_steps: of the segments of the log so far; steps of the next one.
        cpu_s: seconds of processor time of the keeper process; 0 where it is a thread.
        copied, copied_bytes: copies of bases in other tiers.
        copied_steps, copied_log_bytes, copy_missed: steps of the log that were copied there, as
            what; steps that will not be.
        peered, peered_bytes: bases that were sent to the memory of another node.
        peers_passed_over: bases that were not, because they came too fast.
        held: bases that live in memory, and were whole there.
        peered_steps, peer_missed: steps of the log that were sent there; that will not be.
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


_NEWEST = ("durable_step", "log_batch_steps")
_COUNTS = [one.name for one in dataclasses.fields(KeeperStats) if one.name not in _NEWEST]


def add_stats(one: KeeperStats, other: KeeperStats) -> KeeperStats:
    """Of both; ``other`` is the newer one."""
    both = KeeperStats(**{name: getattr(one, name) + getattr(other, name) for name in _COUNTS})
    both.durable_step = one.durable_step if other.durable_step is None else other.durable_step
    both.log_batch_steps = other.log_batch_steps or one.log_batch_steps
    return both
