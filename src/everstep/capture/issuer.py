"""Thread that enqueues copies on a device, so that training does not spend its time on that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from everstep.seams.processes import IoThreads, Outcome

Reached = tuple[int, Any, torch.device]
"""End of a group of batches, event after their copies, and their device."""


class Enqueued(NamedTuple):
    """Copies enqueued on devices.

    Attributes:
        reached: ends of groups of batches, with the events after them.
        first: event before the first copy, by device.
        begun: events after the copies that were begun before an error.
        error: reason why not all copies were enqueued.
        staged: by device, the begin of the batches that were copied into its stage, and the event
            after these copies.
        is_whole: every batch of the capture is in a stage.
    """

    reached: Sequence[Reached] = ()
    first: Mapping[torch.device, Any] = MappingProxyType({})
    begun: Sequence[Any] = ()
    error: BaseException | None = None
    staged: Mapping[torch.device, tuple[int, Any]] = MappingProxyType({})
    is_whole: bool = False

    def events(self) -> Iterable[Any]:
        """Return events after all enqueued copies."""
        staged = (event for _, event in self.staged.values())
        return [*(event for _, event, _ in self.reached), *staged, *self.begun]

    def copied_s(self) -> float | None:
        """Return the duration of the copies on the slowest device; all must be complete."""
        last = {device: event for _, event, device in self.reached}
        taken_ms = [self.first[device].elapsed_time(event) for device, event in last.items()]
        return max(taken_ms) / 1e3 if taken_ms else None

    def failed(self, error: BaseException, begun: Sequence[Any] = ()) -> Enqueued:
        """Return the same with an error.

        The frames of its traceback are dropped, because they may hold much of the memory that was
        short.
        """
        found: BaseException | None = error
        while found is not None:
            found.__traceback__ = None
            found = found.__cause__ or found.__context__
        return self._replace(begun=begun, error=error)


Issued = Future[Enqueued]
"""Future of the enqueued copies; cancelled if the call was interrupted before it began."""


class Issuer:
    """Thread that enqueues copies, one capture after the other.

    Args:
        thread: a pool of one thread; closed with this object.
    """

    def __init__(self, thread: IoThreads) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._issued: list[Issued] = []  # may not be enqueued yet

    def issue(self, enqueue: Callable[[], Enqueued]) -> Issued:
        """Enqueue copies in the thread; ``enqueue`` returns its error and events in the result."""
        # Not a plain Future: a Ctrl-C while the gate waits for it could leave its lock taken
        # forever.
        issued: Issued = Outcome()

        def work() -> None:
            if not issued.set_running_or_notify_cancel():
                return
            try:
                found = enqueue()
            except BaseException as error:  # a caller may wait for the result without a timeout
                found = Enqueued().failed(error)
            issued.set_result(found)

        # Listed before it begins: releasing memory waits for it, even if this call is interrupted
        # before it returns.
        with self._lock:
            self._issued = [*(one for one in self._issued if not one.done()), issued]
        try:
            self._thread.submit(work)
        except BaseException:
            # The job may be in the queue already; once cancelled it does nothing.
            issued.cancel()
            raise
        return issued

    def under_way(self) -> list[Issued]:
        """Return the captures that may not be enqueued yet."""
        with self._lock:
            return [one for one in self._issued if not one.done()]

    def close(self) -> None:
        """End the thread, after all issued work."""
        self._thread.close()
