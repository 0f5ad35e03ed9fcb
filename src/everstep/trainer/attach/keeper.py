"""Interface of a keeper for the training process, whether it is a thread or a process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from everstep.errors import EverstepError
from everstep.keeper.persist.local_keeper import LocalKeeper
from everstep.link.capture import Capture
from everstep.link.keeper_stats import KeeperStats
from everstep.link.pool import CapturePool
from everstep.link.recordable import LogKeeper
from everstep.state.survey.survey import Survey

if TYPE_CHECKING:
    from everstep.trainer.attach.remote import RemoteKeeper

__all__ = ["IGNORED", "Keeper", "KeeperEvents", "Service", "ThreadKeeper"]


class Keeper(LogKeeper, Protocol):
    """Keeper that makes captures durable.

    A thread of the training process (:class:`ThreadKeeper`) or a separate process
    (:class:`.remote.RemoteKeeper`).
    """

    @property
    def pid(self) -> int | None:
        """Keeper process; None for a thread, which ends with the training process."""

    @property
    def replaced(self) -> bool:
        """True if it is lost because it now serves another training process."""

    @property
    def lost_steps(self) -> Collection[int]:
        """Steps of the bases that were lost with it."""

    @property
    def stats(self) -> KeeperStats: ...

    @property
    def replica_step(self) -> int | None: ...

    @property
    def replica_bytes(self) -> int: ...

    def begin(self, capture: Capture) -> None: ...

    def announce(self, capture: Capture) -> None: ...

    def captured(self, capture: Capture, objects: Mapping[str, bytes]) -> None: ...

    def abandon(self, capture: Capture, error: EverstepError | None) -> None: ...

    def forget(self, capture: Capture) -> None: ...

    def look(self) -> None: ...

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None: ...

    def close(self, *, stay: bool = False) -> None: ...


class KeeperEvents(Protocol):
    """Receiver of what a keeper reports about log, peers and replica. Called in any thread."""

    def log_on_disk(self, number: int) -> None:
        """Note that log records up to ``number`` are on disk; 0 if the keeper was lost."""

    def peered(self, base: int | None, step: int | None) -> None:
        """Note that all peers hold the base of a step, or a peer holds the log up to ``step``."""

    def replica_stopped(self, why: str, for_good: bool) -> None:
        """Note that the replica has stopped; ``for_good`` if it will not start again."""


class _Ignored:
    def log_on_disk(self, number: int) -> None: ...

    def peered(self, base: int | None, step: int | None) -> None: ...

    def replica_stopped(self, why: str, for_good: bool) -> None: ...


IGNORED: KeeperEvents = _Ignored()
"""Receiver that ignores everything, for a keeper whose memory is only read."""


class ThreadKeeper(LocalKeeper):
    """Keeper that is a thread of the training process. It is never lost alone."""

    pid = None
    replaced = False
    lost_steps: Collection[int] = ()
    replica_step = None
    replica_bytes = 0

    def forget(self, capture: Capture) -> None:
        """Do nothing: this keeper ends with the process that overwrites the memory."""

    def look(self) -> None:
        """Do nothing: a thread of this process cannot be silent."""

    def close(self, *, stay: bool = False) -> None:
        """End the thread; it cannot stay after the process."""
        super().close()


@dataclass(frozen=True, slots=True)
class Service:
    """Keeper in service, and the timeline that it serves.

    Attributes:
        keeper: the keeper.
        process: the same, if it is a separate process.
        thread: the same, if it is a thread of this process.
        pool: memory for captures; None with ``sync``.
        exact: replay of the updates from now on reproduces training bit for bit.
        step: step that training continues from.
        survey: survey of the state there, if one was taken.
    """

    keeper: Keeper
    process: RemoteKeeper | None
    thread: ThreadKeeper | None
    pool: CapturePool | None
    timeline: int
    exact: bool = True
    step: int = 0
    survey: Survey | None = None

    def beginning_at(self, step: int, exact: bool, survey: Survey | None) -> Service:
        """Return the service as it begins, or goes on, at a step."""
        return replace(self, step=step, exact=exact, survey=survey)
