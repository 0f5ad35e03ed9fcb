"""Bases that the training process has asked the keeper's replica for, until they are durable."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from everstep.errors import DeadlineError, EverstepError, StateError
from everstep.link.samples import Samples
from everstep.link.save import Save, done, failed
from everstep.seams import Clock
from everstep.seams.files.moving import Standstill
from everstep.seams.network.sockets import close_descriptors

__all__ = [
    "ReplicaRequests",
    "Replies",
    "base_request_to_wire",
]


def base_request_to_wire(
    number: int, step: int, samples: Sequence[Samples], *, exact: bool
) -> dict[str, Any]:
    """The message that asks for a base."""
    return {
        "kind": "ask",
        "number": number,
        "step": step,
        "exact": exact,
        "samples": [[some.width_bytes, some.where, some.values] for some in samples],
    }


class ReplicaRequests:
    """Who waits for them.

    Args:
        changed: held while anything changes; told when something ends.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._numbers = 0
        self._saves: dict[int, tuple[Save, bool]] = {}
        self._retaining: dict[int, int] = {}  # steps of those whose retention is not over

    @property
    def pending(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._saves or self._retaining)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of those that are neither durable nor have failed."""
        return tuple(save.step for save, _ in self._saves.values())

    def number(self) -> int:
        """One that no other is named by. Whoever registers one knows it before, so as to take it
        back, wherever an interrupt arrives."""
        with self._changed:
            self._numbers += 1
            return self._numbers

    def add(self, number: int, save: Save, *, exact: bool) -> None:
        """One is asked for, of its very step if ``exact``."""
        with self._changed:
            self._saves[number] = save, exact

    def persisted(self, numbers: Sequence[int], step: int, size_bytes: int) -> None:
        """They are durable, in a base of ``step``."""
        for save, exact in self._pop(numbers, step):
            if exact and save.step != step:
                why = f"the replica went on with a base of step {step} before it had made this one"
                failed(save.durable, StateError(why, step=save.step))
            else:
                done(save.durable, size_bytes)

    def refused(self, numbers: Sequence[int], error: EverstepError, step: int | None) -> None:
        """There will be no such bases.

        Args:
            step: of the base that has failed; the keeper has still to clean up behind it.
        """
        for save, _ in self._pop(numbers, step):
            failed(save.durable, error)

    def retained(self, step: int) -> None:
        """Retention behind the base of a step is over."""
        with self._changed:
            self._retaining = {n: at for n, at in self._retaining.items() if at > step}
            self._changed.notify_all()

    def lose(self, error: EverstepError) -> None:
        """Nobody is there any more to answer."""
        with self._changed:
            self._retaining.clear()
        self.refused(list(self._saves), error, None)

    def _pop(self, numbers: Sequence[int], step: int | None) -> list[tuple[Save, bool]]:
        with self._changed:
            found = [self._saves.pop(number, None) for number in numbers]
            if step is not None:
                self._retaining.update(dict.fromkeys(numbers, step))
            self._changed.notify_all()
        return [save for save in found if save is not None]


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
                    still.look_again_s,
                )
                if kind in self._found:
                    return self._found.pop(kind)
            if keeper.lost is not None:
                raise keeper.lost
        raise DeadlineError(
            f"the keeper (process {keeper.pid}) has not answered {asked!r} within {timeout_s:g} s",
            hint="everstep ps shows what it is doing; look at the disk",
        )
