"""Errors and deadlines of background work: one channel, in which no error is lost.

Background work reports its progress and its end or failure. The training thread checks the channel
at every call. Work without progress for too long is reported as hung, once, even if it never
returns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from everstep.config import FailurePolicy
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    NonFiniteError,
    StorageError,
)
from everstep.events import EventStream
from everstep.seams import Clock
from everstep.seams.progress import ProgressSink

_log = logging.getLogger("everstep")
_T = TypeVar("_T")
_NO_ERRORS: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(slots=True, eq=False)
class Work:
    """A piece of background work, and the time of its last progress."""

    description: str
    step: int
    last_progress_s: float
    reported: bool = False


class BackgroundChannel:
    """Collects errors that occur outside of the training thread.

    Args:
        policy: how to report an error: raise it at the next call, warn, or call a function.
        clock: clock in whose ``ticking()`` the work is done.
        progress_timeout_s: seconds without progress after which work counts as hung. Time during
            which the whole process stood still does not count.
        events: gets each error and notice when it is posted; None: nobody listens.

    Attributes:
        progress_timeout_s: as given.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        clock: Clock,
        *,
        progress_timeout_s: float,
        events: EventStream | None = None,
    ) -> None:
        self._policy = policy
        self._events = events
        self._clock = clock
        self.progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._errors: list[EverstepError] = []
        self._notices: list[EverstepError] = []
        self._under_way: list[Work] = []
        self._timeline: int | None = None  # opened last by this process
        self._taking_over = False

    def begin(self, description: str, step: int) -> Work:
        """Register a piece of work."""
        work = Work(description, step, self._clock.running_s())
        with self._lock:
            self._under_way.append(work)
        return work

    def progressed(self, work: Work) -> None:
        """Restart the deadline of a piece of work."""
        work.last_progress_s = self._clock.running_s()

    def storage_progressed(self) -> None:
        """Restart the deadlines of all work: a storage operation has completed; from any thread.

        Work is done in order, so progress of one piece is progress of all that wait for it.
        """
        now_s = self._clock.running_s()
        with self._lock:
            for work in self._under_way:
                work.last_progress_s = now_s

    def end(self, work: Work) -> None:
        """Unregister a piece of work that has ended, with or without success."""
        with self._lock:
            # Harmless when repeated: several paths of a failed save may end the same work.
            if work in self._under_way:
                self._under_way.remove(work)

    def hung(self) -> bool:
        """Return True if any work is overdue, whether reported or not."""
        # Time in which the process stood still (suspend, SIGSTOP) must not count as a hang.
        now_s = self._clock.running_s()
        with self._lock:
            return any(
                now_s - work.last_progress_s > self.progress_timeout_s for work in self._under_way
            )

    def post(
        self, error: EverstepError, *, first: bool = False, timeline: int | None = None
    ) -> None:
        """Report an error, from any thread; the training thread sees it at its next call.

        Args:
            first: True to report it before errors posted earlier.
            timeline: timeline that was served when it occurred; None for the current one.
        """
        with self._lock:
            # That an older timeline was fenced off is no error any more once this process has
            # opened a newer one.
            over = timeline is not None and timeline != self._timeline is not None
            if not (over and isinstance(error, FencedError)):
                self._errors.insert(0 if first else len(self._errors), error)
                posted = True
            else:
                posted = False
        if posted:
            self._emit("failure", error)
        else:
            _log_over(error)

    def post_notice(self, notice: EverstepError) -> None:
        """Report a condition that is no failure, from any thread: it is never raised."""
        with self._lock:
            self._notices.append(notice)
        self._emit("notice", notice)

    def _emit(self, kind: str, error: EverstepError) -> None:
        if self._events is not None:
            words = {"error": type(error).__name__, "message": str(error)}
            self._events.emit(kind, error.step or 0, **words)

    @contextlib.contextmanager
    def going_back(self, step: int | None) -> Iterator[None]:
        """Suspend fencing errors around the waits before a resume.

        That another process has taken over the run must not keep this one from taking it back. If
        it does not take it back, the error is raised at the next call.

        Args:
            step: step that training returns to, if known. Non-finite gradients of later steps are
                only
                logged, as the steps that consumed them are undone.
        """
        if step is not None:
            for error in self._withdrawn(lambda error: _consumed_since(error, step)):
                _log.warning("undone by going back to step %d: %s", step, error)
        self._taking_over = True
        try:
            yield
        finally:
            self._taking_over = False

    def took_over(self, timeline: int) -> None:
        """Record that this process has opened ``timeline``: earlier fencing errors are only
        logged."""
        # Set before errors are withdrawn: one that is posted in between is dropped by post().
        with self._lock:
            self._timeline = timeline
        for error in self._withdrawn(lambda error: isinstance(error, FencedError)):
            _log_over(error)

    def _withdrawn(self, which: Callable[[EverstepError], bool]) -> list[EverstepError]:
        """Remove and return the errors that ``which`` selects."""
        with self._lock:
            withdrawn = [error for error in self._errors if which(error)]
            self._errors = [error for error in self._errors if error not in withdrawn]
        return withdrawn

    @property
    def has_errors(self) -> bool:
        """True if the next :meth:`check` has an error to report."""
        return bool(self._errors)

    @property
    def _has_news(self) -> bool:
        """True if :meth:`check` may have something to do."""
        # Without the lock, as each training step reads it; a miss is seen at the next call.
        return bool(self._notices or self._errors or self._under_way)

    def check(self) -> None:
        """Handle the errors posted so far, by the policy. Call from the training thread only.

        Raises:
            EverstepError: the oldest error, with the policy ``"raise"``; the others stay queued.
        """
        if not self._has_news:
            return
        # Taken under the lock, but reported outside of it: a policy function may call into the
        # channel.
        with self._lock:
            notices = self._notices
            self._notices = []
        for notice in notices:
            if callable(self._policy):
                self._policy(notice)
            else:
                _log.warning("%s", notice)
                warnings.warn(f"everstep: {notice}", RuntimeWarning, stacklevel=3)
        while (error := self._next()) is not None:
            if callable(self._policy):
                self._policy(error)
            elif self._policy == "warn":
                _log.warning("a background task failed: %s", error)
                warnings.warn(f"everstep: {error}", RuntimeWarning, stacklevel=3)
            else:
                raise error

    def raising_storage_errors_last(self) -> AbstractContextManager[None]:
        """Return a context that raises storage errors only at the end of its block.

        A step is complete even if something could not be written after it; a log without the step
        would
        reach no further.

        Raises:
            EverstepError: any other error, at once, as in :meth:`check`: work that hangs would be
                waited
                for again, and a state that is not finite would become a base.
        """
        # The shared null context saves a generator in each step without news.
        return self._deferring() if self._has_news else _NO_ERRORS

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        failed: list[EverstepError] = []
        try:
            while True:
                try:
                    self.check()
                    break
                except StorageError as error:
                    failed.append(error)
            yield
        except BaseException:
            # Errors that check() took out of the queue must not be lost: the next check raises
            # them.
            self._put_back(failed)
            raise
        # Only one can be raised now; later checks raise the others.
        self._put_back(failed[1:])
        if failed:
            raise failed[0]

    def _put_back(self, failed: list[EverstepError]) -> None:
        """Put errors back in front of the queue: they are the oldest."""
        with self._lock:
            self._errors[:0] = failed

    def _next(self) -> EverstepError | None:
        """Return the next error to report; check the deadlines of all work first."""
        hung, error = self._oldest()
        for deadline in hung:
            self._emit("failure", deadline)
        return error

    def _oldest(self) -> tuple[list[EverstepError], EverstepError | None]:
        """Return work that is newly found to hang, and the next error to report."""
        now_s = self._clock.running_s()
        hung: list[EverstepError] = []
        with self._lock:
            for work in self._under_way:
                # Reported once: the work may come back, and each check would repeat the error until
                # then.
                if now_s - work.last_progress_s > self.progress_timeout_s and not work.reported:
                    work.reported = True
                    hung.append(
                        DeadlineError(
                            f"{work.description} has made no progress for "
                            f"{now_s - work.last_progress_s:.0f} s: the storage hangs",
                            step=work.step,
                            hint="check the disk or network file system (dmesg, df, iostat)",
                        )
                    )
            self._errors += hung
            for place, error in enumerate(self._errors):
                # Fencing errors stay queued during a takeover; took_over() withdraws them if it
                # succeeds.
                if not (self._taking_over and isinstance(error, FencedError)):
                    return hung, self._errors.pop(place)
            return hung, None


class WatchedProgress:
    """Progress of one base: restarts the deadline of its work, and passes the amount on for
    display."""

    def __init__(self, channel: BackgroundChannel, work: Work, shown: ProgressSink) -> None:
        self._channel = channel
        self._work = work
        self._shown = shown

    def advance(self, amount: int) -> None:
        self._channel.progressed(self._work)
        self._shown.advance(amount)


def _consumed_since(error: EverstepError, step: int) -> bool:
    return isinstance(error, NonFiniteError) and error.step is not None and error.step > step


def _log_over(error: EverstepError) -> None:
    _log.info("ignored, as this process has taken the run over since: %s", error)
