"""Rank processes whose bases are copied to a tier."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.support.world import TIMEOUT_S


def wait_for(done: Callable[[], bool], what: str) -> None:
    never = threading.Event()
    for _ in range(int(3 * TIMEOUT_S / 0.02)):
        if done():
            return
        never.wait(0.02)
    raise AssertionError(f"waited in vain for {what}")
