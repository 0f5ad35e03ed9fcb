"""Protocol of an arm: one way to save during training; and a pending save."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any, Literal

from everstep.errors import DeadlineError
from everstep_bench.harness.children import TIMEOUT_S
from everstep_bench.harness.figures import Role
from everstep_bench.stall.recording import Copied

Cause = Literal["capture", "gate", "gradients", "back_pressure", "persist"]

CAUSES: tuple[Cause, ...] = ("capture", "gate", "gradients", "back_pressure", "persist")
"""What holds the training thread up: copying the state or beginning to; an update that waits
for a copy of the state; copies of gradients that are waited for; no memory, or the save before
it; writing."""


class Pending:
    """A save under way, and when what of it was over, in monotonic seconds.

    Attributes:
        staged_s: when the state was copied; None if that cannot be known, or not yet.
        done_s: when the library said that it was done; None while it has not.
    """

    def __init__(self) -> None:
        self.staged_s: float | None = None
        self.done_s: float | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()

    @classmethod
    def finished(cls) -> Pending:
        """A save that was over when the call came back."""
        pending = cls()
        pending.finish()
        return pending

    @property
    def over(self) -> bool:
        """True if it is done or has failed."""
        return self._over.is_set()

    def on_staged(self, future: Future[Any] | None = None) -> None:
        """The copy is made."""
        self.staged_s = time.monotonic()

    def on_done(self, future: Future[Any]) -> None:
        """A future is done."""
        failed = None if future.cancelled() else future.exception()
        self.finish(DeadlineError("the save was cancelled") if future.cancelled() else failed)

    def finish(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        self.done_s = time.monotonic()
        self._error = error
        self._over.set()

    def wait(self, timeout_s: float = TIMEOUT_S) -> None:
        """Returns when it is done.

        Raises:
            BaseException: what it failed with.
            DeadlineError: it is not, after ``timeout_s``.
        """
        if not self._over.wait(timeout_s):
            raise DeadlineError(f"a save is not done after {timeout_s:g} s")
        if self._error is not None:
            raise self._error


class Arm:
    """One way to save. What is not overridden does nothing.

    Attributes:
        name: as on the command line.
        detail: what exactly it does, in a few words.
        captures_in_steps: :meth:`stalls` also counts, besides waiting at the gate, what it does
            within steps.
    """

    role: Role = "peer"
    captures_in_steps = False

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        self._stalls: dict[str, float] = dict.fromkeys(CAUSES, 0.0)

    def open(self) -> None:
        """Before the first block; not timed."""

    def prepare(self) -> None:
        """Before each block; not timed."""

    def save(self) -> Pending | None:
        """Begins a save; all of this call is paid for by training."""
        return None

    def after_step(self) -> None:
        """After each step of a block; paid for by training."""

    def settle(self, pending: Pending) -> float:
        """After a block: waits until nothing of the save is under way.

        Returns:
            Seconds spent on making durable what the library has left unsynced.

        Raises:
            BaseException: what the save failed with.
        """
        pending.wait()
        return 0.0

    def stalls(self) -> dict[str, float]:
        """Seconds that training was held up so far, by cause."""
        return dict(self._stalls)

    def persist_s(self) -> float | None:
        """Seconds of writing so far, in whichever thread; None if that cannot be known."""
        return None

    def copies(self) -> tuple[Copied, ...]:
        """Return the copies since :meth:`prepare`, piece by piece; empty if unknown."""
        return ()

    def processes(self) -> list[int]:
        """Processes of its own that are nobody's children."""
        return []

    def clean(self) -> None:
        """After each block, even one that failed; not timed."""

    def close(self) -> None:
        """After the last block, and after an ``open`` that failed."""


class Ideal(Arm):
    """Training that saves nothing."""

    role: Role = "ideal"

    def __init__(self) -> None:
        super().__init__("ideal", "no checkpoint")
