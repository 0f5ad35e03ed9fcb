"""Interface of a keeper for the training process, whether it is a thread or a process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from everstep.errors import DeadlineError, EverstepError
from everstep.format import BasePlan
from everstep.format.log import RecordHead
from everstep.keeper.persist import BaseWriter
from everstep.link import Save
from everstep.link.capture import Capture
from everstep.link.pool import CapturePool
from everstep.seams.progress import progress, silent
from everstep.state.layout import Body, ShardLayout
from everstep.state.survey import Survey
from everstep.trainer.attach.remote import RemoteKeeper
from everstep.trainer.attach.requests import WaitDeadline, storage_hang_error


class ThreadKeeper(BaseWriter):
    """Keeper that is a thread of the training process. It is never lost alone."""

    lost: EverstepError | None = None
    pid = None
    replaced = False
    lost_steps: Collection[int] = ()
    replica_step = None
    replica_bytes = 0
    peer_log_step = None

    def forget(self, capture: Capture) -> None:
        """Do nothing: this keeper ends with the process that overwrites the memory."""

    def look(self) -> None:
        """Do nothing: a thread of this process cannot be silent."""

    def persist(self, plan: BasePlan, bodies: Sequence[Body], save: Save, *, show: bool) -> None:
        """Make a base durable in the calling thread.

        Raises:
            EverstepError: the base failed; its files were removed.
        """
        with progress(f"save step {save.step}", plan.size_bytes) as bar:
            self._persist(plan, bodies, save, bar if show else silent)
        self._retain(save)

    def announce(self, capture: Capture) -> None:
        """Do nothing: a keeper in this process needs no message."""

    def log(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """Accept a log record that is complete in the arena."""
        assert self.records is not None
        self.records.add(number, head, layout, objects, offset)
        self.records.segments.add_to(self.stats)

    def forget_log(self, upto: int) -> None:
        """Drop records up to ``upto``: their memory is about to be reused."""
        if self.records is not None:
            self.records.forget(upto)

    def log_to_disk(self, on: bool) -> None:
        """Switch writing the log of later steps to disk on or off."""
        assert self.records is not None
        self.records.to_disk(on)

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None:
        """Wait until everything that was begun is durable or has failed.

        Args:
            timeout_s: seconds to wait; None for no limit.
            show: show a progress bar.

        Raises:
            DeadlineError: after ``timeout_s``, or when no work makes progress.
            EverstepError: an error reported meanwhile, according to the failure policy.
        """
        deadline = WaitDeadline(self._timeline.seams.clock, timeout_s)
        with self._changed:
            total = sum(capture.plan.size_bytes for capture in self._waiting)
        seen = self._written.count
        with progress("save", total) as bar:
            while True:
                with self._changed:
                    if not self._waiting:
                        break
                    self._changed.wait(deadline.poll_s)
                if show:
                    bar.advance(self._written.count - seen)
                    seen = self._written.count
                self._channel.check()
                # A hang is reported once, by check(): without this the wait would never end.
                if self._channel.hung():
                    raise storage_hang_error(len(self._waiting))
                if deadline.is_over(len(self.waiting)):
                    break
        # Again after the loop, because a base may have failed since the last check.
        self._channel.check()

    def close(self, *, stay: bool = False) -> None:
        """End all threads after they have persisted the log and the captures in the queue.

        Args:
            stay: without effect, as the threads cannot stay after the process.
        """
        if self.records is not None:
            # The log before the bases: records that were batched would be lost with this thread.
            self.records.flush()
            try:
                self.records.settle(self._timeline.timeout_s)
            except DeadlineError as error:
                self._channel.post(error)
            self.records.close()
        super().close()


Keeper = ThreadKeeper | RemoteKeeper


@dataclass(frozen=True, slots=True)
class Service:
    """Keeper in service, and the timeline that it serves.

    Attributes:
        keeper: the keeper.
        process: the same, if it is a separate process.
        thread: the same, if it is a thread of this process.
        pool: memory for captures; None with ``sync``.
        exact: replay of the updates from now on reproduces training bit for bit.
        step: step that training continues from.
        survey: survey of the state there, if one was taken.
    """

    keeper: Keeper
    process: RemoteKeeper | None
    thread: ThreadKeeper | None
    pool: CapturePool | None
    timeline: int
    exact: bool = True
    step: int = 0
    survey: Survey | None = None

    def beginning_at(self, step: int, exact: bool, survey: Survey | None) -> Service:
        """Return the service as it begins, or goes on, at a step."""
        return replace(self, step=step, exact=exact, survey=survey)
