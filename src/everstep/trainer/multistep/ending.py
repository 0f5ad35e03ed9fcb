"""End of multi-step bases: the step mark at which a window ends, and what follows a void one.

A process that trains alone (:class:`EndAlone`) ends a window after its last part. A window whose
parts cannot be brought to one step is void; another one begins at the next mark.

A base of several ranks (:class:`EndTogether`) is complete only if every rank has its shard of the
very same step. Each rank cuts its state into as many parts as its own measurements suggest. So when
a base is due, each proposes a number of parts, and the largest one decides at which mark all
windows end. Nothing else is agreed on: a rank with fewer parts begins later, and one whose window
is void captures its shard in one step, at that mark. So no rank waits for a base that another one
cannot finish, and no messages are exchanged in between (``docs/design/multistep.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.errors import StateError
from everstep.format import ShardIdentity
from everstep.link import Save, fail
from everstep.link.save import copy_outcome
from everstep.state.training_state import State
from everstep.trainer.base import MarkSnapshot
from everstep.trainer.job import Job
from everstep.trainer.multistep.plan import WindowPlan

VOID_MAX = 2
"""Number of consecutive void windows after which a base is captured in one step."""


@dataclass(frozen=True, slots=True)
class StepMark:
    """A step mark, and the state at it without the tensors that optimizers own."""

    identity: ShardIdentity
    snapshot: MarkSnapshot

    def holds(self, state: State) -> bool:
        """Return True if the state is unchanged since the mark."""
        return self.snapshot.holds(state.survey())


@dataclass(slots=True)
class BaseInProgress:
    """Base from the step at which it is due to the step mark that it is of.

    Attributes:
        due: step at whose mark it became due.
        begin: step at whose mark this rank's window begins.
        end: step at whose mark the windows of all ranks end.
        plan: plan of this rank's window; None if it captures its shard in one step.
        begun: True if this rank's window has begun, and will complete the save.
        over: True if it has ended, or was abandoned.
    """

    due: int
    begin: int
    end: int
    plan: WindowPlan | None
    begun: bool = False
    over: bool = False
    _save: Save | None = None

    def save(self, timeline: int) -> Save:
        """Return the save that this base fulfils."""
        self._save = self._save or Save(self.end, timeline)
        return self._save

    def finish(self, taken: Save | None = None) -> None:
        """Note that it has ended; complete a save that no window will complete.

        Args:
            taken: base of one step taken in its place, whose outcome the save takes over; None to
                fail the save.
        """
        self.over = True
        self.plan = None
        save = self._save
        if save is None or self.begun:
            return
        if taken is not None:
            copy_outcome(save, taken)
            return
        why = StateError("no rank has begun to capture this base", step=save.step)
        fail(save.staged, why)
        fail(save.durable, why)


class EndAlone:
    """End of the windows of a process that trains alone.

    Attributes:
        shared: True if other ranks rely on the step at which the base ends. Its window is then
            complete only after all checks, and no rank begins another window by itself.
        base: newest base, in progress or over; None before the first.
        mark: last step mark, until something is updated; None if no base is in progress.
        again: reason why another base is due after one became void; None if none is.
        voids_in_row: number of consecutive void windows.
    """

    shared = False

    def __init__(self) -> None:
        self.base: BaseInProgress | None = None
        self.mark: StepMark | None = None
        self.again: str | None = None
        self.voids_in_row = 0

    @property
    def in_progress(self) -> BaseInProgress | None:
        """Return the base in progress; None if there is none."""
        return None if self.base is None or self.base.over else self.base

    def can_begin(self, step: int) -> bool:
        """Return True if a base that is due at the end of ``step`` begins there."""
        return self.in_progress is None

    def begin(self, step: int, plan: WindowPlan | None) -> None:
        """Begin a base that is due at the end of ``step``; agree with all ranks where it ends.

        Args:
            step: step that has just ended.
            plan: plan of this rank's window; None to capture its shard in one step.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        self.finish()
        parts = 1 if plan is None else max(1, len(plan.parts))
        # Noted before it is agreed on: a rank that asks twice would be one message ahead.
        self.base = BaseInProgress(due=step, begin=step, end=step, plan=plan, over=True)
        end = self.agree(step, parts)
        self.base = BaseInProgress(due=step, begin=end - parts + 1, end=end, plan=plan)

    def finish(self, step: int | None = None, taken: Save | None = None) -> None:
        """Note that no base is in progress any more.

        Args:
            step: step that it is of; None if it was abandoned.
            taken: base of one step taken in its place.
        """
        base = self.in_progress
        if base is not None:
            base.finish(taken)
            # Several ranks compare with it in can_begin(): an abandoned base must not block later
            # steps.
            base.end = base.due if step is None else step

    def restart(self) -> None:
        """Forget everything: training continues from another step."""
        self.finish()
        self.base = None

    def voided(self, why: str) -> None:
        """Count a void window; make another base due, unless all ranks go on to the agreed step."""
        self.voids_in_row += 1
        if not self.shared:
            self.again = why

    def agree(self, step: int, parts: int) -> int:
        """Return the step at whose mark a base that is due at ``step`` ends."""
        return step + parts - 1

    def can_end(self, step: int | None) -> bool:
        """Return True if the base in progress can end before its last step, as none follows.

        Args:
            step: step of the last mark, if the state still is that of it.
        """
        return step is not None


class EndTogether(EndAlone):
    """End of this rank's windows, agreed on with all ranks of a job.

    Args:
        job: all ranks.
    """

    shared = True

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def can_begin(self, step: int) -> bool:
        """Return True if a base that is due at the end of ``step`` begins there, on all ranks.

        It does not if one is in progress or ends there. Nor if one was agreed on there before: an
        error at the end of a step makes each rank ask a second time.
        """
        base = self.base
        if base is None:
            return True
        return (base.over or base.end < step) and step not in (base.due, base.end)

    def agree(self, step: int, parts: int) -> int:
        replies = self._job.exchange(f"end step {step}", {"parts": parts})
        return step + int(max(reply["parts"] for reply in replies)) - 1

    def can_end(self, step: int | None) -> bool:
        # Even if this rank cannot end there: the other ranks wait for its message.
        replies = self._job.exchange("call wait() or close()", {"step": step})
        return step is not None and all(reply["step"] == step for reply in replies)


def window_end(job: Job | None) -> EndAlone:
    """Return how the windows of this process end."""
    return EndAlone() if job is None else EndTogether(job)
