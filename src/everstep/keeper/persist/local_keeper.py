"""Make captured bases durable, in the order in which they were taken.

One thread writes: in the keeper process, or in the training process where there is no keeper
process. The calling thread writes bases of ``sync``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from everstep.arena.memory import Arena
from everstep.commit.lineage import BaseId
from everstep.errors import (
    DamageError,
    DeadlineError,
    EverstepError,
    FencedError,
    StateError,
    StorageError,
)
from everstep.format.log import RecordHead
from everstep.format.names import SLOTS_DIR, timeline_dir
from everstep.format.plan import BasePlan
from everstep.format.writer import ChunkRing, Written
from everstep.keeper.log.log_store import LogStore
from everstep.keeper.persist.persister import Audit, DigestAudit, Persister, digests_of
from everstep.keeper.retain.history import HistoryFlush
from everstep.keeper.retain.retention import Retention
from everstep.link.capture import Capture
from everstep.link.channel import BackgroundChannel, WatchedProgress
from everstep.link.job_session import JobSession
from everstep.link.keeper_stats import KeeperStats
from everstep.link.save import Save, complete, fail
from everstep.link.waiting import WaitDeadline, storage_hang_error
from everstep.run.fence import Fence
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.files.stalls import ObservedFileSystem
from everstep.seams.network.mailbox import Mailbox
from everstep.seams.processes.conditions import Condition
from everstep.seams.progress import Counted, ProgressSink, progress, silent
from everstep.state.layout.shards import Body, ShardLayout
from everstep.tiers.durable_files import storage_errors
from everstep.tiers.slots import SlotStore

# Loaded at first use: only jobs of several ranks, or with bases in memory, need them.
if TYPE_CHECKING:
    from everstep.keeper.held.memory_bases import MemoryBases
    from everstep.keeper.persist.rank_commits import RankCommits

__all__ = ["CHUNKS", "WRITERS", "LocalKeeper"]

WRITERS = 6
"""Transfers in flight: virtual and NVMe disks reach their bandwidth only with several."""

CHUNKS = WRITERS + 2
_LOOK_AGAIN_S = 0.2


class LocalKeeper:
    """Persists bases of one timeline and runs retention after each.

    Args:
        run: the run folder.
        timeline: number of the timeline that this process writes.
        channel: collects errors and deadlines of background work.
        ring: chunks and threads that write to disk.
        arena: memory that holds the captures; None if there are none.
        keep: number of bases to keep.
        verified: base that was read back and found intact, if any.
        timeout_s: seconds without progress after which a transfer counts as hung.
        history: log segments to keep (see :class:`.retention.Retention`).
        on_done: called after the retention that follows a base; until it returns, the capture
            counts as :attr:`waiting`.
        job_session: place of this rank among several ranks; None for a single rank.
        mailbox: connects to the keepers of the other ranks.

    Attributes:
        lost: why this keeper can no longer be used; always None, as it ends with its process.
        log_of_run: log that leads from base to base, if there is one.
        records: the same log, if this keeper is a thread of the training process.
        bases: holds bases that live in memory, if there are any.
        stats: counters of this keeper.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        timeline: int,
        channel: BackgroundChannel,
        ring: ChunkRing,
        arena: Arena | None,
        *,
        keep: int,
        verified: BaseId | None = None,
        timeout_s: float,
        history: str = "last",
        on_done: Callable[[Capture], None] = lambda capture: None,
        job_session: JobSession | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        self.lost: EverstepError | None = None
        self._operations = 0  # completed operations on the disk
        self._written = Counted()
        self._commits: RankCommits | None = None
        # Every disk operation of bases and retention is counted, so that slow storage is not taken
        # for hung.
        filesystem: FileSystem = ObservedFileSystem(seams.filesystem, self._operation_done)
        self._filesystem = filesystem
        seams = dataclasses.replace(seams, filesystem=filesystem)
        self._clock = seams.clock
        self._timeout_s = timeout_s
        self._run = run
        self._channel = channel
        self._arena = arena
        directory = timeline_dir(run, timeline) / SLOTS_DIR
        self._slots = slots = SlotStore(filesystem, directory)
        fence = Fence(filesystem, run, timeline)
        self._persister = Persister(filesystem, run, ring, slots, timeout_s=timeout_s, fence=fence)
        self._retention = Retention(
            filesystem,
            run,
            timeline,
            ring,
            slots,
            keep=keep,
            timeout_s=timeout_s,
            history=history,
            clock=seams.clock,
        )
        self._history_flush = HistoryFlush(history, keep)
        if verified is not None:
            self._retention.verified.add(verified)
        self._port = 0  # port of the mailbox, if there is one
        if job_session is not None:
            assert mailbox is not None
            from everstep.keeper.persist.rank_commits import RankCommits

            # Opened before RankCommits starts its thread, which reads from it.
            mailbox.open(job_session.session, job_session.rank, job_session.peers)
            self._port = job_session.peers[job_session.rank][1]
            self._commits = RankCommits(
                seams,
                run,
                timeline,
                job_session,
                mailbox,
                self._persister,
                ring,
                keep=keep,
                history=history,
                post=channel.post,
                timeout_s=timeout_s,
            )
        self._audit = DigestAudit()
        self.log_of_run: LogStore | None = None
        self.records: LogStore | None = None
        self._on_done = on_done
        self.bases: MemoryBases | None = None
        self.stats = KeeperStats()
        self._jobs: queue.SimpleQueue[Capture | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = Condition()
        self._waiting: list[Capture] = []

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
        return 0 if self.log_of_run is None else self.log_of_run.moves

    def _operation_done(self) -> None:
        """Count a completed disk operation: deadlines here and at other ranks start again."""
        self._operations += 1
        self._channel.storage_progressed()
        if self._commits is not None:
            self._commits.storage_progressed()

    @property
    def waiting(self) -> list[Capture]:
        """Captures whose end (durable or failed) was not yet reported to everyone."""
        # A copy: the writing thread changes the list.
        with self._changed:
            return list(self._waiting)

    @property
    def commits(self) -> RankCommits | None:
        """Commits of this rank with other ranks; None for a single rank."""
        return self._commits

    @property
    def is_one_of_several(self) -> bool:
        """True if other ranks write shards of each base."""
        return self._commits is not None

    def sweep(self) -> None:
        """Clean up after crashes; a failure is reported but does not stop the keeper."""
        try:
            if self._commits is not None:
                self._commits.sweep()
                return
            with storage_errors("clean up", self._run):
                self._retention.sweep(self._retention.scan(), in_flight=())
        except EverstepError as error:
            self._channel.post(error)

    def sweep_in_background(self) -> None:
        """Run :meth:`sweep` in the writing thread, before any base."""
        self._start()
        self._jobs.put(self.sweep)

    def persist(self, plan: BasePlan, bodies: Sequence[Body], save: Save, *, show: bool) -> None:
        """Make a base durable in the calling thread.

        Raises:
            EverstepError: the base failed; its files were removed.
        """
        with progress(f"save step {save.step}", plan.size_bytes) as bar:
            # The audit needs the digests, which exist only after the files were written.
            audit = self._audit.of(plan)
            self._persist(plan, bodies, save, bar if show else silent, audit)
        self._retain(save)

    def release(self) -> None:
        """Fail bases that only wait for other ranks: the next start of the job decides on them."""
        if self.bases is not None:
            self.bases.release()
        if self._commits is not None:
            self._commits.release()

    def training_ended(self) -> None:
        """Tell other ranks, after the complete captures, that this rank takes no more bases."""
        if self._commits is not None:
            self._start()
            # Through the queue: captures before it still become durable on all ranks.
            self._jobs.put(self._commits.training_ended)

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

    def announce(self, capture: Capture) -> None:
        """Do nothing: a keeper in this process needs no message."""

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
        capture.withdrawn = error is None
        capture.incoming.lose(error or StateError("the save was interrupted", step=capture.step))
        # Possibly a second time, which is harmless: an interrupt may have prevented the first.
        self._jobs.put(capture)

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
        self.records.add_to(self.stats)

    def forget_log(self, upto: int) -> None:
        """Drop records up to ``upto``: their memory is about to be reused."""
        if self.records is not None:
            self.records.forget(upto)

    def log_to_disk(self, on: bool) -> None:
        """Switch writing the log of later steps to disk on or off."""
        assert self.records is not None
        self.records.to_disk(on)

    def audit(self, plan: BasePlan, written: Sequence[Written]) -> None:
        """Audit the digests of a base that could not be written against the previous base.

        Raises:
            AuditError: the base is not the state of its step.
        """
        self._audit.of(plan)(digests_of(written))

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None:
        """Wait until everything that was begun is durable or has failed.

        Args:
            timeout_s: seconds to wait; None for no limit.
            show: show a progress bar.

        Raises:
            DeadlineError: after ``timeout_s``, or when no work makes progress.
            EverstepError: an error reported meanwhile, according to the failure policy.
        """
        deadline = WaitDeadline(self._clock, timeout_s)
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
        self._channel.check()

    def free_port(self, port: int) -> None:
        """Close the mailbox if it listens at ``port``, so that its successor can use the port."""
        if self._commits is not None and self._port == port:
            self._commits.close()

    def close(self) -> None:
        """End the thread after it has persisted the captures in the queue."""
        if self.records is not None:
            # The log before the bases: records that were batched would be lost with this thread.
            self.records.flush()
            try:
                self.records.settle(self._timeout_s)
            except DeadlineError as error:
                self._channel.post(error)
            self.records.close()
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._jobs.put(None)
            # While captures wait at this point, the storage hangs or the caller has given up: do
            # not wait long.
            thread.join(timeout=_LOOK_AGAIN_S if self._waiting else self._timeout_s)
            # The storage hangs: make no further call to it, which would hang this thread, too.
            if thread.is_alive():
                return
        if self._commits is not None:
            self._commits.close()
        # Parked files save allocation for the next base; after the end they only take space.
        with contextlib.suppress(OSError):
            self._slots.clear()

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
                stack.enter_context(self._clock.ticking())
            self._do_all()

    def _do_all(self) -> None:
        """Process the queue until ``None``."""
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, Capture):
                with self._reporting("during cleanup", None):
                    job()
                continue
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
        if self.log_of_run is not None:
            self.log_of_run.expect_base(coming)

    def _do(self, capture: Capture) -> None:
        """Persist one capture and run retention."""
        save = capture.save
        # A multi-step capture is rebuilt in another thread first.
        if capture.assembling:
            capture.made.wait()
        try:
            if capture.withdrawn and capture.incoming.complete:
                fail(save.durable, StateError("a newer base exists", step=save.step))
                return
            arena = capture.arena or self._arena
            assert arena is not None
            failpoint("keeper.before_persist")
            audit = self._audit.of(capture.plan)
            capture.written = self._persist(
                capture.files,
                capture.bodies(arena),
                save,
                self._written,
                audit,
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
        audit: Audit,
        wait_complete: Callable[[], object] = lambda: None,
    ) -> tuple[Written, ...]:
        """Write and commit one base, or hold it in memory; update the counters.

        Args:
            shown: receives the bytes written.
            wait_complete: waits until the capture is complete; raises if it never will be.
        """
        start_s = self._clock.monotonic_s()
        # Registered before the first operation: storage that hangs at once is reported, too.
        work = self._channel.begin(f"writing the base of step {save.step}", save.step)
        watched = WatchedProgress(self._channel, work, shown)
        try:
            if save.in_memory:
                assert self.bases is not None
                written = self.bases.hold(plan, bodies, watched, audit)
            else:
                # Before the commit, as retention runs right after it and looks at the log on disk.
                self._history_flush.before_base(
                    save.step, self.log_of_run, self._timeout_s, lambda: watched.advance(0)
                )
                committer = self._commits or self._persister
                written = committer.persist(plan, bodies, watched, audit)
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
        self.stats.persist_s += self._clock.monotonic_s() - start_s
        self.stats.committed += 1
        linked_bytes = sum(shard.record.length for shard in written if shard.linked)
        self.stats.linked_bytes += linked_bytes
        self.stats.written_bytes += plan.size_bytes - linked_bytes
        self.stats.durable_step = max(save.step, self.stats.durable_step or 0)
        complete(save.durable, plan.size_bytes)
        return written

    def _post_damage(self, error: DamageError) -> None:
        # The damaged file may be one that later bases would link to.
        self._persister.static.forget()
        self._channel.post(error)

    def _retain(self, save: Save) -> None:
        """Run retention after a commit; its failure is reported, and the base stays durable."""
        start_s = self._clock.monotonic_s()
        # A read-back of a large base takes long: retention has a deadline of its own.
        work = self._channel.begin("cleaning up old bases", save.step)
        try:
            if self._commits is not None:
                self._commits.retain()
            else:
                self._retention.run(self._post_damage)
        except (FencedError, StorageError, DeadlineError) as error:
            self._channel.post(error)
        except Exception as error:
            self._post_internal("in retention", error, save)
        finally:
            self._channel.end(work)
            self.stats.retain_s += self._clock.monotonic_s() - start_s
