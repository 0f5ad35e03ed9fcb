"""One call at a time: a step mark, a base, or a resume is not begun in the middle of another."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

from everstep.capture.updates import in_thread
from everstep.errors import StateError

__all__ = ["Calls", "not_within", "one_at_a_time"]

_LOOK_AGAIN_S = 1e-3
_LAST_CALL_S = 10.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Calls:
    """The call that is under way: of a training thread, a signal handler, or another thread.

    It is as long as its frame is on the stack of its thread: an interrupt at any moment leaves
    none that never ends.

    Args:
        timeout_s: how long a call waits for one of another thread.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._now: tuple[str, int, FrameType] | None = None
        self._ends_in: int | None = None

    def begin(self, name: str, frame: FrameType) -> None:
        """A call begins.

        Raises:
            StateError: one is under way: in this thread, or for too long in another; or the
                interpreter ends.
        """
        me = threading.get_ident()
        since_s = time.monotonic()
        while (now := self._now) is not None and in_thread(now[2], now[1]):
            if now[1] == me:
                raise _within(name, now[0])
            if time.monotonic() - since_s > self._timeout_s:
                raise self._waited(f"{name}()", now[0])
            time.sleep(_LOOK_AGAIN_S)
        self._now = (name, me, frame)
        if self.over:  # looked at last: whoever ends looks whether a call is under way behind that
            self._now = None
            raise _over(name)

    def refuse_within(self, name: str) -> None:
        """What waits for what a call has begun is called in the middle of that.

        Raises:
            StateError: it would wait for ever: the call is below it on the stack. Or the
                interpreter ends.
        """
        if self.over:
            raise _over(name)
        now = self._now
        if now is not None and now[1] == threading.get_ident() and in_thread(now[2], now[1]):
            raise _within(name, now[0])

    def end(self) -> None:
        """The call that has begun is over."""
        self._now = None

    @property
    def over(self) -> bool:
        """Whether the interpreter ends, in another thread."""
        return self._ends_in is not None and self._ends_in != threading.get_ident()

    def last(self) -> None:
        """The interpreter ends, in this thread: no other one begins a call any more. What is under
        way comes to its end, or does not for long."""
        self._ends_in = threading.get_ident()
        with contextlib.suppress(StateError):
            self.wait_for_others("the end of the interpreter", min(self._timeout_s, _LAST_CALL_S))

    def wait_for_others(self, who: str, timeout_s: float | None = None) -> None:
        """Returns when no other thread is in a call; ``who``: waits for it, in words.

        Raises:
            StateError: it takes too long.
        """
        timeout_s = timeout_s or self._timeout_s
        since_s = time.monotonic()
        while (now := self._now) is not None and now[1] != threading.get_ident():
            if not in_thread(now[2], now[1]):
                return
            if time.monotonic() - since_s > timeout_s:
                raise self._waited(who, now[0])
            time.sleep(_LOOK_AGAIN_S)

    def _waited(self, who: str, other: str) -> StateError:
        return StateError(
            f"{who} has waited {self._timeout_s:g} s for {other}() in another thread",
            hint="it hangs, or takes long: save from the training loop, or with async",
        )


def _within(name: str, outer: str) -> StateError:
    return StateError(
        f"{name}() in the middle of {outer}(): in a signal handler, perhaps, or in on_failure=",
        hint="set a flag there, and call it from the training loop; or use preempt=",
    )


def _over(name: str) -> StateError:
    return StateError(
        f"{name}() while the interpreter ends: it waits for what was taken before, and for no more",
        hint="let the main thread join() the one that trains, or not end before close()",
    )


def one_at_a_time(name: str) -> Callable[[_Function], _Function]:
    """For methods of an object with :class:`Calls` in ``_calls``."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            calls: Calls = self._calls
            calls.begin(name, sys._getframe())
            try:
                return function(self, *args, **options)
            finally:
                calls.end()

        return cast("_Function", call)

    return decorate


def not_within(name: str) -> Callable[[_Function], _Function]:
    """For those of its methods that wait for what such calls have begun."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            self._calls.refuse_within(name)
            return function(self, *args, **options)

        return cast("_Function", call)

    return decorate
