"""The replica of the attached training process, as the event loop uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from everstep.arena import Arena
from everstep.errors import EverstepError
from everstep.keeper.held import NewestCapture
from everstep.keeper.process import AttachedTrainer, Handler, ServedTimeline
from everstep.keeper.replica.rebuilds import timeline_record
from everstep.keeper.replica.replica import BaseRequest, Replica, Reports
from everstep.link.assembly import Samples
from everstep.link.capture import Capture
from everstep.seams import FileSystem


class ServedReplica:
    """At most one replica: that of the log of the attached training process.

    Args:
        newest_capture: the capture that is kept for a restarted process.

    Attributes:
        replica: the replica; None: the process has none.
    """

    def __init__(
        self, filesystem: FileSystem, run: PurePath, newest_capture: NewestCapture
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._newest_capture = newest_capture
        self.replica: Replica | None = None
        self._served: ServedTimeline | None = None
        # The replica's state while it is held, unchanged, for the next process.
        self._frozen: Capture | None = None
        self._frozen_for: AttachedTrainer | None = None
        # Numbers of requested bases that are neither durable nor refused.
        self._requested: set[int] = set()

    @property
    def step(self) -> int | None:
        """Step of the replica's state; None: there is no replica."""
        return None if self.replica is None else self.replica.step

    @property
    def progress(self) -> list[int | None]:
        """Step of the replica, number of the last record that is not needed any more, bytes of
        memory.
        """
        if self.replica is None:
            return [None, 0, 0]
        arena = self.replica.arena
        size_bytes = 0 if arena is None else arena.size_bytes
        return [self.replica.step, self.replica.applied, size_bytes]

    @property
    def reach(self) -> list[int] | None:
        """Timeline, step of the state and newest step of the log, for several ranks that resume
        from the same step; None: the replica cannot be frozen there, or the rank is alone."""
        if self.replica is None or self._served is None or not self._is_one_of_several:
            return None
        reach = self.replica.reach
        return None if reach is None else [self._served.number, *reach]

    @property
    def arena(self) -> Arena | None:
        """Memory of the replica; None: it has none."""
        return None if self.replica is None else self.replica.arena

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of messages about the replica."""
        return {"ask": self._request_base, "no_replica": lambda trainer, message: self.close()}

    def serve(self, timeline: ServedTimeline) -> None:
        """Start a timeline; its ``replica`` setting says whether it has a replica."""
        self._served = timeline
        # A new set: threads of the old replica may still use the old one.
        requested: set[int] = set()
        self._requested = requested
        if timeline.settings.get("replica") is None:
            return
        # A requested base will be followed by retention, which may free space for the log.
        timeline.log.segments.bases_expected.append(lambda: bool(requested))
        self.replica = Replica(
            timeline,
            lambda: timeline_record(self._filesystem, self._run, timeline.number),
            Reports(timeline, requested),
        )

    def close(self, *, timeout_s: float = 0.0) -> None:
        """End the replica. A frozen state that is held for another process stays."""
        if self.replica is not None:
            self.replica.close(timeout_s=timeout_s)
        self.replica = None
        self._frozen = None
        self._frozen_for = None
        self._served = None

    def _request_base(self, trainer: AttachedTrainer, message: dict[str, Any]) -> None:
        # The process did not resume from the frozen state after all: let the replica go on.
        if trainer is self._frozen_for:
            self.arrived()
        samples = tuple(Samples(*some) for some in message["samples"])
        request = BaseRequest(message["number"], message["step"], message["exact"], samples)
        if self.replica is None:
            error = EverstepError("this keeper has no replica", step=request.step)
            assert self._served is not None
            Reports(self._served, self._requested).refused([request], error)
            return
        self._requested.add(request.number)
        self.replica.request_base(request)

    def base_durable(self, base: Capture, arena: Arena) -> None:
        """Start the replica from a base of the training process. In the writing thread, before the
        trainer is notified.
        """
        if self.replica is not None:
            self.replica.begin(base, arena)

    def base_failed(self, base: Capture, error: EverstepError) -> None:
        """Fail the requests that waited for this base. In the writing thread."""
        if self.replica is not None:
            self.replica.failed(base, error)

    def freeze(self, trainer: AttachedTrainer | None, *, own: bool, at: int | None = None) -> None:
        """Freeze the replica's state as the capture that is held for ``trainer``.

        Replicas of several ranks are at different steps: they are only frozen ``at`` a step on
        which the ranks have agreed.

        Args:
            trainer: process that may resume from it; None: one that only reads it.
            own: True: freeze it even if it is the replica of ``trainer`` itself.
            at: step up to which the log is applied first.
        """
        if self.replica is None or self._served is None:
            return
        if at is None and (
            self._is_one_of_several or (self._served.trainer is trainer and not own)
        ):
            return
        frozen = self.replica.freeze(at)
        if frozen is None or frozen.arena is None:
            return
        self._frozen_for = trainer
        if frozen is not self._frozen:
            self._frozen = frozen
            self._newest_capture.take(frozen, frozen.arena)

    def arrived(self) -> None:
        """Release the frozen state: the process that could have resumed from it records a log of
        its own.
        """
        frozen = self._frozen
        self._frozen = None
        self._frozen_for = None
        if frozen is not None and self.replica is not None:
            self._newest_capture.drop(frozen)
            self.replica.thaw()

    def lose(self) -> None:
        """Drop all requests: the training process died, and its successor does not need them."""
        self._requested.clear()
        if self.replica is not None:
            self.replica.drop_requests()

    def finish(self) -> bool:
        """Return True while the keeper must not end because the replica's last base is being
        written.
        """
        # The keeper is about to exit: no process will resume from the frozen state, and the replica
        # has to write it.
        self.arrived()
        # With several ranks there is no last base: their keepers end at different steps.
        if self._is_one_of_several or self.replica is None:
            return False
        return self.replica.finish()

    def done(self, base: Capture) -> None:
        """Notify the trainer that retention after a base of the replica is over. In the writing
        thread.
        """
        if self._served is not None:
            self._served.trainer.send({"kind": "retained", "step": base.step})

    @property
    def _is_one_of_several(self) -> bool:
        return self._served is not None and self._served.writer.is_one_of_several
