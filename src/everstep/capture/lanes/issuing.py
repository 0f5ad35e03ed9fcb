"""The thread that gives copies to a device, and what has become of them there.

The training thread would take some microseconds for each of hundreds of copies, in which the
device has nothing to do (``docs/design/capture.md``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from everstep.seams.processes.conditions import Outcome
from everstep.seams.processes.threads import IoThreads

__all__ = ["Enqueued", "Issued", "Issuer", "Reached"]

Reached = tuple[int, Any, torch.device]
"""The end of some batches, the event behind their copies, and where they come from."""


class Enqueued(NamedTuple):
    """Copies that run by themselves: events in front of them, by device, and behind them. Or why it
    is not all of them, and events behind what was begun."""

    reached: Sequence[Reached] = ()
    first: Mapping[torch.device, Any] = MappingProxyType({})
    begun: Sequence[Any] = ()
    error: BaseException | None = None

    def events(self) -> Iterable[Any]:
        """Behind all of them."""
        return [*(event for _, event, _ in self.reached), *self.begun]

    def copied_s(self) -> float | None:
        """Of the device that took longest; all are over."""
        last = {device: event for _, event, device in self.reached}
        taken_ms = [self.first[device].elapsed_time(event) for device, event in last.items()]
        return max(taken_ms) / 1e3 if taken_ms else None

    def failed(self, error: BaseException, begun: Sequence[Any] = ()) -> Enqueued:
        """The same, with an error: without what its frames hold, which may be much of the memory
        that there was too little of."""
        found: BaseException | None = error
        while found is not None:
            found.__traceback__ = None
            found = found.__cause__ or found.__context__
        return self._replace(begun=begun, error=error)


Issued = Future[Enqueued]
"""What was enqueued, once it is; cancelled, if the call was interrupted before it began."""


class Issuer:
    """Enqueues in a thread, one after the other.

    Args:
        thread: of one thread; closed with this.
    """

    def __init__(self, thread: IoThreads) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._issued: list[Issued] = []  # perhaps not yet

    def issue(self, enqueue: Callable[[], Enqueued]) -> Issued:
        """Has copies enqueued; ``enqueue`` says what it fails with, and behind which events."""
        issued: Issued = Outcome()

        def work() -> None:
            if not issued.set_running_or_notify_cancel():
                return
            try:
                found = enqueue()
            except BaseException as error:  # whoever waits for it would do so for ever
                found = Enqueued().failed(error)
            issued.set_result(found)

        # Known before it begins: whoever gives memory back waits for it, even if this call is
        # interrupted on its way out.
        with self._lock:
            self._issued = [*(one for one in self._issued if not one.done()), issued]
        try:
            self._thread.submit(work)
        except BaseException:
            issued.cancel()
            raise
        return issued

    def under_way(self) -> list[Issued]:
        """What may not be enqueued yet."""
        with self._lock:
            return [one for one in self._issued if not one.done()]

    def close(self) -> None:
        """Ends the thread, after what was issued."""
        self._thread.close()
