"""Interface of a keeper for the training process, whether it is a thread or a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from everstep.errors import EverstepError
from everstep.link.capture import Capture
from everstep.link.keeper_stats import KeeperStats
from everstep.link.recordable import LogKeeper

__all__ = ["Keeper"]


class Keeper(LogKeeper, Protocol):
    """Keeper that makes captures durable.

    A thread of the training process (:class:`.local.LocalKeeper`) or a separate process
    (:class:`.remote.RemoteKeeper`).
    """

    @property
    def stats(self) -> KeeperStats: ...

    def begin(self, capture: Capture) -> None: ...

    def announce(self, capture: Capture) -> None: ...

    def captured(self, capture: Capture, objects: Mapping[str, bytes]) -> None: ...

    def abandon(self, capture: Capture, error: EverstepError | None) -> None: ...

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None: ...

    def close(self) -> None: ...
