"""Detect calls of a tier that hang.

A directory on a network file system responds when its server does, perhaps never, and a thread in
such a call cannot be interrupted. Callers that wait for it check here whether it still makes
progress.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from everstep.seams import Clock, ReadFile
from everstep.tiers.contract import Tier

_WORDS = {
    "create": "writing",
    "open": "opening",
    "scan": "listing",
    "walk": "listing",
    "delete": "deleting",
    "sweep": "cleaning up",
    "check": "reading",
}


class WatchedTier:
    """Passes all calls on and tracks those in progress.

    Args:
        tier: the tier that is watched.
    """

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        # By call: its description, and the time of its last progress.
        self._calls: dict[object, tuple[str, float]] = {}

    def stuck(self, after_s: float) -> tuple[str, float] | None:
        """Return the call with the oldest progress, in words, and its age in seconds.

        None if every call has progressed within ``after_s``. A write progresses with each chunk
        that is read for it. Reads from an open object are not tracked.
        """
        now_s = self._clock.running_s()
        with self._lock:
            calls = list(self._calls.values())
        # Without a call in progress the age is 0, which `>= after_s > 0` excludes.
        call, progress_s = min(calls, key=lambda call: call[1], default=("", now_s))
        return (call, now_s - progress_s) if now_s - progress_s >= after_s > 0 else None

    def put(self, name: str, source: ReadFile) -> None:
        with self._tracked(f"writing {name}") as progress:
            self._tier.put(name, _WatchedSource(source, progress))

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._tier, name)
        if name not in _WORDS:
            return operation

        def tracked(*args: Any) -> Any:
            place = args[0] if args else ""
            with self._tracked(f"{_WORDS[name]} {place or 'it'}"):
                return operation(*args)

        return tracked

    @contextlib.contextmanager
    def _tracked(self, description: str) -> Iterator[Callable[[], None]]:
        # The description is no key: several threads may run the same operation on the same name.
        call = object()

        def progress() -> None:
            # running_s() stands still while this process is stopped: that is no hang.
            with self._lock:
                self._calls[call] = description, self._clock.running_s()

        progress()
        try:
            yield progress
        finally:
            with self._lock:
                del self._calls[call]


class _WatchedSource:
    """A source whose reads count as progress of the write."""

    def __init__(self, source: ReadFile, progress: Callable[[], None]) -> None:
        self._source = source
        self._progress = progress

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._progress()
        count = self._source.read_into(buffer, offset)
        self._progress()
        return count

    def close(self) -> None:
        self._source.close()
