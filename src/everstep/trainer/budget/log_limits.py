"""How much a log may take: of host memory, and of the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from everstep.config.options import Options
from everstep.errors import KeeperError, OutOfSpaceError
from everstep.trainer.budget.host_memory import log_budget_bytes

__all__ = [
    "LogLimits",
    "log_dropped",
    "log_dropped_early",
    "too_large",
]

_MEMORY_SHARE = 4  # one segment takes at most this part of the memory of the log
_DISK_SHARE = 2  # and at most this part of the bytes allowed between two bases


@dataclass(frozen=True, slots=True)
class LogLimits:
    """The limits of one rank's log, and what they follow from.

    Attributes:
        memory_bytes: of records in host memory, plain data included; with half as much a new base
            is due. 0: not known.
        interval_bytes: of records that go to disk between two bases; with more a new base is due.
            None: any number.
        disk_bytes: of the run folder, as the budget says; None: there is none.
        bases_bytes: of these, for bases.
        host_bytes, arena_bytes, state_bytes: the budget, what of it captures and the log share, and
            what a base takes there.
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
        """Those of a log in an arena of this size, and on no disk."""
        return cls(
            memory_bytes=log_budget_bytes(arena_bytes, state_bytes),
            host_bytes=host_bytes,
            arena_bytes=arena_bytes,
            state_bytes=state_bytes,
        )

    def on_disk(
        self, options: Options, bases: int, bases_bytes: int, free_bytes: Callable[[], int]
    ) -> LogLimits:
        """With those of the disk: what the budget leaves beside bases; without one, and where the
        interval is chosen, half of what is free. The log behind as many bases is there at a time.

        Args:
            bases: that are there at most, the one that is being written included.
            bases_bytes: that they take.
            free_bytes: asked for what is free, for this rank.
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
        """Return the segment size to ask the keeper for (``log_batch.batch_of``)."""
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
        """Refuses a log of which no step fits into its memory.

        Args:
            mark_bytes: that the mark of a step takes there.

        Raises:
            OutOfSpaceError: with the number of bytes.
        """
        if mark_bytes > self.memory_bytes:
            more = f"Budget(host_bytes={self.host_bytes_for(2 * mark_bytes)}) or more"
            raise OutOfSpaceError(
                "what each step of the log holds besides gradients (what no optimizer updates, and "
                f"plain data) takes {mark_bytes} bytes of host memory; of the budget of "
                f"{self.host_bytes} bytes the log has {self.memory_bytes}",
                hint=f"{more}, less plain data in the state, or method='lazy'",
            )

    def host_bytes_for(self, log_bytes: int) -> int | None:
        """The budget of host memory of which the log would have so much; None: not known. The
        arena is thought to have the part of it that it has now."""
        if not self.arena_bytes:
            return None
        arena_bytes = min(log_bytes + 2 * self.state_bytes, 2 * log_bytes + self.state_bytes + 1)
        return -(-self.host_bytes * arena_bytes // self.arena_bytes)


def too_large(need_bytes: int, most_bytes: int) -> OutOfSpaceError:
    """One record takes more than all may."""
    return OutOfSpaceError(
        f"a record of the log takes {need_bytes} bytes of host memory, and all of them may have "
        f"{most_bytes}: steps are not recorded, and a crash goes back to the newest base",
        hint="a larger Budget(host_bytes=), less plain data in the state, or method='lazy'",
    )


def log_dropped(step: int | None) -> OutOfSpaceError:
    """The log was let go of, up to this step."""
    return OutOfSpaceError(
        "the log was let go of, as a base of the state has no room beside it any more: until that "
        "is durable a crash goes back to the base before",
        step=step,
        hint="a larger Budget(host_bytes=), or less plain data in the state",
    )


def log_dropped_early(step: int) -> KeeperError:
    """What is told when the log has no memory to wait for the peers."""
    return KeeperError(
        f"the log up to step {step} was let go before the base of that step is whole with all "
        "peers: there is no host memory for more of it",
        step=step,
        tier="peer",
        hint="a node that is lost until then takes all ranks back to an older base; more "
        "Budget(host_bytes=), a shorter every=, or a larger PeerOptions(bytes_per_s=)",
    )
