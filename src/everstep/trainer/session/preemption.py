"""An orderly end when the machine is taken away: a last base, then the loop is told to leave.

Schedulers announce the end of a job by a signal and kill it some time later. With
``Checkpointer(preempt=...)`` that signal is noted; at the next step mark a last base is taken and
waited for, within what is left of the announced time; from then on ``ckpt.preempted`` is true, and
the loop ends as it does on its last step. It is a property and not an exception: an exception
would pass through ``except`` clauses and frameworks that take it for a failure, and what a loop
does on its way out (a last evaluation, ``close()``) is its own affair.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
import torch.distributed

from everstep.config.options import Preemption
from everstep.errors import DeadlineError
from everstep.seams.clock import Clock
from everstep.seams.processes.signals import SignalWatch

__all__ = ["PreemptionHandler", "any_rank", "rank_vote"]

_log = logging.getLogger("everstep")


class PreemptionHandler:
    """Ends training in order; of one process.

    Args:
        wanted: None: nothing is watched, and :attr:`preempted` stays false.
        any_rank: of a job of several ranks: whether any rank passes true; all of them call it at
            the same steps, and get the same answer. None: there is one rank.

    Attributes:
        preempted: the last base has been taken; the loop should end.

    Raises:
        OptionError: elsewhere than in the main thread.
    """

    def __init__(
        self,
        wanted: Preemption | None,
        clock: Clock,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> None:
        self.preempted = False
        self._wanted = wanted
        self._clock = clock
        self._any_rank = any_rank
        self._asked_at: int | None = None
        self._is_last = False
        self._watch: SignalWatch | None = None
        self._let_go: Callable[[], object] = lambda: None
        if wanted is not None:
            self._watch = SignalWatch(wanted.signals, clock, grace_s=wanted.grace_s)

    def install(self) -> None:
        """From now on."""
        if self._watch is not None:
            self._watch.install()
            # Of a Checkpointer that is dropped without close(), too: nobody else would act.
            self._let_go = weakref.finalize(self, self._watch.close)

    def ask(self, step: int) -> None:
        """Ranks find out together whether this step is the last one.

        To be called before anything in a step's end can fail: a rank that left this out, and
        whose program goes on, would answer with the next collective call of its training.
        """
        if self._watch is None or self._any_rank is None or self._is_last:
            return
        assert self._wanted is not None
        self._asked_at = step
        if step % self._wanted.agree_steps == 0:
            self._is_last = self._any_rank(self._watch.came is not None)

    def marked(self, step: int, save_last: Callable[[float], None]) -> None:
        """A step is over; the one place where training ends in order.

        Args:
            save_last: takes a base of this step, and waits so many seconds until it is durable.

        Raises:
            EverstepError: what ``save_last`` raises; :attr:`preempted` is true all the same.
        """
        if self._watch is None:
            return  # mostly
        if self._asked_at != step:
            self.ask(step)
        self._asked_at = None
        if self.preempted:
            return
        if not (self._is_last or (self._any_rank is None and self._watch.came is not None)):
            return
        assert self._wanted is not None
        now_s = self._clock.monotonic_s()
        came = self._watch.came
        name = "a signal of another rank"
        since_s = 0.0
        if came is not None:
            name = came.name
            since_s = now_s - came.at_s
        self._watch.pass_on()
        self.preempted = True  # whatever becomes of the base
        _log.warning("%s: step %d is the last; its base is taken now", name, step)
        try:
            save_last(max(0.0, self._wanted.grace_s - since_s))
        except DeadlineError as error:  # close() waits on, and raises it if it does not come
            _log.error(
                "the base of step %d is not durable %g s after %s: %s",
                step,
                self._wanted.grace_s,
                name,
                error,
            )

    def close(self) -> None:
        """Signals do what they did before."""
        self._let_go()


def rank_vote() -> Callable[[bool], bool] | None:
    """How the ranks of this job agree; None of one rank."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return any_rank if distributed.get_world_size() > 1 else None
    return None


def any_rank(mine: bool) -> bool:
    """Whether any rank of the job passes true; a collective call of the default group."""
    backend = str(torch.distributed.get_backend())
    device = "cpu" if "gloo" in backend or not torch.cuda.is_available() else "cuda"
    flag = torch.tensor([int(mine)], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
