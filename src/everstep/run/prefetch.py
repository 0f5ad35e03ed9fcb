"""Work that is prepared in a thread of its own while the caller does what comes before it.

Replay of a step takes as long as reading, checking and decoding the next ones; so both go on at
the same time (LowDiff section IV-C: recovery in parallel).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Generic, TypeVar

from everstep.seams.processes.conditions import Condition

__all__ = ["Prefetch"]

_T = TypeVar("_T")


class Prefetch(Generic[_T]):
    """The items of a generator, in their order, made ahead of whoever iterates.

    An error of the generator is raised where the item would have been that it stands for. To be
    used in a ``with`` block: when that ends, no thread is left, and the generator is closed.

    Args:
        items: run in the thread; nothing else may use what it uses meanwhile.
        count: items that may wait, at most; one more is being made.
        size_bytes: host memory that an item takes.
        limit_bytes: that those take together, at most, that wait or that whoever iterates still
            holds: the one that was given last, and what :meth:`holds` was told of. A single one
            may be larger; and one more is being made.
    """

    def __init__(
        self,
        items: Generator[_T, None, None],
        *,
        count: int,
        size_bytes: Callable[[_T], int] = lambda item: 0,
        limit_bytes: int = 0,
    ) -> None:
        self._items = items
        self._count = count
        self._size_bytes = size_bytes
        self._limit_bytes = limit_bytes
        self._changed = Condition()
        self._waiting: deque[tuple[_T, int]] = deque()
        self._kept_bytes = self._held_bytes = 0
        self._ended = self._stopped = self._wanted = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="everstep-ahead", daemon=True)

    def __enter__(self) -> Prefetch[_T]:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Prefetch[_T]:
        return self

    @property
    def ready(self) -> bool:
        """Whether the next item is there already, or will never be: nobody would wait for it."""
        with self._changed:
            return bool(self._waiting) or self._ended

    def holds(self, size_bytes: int) -> None:
        """Of all that was given to whoever iterates, so much is still in use."""
        with self._changed:
            self._kept_bytes = self._held_bytes = size_bytes
            self._changed.notify_all()

    def __next__(self) -> _T:
        with self._changed:
            self._held_bytes = self._kept_bytes
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._wanted = False
            if self._waiting:
                item, size_bytes = self._waiting.popleft()
                self._held_bytes += size_bytes
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
                del item  # it is whoever takes it who decides how long it lives
        except BaseException as error:  # raised where the item would have been
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: _T) -> bool:
        """Waits for room; False if nobody wants the item any more."""
        size_bytes = self._size_bytes(item)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room(size_bytes))
            if not self._stopped:
                self._waiting.append((item, size_bytes))
                self._changed.notify_all()
            return not self._stopped

    def _has_room(self, size_bytes: int) -> bool:
        taken_bytes = self._held_bytes + sum(size for _, size in self._waiting)
        if not self._waiting and (self._wanted or not taken_bytes):
            return True
        return len(self._waiting) < self._count and taken_bytes + size_bytes <= self._limit_bytes
