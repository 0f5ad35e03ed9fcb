"""Makes captured bases durable, in the order in which they were taken.

One thread writes: in the keeper process, or, where there is none, in the training process.
``sync`` bases are written by the calling thread.
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
from everstep.keeper.log.log import LogStore
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
from everstep.seams.files.moving import MovingFileSystem
from everstep.seams.network.mailbox import Mailbox
from everstep.seams.processes.conditions import Condition
from everstep.seams.progress import Counted, ProgressSink, progress, silent
from everstep.state.layout.shards import Body, ShardLayout
from everstep.tiers.disk import storage_errors
from everstep.tiers.slots import SlotStore

if TYPE_CHECKING:  # loaded where there are several ranks, or bases in memory
    from everstep.keeper.held.memory_bases import MemoryBases
    from everstep.keeper.persist.rank_commits import RankCommits

__all__ = ["CHUNKS", "WRITERS", "LocalKeeper"]

WRITERS = 6  # transfers under way at a time: a virtual or an NVMe disk wants several
CHUNKS = WRITERS + 2
_LOOK_AGAIN_S = 0.2


class LocalKeeper:
    """Persists bases of one timeline and runs retention after each.

    Args:
        run: the run folder.
        arena: the memory that captures are in; None if there will be none.
        keep: bases to keep.
        verified: a base that was read and found whole, if any.
        on_done: called after the retention that follows a base, which still counts as
            :attr:`waiting`.
        timeout_s: a transfer that takes longer counts as hung.
        history: which segments of the log stay (see :class:`.retain.Retention`).
        job_session: of this rank among several; None: it is alone.
        mailbox: to the keepers of the others.
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
        self.lost: EverstepError | None = None  # it goes with this process
        self._operations = 0  # on the disk, that have come back
        self._written = Counted()
        self._commits: RankCommits | None = None
        filesystem: FileSystem = MovingFileSystem(seams.filesystem, self._moved)
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
        about = filesystem, run, timeline, ring, slots
        self._retention = Retention(
            *about, keep=keep, timeout_s=timeout_s, history=history, clock=seams.clock
        )
        self._promised = HistoryFlush(history, keep)
        if verified is not None:
            self._retention.verified.add(verified)
        self._port = 0  # of the mailbox
        if job_session is not None:
            assert mailbox is not None
            from everstep.keeper.persist.rank_commits import RankCommits

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
        self.records: LogStore | None = None  # the same, if this is a thread of the trainer
        self._on_done = on_done
        self.bases: MemoryBases | None = None  # for those that live in memory
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
        """Changes as long as a base that is being written gets anywhere, or retention does."""
        return self._operations + self._written.count

    @property
    def log_moves(self) -> int:
        """Changes as long as the log gets anywhere."""
        return 0 if self.log_of_run is None else self.log_of_run.moves

    def _moved(self) -> None:
        self._operations += 1
        self._channel.moved()
        if self._commits is not None:
            self._commits.moved()

    @property
    def waiting(self) -> list[Capture]:
        """Captures of whose end (durable, or failed) not everybody has heard yet."""
        with self._changed:
            return list(self._waiting)

    @property
    def commits(self) -> RankCommits | None:
        """Of this rank with others; None: it is alone."""
        return self._commits

    @property
    def is_one_of_several(self) -> bool:
        """Whether other ranks have parts of each base."""
        return self._commits is not None

    def sweep(self) -> None:
        """Cleans up after crashes; a failure is reported, and no reason to stop."""
        try:
            if self._commits is not None:
                self._commits.sweep()
                return
            with storage_errors("clean up", self._run):
                self._retention.sweep(self._retention.look(), in_flight=())
        except EverstepError as error:
            self._channel.post(error)

    def sweep_in_background(self) -> None:
        """:meth:`sweep` in the thread, before any base."""
        self._start()
        self._jobs.put(self.sweep)

    def persist(self, plan: BasePlan, bodies: Sequence[Body], save: Save, *, show: bool) -> None:
        """Makes a base durable in the calling thread.

        Raises:
            EverstepError: the base failed; nothing of it is left.
        """
        with progress(f"save step {save.step}", plan.size_bytes) as bar:
            audit = self._audit.of(plan)
            self._persist(plan, bodies, save, bar if show else silent, audit)
        self._retain(save)

    def release(self) -> None:
        """Whoever resumes the run comes next: what only waits for other ranks fails now."""
        if self.bases is not None:
            self.bases.release()
        if self._commits is not None:
            self._commits.release()

    def no_more(self) -> None:
        """Behind what was captured whole nothing more will come."""
        if self._commits is not None:
            self._start()
            self._jobs.put(self._commits.no_more)

    def begin(self, capture: Capture) -> None:
        """A capture has begun; one that streams is written as it arrives."""
        self._start()
        with self._changed:
            capture.begun = True
            self._waiting.append(capture)
        self._tell_log(True)
        if capture.stream:
            self._jobs.put(capture)

    def announce(self, capture: Capture) -> None:
        """It has been told already: it lives in this process."""

    def expect(self, capture: Capture) -> None:
        """A capture is being made whole; what follows is written behind it."""
        self._jobs.put(capture)

    def captured(self, capture: Capture, objects: Mapping[str, bytes]) -> None:
        """All of a capture has arrived: whatever happens to training, it becomes durable."""
        if not capture.stream:  # first: behind an interrupt what has arrived cannot be withdrawn
            self._jobs.put(capture)
        capture.incoming.arrived(objects)

    def abandon(self, capture: Capture, error: EverstepError | None) -> None:
        """The rest of a capture will never arrive; nothing of it is left.

        Args:
            error: why, to be reported; None when whoever asked for it has withdrawn it.
        """
        if capture.incoming.complete or capture.incoming.lost:
            return
        capture.withdrawn = error is None
        capture.incoming.lose(error or StateError("the save was interrupted", step=capture.step))
        self._jobs.put(capture)  # perhaps once more: an interrupt may have come before the first

    def log(
        self,
        number: int,
        head: RecordHead,
        layout: ShardLayout,
        objects: Mapping[str, bytes],
        offset: int,
    ) -> None:
        """A record of the log lies whole in the arena."""
        assert self.records is not None
        self.records.add(number, head, layout, objects, offset)
        self.records.add_to(self.stats)

    def forget_log(self, upto: int) -> None:
        """The memory of records up to this number is going to be used again."""
        if self.records is not None:
            self.records.forget(upto)

    def log_to_disk(self, on: bool) -> None:
        """Records of the steps from now on are written to disk, too; or they are not."""
        assert self.records is not None
        self.records.to_disk(on)

    def audit(self, plan: BasePlan, written: Sequence[Written]) -> None:
        """Compares a base that could not be written with the one before.

        Raises:
            AuditError: it is not the state of its step.
        """
        self._audit.of(plan)(digests_of(written))

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None:
        """Waits until everything that was begun is durable or has failed.

        Raises:
            DeadlineError: after ``timeout_s``, or when the work makes no progress.
            EverstepError: what failed meanwhile, by the policy.
        """
        patience = WaitDeadline(self._clock, timeout_s)
        with self._changed:
            total = sum(capture.plan.size_bytes for capture in self._waiting)
        seen = self._written.count
        with progress("save", total) as bar:
            while True:
                with self._changed:
                    if not self._waiting:
                        break
                    self._changed.wait(patience.poll_s)
                if show:
                    bar.advance(self._written.count - seen)
                    seen = self._written.count
                self._channel.check()
                if self._channel.hung():  # reported already; waiting on would be for ever
                    raise storage_hang_error(len(self._waiting))
                if patience.is_over(len(self.waiting)):
                    break
        self._channel.check()

    def leave(self, port: int) -> None:
        """Makes room for who takes its place with a mailbox at ``port``, if that is its own."""
        if self._commits is not None and self._port == port:
            self._commits.close()

    def close(self) -> None:
        """Ends the thread; what is queued is persisted first."""
        if self.records is not None:
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
            thread.join(timeout=_LOOK_AGAIN_S if self._waiting else self._timeout_s)
            if thread.is_alive():
                return  # the storage hangs: not one more call to it
        if self._commits is not None:
            self._commits.close()
        with contextlib.suppress(OSError):  # nobody will overwrite them now
            self._slots.clear()

    def _start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="everstep-keeper", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:  # whatever of this hangs, training is told
            with self._reporting("in starting a thread", None):
                stack.enter_context(self._clock.ticking())
            self._do_all()

    def _do_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, Capture):
                with self._reporting("in cleaning up", None):
                    job()
                continue
            if job not in self.waiting:
                continue
            try:
                self._do(job)
            finally:  # whatever happens, nobody waits for it for ever
                try:
                    self._on_done(job)
                finally:  # only now: a keeper that has nothing to wait for may end
                    with self._changed:
                        self._waiting.remove(job)
                        self._changed.notify_all()
                    self._tell_log(bool(self.waiting))
            del job

    def _tell_log(self, coming: bool) -> None:
        if self.log_of_run is not None:
            self.log_of_run.relief(coming)

    def _do(self, capture: Capture) -> None:
        save = capture.save
        if capture.assembling:
            capture.made.wait()
        try:
            if capture.withdrawn and capture.incoming.complete:
                fail(save.durable, StateError("a newer base is there", step=save.step))
                return
            arena = capture.arena or self._arena
            assert arena is not None
            failpoint("keeper.before_persist")
            audit = self._audit.of(capture.plan)
            about = capture.files, capture.bodies(arena), save, self._written, audit
            capture.written = self._persist(*about, whole=capture.incoming.objects)
        except EverstepError as error:
            if not capture.withdrawn:
                self._channel.post(error)
            return
        except BaseException as error:  # a bug: reported like any other failure
            fail(save.durable, self._post_internal("in a save", error, save))
            return
        finally:
            with self._reporting("behind a save", save):
                capture.on_end(capture)
        if save.in_memory:
            return
        with self._reporting("in retention", save):
            self._retain(save)

    @contextlib.contextmanager
    def _reporting(self, where: str, save: Save | None) -> Iterator[None]:
        """What goes wrong would end this thread, and with it all saves to come."""
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
        whole: Callable[[], object] = lambda: None,
    ) -> tuple[Written, ...]:
        start_s = self._clock.monotonic_s()
        work = self._channel.begin(f"writing the base of step {save.step}", save.step)
        watched = WatchedProgress(self._channel, work, shown)
        try:
            if save.in_memory:
                assert self.bases is not None
                written = self.bases.hold(plan, bodies, watched, audit)
            else:
                about = save.step, self.log_of_run, self._timeout_s
                self._promised.before_base(*about, lambda: watched.advance(0))
                keeps = self._commits or self._persister
                written = keeps.persist(plan, bodies, watched, audit)
                if not written:  # it was there already, but this capture may still be under way
                    whole()
        except BaseException as error:
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
        self._persister.static.forget()
        self._channel.post(error)

    def _retain(self, save: Save) -> None:
        """Retention after a commit; its failure is reported, the base stays durable."""
        start_s = self._clock.monotonic_s()
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
