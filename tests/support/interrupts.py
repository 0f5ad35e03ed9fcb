"""An interrupt wherever CPython looks for signals: where a function begins, and behind each call.
(Loops look, too, where they begin anew.) Another thread at any line of a method."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["interrupted_at", "started_at"]


def interrupted_at(count: int, call: Callable[[], Any]) -> bool:
    """Runs ``call``, which is interrupted where signals are looked for the next time after so many,
    in whatever function that is; whether there was such a place."""
    left = [count]

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "return", "c_return"):
            left[0] -= 1
            if left[0] < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    gc.disable()  # what it would call is of earlier tests
    sys.setprofile(look)
    try:
        call()
    except (KeyboardInterrupt, RuntimeError):  # the latter: of a wait that had let go
        return True
    finally:
        sys.setprofile(before)
        gc.enable()
    return False


@contextlib.contextmanager
def started_at(line: int, method: Any, other: threading.Thread) -> Iterator[None]:
    """Starts the thread before so many lines of the method, once, and lets it run if it can."""
    left = [line]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and other.ident is None:
            left[0] -= 1
            if left[0] < 0:
                other.start()
                other.join(0.2)  # it may have to wait for the method
        return look

    code = method.__code__
    before = sys.gettrace()
    sys.settrace(lambda frame, *_: look if frame.f_code is code else None)
    try:
        yield
    finally:
        sys.settrace(before)
