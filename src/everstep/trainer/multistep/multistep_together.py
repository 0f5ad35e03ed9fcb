"""Where the ranks of a job end a base that they capture over several steps
(``docs/design/multistep.md``).

A base is whole only if every rank has its part of the very same step. Into how many parts each of
them cuts its own follows from what it has measured, so when a base is due each says how many
it wants, and the most of these says at which mark all of them end. That is all they agree on: who
wants fewer parts begins later, and whose window becomes void takes its part in one step, at that
mark. So nobody waits for a base that another rank cannot finish, and nothing is said meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.errors import StateError
from everstep.format.header import ShardIdentity
from everstep.link.save import Save, copy_outcome, fail
from everstep.state.training_state import State
from everstep.trainer.job.job import Job
from everstep.trainer.multistep.multistep_mark import AtMark

__all__ = ["Here", "Together"]


@dataclass(frozen=True, slots=True)
class Here:
    """The last step mark, and the state then."""

    identity: ShardIdentity
    mark: AtMark

    def holds(self, state: State) -> bool:
        """Whether the state still is that of then."""
        return self.mark.holds(state.survey())


class Together:
    """What the ranks of a job have agreed on.

    Attributes:
        step: at the end of which all ranks end; None: nothing is under way.
        begins: at the end of which this one begins.
        here: the last step mark, as long as nothing has been updated since; None where no base
            is under way.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since = self._last = 0
        self._save: Save | None = None
        self.step: int | None = None
        self.begins = 0
        self.here: Here | None = None

    def asks(self, step: int) -> bool:
        """Whether a base that is due at the end of ``step`` begins there, on all ranks: none is
        under way, or ends there, nor was that asked before."""
        free = self.step is None or self.step < step
        return free and step not in (self._since, self._last)

    def agree(self, step: int, parts: int) -> None:
        """A base is due: finds out where all ranks end it.

        Args:
            parts: that this rank would cut it into; 1: it takes its part in one step.

        Raises:
            DeadlineError: another rank does not take this step.
        """
        self.over()
        self._since = step
        said = self._job.exchange(f"end step {step}", {"parts": parts})
        self.step = step + max(one["parts"] for one in said) - 1
        self.begins = self.step - parts + 1

    def is_under_way(self, step: int) -> bool:
        """Whether, at the end of ``step``, a base is that was due before."""
        return self.step is not None and self._since < step

    def promised(self, timeline: int) -> Save:
        """What is under way, before this rank has begun."""
        assert self.step is not None
        self._save = self._save or Save(self.step, timeline)
        return self._save

    def begun(self, timeline: int) -> Save:
        """What is under way, now that this rank begins."""
        save = self.promised(timeline)
        self._save = None
        return save

    def all_here(self) -> bool:
        """Whether all ranks can end where they are now: at the same step mark.

        Raises:
            DeadlineError: not all ranks ask.
        """
        step = None if self.here is None else self.here.identity.step
        said = self._job.exchange("call wait() or close()", {"step": step})
        return step is not None and all(one["step"] == step for one in said)

    def taken(self, step: int, save: Save | None = None) -> None:
        """This rank's part is of ``step``, as is that of all others.

        Args:
            save: it was taken in one step, in the place of what was promised.
        """
        self.over(save)
        self._last = step

    def restarted(self) -> None:
        """All ranks go on from another step."""
        self.over()
        self._since = self._last = 0

    def over(self, taken: Save | None = None) -> None:
        """Nothing is under way any more."""
        save = self._save
        self._save = None
        self.step = None
        if save is not None and taken is not None:
            copy_outcome(save, taken)
        elif save is not None:
            why = StateError("no rank has begun to capture this base", step=save.step)
            fail(save.staged, why)
            fail(save.durable, why)
