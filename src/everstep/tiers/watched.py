"""A tier whose calls may hang, and what tells that one does.

A directory of a network file system answers when its server does, perhaps never, and no thread can
be got out of such a call. Whoever waits for it looks here whether it still moves.
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
    """Passes everything on, and remembers what is under way.

    Args:
        tier: does it.
    """

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[str, float]] = {}  # what, and when it last moved

    def stuck(self, after_s: float) -> tuple[str, float] | None:
        """The call under way that has not moved for longest, in words, and for how many seconds;
        None: none has stood still for ``after_s``.

        What is being written moves with each piece that is read for it. What is read from an
        object that is open is not looked at.
        """
        now_s = self._clock.running_s()
        with self._lock:
            calls = list(self._calls.values())
        what, moved_s = min(calls, key=lambda call: call[1], default=("", now_s))
        return (what, now_s - moved_s) if now_s - moved_s >= after_s > 0 else None

    @property
    def traits(self) -> Traits:
        return self._tier.traits

    @property
    def url(self) -> str:
        return self._tier.url

    def put(self, name: str, source: ReadFile) -> None:
        with self._under_way(f"writing {name}") as moves:
            self._tier.put(name, _Read(source, moves))

    def create(self, name: str, data: bytes) -> bool:
        with self._under_way(f"writing {name}"):
            return self._tier.create(name, data)

    def open(self, name: str) -> ReadFile:
        with self._under_way(f"opening {name}"):
            return self._tier.open(name)

    def scan(self, prefix: str = "") -> list[Item]:
        with self._under_way(f"listing {prefix or 'it'}"):
            return self._tier.scan(prefix)

    def walk(self, prefix: str = "") -> list[Item]:
        with self._under_way(f"listing {prefix or 'it'}"):
            return self._tier.walk(prefix)

    def delete(self, name: str) -> None:
        with self._under_way(f"deleting {name}"):
            self._tier.delete(name)

    def sweep(self, prefix: str) -> None:
        with self._under_way(f"cleaning up {prefix}"):
            self._tier.sweep(prefix)

    def check(self) -> None:
        with self._under_way("reading it"):
            self._tier.check()

    def refresh(self) -> None:
        self._tier.refresh()

    def close(self) -> None:
        self._tier.close()

    @contextlib.contextmanager
    def _under_way(self, what: str) -> Iterator[Callable[[], None]]:
        call = object()

        def moves() -> None:
            with self._lock:
                self._calls[call] = what, self._clock.running_s()

        moves()
        try:
            yield moves
        finally:
            with self._lock:
                del self._calls[call]


class _Read:
    """What is written, and tells that it is read."""

    def __init__(self, source: ReadFile, moves: Callable[[], None]) -> None:
        self._source = source
        self._moves = moves

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._moves()
        count = self._source.read_into(buffer, offset)
        self._moves()
        return count

    def close(self) -> None:
        self._source.close()
