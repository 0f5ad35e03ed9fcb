"""One feature of the training process, as the session and the saver know it.

The gradient log, a window of several steps, the keeper's replica, the interval between bases: each
is a :class:`Participant`. The session calls every participant at the same events and knows none by
name. The method of a Checkpointer decides which ones there are
(:mod:`everstep.trainer.session.components`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar, Protocol

from everstep.capture import Lane
from everstep.config import Options
from everstep.errors import AuditError
from everstep.format import ShardIdentity
from everstep.link import BackgroundChannel, Save
from everstep.restore.start import Recovery, Resumed
from everstep.seams import Clock
from everstep.state.survey import Survey
from everstep.state.training_state import State
from everstep.trainer.attach.keeper import Service
from everstep.trainer.refusals import Refusals


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """Objects of one training process that its participants share.

    Attributes:
        options: options of the Checkpointer.
        run: run folder, for messages.
        state: state to capture.
        lane: makes the copies.
        channel: reports errors to the training thread.
        clock: measures time.
        refusals: what becomes of updates that the method cannot repeat.
    """

    options: Options
    run: PurePath
    state: State
    lane: Lane
    channel: BackgroundChannel
    clock: Clock
    refusals: Refusals


class TrainingPosition(Protocol):
    """Position of this rank's training."""

    step: int

    @property
    def lsn(self) -> int:
        """Number of updates so far."""
        ...

    def identity(self) -> ShardIdentity:
        """Return the identity of a base of the current step."""
        ...


@dataclass(frozen=True, slots=True)
class Mark:
    """End of a step.

    Attributes:
        position: the position of training, as long as the mark is handled.
        survey: survey of the state; None if no participant reads it.
    """

    position: TrainingPosition
    survey: Survey | None

    @property
    def step(self) -> int:
        """The step that has ended."""
        return self.position.step

    @property
    def identity(self) -> ShardIdentity:
        """Identity of a base of this step.

        Computed when it is needed: most steps have no base, and this is the hot path.
        """
        return self.position.identity()


@dataclass(frozen=True, slots=True)
class RestoredState:
    """State that a resume has restored.

    Attributes:
        resumed: how it was found.
        led_from: step of the base that base and log lead from; None without one.
        survey: survey of the state, if one was taken.
        only_in_memory: the base is on no disk yet.
        again: this process has trained before.
    """

    resumed: Resumed
    led_from: int | None
    survey: Survey | None
    only_in_memory: bool
    again: bool

    @property
    def on_disk(self) -> int | None:
        """Step of the base if it is on disk, else None."""
        base = self.resumed.base
        return None if base is None or self.only_in_memory else base.step


@dataclass(frozen=True, slots=True)
class BaseRequest:
    """Base that is to be taken.

    Attributes:
        identity: step, timeline and rank.
        survey: survey of the state, if one was taken.
        show: the program asks for the base of this very step and may wait for it.
        in_memory: keep the base in the memory of keepers only.
        captured: the log needs a base that this process captures.
        needed: the log of some rank needs it. All ranks are told the same.
    """

    identity: ShardIdentity
    survey: Survey | None
    show: bool
    in_memory: bool = False
    captured: bool = False
    needed: bool = False


class BaseSource(Protocol):
    """Participant that bases are requested from."""

    def take(self, request: BaseRequest) -> Save:
        """Take a base, or return the one already taken of this step.

        Raises:
            EverstepError: This base, or an earlier one in the background, has failed and the
                failure policy raises.
        """
        ...


class Participant:
    """Feature that takes part in training. Every method does nothing unless it is overridden.

    Attributes:
        follows_updates: the updates of each step are passed to it.
    """

    follows_updates: ClassVar[bool] = False

    @property
    def reads_marks(self) -> bool:
        """True if it needs a survey of the state at each step mark."""
        return False

    # --- A timeline ---------------------------------------------------------------------

    def start(self, service: Service) -> None:
        """Work with a keeper that has come into service, or with a new timeline of it."""

    def go_back(self) -> None:
        """Abandon work in progress: training returns to an earlier step."""

    def restored(self, restored: RestoredState) -> None:
        """Continue from a restored state, after :meth:`start`."""

    def recovered(self, recovery: Recovery) -> None:
        """Note the result of a resume, as the caller gets it."""

    # --- Updates ------------------------------------------------------------------------

    def gate_update(self, optimizer: str | None) -> None:
        """Block until an update may change what this participant copies (I1).

        Args:
            optimizer: key of the optimizer about to update; None if any may.
        """

    def consumed(self, key: str, lsn: int, step: int, *, over: bool = False) -> None:
        """Handle an optimizer that is about to consume its gradients.

        Args:
            key: key of the optimizer.
            lsn: number of the update.
            step: step in progress.
            over: the update has already run: a hook registered later was called last.
        """

    def applied(self, key: str) -> None:
        """Handle the end of an optimizer's update."""

    def declared(self, pattern: str, lsn: int, step: int) -> None:
        """Handle the end of a function that is registered for ``pattern``."""

    def skipped(self, why: str) -> None:
        """Handle a change of optimizer-owned tensors that replay cannot repeat."""

    # --- The end of a step --------------------------------------------------------------

    def step_ends(self) -> None:
        """Handle the end of a step, before anything about it can fail."""

    def mark(self, mark: Mark) -> bool:
        """Handle a step mark.

        Returns:
            True if the state was changed by something that no hook has announced.
        """
        return False

    @property
    def needs_base(self) -> bool:
        """True if a base is due, whatever the interval."""
        return False

    @property
    def needs_capture(self) -> bool:
        """True if that base has to be captured by this process, and cannot wait."""
        return False

    @property
    def is_busy(self) -> bool:
        """True if a base of several steps is in progress, so that no other one can begin."""
        return False

    def base_is_needed(self, step: int) -> None:
        """Note that a log needs a base of ``step``; every rank calls this, whatever has failed."""

    @property
    def replaced_base(self) -> Save | None:
        """Base that this participant has taken at the last step mark in place of another one."""
        return None

    def base_is_due(self, step: int) -> None:
        """Agree with all ranks on the base that is due at ``step``; every rank calls this."""

    def base_deferred(self) -> None:
        """Count a base that was due while another one was in progress."""

    def base_requested(self, step: int) -> None:
        """Note that a base of ``step`` is about to be taken; it may fail."""

    def base_taken(self, save: Save) -> None:
        """Handle a base that was taken."""

    def step_done(self, step: int) -> None:
        """Handle the end of a step, after its base was requested; may block training."""

    @property
    def is_as_marked(self) -> bool:
        """False if the state is known to have changed since the last step mark."""
        return True

    # --- Events of the keeper, in any thread --------------------------------------------

    def log_on_disk(self, number: int) -> None:
        """Note that log records up to ``number`` are on disk; 0 if the keeper was lost."""

    def base_everywhere(self, step: int) -> None:
        """Note that all peers hold the base of ``step``."""

    def copied(self, place: int, base: int | None, step: int | None) -> None:
        """Note that the base of step ``base``, or the log up to ``step``, is in a place for
        copies.

        Args:
            place: index of the place.
        """

    def replica_stopped(self, why: str, for_good: bool) -> None:
        """Note that the keeper's replica has stopped."""

    # --- The end of training ------------------------------------------------------------

    def finish_records(self) -> None:
        """Wait until the keeper has all that was recorded of completed steps."""

    def finish_copies(self) -> None:
        """End captures in progress: no step will follow."""

    def retake_lost_base(self) -> bool:
        """Return True if the final base was lost and another one was begun in its place."""
        return False

    def forget_failed_base(self) -> bool:
        """Return True, once, if the newest base has failed and may be captured instead."""
        return False

    def handles_torn_base(self, error: AuditError) -> bool:
        """Return True if this participant reports ``error``: a base whose state was overwritten
        while it was copied. Called in any thread."""
        return False

    def lacks_base_of(self, step: int) -> bool:
        """Return True if ``step`` would be lost with this process without a base of it."""
        return False

    def refuses_last_base(self, step: int) -> bool:
        """Return True, with a message, if no base of ``step`` may be taken at the end."""
        return False

    @property
    def holds_steps(self) -> bool:
        """True if the keeper's memory has steps that nothing on disk has, after close()."""
        return False

    @property
    def holds_steps_at_exit(self) -> bool:
        """True if it has such steps after an exit without close()."""
        return False

    def leave(self) -> None:
        """Abandon what needs other ranks: training has ended out of order."""

    def close(self) -> None:
        """Release hooks and patches."""

    # --- Results ------------------------------------------------------------------------

    @property
    def durable_step(self) -> int | None:
        """Newest step on disk because of this participant; None if unknown."""
        return None

    @property
    def reachable_step(self) -> int | None:
        """Newest step that the keeper's memory leads to because of it; None if unknown."""
        return None

    def figures(self) -> Mapping[str, Any]:
        """Return its fields of :class:`~everstep.trainer.session.stats.Stats`."""
        return {}
