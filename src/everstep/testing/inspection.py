"""The parts of a Checkpointer, for tests of everstep itself.

A test that looks inside a Checkpointer, or stops it where no call does, goes through
:func:`inspect`. The parts are those of this version: they may change in any other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from everstep.checkpointer import Checkpointer
    from everstep.format.header import ShardIdentity
    from everstep.link.save import Save
    from everstep.trainer.attach.keeper import Keeper
    from everstep.trainer.base.saver import PendingCapture
    from everstep.trainer.log.recorder import Recorder
    from everstep.trainer.multistep.driver import MultistepDriver
    from everstep.trainer.session.components import Components
    from everstep.trainer.session.replica_bases import ReplicaBases
    from everstep.trainer.session.session import Session
    from everstep.trainer.session.start import RunStarter
    from everstep.trainer.session.state_watch import StateWatch
    from everstep.trainer.session.step_consensus import StepConsensus


_Part = TypeVar("_Part")


def inspect(checkpointer: Checkpointer) -> Inspection:
    """Return the parts of ``checkpointer``."""
    return Inspection(checkpointer)


class Inspection:
    """Parts of one Checkpointer, and actions that only tests need.

    Components of the session are attributes
    (:class:`~everstep.trainer.session.components.Components`). A part that the method of the
    Checkpointer does not have is an error.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._of = checkpointer
        self._session = cast("Session", checkpointer._session)  # a disabled one has no parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.components, name)

    @property
    def components(self) -> Components:
        """All components."""
        return self._session.parts

    @property
    def is_open(self) -> bool:
        """True until the Checkpointer is closed."""
        return self._session.is_open

    @property
    def timeline(self) -> int:
        """Number of the timeline; 0 before the first."""
        return self._session.at.timeline

    @property
    def identity(self) -> ShardIdentity:
        """Identity of a base of the current step."""
        return self._session.at.identity()

    @property
    def keeper(self) -> Keeper:
        """Keeper in service."""
        assert self._session.keeper is not None
        return self._session.keeper

    @property
    def pending(self) -> list[PendingCapture]:
        """Captures whose copies may be in progress, in order."""
        return list(self._session.parts.saver._pending)

    @property
    def captured(self) -> int:
        """Number of captures begun by this process."""
        return self._session.parts.saver._captures

    def part(self, kind: type[_Part]) -> _Part:
        """Return the participant of a class."""
        (found,) = (one for one in self._session.parts.participants if isinstance(one, kind))
        return found

    @property
    def recorder(self) -> Recorder:
        """Recorder of the gradient log."""
        from everstep.trainer.log.recorder import Recorder

        return self.part(Recorder)

    @property
    def multistep(self) -> MultistepDriver:
        """Window of multi-step bases."""
        from everstep.trainer.multistep.driver import MultistepDriver

        return self.part(MultistepDriver)

    @property
    def replica(self) -> ReplicaBases:
        """Requests to the keeper's replica."""
        from everstep.trainer.session.replica_bases import ReplicaBases

        return self.part(ReplicaBases)

    @property
    def consensus(self) -> StepConsensus:
        """Decisions of all ranks at a step boundary."""
        return self._session.consensus

    @property
    def state_watch(self) -> StateWatch:
        """Tracks the updates between two step marks."""
        return self._session.watch

    @property
    def starter(self) -> RunStarter:
        """Restores a state and opens timelines."""
        return self._session.starter

    @property
    def has_mixed_state(self) -> bool:
        """True if a failed resume has left a mixture of two states."""
        return self._session.starter.live_state.is_mixed

    def take_due(self) -> Save:
        """Take the base that is taken at a step mark where one is due."""
        return self._session.take(None, show=False)

    def save_last(self, timeout_s: float) -> None:
        """Take the last base, as after a preemption signal, and wait for it."""
        self._session.save_last(timeout_s)

    def consume(self, key: str) -> None:
        """Report that an optimizer is about to consume its gradients."""
        self._session.watch.consumed(key)

    def skip_last_base(self) -> None:
        """Take no last base in close(): a resume then has to replay the log."""
        self.recorder.base_step = sys.maxsize

    def release(self) -> None:
        """End without any last base, wait or error."""
        self._session.release()
        self._of._forget()
