"""Detect calls of a tier that hang.

A directory on a network file system responds when its server does, perhaps never, and a thread in
such a call cannot be interrupted. Callers that wait for it check here whether it still makes
progress.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import ReadFile
from everstep.tiers.contract import Item, Tier, Traits

__all__ = ["WatchedTier"]


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
        call, progress_s = min(calls, key=lambda call: call[1], default=("", now_s))
        return (call, now_s - progress_s) if now_s - progress_s >= after_s > 0 else None

    @property
    def traits(self) -> Traits:
        return self._tier.traits

    @property
    def url(self) -> str:
        return self._tier.url

    def put(self, name: str, source: ReadFile) -> None:
        with self._tracked(f"writing {name}") as progress:
            self._tier.put(name, _WatchedSource(source, progress))

    def create(self, name: str, data: bytes) -> bool:
        with self._tracked(f"writing {name}"):
            return self._tier.create(name, data)

    def open(self, name: str) -> ReadFile:
        with self._tracked(f"opening {name}"):
            return self._tier.open(name)

    def scan(self, prefix: str = "") -> list[Item]:
        with self._tracked(f"listing {prefix or 'it'}"):
            return self._tier.scan(prefix)

    def walk(self, prefix: str = "") -> list[Item]:
        with self._tracked(f"listing {prefix or 'it'}"):
            return self._tier.walk(prefix)

    def delete(self, name: str) -> None:
        with self._tracked(f"deleting {name}"):
            self._tier.delete(name)

    def sweep(self, prefix: str) -> None:
        with self._tracked(f"cleaning up {prefix}"):
            self._tier.sweep(prefix)

    def check(self) -> None:
        with self._tracked("reading it"):
            self._tier.check()

    def refresh(self) -> None:
        self._tier.refresh()

    def close(self) -> None:
        self._tier.close()

    @contextlib.contextmanager
    def _tracked(self, description: str) -> Iterator[Callable[[], None]]:
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
