"""Copy what is durable to one place, in the background.

A :class:`Courier` has the thread, the time of its next turn, and the handling of failures. What is
copied, and in which order, is decided by its :class:`CopyWork`: bases (:mod:`.base_copies`,
:mod:`.rank_copies`) or the log (:mod:`.log_copies`). Training never waits for a copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from everstep.errors import EverstepError, FencedError, ForeignDirectoryError, InfeasibleError
from everstep.keeper.ship.place import CopyPlace
from everstep.seams.clock import Clock
from everstep.seams.processes.conditions import Condition

_log = logging.getLogger("everstep.keeper")
_STOP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class CopyStats:
    """Figures of a courier since it started.

    Attributes:
        copied: bases, or steps of the log, that were copied.
        copied_bytes: bytes that were copied.
        step: step of the newest copy.
        missed: steps of the log that will not be copied: their memory was released before.
        failed: failed attempts.
    """

    copied: int = 0
    copied_bytes: int = 0
    step: int | None = None
    missed: int = 0
    failed: int = 0


class CopyWork(Protocol):
    """Work of a courier: the objects that it copies."""

    def turn(self) -> None:
        """Copy what is due. Errors are reported; the thread goes on."""
        ...

    def waiting(self) -> float | None:
        """Return the seconds after which to call this again while no turn is due; None: never."""
        ...


class Courier:
    """Makes copies in one place, turn by turn.

    Args:
        place: the place, with the timeline that is copied and the limit of objects per hour.
        post: called with errors, in any thread.
        retry_s: seconds after which a failed turn is repeated, and reported once per outage. None:
            the next turn comes with the next base.

    Attributes:
        changed: guards the state of the courier and of its work, which several threads use.
        closed: True after :meth:`close`.
        refused: True after an error for good: no more copies are made.
        at_work: True during a turn.
        paused: True while being fenced off is no error.
        not_before_s: time before which no copy should begin: the pace, or a pause after a failure.
    """

    def __init__(
        self,
        place: CopyPlace,
        clock: Clock,
        post: Callable[[EverstepError], None],
        *,
        retry_s: float | None = None,
    ) -> None:
        self.place = place
        self.clock = clock
        self.changed = Condition()
        self.closed = False
        self.refused = False
        self.at_work = False
        self.paused = False
        self.not_before_s = clock.monotonic_s()
        self.stats = CopyStats()
        self.post = post
        self._retry_s = retry_s
        self._down = False
        self._due_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def due(self) -> bool:
        """True if a turn was requested that has not begun, even if it must wait for its time."""
        return self._due_s is not None

    @property
    def over(self) -> bool:
        """True if no more copies are made."""
        return self.closed or self.refused

    def start(self, work: CopyWork, name: str) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wake(self, at_s: float | None = None) -> None:
        """Request a turn: there is something new to copy.

        Args:
            at_s: earliest time; None: now.
        """
        with self.changed:
            self.paused = False
            self.look_again(self.clock.monotonic_s() if at_s is None else at_s)

    def look_again(self, at_s: float) -> None:
        """Request a turn at a time, unless an earlier one is due."""
        with self.changed:
            if not self.over:
                self._due_s = at_s if self._due_s is None else min(at_s, self._due_s)
                self.changed.notify_all()

    def pause(self) -> None:
        """Expect that the attached process itself opens another timeline.

        Being fenced off is no error then, until the next :meth:`wake` shows that it did not.
        """
        with self.changed:
            self.paused = True

    def succeeded(self, pace_s: float) -> None:
        """Note that a copy succeeded: the next failure is another outage.

        Args:
            pace_s: minimum seconds until the next copy.
        """
        self._down = False
        self.not_before_s = self.clock.monotonic_s() + pace_s

    def take_turn(self, work: CopyWork) -> None:
        """Take a turn in this thread, and handle its failure."""
        with self.changed:
            # One step: a courier is busy because a turn is due, or because it is at work.
            self._due_s = None
            self.at_work = True
        try:
            work.turn()
        except (FencedError, ForeignDirectoryError, InfeasibleError) as error:
            self.fail(error, for_good=True)
        except EverstepError as error:
            self.fail(error)
        except Exception as error:
            # Must not end this thread: all later copies would be missing without a report.
            url = self.place.url
            internal = EverstepError(f"internal error while copying to {url}: {error!r}")
            internal.__cause__ = error
            self.fail(internal)
        finally:
            # Also after errors: the other courier of this place may use the objects left over.
            self.place.rate.settled(self)
            with self.changed:
                self.at_work = False

    def fail(self, error: EverstepError, *, for_good: bool = False) -> None:
        """Count and report a failed turn.

        Args:
            for_good: True: make no more copies.
        """
        with self.changed:
            # Fenced off by the attached process itself, which opens a new timeline: no error.
            expected = self.paused and isinstance(error, FencedError)
            self.refused = self.refused or (for_good and not expected)
            if self.closed or expected:
                _log.info("not copied: %s", error)
                return
            self.stats.failed += 1
            reported = self._down and not for_good
            if self._retry_s is not None:
                self._down = True
                self.not_before_s = self.clock.monotonic_s() + self._retry_s
                self.look_again(self.not_before_s)
        # One report per outage; later attempts only go to the keeper's log file.
        if reported:
            _log.warning("%s", error)
        else:
            self.post(error)

    def close(self) -> None:
        """Stop. A copy in progress is abandoned; the courier of the next timeline continues it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        # Ends the waiting of operations that are being retried.
        self.place.tier.close()
        if self._thread is not None:
            # With a timeout: a transfer in progress cannot be cancelled.
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self, work: CopyWork) -> None:
        while self._wait_for_turn(work):
            self.take_turn(work)

    def _wait_for_turn(self, work: CopyWork) -> bool:
        """Wait until a turn is due; return False if the thread must end."""
        with self.changed:
            while not self.over:
                now_s = self.clock.monotonic_s()
                if self._due_s is not None and self._due_s <= now_s:
                    return True
                waits_s = [None if self._due_s is None else self._due_s - now_s, work.waiting()]
                self.changed.wait(min((s for s in waits_s if s is not None), default=None))
            return False
