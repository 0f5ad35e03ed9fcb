"""What several keepers have done, one after the other."""

from __future__ import annotations

import dataclasses

from everstep.link.keeper_stats import KeeperStats

__all__ = ["summed"]

_NEWEST = ("durable_step", "log_batch_steps")
_COUNTS = [one.name for one in dataclasses.fields(KeeperStats) if one.name not in _NEWEST]


def summed(one: KeeperStats, other: KeeperStats) -> KeeperStats:
    """Of both; ``other`` is the newer one."""
    both = KeeperStats(**{name: getattr(one, name) + getattr(other, name) for name in _COUNTS})
    both.durable_step = one.durable_step if other.durable_step is None else other.durable_step
    both.log_batch_steps = other.log_batch_steps or one.log_batch_steps
    return both
