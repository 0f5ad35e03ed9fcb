"""Requests to the keeper process that wait for a reply, and pending bases of its replica.

Deadlines and errors of waiting for a keeper.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from everstep.errors import DeadlineError, EverstepError, KeeperError, StateError
from everstep.link import Save, complete, fail
from everstep.link.assembly import Samples
from everstep.seams import Clock
from everstep.seams.filesystem import StallTimer
from everstep.seams.sockets import close_descriptors

if TYPE_CHECKING:
    from everstep.trainer.attach.remote import RemoteKeeper


def base_request_to_wire(
    number: int, step: int, samples: Sequence[Samples], *, exact: bool
) -> dict[str, Any]:
    """Return the message that requests a base from the replica."""
    return {
        "kind": "ask",
        "number": number,
        "step": step,
        "exact": exact,
        "samples": [[some.width_bytes, some.where, some.values] for some in samples],
    }


class ReplicaRequests:
    """Bases requested from the keeper's replica that are not durable yet.

    Args:
        changed: condition that guards all attributes, and is notified when a request ends.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._numbers = 0
        self._saves: dict[int, tuple[Save, bool]] = {}
        self._retaining: dict[int, int] = {}  # steps of ended requests, until retention is over

    @property
    def pending(self) -> bool:
        """True if a request or its retention has not ended."""
        return bool(self._saves or self._retaining)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the requests that are neither durable nor failed."""
        return tuple(save.step for save, _ in self._saves.values())

    def number(self) -> int:
        """Return an unused number for a request.

        It is separate from :meth:`add` so that the caller can withdraw the request by its number,
        wherever an interrupt arrives.
        """
        with self._changed:
            self._numbers += 1
            return self._numbers

    def add(self, number: int, save: Save, *, exact: bool) -> None:
        """Add a request.

        Args:
            exact: True if only a base of the very step of ``save`` fulfills it.
        """
        with self._changed:
            self._saves[number] = save, exact

    def persisted(self, numbers: Sequence[int], step: int, size_bytes: int) -> None:
        """End requests that a durable base of ``step`` fulfills."""
        for save, exact in self._pop(numbers, step):
            if exact and save.step != step:
                why = (
                    f"the replica has continued to step {step} before it could make a base of step "
                    f"{save.step}"
                )
                fail(save.durable, StateError(why, step=save.step))
            else:
                complete(save.durable, size_bytes)

    def refused(self, numbers: Sequence[int], error: EverstepError, step: int | None) -> None:
        """End requests with an error.

        Args:
            step: step of the base that has failed, which the keeper has still to clean up; None if
                there is none.
        """
        for save, _ in self._pop(numbers, step):
            fail(save.durable, error)

    def retained(self, step: int) -> None:
        """Note that retention after the base of ``step`` is over."""
        with self._changed:
            self._retaining = {n: at for n, at in self._retaining.items() if at > step}
            self._changed.notify_all()

    def lose(self, error: EverstepError) -> None:
        """End all requests, because the keeper or the replica is lost."""
        with self._changed:
            self._retaining.clear()
        self.refused(list(self._saves), error, None)

    def _pop(self, numbers: Sequence[int], step: int | None) -> list[tuple[Save, bool]]:
        with self._changed:
            found = [self._saves.pop(number, None) for number in numbers]
            if step is not None:
                # Under the same lock as the removal: in between `pending` would be False, and
                # wait() would return.
                self._retaining.update(dict.fromkeys(numbers, step))
            self._changed.notify_all()
        # Futures are set by the caller without the lock: their callbacks may take it.
        return [save for save in found if save is not None]


class Replies:
    """Replies of the keeper process, by kind. One request of a kind is pending at a time.

    Args:
        changed: condition that guards the replies, and is notified when one arrives.

    Attributes:
        chunks: number of messages with bytes that have arrived.
    """

    def __init__(self, changed: threading.Condition, clock: Clock) -> None:
        self._changed = changed
        self._clock = clock
        self._found: dict[str, tuple[dict[str, Any], list[int]]] = {}
        self._blobs: dict[int, bytearray] = {}
        self.chunks = 0

    def add_blob(self, message: dict[str, Any]) -> None:
        """Add bytes that belong to the next reply."""
        self.chunks += 1
        self._blobs.setdefault(message["number"], bytearray()).extend(message["part"])

    def arrived(self, message: dict[str, Any], fds: list[int]) -> None:
        """Add a reply, with all blobs received before it.

        Args:
            fds: file descriptors that came with it.
        """
        # Without the lock: only the reader thread adds blobs and replies.
        message["blobs"] = self._blobs
        self._blobs = {}
        with self._changed:
            self._found[message["kind"]] = (message, fds)
            self._changed.notify_all()

    def forget(self, kind: str) -> None:
        """Drop a reply to an earlier request whose caller was interrupted."""
        with self._changed:
            # The descriptors belong to no caller, and would stay open.
            _, fds = self._found.pop(kind, ({}, []))
        close_descriptors(fds)

    def wait(
        self, keeper: RemoteKeeper, request: str, kind: str, timeout_s: float
    ) -> tuple[dict[str, Any], list[int]]:
        """Wait for the reply of a ``kind`` and return it with its file descriptors.

        Args:
            keeper: keeper process.
            request: kind of the request, for the message of an error.
            timeout_s: seconds without progress of the keeper.

        Raises:
            KeeperError: The keeper is lost.
            DeadlineError: The keeper makes no progress for ``timeout_s``.
        """
        # Any progress extends the wait: the keeper may write large bases before it replies.
        still = StallTimer(timeout_s, self._clock.running_s)
        while not still.is_over((keeper.moves, keeper.log_moves, self.chunks)):
            with self._changed:
                self._changed.wait_for(
                    lambda: kind in self._found or keeper.lost is not None,
                    still.poll_s,
                )
                # Tested before the loss: a reply that has arrived counts even if the keeper was
                # lost after it.
                if kind in self._found:
                    return self._found.pop(kind)
            if keeper.lost is not None:
                raise keeper.lost
        raise DeadlineError(
            f"the keeper (process {keeper.pid}) has not replied to {request!r} within "
            f"{timeout_s:g} s",
            hint="everstep ps shows what it is doing; check the disk",
        )


_LOOK_AGAIN_S = 0.2
"""Interval in which a waiting thread checks for hung storage and shows progress."""

_REPLICA_TIMEOUT_MIN_S = 60.0


def storage_hang_error(count: int) -> DeadlineError:
    """Return the error for ``count`` bases that make no progress."""
    return DeadlineError(
        f"{count} base(s) are not durable: the storage hangs",
        hint="check the disk or the network file system (dmesg, df, iostat)",
    )


class ReplicaProgress:
    """Deadline for bases that were requested from the replica.

    It is twice the usual one: the replica may have to load torch first, and other ranks may be
    late.

    Args:
        timeout_s: usual deadline in seconds.
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        timeout_s = max(_REPLICA_TIMEOUT_MIN_S, 2 * timeout_s)
        self._still = StallTimer(timeout_s, clock.running_s)

    def check(self, *progress: object) -> None:
        """Compare the current progress with the last one; call several times a second.

        Raises:
            DeadlineError: it has not changed for too long.
        """
        for_s = self._still.for_s(progress)
        if for_s > self._still.timeout_s:
            raise DeadlineError(
                f"the keeper's replica has made no progress for {for_s:.0f} s with the bases "
                "requested from it",
                hint="everstep ps shows its state; its log is in the runtime folder (everstep "
                "doctor)",
            )


class WaitDeadline:
    """Deadline of a wait for bases.

    Args:
        timeout_s: seconds to wait; None for no limit.
    """

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._start_s = clock.monotonic_s()

    @property
    def poll_s(self) -> float:
        """Longest time in seconds to wait before the next check."""
        if self._timeout_s is None:
            return _LOOK_AGAIN_S
        return min(_LOOK_AGAIN_S, max(0.0, self._timeout_s - self._waited_s))

    def is_over(self, count: int) -> bool:
        """Return True if no time is left.

        Args:
            count: number of bases that are not durable now.

        Raises:
            DeadlineError: no time is left, and ``count`` is positive.
        """
        waited_s = self._waited_s
        if self._timeout_s is None or waited_s < self._timeout_s:
            return False
        if count:
            raise DeadlineError(
                f"{count} base(s) are not durable after {waited_s:.0f} s",
                hint="wait longer, or check the disk",
            )
        return True

    @property
    def _waited_s(self) -> float:
        return self._clock.monotonic_s() - self._start_s


def keeper_lost_error(pid: int, error: BaseException | None) -> KeeperError:
    """Return the error for a keeper process or connection that has ended."""
    why = f": {error}" if error is not None else ""
    return KeeperError(
        f"the keeper (process {pid}) is gone{why}",
        hint="training continues; a new keeper is started and a new base taken (with several "
        "ranks, when the next one is due)",
    )
