"""Note signals that request the end of the process, so that its loop can end at a safe place.

A handler runs between any two instructions of the main thread, possibly while that thread holds a
lock. So it only notes the signal and calls the previous handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from everstep.errors import OptionError
from everstep.seams.clock import Clock

SAME_S = 2.0
"""Seconds after the first signal in which a second one counts as the same request. If a signal goes
to all processes of a job, and the launcher forwards it too, workers get it twice."""


class ReceivedSignal(NamedTuple):
    """A received signal.

    Attributes:
        name: name, e.g. ``"SIGTERM"``.
        at_s: time of the monotonic clock in seconds.
    """

    name: str
    at_s: float


class SignalWatch:
    """Note the first of several signals.

    A forked process inherits the handlers, but there the signals act as before; so they do here
    once the watch is closed.

    Args:
        names: names of signals.
        clock: measures the time between signals.
        grace_s: period after the first signal in which further ones are only noted. Later ones act
            as before the watch: the request was ignored.

    Attributes:
        came: the first signal; None as long as there is none.

    Raises:
        OptionError: called outside the main thread, or a signal has a handler that could not be
            restored.
    """

    def __init__(self, names: Iterable[str], clock: Clock, *, grace_s: float) -> None:
        self.came: ReceivedSignal | None = None
        self._numbers = [signal.Signals[name] for name in dict.fromkeys(names)]
        self._clock = clock
        self._grace_s = grace_s
        self._earlier: dict[int, Any] = {}
        self._pid = os.getpid()
        self._passing = False

        self._check()

    def install(self) -> None:
        """Install the handlers."""
        for number in self._numbers:
            # Before the handler is installed: a signal may arrive at once.
            self._earlier[number] = signal.getsignal(number)
            signal.signal(number, self._handle)

    def _check(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be watched in the main thread only, and this is "
                f"{threading.current_thread().name!r}",
                hint="make the Checkpointer in the main thread, or leave preempt out",
            )
        for number in self._numbers:
            if signal.getsignal(number) is None:
                raise OptionError(
                    f"{number.name} has a handler that was not installed from Python and could not "
                    "be restored",
                    hint="leave this signal out",
                )

    def pass_on(self) -> None:
        """Let further signals act as before the watch. A repetition of the same request
        (:data:`SAME_S`) still does nothing.
        """
        self._passing = True

    def close(self) -> None:
        """Restore the previous handlers, unless ours were replaced since."""
        self._passing = True
        self.came = None
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may change handlers; ours acts as the previous ones from now.
            return
        for number, earlier in self._earlier.items():
            # Not ``is``: each access to the attribute makes another bound method.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, earlier)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = self._clock.monotonic_s()
        came = self.came
        noted = not self._passing
        if came is not None:
            noted = now_s - came.at_s < (self._grace_s if noted else SAME_S)
        if os.getpid() != self._pid:
            self._as_before(number, frame)
        elif noted:
            self.came = came or ReceivedSignal(signal.Signals(number).name, now_s)
            earlier = self._earlier[number]
            # Python's default SIGINT handler, which raises KeyboardInterrupt, is not the program's.
            if callable(earlier) and earlier is not signal.default_int_handler:
                earlier(number, frame)
        else:
            self._as_before(number, frame)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)
        elif earlier == signal.SIG_DFL:
            # The default action cannot be called: install it and send the signal again, so that the
            # exit status names the signal.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
