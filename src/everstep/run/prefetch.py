"""Produce the items of a generator ahead of their use, in a thread.

Replay of a step takes about as long as reading, verifying and decoding the next ones, so both run
at the same time (LowDiff section IV-C: recovery in parallel).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Generic, TypeVar

from everstep.seams.processes import Condition

_T = TypeVar("_T")


class Prefetch(Generic[_T]):
    """Items of a generator, in order, produced ahead of the consumer.

    An error of the generator is raised in place of the item that it prevented. Use it in a ``with``
    block: on exit the thread has ended and the generator is closed.

    Args:
        items: generator run in the thread; nothing else may use its resources meanwhile.
        count: maximum number of waiting items; one more is being produced.
        size_bytes: returns the host memory that an item takes.
        limit_bytes: maximum total size of waiting items and of those that the consumer still holds:
            the last one returned, and the size given to :meth:`set_held_bytes`. A single item may
            be larger, and one more is being produced.
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
        # A daemon: a read that never returns must not keep the process from exiting.
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
        # Join before the generator is closed by anybody else: its resources are free afterwards.
        self._thread.join()

    def __iter__(self) -> Prefetch[_T]:
        return self

    @property
    def ready(self) -> bool:
        """True if the next item, or the end, can be returned without waiting."""
        with self._changed:
            return bool(self._waiting) or self._ended

    def set_held_bytes(self, size_bytes: int) -> None:
        """Set the size of all returned items that the consumer still uses."""
        with self._changed:
            self._kept_bytes = self._held_bytes = size_bytes
            self._changed.notify_all()

    def __next__(self) -> _T:
        with self._changed:
            # The consumer releases the last item before it requests the next one.
            self._held_bytes = self._kept_bytes
            self._wanted = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._ended)
            self._wanted = False
            # Also after an error: items produced before it are valid.
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
                del item  # only the consumer may keep the item alive
        except BaseException as error:  # raised in the consumer, in place of the item
            self._error = error
        finally:
            # Before the end is announced: afterwards the consumer may use the resources itself.
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: _T) -> bool:
        """Queue an item when it fits the limits; return False if the consumer has stopped."""
        size_bytes = self._size_bytes(item)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._fits(size_bytes))
            if not self._stopped:
                self._waiting.append((item, size_bytes))
                self._changed.notify_all()
            return not self._stopped

    def _fits(self, size_bytes: int) -> bool:
        taken_bytes = self._held_bytes + sum(size for _, size in self._waiting)
        # Always let one item through: an item larger than the limit must not block for ever.
        if not self._waiting and (self._wanted or not taken_bytes):
            return True
        return len(self._waiting) < self._count and taken_bytes + size_bytes <= self._limit_bytes
