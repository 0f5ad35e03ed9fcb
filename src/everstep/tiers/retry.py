"""Retry operations that a store refuses temporarily.

Every operation of the contract may be repeated (see :mod:`.contract`), so one rule covers all.
After :class:`UnreachableError`, wait a little, longer each time and with jitter so that clients do
not retry at the same moment, until the attempts or the time are used up. After refused credentials,
obtain new ones from their source.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

from everstep.errors import (
    DeadlineError,
    OptionError,
    PermissionDeniedError,
    UnreachableError,
)
from everstep.seams import Clock, ReadFile, SystemClock
from everstep.tiers.contract import Item, ReadThrough, Tier, Traits

_T = TypeVar("_T")
_DENIALS = 3
"""Refusals within one operation after which they are final."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number and duration of retries.

    Attributes:
        attempts: attempts per operation, including the first.
        first_s: maximum first pause; the maximum doubles with each pause.
        pause_s_max: maximum of any pause.
        deadline_s: no attempt begins later than this after the first.
    """

    attempts: int = 5
    first_s: float = 0.2
    pause_s_max: float = 10.0
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.first_s, self.pause_s_max, self.deadline_s) < 0:
            raise OptionError(f"invalid retry policy: {self}")

    def pause_s(self, attempt: int, random_share: float) -> float:
        """Return the seconds to wait after attempt number ``attempt`` (from 1), with "full
        jitter".
        """
        return min(self.pause_s_max, self.first_s * 2.0 ** (attempt - 1)) * random_share


class RetryingTier:
    """A tier whose operations are retried.

    Args:
        inner: tier that performs the operations.
        pause: waits for some seconds and returns True to give up; None: sleeps, until
            :meth:`close`.
        seed: seed of the jitter; None: random.
    """

    def __init__(
        self,
        inner: Tier,
        policy: RetryPolicy | None = None,
        *,
        clock: Clock | None = None,
        pause: Callable[[float], bool] | None = None,
        seed: int | None = None,
    ) -> None:
        self._inner = inner
        self._policy = policy or RetryPolicy()
        self._clock = clock or SystemClock()
        self._closed = threading.Event()
        # close() sets the event, which ends each pause at once.
        self._pause = pause or self._closed.wait
        self._random = random.Random(seed)

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, name: str, source: ReadFile) -> None:
        self._try(f"write {name}", name, lambda: self._inner.put(name, source))

    def create(self, name: str, data: bytes) -> bool:
        return self._try(f"create {name}", name, lambda: self._inner.create(name, data))

    def open(self, name: str) -> ReadFile:
        file = self._try(f"open {name}", name, lambda: self._inner.open(name))
        return ReadThrough(file, partial(self._read, name, file))

    def scan(self, prefix: str = "") -> list[Item]:
        return self._try("list", prefix, lambda: self._inner.scan(prefix))

    def delete(self, name: str) -> None:
        self._try(f"delete {name}", name, lambda: self._inner.delete(name))

    def sweep(self, prefix: str) -> None:
        self._try(f"clean up {prefix}", prefix, lambda: self._inner.sweep(prefix))

    def check(self) -> None:
        self._try("read", "", self._inner.check)

    def refresh(self) -> None:
        self._inner.refresh()

    def close(self) -> None:
        """End all waiting: operations that are being retried fail."""
        self._closed.set()
        self._inner.close()

    def _read(self, name: str, file: ReadFile, buffer: memoryview, offset: int) -> int:
        """Read from an open file; retry if fewer bytes than expected arrive."""
        want = max(0, min(buffer.nbytes, file.size_bytes - offset))

        def read() -> int:
            got = file.read_into(buffer, offset)
            # The size was taken at the open, so a read inside of it is short only by a fault on the
            # way.
            if got < want:
                raise UnreachableError(
                    f"could not read {name}: received {got} of {want} bytes",
                    tier=self.traits.kind,
                    path=f"{self.url}/{name}",
                    hint="check the network to the store, and proxies in between",
                )
            return got

        return self._try(f"read {name}", name, read)

    def _give_up(self, when: str, what: str, name: str, error: UnreachableError) -> NoReturn:
        raise DeadlineError(
            f"could not {what} {when}: {error.message}",
            tier=self.traits.kind,
            path=f"{self.url}/{name}" if name else self.url,
            hint=error.hint,
        ) from None

    def _try(self, what: str, name: str, operation: Callable[[], _T]) -> _T:
        began_s = self._clock.monotonic_s()
        denied = 0
        attempt = 1
        while True:
            try:
                return operation()
            except PermissionDeniedError:
                # Credentials may have expired: obtain new ones and try again, without a pause.
                denied += 1
                if denied == _DENIALS:
                    raise
                self._inner.refresh()
            except UnreachableError as error:
                if attempt >= self._policy.attempts:
                    raise _gave_up(error, attempt) from None
                pause_s = self._policy.pause_s(attempt, self._random.random())
                spent_s = self._clock.monotonic_s() - began_s
                # Before the pause: an attempt that may not begin any more is not worth waiting for.
                if spent_s + pause_s > self._policy.deadline_s:
                    self._give_up(f"within {self._policy.deadline_s:g} s", what, name, error)
                if self._pause(pause_s):
                    self._give_up("before it was closed", what, name, error)
            attempt += 1


def _gave_up(error: UnreachableError, attempts: int) -> UnreachableError:
    return UnreachableError(
        f"{error.message} (the last of {attempts} attempts)",
        step=error.step,
        rank=error.rank,
        tier=error.tier,
        path=error.path,
        hint=error.hint,
    )
