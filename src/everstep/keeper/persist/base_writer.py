"""Write bases of one timeline in the order in which they were taken, each followed by retention.

One thread writes: in the keeper process, or in the training process where there is no keeper
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from everstep.arena import Arena
from everstep.commit import BaseId
from everstep.errors import DeadlineError, EverstepError, FencedError, StateError, StorageError
from everstep.format import BasePlan
from everstep.format.records import Annotations
from everstep.format.writer import Written
from everstep.keeper.held import MemoryBases
from everstep.keeper.log import LogStore
from everstep.keeper.persist.committer import Timeline, is_committed, open_committer
from everstep.keeper.retain import HistoryFlush
from everstep.link import BackgroundChannel, Save, complete, fail
from everstep.link.capture import Capture
from everstep.link.channel import WatchedProgress
from everstep.link.messages import KeeperStats
from everstep.seams import failpoint
from everstep.seams.filesystem import observed
from everstep.seams.processes import Condition
from everstep.seams.progress import Counted, ProgressSink
from everstep.state.layout import Body

_LOOK_AGAIN_S = 0.2


class BaseWriter:
    """Persists bases of one timeline and runs retention after each.

    Args:
        channel: collects errors and deadlines of background work.
        arena: memory that holds the captures; None if there are none.
        records: log that leads from base to base, if there is one.
        bases: holds bases that live in memory, if there are any.
        on_done: called after the retention that follows a base; until it returns, the capture
            counts as :attr:`waiting`.

    Attributes:
        committer: commits the bases, alone or together with other ranks.
        stats: counters of this keeper.
    """

    def __init__(
        self,
        timeline: Timeline,
        channel: BackgroundChannel,
        arena: Arena | None,
        *,
        records: LogStore | None = None,
        bases: MemoryBases | None = None,
        on_done: Callable[[Capture], None] = lambda capture: None,
    ) -> None:
        self._operations = 0  # completed operations on the disk
        self._written = Counted()
        # Every disk operation of bases and retention is counted, so that slow storage is not taken
        # for hung.
        watched = observed(timeline.seams.filesystem, self._operation_done)
        seams = dataclasses.replace(timeline.seams, filesystem=watched)
        self._timeline = dataclasses.replace(timeline, seams=seams)
        self._channel = channel
        self._arena = arena
        self.records = records
        self._bases = bases
        self._on_done = on_done
        self._history_flush = HistoryFlush(timeline.history, timeline.keep.newest)
        self.stats = KeeperStats()
        self._jobs: queue.SimpleQueue[Capture | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = Condition()
        self._waiting: list[Capture] = []
        self.committer = open_committer(self._timeline, channel.post)

    @property
    def written_bytes(self) -> int:
        """Bytes of bases handed to the disk so far."""
        return self._written.count

    @property
    def moves(self) -> int:
        """Counter that changes while a base or retention makes progress."""
        return self._operations + self._written.count

    @property
    def log_moves(self) -> int:
        """Counter that changes while writing the log makes progress."""
        return 0 if self.records is None else self.records.moves

    def _operation_done(self) -> None:
        """Count a completed disk operation: deadlines here and at other ranks start again."""
        # Several threads count without a lock and an increment may be lost: the value only has to
        # change.
        self._operations += 1
        self._channel.storage_progressed()
        # Through the link, not the committer: this is also called while the committer is made.
        if self._timeline.link is not None:
            self._timeline.link.storage_progressed()

    @property
    def waiting(self) -> list[Capture]:
        """Captures whose end (durable or failed) was not yet reported to everyone."""
        # A copy: the writing thread changes the list.
        with self._changed:
            return list(self._waiting)

    @property
    def is_one_of_several(self) -> bool:
        """True if other ranks write shards of each base."""
        return self._timeline.link is not None

    def sweep(self) -> None:
        """Clean up after crashes; a failure is reported but does not stop the keeper."""
        try:
            self.committer.sweep()
        except EverstepError as error:
            self._channel.post(error)

    def queue(self, job: Callable[[], None]) -> None:
        """Run ``job`` in the writing thread, after the captures in the queue."""
        self._start()
        self._jobs.put(job)

    def annotate(self, annotations: Annotations) -> None:
        """Write the annotations of a base as soon as the base is committed."""
        base = BaseId(annotations.timeline, annotations.step)
        self.committer.writer.annotations.add(annotations)
        # Through the queue: if the base is committed already, nobody else writes them.
        self.queue(lambda: self._write_annotations(base))

    def _write_annotations(self, base: BaseId) -> None:
        writer = self.committer.writer
        if is_committed(writer, base):
            writer.annotations.write(base, self._channel.post)

    def release(self) -> None:
        """Fail bases that only wait for other ranks: the next start of the job decides on them."""
        if self._bases is not None:
            self._bases.release()
        self.committer.release()

    def training_ended(self) -> None:
        """Tell other ranks, after the complete captures, that this rank takes no more bases."""
        # Through the queue: captures before it still become durable on all ranks.
        self.queue(self.committer.training_ended)

    def begin(self, capture: Capture) -> None:
        """Register a capture that has begun; a streaming one is written while it arrives."""
        self._start()
        # Before the capture is queued, so that wait() cannot return while it is in progress.
        with self._changed:
            capture.begun = True
            self._waiting.append(capture)
        # The log writer yields the disk to bases from now on.
        self._tell_log(True)
        if capture.stream:
            self._jobs.put(capture)

    def expect(self, capture: Capture) -> None:
        """Queue a capture that is still being rebuilt; later captures are written after it."""
        self._jobs.put(capture)

    def captured(self, capture: Capture, objects: Mapping[str, bytes]) -> None:
        """Accept a complete capture: it becomes durable whatever happens to training."""
        # Queued before it counts as arrived: an interrupt between the two must not leave an
        # arrived capture, which can no longer be withdrawn, outside of the queue.
        if not capture.stream:
            self._jobs.put(capture)
        capture.incoming.arrived(objects)

    def abandon(self, capture: Capture, error: EverstepError | None) -> None:
        """Drop a capture whose remaining data will never arrive, with all its files.

        Args:
            error: reason to report; None if the requester has withdrawn the capture.
        """
        # A complete capture becomes durable whatever happens; a lost one was abandoned before.
        if capture.incoming.complete or capture.incoming.lost:
            return
        # Before lose(), which wakes the writing thread: that reads the flag to decide about a
        # report.
        capture.withdrawn = error is None
        capture.incoming.lose(error or StateError("the save was interrupted", step=capture.step))
        # Possibly a second time, which is harmless: an interrupt may have prevented the first.
        self._jobs.put(capture)

    def audit(self, plan: BasePlan, written: Sequence[Written]) -> None:
        """Audit the digests of a base that could not be written against the previous base.

        Raises:
            AuditError: the base is not the state of its step.
        """
        self.committer.writer.audit.check(plan, written)

    def free_port(self, port: int) -> None:
        """Close the mailbox if it listens at ``port``, so that its successor can use the port."""
        link = self._timeline.link
        if link is not None and link.port == port:
            self.committer.close()

    def close(self) -> None:
        """End the thread after it has persisted the captures in the queue."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._jobs.put(None)
            # While captures wait at this point, the storage hangs or the caller has given up: do
            # not wait long.
            thread.join(timeout=_LOOK_AGAIN_S if self._waiting else self._timeline.timeout_s)
            # The storage hangs: make no further call to it, which would hang this thread, too.
            if thread.is_alive():
                return
        self.committer.close()
        self.committer.writer.close()

    def _start(self) -> None:
        # Any thread may be the first to need it.
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="everstep-keeper", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            # A failure to start the ticking thread is reported, but does not stop the writing.
            with self._reporting("while starting a thread", None):
                stack.enter_context(self._timeline.seams.clock.ticking())
            self._do_all()

    def _do_all(self) -> None:
        """Process the queue until ``None``."""
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, Capture):
                with self._reporting("during cleanup", None):
                    job()
                continue
            # A capture may be queued twice (see abandon()): only the first turn handles it.
            if job not in self.waiting:
                continue
            try:
                self._do(job)
            finally:
                # Whatever happens, threads that wait for this capture must be released.
                try:
                    self._on_done(job)
                finally:
                    # After on_done: a keeper process with nothing in ``waiting`` may exit, and
                    # would not send the messages of on_done.
                    with self._changed:
                        self._waiting.remove(job)
                        self._changed.notify_all()
                    self._tell_log(bool(self.waiting))
            # Drop the reference before the next wait: the capture keeps its arena alive.
            del job

    def _tell_log(self, coming: bool) -> None:
        """Tell the log writer whether bases compete for the disk."""
        if self.records is not None:
            self.records.expect_base(coming)

    def _do(self, capture: Capture) -> None:
        """Persist one capture and run retention."""
        save = capture.save
        # A multi-step capture is rebuilt in another thread first.
        if capture.assembling:
            # Without a timeout: the rebuild sets it whether it succeeds or fails.
            capture.made.wait()
        try:
            # A state of the replica that a newer base has overwritten (Replica.begin).
            if capture.withdrawn and capture.incoming.complete:
                fail(save.durable, StateError("a newer base exists", step=save.step))
                return
            arena = capture.arena or self._arena
            assert arena is not None
            failpoint("keeper.before_persist")
            capture.written = self._persist(
                capture.files,
                capture.bodies(arena),
                save,
                self._written,
                wait_complete=capture.incoming.objects,
            )
        except EverstepError as error:
            if not capture.withdrawn:
                self._channel.post(error)
            return
        except BaseException as error:
            # A bug in everstep is reported like any other failure: the thread has to go on.
            fail(save.durable, self._post_internal("in a save", error, save))
            return
        finally:
            # In every case: the trainer takes its memory back when it learns of the end.
            with self._reporting("after a save", save):
                capture.on_end(capture)
        if save.in_memory:
            return
        with self._reporting("in retention", save):
            self._retain(save)

    @contextlib.contextmanager
    def _reporting(self, where: str, save: Save | None) -> Iterator[None]:
        """Report an exception instead of raising it: it would end this thread and all later
        saves."""
        try:
            yield
        except BaseException as error:
            self._post_internal(where, error, save)

    def _post_internal(self, where: str, error: BaseException, save: Save | None) -> EverstepError:
        step = None if save is None else save.step
        ours = EverstepError(f"internal error {where}: {error!r}", step=step)
        ours.__cause__ = error
        self._channel.post(ours)
        return ours

    def _persist(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        save: Save,
        shown: ProgressSink,
        wait_complete: Callable[[], object] = lambda: None,
    ) -> tuple[Written, ...]:
        """Write and commit one base, or hold it in memory; update the counters.

        Args:
            shown: receives the bytes written.
            wait_complete: waits until the capture is complete; raises if it never will be.
        """
        start_s = self._timeline.seams.clock.monotonic_s()
        # Registered before the first operation: storage that hangs at once is reported, too.
        work = self._channel.begin(f"writing the base of step {save.step}", save.step)
        watched = WatchedProgress(self._channel, work, shown)
        try:
            if save.in_memory:
                assert self._bases is not None
                audit = self.committer.writer.audit.check
                written = self._bases.hold(plan, bodies, watched, audit)
            else:
                # Before the commit, as retention runs right after it and looks at the log on disk.
                self._history_flush.before_base(
                    save.step, self.records, self._timeline.timeout_s, lambda: watched.advance(0)
                )
                written = self.committer.persist(plan, bodies, watched)
                # Before the base counts as durable, which its annotations then are, too.
                base = BaseId(save.timeline, save.step)
                self.committer.writer.annotations.write(base, self._channel.post)
                # Nothing was written, as the base is committed already. Its memory may not be
                # released before the capture, which may still be in progress, has ended.
                if not written:
                    wait_complete()
        except BaseException as error:
            # Completed here and not by the caller, so that waiters see the error even if reporting
            # it fails.
            self.stats.failed += 1
            fail(save.durable, error)
            raise
        finally:
            self._channel.end(work)
        if save.in_memory:
            self.stats.held += 1
            complete(save.durable, plan.size_bytes)
            return written
        self.stats.persist_s += self._timeline.seams.clock.monotonic_s() - start_s
        self.stats.committed += 1
        linked_bytes = sum(shard.record.length for shard in written if shard.linked)
        self.stats.linked_bytes += linked_bytes
        self.stats.written_bytes += plan.size_bytes - linked_bytes
        self.stats.durable_step = max(save.step, self.stats.durable_step or 0)
        # Last: a thread that is woken by it may read the counters at once.
        complete(save.durable, plan.size_bytes)
        return written

    def _retain(self, save: Save) -> None:
        """Run retention after a commit; its failure is reported, and the base stays durable."""
        # A read-back of a large base takes long: retention has a deadline of its own.
        work = self._channel.begin("cleaning up old bases", save.step)
        try:
            self.committer.retain()
        except (FencedError, StorageError, DeadlineError) as error:
            self._channel.post(error)
        except Exception as error:
            self._post_internal("in retention", error, save)
        finally:
            self._channel.end(work)
