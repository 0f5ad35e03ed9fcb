"""Limits of the gradient log in host memory and on disk, and the errors when they are reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from everstep.config.options import Options
from everstep.errors import KeeperError, OutOfSpaceError
from everstep.trainer.budget.host_memory import log_budget_bytes

_MEMORY_SHARE = 4  # a segment has at most 1/4 of the memory of the log
_DISK_SHARE = 2  # and at most 1/2 of the bytes allowed between two bases


@dataclass(frozen=True, slots=True)
class LogLimits:
    """Limits of one rank's log, and the sizes they are computed from, in bytes.

    Attributes:
        memory_bytes: records in host memory, including plain data; 0 if unknown. A new base is due
            when half of it is used.
        interval_bytes: records on disk between two bases; None for no limit. A new base is due
            before more are written.
        disk_bytes: budget of the run folder; None without one.
        bases_bytes: share of ``disk_bytes`` for bases.
        host_bytes: budget of host memory.
        arena_bytes: share of ``host_bytes`` for captures and the log.
        state_bytes: host memory of a base.
    """

    memory_bytes: int = 0
    interval_bytes: int | None = None
    disk_bytes: int | None = None
    bases_bytes: int = 0
    host_bytes: int = 0
    arena_bytes: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, host_bytes: int, arena_bytes: int, state_bytes: int) -> LogLimits:
        """Return the limits of a log in an arena of this size, without a disk."""
        return cls(
            memory_bytes=log_budget_bytes(arena_bytes, state_bytes),
            host_bytes=host_bytes,
            arena_bytes=arena_bytes,
            state_bytes=state_bytes,
        )

    def on_disk(
        self, options: Options, bases: int, bases_bytes: int, free_bytes: Callable[[], int]
    ) -> LogLimits:
        """Return the limits with those of the disk.

        With a disk budget, the log has the space that bases leave. Without one, and if the interval
        is chosen automatically, it has half of the free space. The space is divided by the number
        of bases, as each has a log of its own.

        Args:
            bases: maximum number of bases on disk, including the one being written.
            bases_bytes: bytes of these bases.
            free_bytes: function that returns the free bytes for this rank.
        """
        disk_bytes = options.budget.disk_bytes
        if not options.log_on_disk or (disk_bytes is None and not options.every.auto):
            return self
        if disk_bytes is None:
            return replace(self, interval_bytes=max(1, free_bytes() // 2 // bases))
        interval_bytes = max(1, (disk_bytes - bases_bytes) // bases)
        return replace(
            self,
            interval_bytes=interval_bytes,
            disk_bytes=disk_bytes,
            bases_bytes=bases_bytes,
        )

    def batch_to_wire(self, options: Options) -> dict[str, Any]:
        """Return the segment size to ask the keeper for (``batch_from_wire``)."""
        lag_steps = options.log.lag_steps
        memory_max = self.memory_bytes // _MEMORY_SHARE if self.memory_bytes else None
        bounds = [] if memory_max is None else [memory_max]
        if self.disk_bytes is not None and self.interval_bytes is not None:
            bounds.append(max(1, self.interval_bytes // _DISK_SHARE))
        return {
            "auto": options.batch_auto,
            "steps": options.log.batch_first,
            "most": None if lag_steps is None else lag_steps + 1,
            "bytes_max": min(bounds) if bounds else None,
            "memory_max": memory_max,
            "disk_bytes": self.disk_bytes,
            "bases_bytes": self.bases_bytes,
        }

    def check(self, mark_bytes: int) -> None:
        """Check that the memory of the log has space for a step.

        Args:
            mark_bytes: host memory of a step mark.

        Raises:
            OutOfSpaceError: It does not.
        """
        if mark_bytes > self.memory_bytes:
            more = f"Budget(host_bytes={self.host_bytes_for(2 * mark_bytes)}) or more"
            raise OutOfSpaceError(
                "each step of the log contains data besides gradients (entries that no optimizer "
                f"updates, and plain data) of {mark_bytes} bytes of host memory; of the budget of "
                f"{self.host_bytes} bytes the log has {self.memory_bytes}",
                hint=f"{more}, less plain data in the state, or method='lazy'",
            )

    def host_bytes_for(self, log_bytes: int) -> int | None:
        """Return the budget of host memory with which the log has ``log_bytes``; None if unknown.

        The arena is assumed to keep its current share of the budget.
        """
        if not self.arena_bytes:
            return None
        # Inverse of log_budget_bytes(): the smaller arena for which one of its two terms reaches
        # log_bytes.
        arena_bytes = min(log_bytes + 2 * self.state_bytes, 2 * log_bytes + self.state_bytes + 1)
        return -(-self.host_bytes * arena_bytes // self.arena_bytes)


def too_large(need_bytes: int, most_bytes: int) -> OutOfSpaceError:
    """Return the error for a record that is larger than the memory of the log."""
    return OutOfSpaceError(
        f"a record of the log needs {need_bytes} bytes of host memory, and the whole log may use "
        f"{most_bytes}: steps are not recorded, and a crash loses all steps since the newest base",
        hint="a larger Budget(host_bytes=), less plain data in the state, or method='lazy'",
    )


def log_dropped(step: int | None) -> OutOfSpaceError:
    """Return the error for a log that was dropped up to a step to make space for a base."""
    return OutOfSpaceError(
        "the gradient log was dropped because host memory has no space for it beside a base: until "
        "the next base is durable, a crash loses all steps since the previous base",
        step=step,
        hint="a larger Budget(host_bytes=), or less plain data in the state",
    )


def log_dropped_early(step: int) -> KeeperError:
    """Return the error for a log that was dropped before the peers had the base after it."""
    return KeeperError(
        f"the log up to step {step} was dropped before the base of that step was complete with all "
        "peers, because there is no host memory to keep it longer",
        step=step,
        tier="peer",
        hint="if a node is lost before, all ranks return to an older base; use more "
        "Budget(host_bytes=), a shorter every=, or a larger PeerOptions(bytes_per_s=)",
    )
