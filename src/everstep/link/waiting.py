"""What is said when waiting for a keeper leads nowhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from everstep.errors import DeadlineError, EverstepError, KeeperError
from everstep.seams import Clock
from everstep.seams.files.moving import Standstill

__all__ = [
    "ReplicaProgress",
    "WaitDeadline",
    "ignore_if_lost",
    "keeper_lost_error",
    "storage_hang_error",
]

_LOOK_AGAIN_S = 0.2
"""How often who waits looks whether the storage hangs, and shows how far it is."""

_NOWHERE_S = 60.0


class _MayBeLost(Protocol):
    lost: EverstepError | None


@contextlib.contextmanager
def ignore_if_lost(keeper: _MayBeLost) -> Iterator[None]:
    """What is asked of a keeper that is lost meanwhile stays undone, without an error: whoever
    looks whether it is there sees to its loss."""
    try:
        yield
    except KeeperError:
        if keeper.lost is None:
            raise


def storage_hang_error(count: int) -> DeadlineError:
    """``count`` bases make no progress."""
    return DeadlineError(
        f"{count} base(s) are not durable: the storage hangs",
        hint="look at the disk or the network file system (dmesg, df, iostat)",
    )


class ReplicaProgress:
    """Whether bases that a keeper's replica was asked for get anywhere: it may load torch first,
    and parts of other ranks may be late, so there is twice the time that all else has.

    Args:
        timeout_s: that time.
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._still = Standstill(max(_NOWHERE_S, 2 * timeout_s), clock.running_s)

    def look(self, *at: object) -> None:
        """It is ``at`` that now; asked several times a second.

        Raises:
            DeadlineError: as it was for too long.
        """
        for_s = self._still.for_s(at)
        if for_s > self._still.timeout_s:
            raise DeadlineError(
                f"the keeper's replica gets nowhere for {for_s:.0f} s with bases that it was "
                "asked for",
                hint="everstep ps shows what it does; its log is in the runtime folder (everstep "
                "doctor)",
            )


class WaitDeadline:
    """The time that whoever waits for bases has given.

    Args:
        timeout_s: None: as long as it takes.
    """

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._start_s = clock.monotonic_s()

    @property
    def poll_s(self) -> float:
        """How long to wait at most before the next look."""
        if self._timeout_s is None:
            return _LOOK_AGAIN_S
        return min(_LOOK_AGAIN_S, max(0.0, self._timeout_s - self._waited_s))

    def is_over(self, count: int) -> bool:
        """Whether no time is left.

        Args:
            count: bases that are not durable now.

        Raises:
            DeadlineError: none is, and there are some.
        """
        waited_s = self._waited_s
        if self._timeout_s is None or waited_s < self._timeout_s:
            return False
        if count:
            raise DeadlineError(
                f"{count} base(s) are not durable after {waited_s:.0f} s",
                hint="wait longer, or look at the disk",
            )
        return True

    @property
    def _waited_s(self) -> float:
        return self._clock.monotonic_s() - self._start_s


def keeper_lost_error(pid: int, error: BaseException | None) -> KeeperError:
    """The keeper process has ended, or its connection has."""
    why = f": {error}" if error is not None else ""
    return KeeperError(
        f"the keeper (process {pid}) is gone{why}",
        hint="training goes on; a new keeper is started, and a new base taken (of several ranks, "
        "as the next one is due)",
    )
