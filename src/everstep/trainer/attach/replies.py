"""What the keeper process answers to questions of the training process."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from everstep.errors import DeadlineError, EverstepError
from everstep.seams import Clock
from everstep.seams.files.moving import Standstill
from everstep.seams.network.sockets import close_descriptors

__all__ = ["Replies"]


class _Answers(Protocol):
    pid: int
    lost: EverstepError | None
    moves: int
    log_moves: int


class Replies:
    """Those that have come, by kind; one question of a kind is asked at a time.

    Args:
        changed: held while anything changes; told when one comes.
    """

    def __init__(self, changed: threading.Condition, clock: Clock) -> None:
        self._changed = changed
        self._clock = clock
        self._found: dict[str, tuple[dict[str, Any], list[int]]] = {}
        self._blobs: dict[int, bytearray] = {}
        self._parts = 0

    def part(self, message: dict[str, Any]) -> None:
        """Bytes that belong to the next one; or none, and more is to come."""
        self._parts += 1
        self._blobs.setdefault(message["number"], bytearray()).extend(message["part"])

    def came(self, message: dict[str, Any], fds: list[int]) -> None:
        """There is one."""
        message["blobs"] = self._blobs
        self._blobs = {}
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
        still = Standstill(timeout_s, self._clock.running_s)
        while not still.is_over((keeper.moves, keeper.log_moves, self._parts)):
            with self._changed:
                self._changed.wait_for(
                    lambda: kind in self._found or keeper.lost is not None,
                    still.poll_s,
                )
                if kind in self._found:
                    return self._found.pop(kind)
            if keeper.lost is not None:
                raise keeper.lost
        raise DeadlineError(
            f"the keeper (process {keeper.pid}) has not answered {asked!r} within {timeout_s:g} s",
            hint="everstep ps shows what it is doing; look at the disk",
        )
