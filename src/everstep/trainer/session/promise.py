"""Keeps a promise (``lose_at_most=``): training waits at the end of a step until it is kept.

A participant among others: it learns from the keeper which step is safe from the failure, and
blocks the training thread while more would be lost. The wait is counted as ``stall_s["promise"]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from everstep.errors import DeadlineError
from everstep.link import Save
from everstep.seams.filesystem import StallTimer
from everstep.seams.processes import Condition
from everstep.tiers.options import PEER
from everstep.trainer.attach.keeper import Service
from everstep.trainer.attach.keepers import Keepers
from everstep.trainer.base import Saver
from everstep.trainer.job import RunPlace
from everstep.trainer.log import Recorder
from everstep.trainer.participant import Participant, RestoredState, TrainingContext
from everstep.trainer.session.recoverable import RecoverableSteps

_POLL_S = 0.005


def safe_steps(
    context: TrainingContext,
    keepers: Keepers,
    saver: Saver,
    recorder: Recorder | None,
    participants: Sequence[Participant],
    place: RunPlace,
) -> tuple[RecoverableSteps, list[Participant]]:
    """Return what tracks the recoverable steps, and what keeps a promise about them: one
    participant, or none without a promise.

    Args:
        place: has the places for copies.
    """
    names = [tier.where for tier in place.tiers]
    exact = [tier.where for tier in place.tiers if tier.log == "whole"]
    if place.peers is not None and place.peers.log == "whole":
        exact.append(PEER)
    recoverable = RecoverableSteps(keepers, participants, recorder, names, exact)
    if context.options.promise is None:
        return recoverable, []
    return recoverable, [PromiseGate(context, keepers, saver, recoverable)]


class PromiseGate(Participant):
    """Block the end of a step while a failure would cost more than was promised.

    Args:
        recoverable: steps that survive this process, or its machine.
    """

    def __init__(
        self,
        context: TrainingContext,
        keepers: Keepers,
        saver: Saver,
        recoverable: RecoverableSteps,
    ) -> None:
        assert context.options.promise is not None
        self._context = context
        self._promise = context.options.promise
        self._keepers = keepers
        self._saver = saver
        self._safe_step: Callable[[], int | None] = {
            "keeper": lambda: recoverable.step,
            "disk": lambda: recoverable.durable_step,
        }.get(self._promise.holder, lambda: recoverable.step_in(self._promise.places))
        self._changed = Condition()
        self._lacks_base = self._is_elsewhere
        self._begins_anew = True  # nothing is lost that was trained by an earlier process
        self._failed_at: int | None = None
        self._begun_s: float | None = None
        self._trained_s = 0.0
        self._ends = deque([(0, 0.0)])  # steps, and the training time at their end

    @property
    def _is_elsewhere(self) -> bool:
        return self._promise.holder in ("peer", "store")

    def start(self, service: Service) -> None:
        """Begin with a keeper, which holds nothing of this training."""
        self._lacks_base = self._is_elsewhere or self._trained_s > 0.0

    def restored(self, restored: RestoredState) -> None:
        """Begin at a restored state."""
        self._begins_anew = restored.resumed.base is None
        self._begun_s = None
        self._trained_s = 0.0
        self._ends = deque([(restored.resumed.step, 0.0)])
        # A base that was restored from memory, say, is in no place that survives the failure.
        self._lacks_base = self._is_elsewhere or self._safe() < 0

    @property
    def needs_base(self) -> bool:
        """True if no base is on its way that could become safe: a step would wait in vain."""
        return self._lacks_base

    def base_taken(self, save: Save) -> None:
        """Wait for this base, too."""
        self._lacks_base = False
        for done in (save.staged, save.durable):
            done.add_done_callback(lambda _: self._wake())

    def log_on_disk(self, number: int) -> None:
        """Wake up: more of the log is on disk. Any thread."""
        self._wake()

    def base_everywhere(self, step: int) -> None:
        """Wake up: a base is in the memory of other nodes. Any thread."""
        self._wake()

    def copied(self, place: int, base: int | None, step: int | None) -> None:
        """Wake up: more is in a place. Any thread."""
        self._wake()

    def step_done(self, step: int) -> None:
        """Wait until no more than was promised would be lost."""
        now_s = self._context.clock.monotonic_s()
        took_s = 0.0 if self._begun_s is None else now_s - self._begun_s
        self._trained_s += took_s
        self._ends.append((step, self._trained_s))
        if not self._is_kept(step, took_s):
            with self._saver.stalled("promise"):
                self._wait(step, took_s)
        self._begun_s = self._context.clock.monotonic_s()

    def _is_kept(self, step: int, took_s: float) -> bool:
        safe = self._safe()
        if safe >= step or safe == self._failed_at:
            return True
        promise = self._promise
        if promise.steps is not None:
            return safe > step - promise.steps
        assert promise.seconds is not None
        while len(self._ends) > 1 and self._ends[1][0] <= safe:
            self._ends.popleft()
        # The next step is in flight when the failure comes. One that takes longer than the time
        # is lost as a whole; then all steps before it are safe.
        return self._trained_s - self._ends[0][1] + took_s <= promise.seconds

    def _wait(self, step: int, took_s: float) -> None:
        timeout_s = self._context.options.progress_timeout_s
        standstill = StallTimer(timeout_s)
        while not self._is_kept(step, took_s):
            keeper = self._keepers.current
            if keeper is None or keeper.lost is not None or self._context.channel.has_errors:
                return  # the next call replaces the keeper and takes a base, or raises the error
            if standstill.is_over((keeper.moves, keeper.log_moves, self._safe())):
                self._failed_at = self._safe()
                self._context.channel.post(
                    DeadlineError(
                        f"step {step}: not kept: {self._promise.in_words}; nothing more has become "
                        f"safe for {timeout_s:g} s",
                        step=step,
                        hint="check the disk, the network and the place for copies (dmesg, df)",
                    )
                )
                return
            with self._changed:
                self._changed.wait(_POLL_S)

    def _safe(self) -> int:
        """Return the newest step that survives the failure; -1 if none does."""
        step = self._safe_step()
        if step is None:
            return 0 if self._begins_anew else -1
        return step

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
