"""How much a log may take: of host memory, and of the disk."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.keeper.budget import log_budget_bytes

__all__ = ["LogLimits"]


@dataclass(frozen=True, slots=True)
class LogLimits:
    """The limits of one rank's log, and what they follow from.

    Attributes:
        memory_bytes: of records in host memory; with half as much a new base is due. 0: not known.
        host_bytes, arena_bytes, state_bytes: the budget, what of it captures and the log share, and
            what a base takes there.
    """

    memory_bytes: int = 0
    host_bytes: int = 0
    arena_bytes: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, host_bytes: int, arena_bytes: int, state_bytes: int) -> LogLimits:
        """Those of a log in an arena of this size."""
        memory_bytes = log_budget_bytes(arena_bytes, state_bytes)
        return cls(memory_bytes, host_bytes, arena_bytes, state_bytes)

    def host_bytes_for(self, log_bytes: int) -> int | None:
        """The budget of host memory of which the log would have so much; None: not known. The
        arena is thought to have the part of it that it has now."""
        if not self.arena_bytes:
            return None
        arena_bytes = min(log_bytes + 2 * self.state_bytes, 2 * log_bytes + self.state_bytes + 1)
        return -(-self.host_bytes * arena_bytes // self.arena_bytes)
