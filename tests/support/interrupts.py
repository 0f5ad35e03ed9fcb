"""An interrupt wherever CPython looks for signals: where a function begins, and behind each call.
(Loops look, too, where they begin anew.)"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["interrupted_at"]


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
    sys.setprofile(look)
    try:
        call()
    except (KeyboardInterrupt, RuntimeError):  # the latter: of a wait that had let go
        return True
    finally:
        sys.setprofile(before)
    return False
