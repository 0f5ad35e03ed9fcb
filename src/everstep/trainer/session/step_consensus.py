"""Collective decisions at a step boundary.

With a fixed interval (``every=100``) each rank computes by itself at which steps to take a base. In
three cases the ranks have to agree:

- One rank's log may need a base: at the first step after a start, when its memory is half full, or
  when an update could not be recorded.
- Intervals in seconds and ``every="auto"`` depend on clocks and measurements, which differ between
  ranks.
- A rank that finds non-finite gradients ends the step on all ranks.

The ranks therefore exchange a few bytes at the end of some steps: at least every :data:`ASK_EVERY`
steps, more often if bases are closer to each other, and at every step if gradients are watched. All
of them compute the same decision from the same messages. The next step with an exchange follows
from these messages alone, so ranks exchange at the same steps no matter what fails on one of them.

A base that a log needs urgently (the state has another shape, or an update could not be recorded)
cannot wait for the next exchange: until then, a failure of the rank would lose the steps. At the
end of each step without an exchange, every rank with a log therefore starts a non-blocking vote
whether any rank needs a base. The result is available at the end of the next step. If it is yes,
all ranks make an exchange there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from everstep.errors import DeadlineError, NonFiniteError
from everstep.trainer.job import Job
from everstep.trainer.log import nonfinite_error
from everstep.trainer.session.components import Components

_SINGLE_RANK: AbstractContextManager[None] = contextlib.nullcontext()


class StepConsensus:
    """Decide at the end of each step whether a base is taken, identically on all ranks.

    Args:
        job: all ranks of the job; None if this process trains alone and decides by itself.
    """

    def __init__(self, job: Job | None, parts: Components) -> None:
        options = parts.options
        self._job = job
        self._channel = parts.channel
        self._cadence = parts.cadence
        self._participants = parts.participants
        self._refusals = parts.refusals
        self._nonfinite_check = parts.nonfinite
        self._timed = options.every.auto or options.every.seconds is not None
        # With watch= all ranks raise at the same step. With lag_steps= or a promise no rank may be
        # further ahead of what is safe than the others.
        each = options.log.watch or options.log.lag_steps is not None
        self._exchanges_each_step = (options.logs and each) or options.promise is not None
        self._exchanges = options.logs or self._timed or self._exchanges_each_step
        self._logs = options.logs
        # Of the next exchange; None until all ranks have started together.
        self._next_step: int | None = None
        self._voted_step = -1  # the last step at which this rank has taken part
        self._any_needs: Callable[[], bool] | None = None  # result of the non-blocking vote
        self._nonfinite: deque[NonFiniteError] = deque()
        if job is not None and parts.nonfinite is not None:
            parts.nonfinite.collect(self._nonfinite)

    def restarted(self) -> None:
        """Begin anew after all ranks have started at the same step."""
        self._next_step = 0
        self._voted_step = -1
        # A vote in flight is of no use any more. The group completes it before its next exchange.
        self._any_needs = None
        self._nonfinite.clear()

    def participating(self, step: int) -> AbstractContextManager[None]:
        """Return a context for the end of ``step`` in which an error does not skip the exchange.

        If the end of the step fails on this rank, it still takes part, as the others wait for it.
        """
        return _SINGLE_RANK if self._job is None else self._participating(step)

    @contextlib.contextmanager
    def _participating(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception:
            with contextlib.suppress(DeadlineError):  # the first error is the cause
                self._decide(step)
            raise

    def decide(self, step: int) -> tuple[bool, bool]:
        """Return whether a log needs a base of ``step``, and whether one is due by the interval.

        Every rank calls this at the end of each step.

        Raises:
            NonFiniteError: A rank has found non-finite gradients, and the policy is to raise.
            DeadlineError: Another rank does not reach this step in time.
        """
        if self._job is None:
            return self._needs_base, self._cadence.due(step)
        needed, due = self._decide(step)
        if self._nonfinite_check is not None and self._nonfinite_check.first is not None:
            # Raise before a base with non-finite values is taken.
            self._channel.check()
        return needed, due

    def flush_errors(self) -> None:
        """Report errors of the unfinished step on this rank only: there is no further exchange."""
        while self._nonfinite:
            self._channel.post(self._nonfinite.popleft())

    @property
    def _needs_base(self) -> bool:
        """Return True if a participant of this rank needs a base."""
        return any(one.needs_base for one in self._participants)

    @property
    def _needs_base_now(self) -> bool:
        """Return True if the log cannot be continued without a base.

        A log whose memory is half full can wait for the next exchange.
        """
        return any(one.needs_capture for one in self._participants)

    def _decide(self, step: int) -> tuple[bool, bool]:
        """Implement :meth:`decide` for several ranks that have started together."""
        if self._job is None or self._next_step is None:
            return False, False
        needed, due = self._exchange(step)
        due = due if self._timed else self._cadence.due(step)
        # Here, not where the base is taken: a rank on which this step fails does not come there.
        for participant in self._participants:
            if needed:
                participant.base_is_needed(step)
            elif due:
                participant.base_is_due(step)
        return needed, due

    def _exchange(self, step: int) -> tuple[bool, bool]:
        """Exchange messages if ``step`` is a step for it; return (False, False) otherwise."""
        if not self._exchanges or self._job is None or self._next_step is None:
            return False, False
        # The end of the step has failed after its exchange, and _participating() calls a second
        # time.
        if step <= self._voted_step:
            return False, False
        # Before anything can fail: a rank that takes part twice would be one message ahead.
        self._voted_step = step
        vote = self._any_needs
        self._any_needs = None
        # Waited for even before an exchange: gloo matches collective calls by their order.
        needed_before = vote is not None and vote()
        if step < self._next_step and not needed_before:
            if self._logs:
                self._any_needs = self._job.begin_any(f"end step {step}", self._needs_base_now)
            return False, False
        # If the exchange fails below, all ranks make another one at the next step.
        self._next_step = step + 1
        bad = self._nonfinite.popleft() if self._nonfinite else None
        self._nonfinite.clear()
        mine = {
            "needed": self._needs_base,
            "cadence": self._cadence.report(),
            "bad": None if bad is None else (bad.step, bad.message),
            "log_ended": self._refusals.why,
        }
        votes = self._job.exchange(f"end step {step}", mine)
        due, again = self._cadence.decide([vote["cadence"] for vote in votes], step)
        self._next_step = step + (1 if self._exchanges_each_step else again)
        self._report_nonfinite(votes)
        self._end_log(votes, step)
        return any(vote["needed"] for vote in votes), due

    def _end_log(self, votes: Sequence[Mapping[str, Any]], step: int) -> None:
        """End the log on all ranks if one has given it up: without that one's it leads nowhere."""
        if why := next((vote["log_ended"] for vote in votes if vote["log_ended"]), ""):
            self._refusals.end(why, step)

    def _report_nonfinite(self, votes: Sequence[Mapping[str, Any]]) -> None:
        """Report the first non-finite gradient that any rank has found, on every rank."""
        bad = [(*vote["bad"], rank) for rank, vote in enumerate(votes) if vote["bad"] is not None]
        if bad and self._nonfinite_check is not None:
            step, message, rank = min(bad)
            self._nonfinite_check.report(nonfinite_error(message, step, rank), first=True)
