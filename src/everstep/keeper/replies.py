"""What the keeper process answers to questions of the training process."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from everstep.errors import DeadlineError, EverstepError
from everstep.seams import Clock
from everstep.seams.sockets import close_descriptors

__all__ = ["Replies"]

_LOOK_AGAIN_S = 0.2


class _Answers(Protocol):
    pid: int
    lost: EverstepError | None
    written_bytes: int


class Replies:
    """Those that have come, by kind; one question of a kind is asked at a time.

    Args:
        changed: held while anything changes; told when one comes.
    """

    def __init__(self, changed: threading.Condition, clock: Clock) -> None:
        self._changed, self._clock = changed, clock
        self._found: dict[str, tuple[dict[str, Any], list[int]]] = {}
        self._blobs: dict[int, bytearray] = {}

    def part(self, message: dict[str, Any]) -> None:
        """Bytes that belong to the next one."""
        self._blobs.setdefault(message["number"], bytearray()).extend(message["part"])

    def came(self, message: dict[str, Any], fds: list[int]) -> None:
        """There is one."""
        message["blobs"], self._blobs = self._blobs, {}
        with self._changed:
            self._found[message["kind"]] = (message, fds)
            self._changed.notify_all()

    def forget(self, kind: str) -> None:
        """Nobody waits any more for what has come: whoever has asked was interrupted."""
        with self._changed:
            _, fds = self._found.pop(kind, ({}, []))
        close_descriptors(fds)

    def wait(
        self, keeper: _Answers, asked: str, kind: str, timeout_s: float
    ) -> tuple[dict[str, Any], list[int]]:
        """The answer to what was ``asked``.

        Raises:
            KeeperError: the keeper is gone.
            DeadlineError: it gets nowhere for ``timeout_s``.
        """
        written_bytes, start_s = keeper.written_bytes, self._clock.monotonic_s()
        while self._clock.monotonic_s() - start_s <= timeout_s:
            with self._changed:
                self._changed.wait_for(
                    lambda: kind in self._found or keeper.lost is not None,
                    min(_LOOK_AGAIN_S, timeout_s),
                )
                if kind in self._found:
                    return self._found.pop(kind)
            if keeper.lost is not None:
                raise keeper.lost
            if keeper.written_bytes != written_bytes:  # it gets somewhere
                written_bytes, start_s = keeper.written_bytes, self._clock.monotonic_s()
        raise DeadlineError(
            f"the keeper (process {keeper.pid}) has not answered {asked!r} within {timeout_s:g} s",
            hint="everstep ps shows what it is doing; look at the disk",
        )
