"""What is said when waiting for a keeper leads nowhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from everstep.errors import DeadlineError, EverstepError, KeeperError

__all__ = ["keeper_gone", "keeper_silent", "not_durable_yet", "storage_hangs", "unless_gone"]


class _MayBeLost(Protocol):
    lost: EverstepError | None


@contextlib.contextmanager
def unless_gone(keeper: _MayBeLost) -> Iterator[None]:
    """What is asked of a keeper that is lost meanwhile stays undone, without an error: whoever
    looks whether it is there sees to its loss."""
    try:
        yield
    except KeeperError:
        if keeper.lost is None:
            raise


def storage_hangs(count: int) -> DeadlineError:
    """``count`` bases make no progress."""
    return DeadlineError(
        f"{count} base(s) are not durable: the storage hangs",
        hint="look at the disk or the network file system (dmesg, df, iostat)",
    )


def not_durable_yet(count: int, waited_s: float) -> DeadlineError:
    """``count`` bases have not become durable in the time that was given."""
    return DeadlineError(
        f"{count} base(s) are not durable after {waited_s:.0f} s",
        hint="wait longer, or look at the disk",
    )


def keeper_silent(pid: int, silent_s: float) -> DeadlineError:
    """The keeper process says nothing."""
    return DeadlineError(
        f"the keeper (process {pid}) has said nothing for {silent_s:.0f} s",
        hint="it is stopped, or this machine is overloaded",
    )


def keeper_gone(pid: int, error: BaseException | None) -> KeeperError:
    """The keeper process has ended, or its connection has."""
    why = f": {error}" if error is not None else ""
    return KeeperError(
        f"the keeper (process {pid}) is gone{why}",
        hint="training goes on; a new keeper is started, and a new base taken (of several ranks, "
        "as the next one is due)",
    )
