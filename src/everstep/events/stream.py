"""Delivers events to listeners, each in a thread of its own.

The training thread only appends to a queue. A listener that is slow, hangs or raises an error
delays no other one, and not training; what its queue cannot hold is dropped and counted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from everstep.errors import OptionError
from everstep.events.event import Event
from everstep.seams import Clock

Listener = Callable[[Event], Any]
"""Function that is called with each event; :mod:`everstep.events.sinks` has some."""

_log = logging.getLogger("everstep")

_QUEUED = 10_000  # events
_FAILURES = 3  # after which a listener is removed
_FORGIVEN = 100  # successes after which earlier failures do not count
_CLOSE_S = 2.0  # longest wait for listeners at the end
_GATHER_S = 0.1  # events of this time are delivered together: a thread that wakes up takes the GIL
_NEWEST_EVERY_S = 1.0
_NEWEST_ONLY = ("log_durable",)
"""Kinds that may come with every step: at most one a second is delivered for each tier."""
_IN_ORDER = ("recovery", "progress", "closed")
"""Kinds before which those that wait are delivered: steps of an earlier timeline come first."""


def parse_listeners(given: object) -> tuple[Listener, ...]:
    """Return the functions of ``on_event=``: none, one, or several.

    Raises:
        OptionError: something is no function.
    """
    listeners: Any = given
    if given is None:
        listeners = ()
    elif callable(given):
        listeners = (given,)
    if not isinstance(listeners, (list, tuple)) or not all(map(callable, listeners)):
        raise OptionError(
            f"on_event must be a function, or a list of functions, not {given!r}",
            hint="on_event=print prints each event",
        )
    return tuple(listeners)


class EventStream:
    """Events of one rank, for any number of listeners.

    Args:
        clock: gives the time of each event.
        listeners: functions to call with each event, in threads of their own. One that has a
            method ``close`` is closed at the end.

    Attributes:
        timeline: timeline of the events that follow.
    """

    def __init__(self, clock: Clock, rank: int, listeners: Sequence[Listener]) -> None:
        self.timeline = 0
        self._clock = clock
        self._rank = rank
        self._deliveries = [_Delivery(listener) for listener in listeners]
        # Also at the exit of a process that does not call close(), and of an object that is
        # dropped: the threads do not refer to it.
        self._ends = weakref.finalize(self, _end, self._deliveries)

    def emit(self, kind: str, step: int, **details: Any) -> None:
        """Queue an event for all listeners; from any thread, without waiting."""
        if not self._deliveries:
            return
        event = Event(kind, self._clock.unix_s(), self._rank, self.timeline, step, details)
        for delivery in self._deliveries:
            delivery.put(event)

    @property
    def has_listeners(self) -> bool:
        """True if anybody listens."""
        return bool(self._deliveries)

    def close(self) -> None:
        """Deliver what is queued, and close the listeners; wait a few seconds at most."""
        self._ends()


def _end(deliveries: Sequence[_Delivery]) -> None:
    for delivery in deliveries:
        delivery.stop()
    deadline_s = time.monotonic() + _CLOSE_S
    for delivery in deliveries:
        delivery.join(max(0.0, deadline_s - time.monotonic()))


class _Delivery:
    """Queue and thread of one listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._queue: deque[Event] = deque()
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._failures = 0
        self._successes = 0  # since the last failure
        self._dropped = 0
        # By kind and tier: the newest event that waits, and when the last one was delivered.
        self._waiting: dict[tuple[str, str], Event] = {}
        self._delivered_s: dict[tuple[str, str], float] = {}
        self._thread = threading.Thread(target=self._run, name="everstep-events", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event, or drop it if the queue is full; from any thread."""
        if len(self._queue) >= _QUEUED:
            if not self._dropped:
                _log.warning("events are dropped: %s is too slow, or hangs", self._name)
            self._dropped += 1
            return
        self._queue.append(event)
        if not self._news.is_set():
            self._news.set()

    def stop(self) -> None:
        """Deliver what is queued, and end; does not wait."""
        self._stopping.set()
        self._news.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        # Not alive in a forked child. The garbage collector may drop the stream in this very
        # thread.
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last events were not delivered: %s hangs", self._name)

    @property
    def _name(self) -> str:
        listener: Any = self._listener
        return str(getattr(listener, "__qualname__", type(listener).__qualname__))

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news.wait(_NEWEST_EVERY_S if self._waiting else None)
            self._stopping.wait(_GATHER_S)
            self._news.clear()
            self._deliver()
        # Events that were queued before stop() are all there.
        self._deliver()
        self._deliver_waiting(all_of_them=True)
        if self._dropped:
            _log.warning("%d events were dropped: %s was too slow", self._dropped, self._name)
        close = getattr(self._listener, "close", None)
        if close is not None:
            self._guarded(close)

    def _deliver(self) -> None:
        while self._queue:
            event = self._queue.popleft()
            if event.kind in _NEWEST_ONLY:
                self._waiting[event.kind, str(event.details.get("tier"))] = event
                continue
            if event.kind in _IN_ORDER:
                self._deliver_waiting(all_of_them=True)
            self._pass_on(event)
        self._deliver_waiting()

    def _deliver_waiting(self, *, all_of_them: bool = False) -> None:
        now_s = time.monotonic()
        for key, event in list(self._waiting.items()):
            since_s = now_s - self._delivered_s.get(key, -math.inf)
            if all_of_them or since_s >= _NEWEST_EVERY_S:
                del self._waiting[key]
                self._delivered_s[key] = now_s
                self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if self._failures < _FAILURES:
            self._guarded(self._listener, event)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        # A listener is the user's code, and may raise anything: training goes on.
        except BaseException as error:
            self._successes = 0
            self._failures += 1
            ends = self._failures == _FAILURES
            _log.warning(
                "a listener for events failed: %s raised %s%s",
                self._name,
                _words_of(error),
                "; it is called no more" if ends else "",
            )
            return
        self._successes += 1
        if self._successes == _FORGIVEN:
            self._failures = 0


def _words_of(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:
        return type(error).__name__
