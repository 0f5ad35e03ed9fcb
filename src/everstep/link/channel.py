"""Errors and deadlines of work in the background: one channel, nothing is swallowed.

Work reports its progress and, at last, that it has ended or failed. The training thread
asks at every call; a piece of work that has made no progress for its stated time is
reported as hung, once, even if it never returns.
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

from everstep.config.options import FailurePolicy
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    NonFiniteError,
    StorageError,
)
from everstep.seams import Clock
from everstep.seams.progress import ProgressSink

__all__ = ["BackgroundChannel", "WatchedProgress", "Work"]

_log = logging.getLogger("everstep")
_T = TypeVar("_T")
_NOTHING_TO_TELL: AbstractContextManager[None] = contextlib.nullcontext()


@dataclass(slots=True, eq=False)
class Work:
    """A piece of background work, and when it last got anywhere."""

    what: str
    step: int
    last_progress_s: float
    reported: bool = False


class BackgroundChannel:
    """Collects what goes wrong behind the training thread.

    Args:
        policy: what to do with an error: raise it at the next call, warn, or call a function.
        clock: in whose ``ticking()`` the work is done.
        progress_timeout_s: work without progress for so long counts as hung; a time in which all of
            this process stood still does not.
    """

    def __init__(self, policy: FailurePolicy, clock: Clock, *, progress_timeout_s: float) -> None:
        self._policy = policy
        self._clock = clock
        self._progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._errors: list[EverstepError] = []
        self._notices: list[EverstepError] = []
        self._under_way: list[Work] = []
        self._timeline: int | None = None  # that this process has opened last
        self._taking_over = False

    def begin(self, what: str, step: int) -> Work:
        """Registers a piece of work."""
        work = Work(what, step, self._clock.running_s())
        with self._lock:
            self._under_way.append(work)
        return work

    def progressed(self, work: Work) -> None:
        """The work got somewhere: its deadline starts again."""
        work.last_progress_s = self._clock.running_s()

    def moved(self) -> None:
        """The storage has got somewhere: so has all work that is under way, which is done in order.
        In any thread."""
        now_s = self._clock.running_s()
        with self._lock:
            for work in self._under_way:
                work.last_progress_s = now_s

    def end(self, work: Work) -> None:
        """The work is over, well or badly."""
        with self._lock:
            if work in self._under_way:
                self._under_way.remove(work)

    def hung(self) -> bool:
        """Whether any work is overdue, reported or not."""
        now_s = self._clock.running_s()
        with self._lock:
            return any(
                now_s - work.last_progress_s > self._progress_timeout_s for work in self._under_way
            )

    def post(
        self, error: EverstepError, *, first: bool = False, timeline: int | None = None
    ) -> None:
        """Reports an error from any thread; the training thread hears of it at its next call.

        Args:
            first: before what was reported already.
            timeline: that was served when it came up; None: the one that is.
        """
        with self._lock:
            over = timeline is not None and timeline != self._timeline is not None
            if not (over and isinstance(error, FencedError)):
                self._errors.insert(0 if first else len(self._errors), error)
                return
        _log_over(error)

    def tell(self, notice: EverstepError) -> None:
        """Tells of what the user should know though nothing has failed: it is never raised. The
        training thread hears of it at its next call."""
        with self._lock:
            self._notices.append(notice)

    @contextlib.contextmanager
    def going_back(self, step: int | None) -> Iterator[None]:
        """Around what is waited for before a resume: that another process has taken the run over
        does not keep this one from taking it back. If it does not, that is raised at its next call.

        Args:
            step: to which training goes back, if it is a step: gradients that were not finite since
                are only logged, for the steps that consumed them are undone.
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
        """This process has opened ``timeline``: that it was fenced off before is only logged."""
        with self._lock:
            self._timeline = timeline
        for error in self._withdrawn(lambda error: isinstance(error, FencedError)):
            _log_over(error)

    def _withdrawn(self, which: Callable[[EverstepError], bool]) -> list[EverstepError]:
        with self._lock:
            gone = [error for error in self._errors if which(error)]
            self._errors = [error for error in self._errors if error not in gone]
        return gone

    @property
    def _has_news(self) -> bool:
        """Whether :meth:`check` may have anything to do; seen without the lock."""
        return bool(self._notices or self._errors or self._under_way)

    def check(self) -> None:
        """Deals with what was reported, by the policy. Called from the training thread only.

        Raises:
            EverstepError: the oldest one, with the policy ``"raise"``; the others stay.
        """
        if not self._has_news:
            return  # mostly
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
        """What storage has failed at is raised at the end of the block: a step is over whatever
        could not be written behind it, and a log without it would lead no further.

        Raises:
            EverstepError: as :meth:`check`; of anything else at once: what hangs would be waited
                for again, and a state that is not finite be taken for a base.
        """
        return self._told_last() if self._has_news else _NOTHING_TO_TELL

    @contextlib.contextmanager
    def _told_last(self) -> Iterator[None]:
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
            self._put_back(failed)
            raise
        self._put_back(failed[1:])
        if failed:
            raise failed[0]

    def _put_back(self, failed: list[EverstepError]) -> None:
        """They are the oldest."""
        with self._lock:
            self._errors[:0] = failed

    def _next(self) -> EverstepError | None:
        now_s = self._clock.running_s()
        with self._lock:
            for work in self._under_way:
                if now_s - work.last_progress_s > self._progress_timeout_s and not work.reported:
                    work.reported = True
                    self._errors.append(
                        DeadlineError(
                            f"{work.what} has made no progress for "
                            f"{now_s - work.last_progress_s:.0f} s: the storage hangs",
                            step=work.step,
                            hint="look at the disk or network file system (dmesg, df, iostat)",
                        )
                    )
            for place, error in enumerate(self._errors):
                if not (self._taking_over and isinstance(error, FencedError)):
                    return self._errors.pop(place)
            return None


class WatchedProgress:
    """Progress of one base: feeds the deadline of the work and whatever is shown."""

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
    _log.info("over, as this process has taken the run over since: %s", error)
