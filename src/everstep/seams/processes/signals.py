"""Signals that ask a process to end: noted, so that its loop can end at a place of its own choice.

A handler runs between any two instructions of the main thread, perhaps while that thread holds a
lock: it notes the signal, lets the handler that was there before do its work, and nothing else.
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

__all__ = ["SAME_S", "ReceivedSignal", "SignalWatch"]

SAME_S = 2.0
"""Within so long after the first, a signal is the same request: where all processes of a job get
it, those of a launcher that forwards it get it twice."""


class ReceivedSignal(NamedTuple):
    """A signal that came.

    Attributes:
        name: ``"SIGTERM"``.
        at_s: of the monotonic clock.
    """

    name: str
    at_s: float


class SignalWatch:
    """Notes the first of some signals.

    A forked process inherits the handlers, but not the duty: there signals do what they did
    before, and so they do here once this is closed.

    Args:
        names: of signals.
        grace_s: so long after the first one, others are noted, too; then they do what they did
            before, since nobody has cared for it.

    Attributes:
        came: the first one; None as long as there is none.

    Raises:
        OptionError: elsewhere than in the main thread, or a handler is in place that could not be
            put back.
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
        """From now on."""
        for number in self._numbers:
            self._earlier[number] = signal.getsignal(number)  # first: one may come at once
            signal.signal(number, self._handle)

    def _check(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OptionError(
                "signals can be watched for by the main thread only, and this is "
                f"{threading.current_thread().name!r}",
                hint="make the Checkpointer in the main thread, or leave preempt out",
            )
        for number in self._numbers:
            if signal.getsignal(number) is None:
                raise OptionError(
                    f"{number.name} has a handler that is not Python's, and could not be put back",
                    hint="leave this signal out",
                )

    def pass_on(self) -> None:
        """From now on a further signal does what it did before; one that is the same request
        (:data:`SAME_S`) still does nothing new."""
        self._passing = True

    def close(self) -> None:
        """Puts the earlier handlers back, where nobody has replaced ours since."""
        self._passing = True
        self.came = None
        if threading.current_thread() is not threading.main_thread():
            return  # only that one may; ours does what the earlier ones did
        for number, earlier in self._earlier.items():
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
            # That of SIGINT in any program is Python's own, which nobody has asked for.
            if callable(earlier) and earlier is not signal.default_int_handler:
                earlier(number, frame)
        else:
            self._as_before(number, frame)

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)
        elif earlier == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
