"""Ends training in order when a signal announces that the job will be killed.

Schedulers announce the end of a job by a signal, and kill the job some time later. With
``Checkpointer(preempt=...)`` the signal is recorded. At the next step mark a last base is taken and
waited for within the remaining time. Then ``ckpt.preempted`` is true, and the loop is expected to
end as after its last step.

``preempted`` is a property and not an exception: an exception would pass through ``except`` clauses
and frameworks that take it for a failure, and the loop could not run its usual final work (a last
evaluation, ``close()``).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
import torch.distributed

from everstep.config.options import Preemption
from everstep.errors import DeadlineError
from everstep.seams import Clock
from everstep.seams.processes.signals import SignalWatch

_log = logging.getLogger("everstep")


class PreemptionHandler:
    """Watch for a preemption signal in one process, and take the last base.

    Args:
        wanted: signals and grace time; None watches no signals, and :attr:`preempted` stays False.
        any_rank: collective call that returns True on all ranks if any rank passes True. All ranks
            call it at the same steps. None with a single rank.

    Attributes:
        preempted: True once the last base was taken; the loop should end.

    Raises:
        OptionError: The object is not made in the main thread.
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
        self._agreed_at: int | None = None
        self._is_last = False
        self._watch: SignalWatch | None = None
        self._restore_signals: Callable[[], object] = lambda: None
        if wanted is not None:
            self._watch = SignalWatch(wanted.signals, clock, grace_s=wanted.grace_s)

    def install(self) -> None:
        """Install the signal handlers."""
        if self._watch is not None:
            self._watch.install()
            # Also for a Checkpointer that is dropped without close(): its handlers would swallow
            # the signals.
            self._restore_signals = weakref.finalize(self, self._watch.close)

    def agree(self, step: int) -> None:
        """Agree with the other ranks whether this step is the last one.

        Must be called before anything at the end of the step can fail. A rank that skipped this
        collective call would answer it with the next collective call of its training.
        """
        if self._watch is None or self._any_rank is None or self._is_last:
            return
        assert self._wanted is not None
        self._agreed_at = step
        if step % self._wanted.agree_steps == 0:
            self._is_last = self._any_rank(self._watch.came is not None)

    def step_ended(self, step: int, save_last: Callable[[float], None]) -> None:
        """Take the last base if a signal has arrived.

        Args:
            save_last: function that takes a base of this step, and waits for it for the given
                number of seconds.

        Raises:
            EverstepError: ``save_last`` has failed. :attr:`preempted` is True nevertheless.
        """
        if self._watch is None:
            return  # the usual case
        if self._agreed_at != step:
            self.agree(step)
        self._agreed_at = None
        if self.preempted:
            return
        if not (self._is_last or (self._any_rank is None and self._watch.came is not None)):
            return
        assert self._wanted is not None
        now_s = self._clock.monotonic_s()
        came = self._watch.came
        name = "a signal of another rank"
        # The time of another rank's signal is not known here: the grace period counts from now.
        since_s = 0.0
        if came is not None:
            name = came.name
            since_s = now_s - came.at_s
        # Before the base is taken: a second signal must be able to end a process whose storage
        # hangs.
        self._watch.pass_on()
        self.preempted = True  # even if the base fails
        _log.warning("%s: step %d is the last one; taking its base now", name, step)
        try:
            save_last(max(0.0, self._wanted.grace_s - since_s))
        except DeadlineError as error:  # close() waits longer, and raises
            _log.error(
                "the base of step %d is not durable %g s after %s: %s",
                step,
                self._wanted.grace_s,
                name,
                error,
            )

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self._restore_signals()


def rank_vote() -> Callable[[bool], bool] | None:
    """Return the collective call by which the ranks of this job agree; None for a single rank."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return any_rank if distributed.get_world_size() > 1 else None
    return None


def any_rank(mine: bool) -> bool:
    """Return True if any rank passes True. A collective call of the default process group."""
    backend = str(torch.distributed.get_backend())
    # NCCL reduces only memory of devices. Mixed backends are named as in "cpu:gloo,cuda:nccl".
    device = "cpu" if "gloo" in backend or not torch.cuda.is_available() else "cuda"
    flag = torch.tensor([int(mine)], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
