"""Deadlines and errors of waiting for a keeper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from everstep.errors import DeadlineError, EverstepError, KeeperError
from everstep.seams import Clock
from everstep.seams.files.stalls import StallTimer

_LOOK_AGAIN_S = 0.2
"""Interval in which a waiting thread checks for hung storage and shows progress."""

_REPLICA_TIMEOUT_MIN_S = 60.0


class _MayBeLost(Protocol):
    lost: EverstepError | None


@contextlib.contextmanager
def ignore_if_lost(keeper: _MayBeLost) -> Iterator[None]:
    """Suppress a KeeperError if the keeper is lost: the caller's next liveness check handles
    the loss."""
    try:
        yield
    except KeeperError:
        # A keeper that is not marked lost has refused something: that is a real error.
        if keeper.lost is None:
            raise


def storage_hang_error(count: int) -> DeadlineError:
    """Return the error for ``count`` bases that make no progress."""
    return DeadlineError(
        f"{count} base(s) are not durable: the storage hangs",
        hint="check the disk or the network file system (dmesg, df, iostat)",
    )


class ReplicaProgress:
    """Deadline for bases that were requested from the replica.

    It is twice the usual one: the replica may have to load torch first, and other ranks may be
    late.

    Args:
        timeout_s: usual deadline in seconds.
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        timeout_s = max(_REPLICA_TIMEOUT_MIN_S, 2 * timeout_s)
        self._still = StallTimer(timeout_s, clock.running_s)

    def check(self, *progress: object) -> None:
        """Compare the current progress with the last one; call several times a second.

        Raises:
            DeadlineError: it has not changed for too long.
        """
        for_s = self._still.for_s(progress)
        if for_s > self._still.timeout_s:
            raise DeadlineError(
                f"the keeper's replica has made no progress for {for_s:.0f} s with the bases "
                "requested from it",
                hint="everstep ps shows its state; its log is in the runtime folder (everstep "
                "doctor)",
            )


class WaitDeadline:
    """Deadline of a wait for bases.

    Args:
        timeout_s: seconds to wait; None for no limit.
    """

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._start_s = clock.monotonic_s()

    @property
    def poll_s(self) -> float:
        """Longest time in seconds to wait before the next check."""
        if self._timeout_s is None:
            return _LOOK_AGAIN_S
        return min(_LOOK_AGAIN_S, max(0.0, self._timeout_s - self._waited_s))

    def is_over(self, count: int) -> bool:
        """Return True if no time is left.

        Args:
            count: number of bases that are not durable now.

        Raises:
            DeadlineError: no time is left, and ``count`` is positive.
        """
        waited_s = self._waited_s
        if self._timeout_s is None or waited_s < self._timeout_s:
            return False
        if count:
            raise DeadlineError(
                f"{count} base(s) are not durable after {waited_s:.0f} s",
                hint="wait longer, or check the disk",
            )
        return True

    @property
    def _waited_s(self) -> float:
        return self._clock.monotonic_s() - self._start_s


def keeper_lost_error(pid: int, error: BaseException | None) -> KeeperError:
    """Return the error for a keeper process or connection that has ended."""
    why = f": {error}" if error is not None else ""
    return KeeperError(
        f"the keeper (process {pid}) is gone{why}",
        hint="training continues; a new keeper is started and a new base taken (with several "
        "ranks, when the next one is due)",
    )
