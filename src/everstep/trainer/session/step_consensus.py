"""What all ranks of a job do at the end of the same step, though each knows something else.

Which steps take a base by a number (``every=100``) each rank knows by itself. Others they agree on.
A log begins at a base: the first step of a start takes one, and later one rank alone may need it
(its memory is half full, it could not record an update). Whether a time is over, and which interval
wastes least, ranks would answer by clocks and figures of their own. What one of them finds in the
gradients that it records ends the step of all. So at one step of :data:`ASK_EVERY`, or at more
where bases are nearer to each other or gradients are watched, each says what it knows, in an
exchange of a few bytes, and all make the same of it. Which step is the next to ask at follows from
what was said and from nothing else: whatever fails on one rank, they ask at the same steps.

A log that leads no further (the state consists of something else, an update could not be recorded)
cannot wait for that: all since would be lost with a rank. At the end of each other step a rank with
a log begins to ask whether any rank needs a base, waits for nobody, and has the answer at the end
of the next one: where it is yes, they all ask each other then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from everstep.config.options import Options
from everstep.errors import DeadlineError, NonFiniteError
from everstep.state.image import State
from everstep.state.survey.survey import Survey
from everstep.trainer.job.job import Job
from everstep.trainer.log.nonfinite import nonfinite_error
from everstep.trainer.multistep.multistep_ranks import RankMultistep
from everstep.trainer.session.cadence import ASK_EVERY
from everstep.trainer.session.components import Components

__all__ = ["ASK_EVERY", "StepConsensus"]

_NO_OTHERS: AbstractContextManager[None] = contextlib.nullcontext()


class StepConsensus:
    """Says what is done at the end of a step; to all ranks the same.

    Args:
        job: None: this process is alone, and goes by what it sees itself.
    """

    def __init__(self, job: Job | None, options: Options, parts: Components, state: State) -> None:
        self._state = state
        self._asked_step = -1
        self._parted = False
        self._job = job
        self._cadence = parts.cadence
        self._channel = parts.channel
        self._recorder = parts.recorder
        self._replica_bases = parts.replica_bases
        over_steps = parts.multistep
        self._multistep = over_steps if isinstance(over_steps, RankMultistep) else None
        self._timed = options.every.auto or options.every.seconds is not None
        # With watch= all raise at the same step; with lag_steps= none is ahead of what is durable.
        each = options.log.watch or options.log.lag_steps is not None
        self._asks_each_step = self._recorder is not None and each
        self._next_step: int | None = None  # None: the ranks have not begun together yet
        self._answered = -1  # the last step at the end of which this rank has said its part
        self._any_needs: Callable[[], bool] | None = None  # what was begun at the end of that
        self._found: deque[NonFiniteError] = deque()
        if job is not None and self._recorder is not None:
            self._recorder.nonfinite.tell = self._found.append

    def began(self) -> None:
        """All ranks go on from the same step: they ask each other at the end of the next one."""
        self._next_step = 0
        self._answered = -1
        self._any_needs = None
        self._asked_step = -1
        self._found.clear()

    def answering(self, step: int) -> AbstractContextManager[None]:
        """Around the end of ``step``: an error on this rank keeps no other from asking."""
        return _NO_OTHERS if self._job is None else self._answering(step)

    @contextlib.contextmanager
    def _answering(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception:
            with contextlib.suppress(DeadlineError):  # of the two, what has failed here says more
                self._answer(step)
            raise

    def ask(self, step: int) -> tuple[bool, bool]:
        """Whether a log needs a base of ``step``, and whether one is due; every rank asks at the
        end of each of its steps.

        Raises:
            NonFiniteError: a rank has seen gradients that are not finite; by the policy.
            DeadlineError: another rank does not take this step.
        """
        if self._job is None:
            return self._needed, self._cadence.due(step)
        needed, due = self._answer(step)
        if self._recorder is not None and self._recorder.nonfinite.first is not None:
            self._channel.check()  # before a base is taken of it
        return needed, due

    def shared(self, survey: Survey | None) -> Survey | None:
        """What was surveyed at this step mark, by what ranks have agreed on since."""
        parted = self._parted
        self._parted = False
        return self._state.survey() if parted and survey is not None else survey

    def left(self) -> None:
        """Training ends: what was found within a step that is not over is said on this rank."""
        while self._found:
            self._channel.post(self._found.popleft())

    @property
    def _needed(self) -> bool:
        """By this rank, for its log."""
        lost = self._replica_bases is not None and self._replica_bases.lost is not None
        return self._recorder is not None and (self._recorder.base_due is not None or lost)

    @property
    def _cannot_wait(self) -> bool:
        """Not only that its memory is half full: of that the next exchange is soon enough."""
        return self._recorder is not None and self._recorder.needs_capture

    def _answer(self, step: int) -> tuple[bool, bool]:
        """:meth:`ask`, of several ranks that have begun together."""
        if self._job is None or self._next_step is None:
            return False, False
        first = step != self._asked_step  # not twice, whatever fails here
        self._asked_step = step
        needed, due = self._agree(step)
        due = due if self._timed else self._cadence.due(step)
        if first and (needed or due):
            self._parted = self._job.agree_on_own_parameters(step)
        if due and self._multistep is not None:
            self._multistep.ask(step)
        return needed, due

    def _agree(self, step: int) -> tuple[bool, bool]:
        """:meth:`ask`, of several ranks; none is needed or due at steps between two exchanges."""
        asks = self._timed or self._recorder is not None
        if not asks or self._job is None or self._next_step is None or step <= self._answered:
            return False, False
        self._answered = step  # not twice at this one, whatever becomes of it
        heard = self._any_needs
        self._any_needs = None
        needed_before = heard is not None and heard()
        if step < self._next_step and not needed_before:
            if self._recorder is not None:
                self._any_needs = self._job.begin_any(f"end step {step}", self._cannot_wait)
            return False, False
        self._next_step = step + 1
        bad = self._found.popleft() if self._found else None
        self._found.clear()
        mine = {
            "needed": self._needed,
            "cadence": self._cadence.says(),
            "bad": None if bad is None else (bad.step, bad.message),
        }
        said = self._job.exchange(f"end step {step}", mine)
        due, again = self._cadence.agreed([one["cadence"] for one in said], step)
        self._next_step = step + (1 if self._asks_each_step else again)
        self._report(said)
        return any(one["needed"] for one in said), due

    def _report(self, said: Sequence[Mapping[str, Any]]) -> None:
        """The first that any rank has found, as an error of this one, too."""
        bad = [(*one["bad"], rank) for rank, one in enumerate(said) if one["bad"] is not None]
        if bad and self._recorder is not None:
            step, what, rank = min(bad)
            self._recorder.nonfinite.report(nonfinite_error(what, step, rank), first=True)
