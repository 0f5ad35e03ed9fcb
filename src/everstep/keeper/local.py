"""The keeper inside the training process: one thread that makes captured bases durable.

``sync`` bases are persisted by the calling thread; ``async`` ones by the keeper's, in the
order in which they were taken.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import PurePath

from everstep.capture.base import Body
from everstep.errors import DeadlineError, EverstepError, FencedError, StorageError
from everstep.format.names import SLOTS_DIR, timeline_dir
from everstep.format.writer import ChunkRing
from everstep.keeper.channel import BackgroundChannel, Work
from everstep.keeper.persist import BasePlan, Persister
from everstep.keeper.retain import Retention
from everstep.keeper.save import Save
from everstep.seams import Seams
from everstep.seams.progress import ProgressSink, progress, silent
from everstep.tiers.slots import SlotStore

__all__ = ["CHUNKS", "WRITERS", "KeeperStats", "LocalKeeper"]

WRITERS = 2
CHUNKS = WRITERS + 2
_LOOK_AGAIN_S = 0.2


@dataclass(slots=True)
class KeeperStats:
    """What the keeper has done so far.

    Attributes:
        persist_s: seconds from the beginning of writing to the commit, all bases together.
        retain_s: seconds in retention, read-backs included.
    """

    committed: int = 0
    failed: int = 0
    written_bytes: int = 0
    persist_s: float = 0.0
    retain_s: float = 0.0
    durable_step: int | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    plan: BasePlan
    bodies: Sequence[Body]
    save: Save
    release: Callable[[], None]


class _Watched:
    """Progress of one base: feeds the deadline of the work and whatever is shown."""

    def __init__(self, channel: BackgroundChannel, work: Work, shown: ProgressSink) -> None:
        self._channel, self._work, self._shown = channel, work, shown

    def advance(self, amount: int) -> None:
        self._channel.progressed(self._work)
        self._shown.advance(amount)


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def advance(self, amount: int) -> None:
        self.count += amount


class LocalKeeper:
    """Persists bases of one timeline and runs retention after each.

    Args:
        run: the run folder.
        keep: bases to keep.
        timeout_s: a transfer that takes longer counts as hung.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        timeline: int,
        channel: BackgroundChannel,
        ring: ChunkRing,
        *,
        keep: int,
        timeout_s: float,
    ) -> None:
        filesystem = seams.filesystem
        self._clock = seams.clock
        self._channel = channel
        directory = timeline_dir(run, timeline) / SLOTS_DIR
        self._slots = slots = SlotStore(filesystem, directory)
        self._persister = Persister(filesystem, run, ring, slots, timeout_s=timeout_s)
        self.retention = Retention(
            filesystem, run, timeline, ring, slots, keep=keep, timeout_s=timeout_s
        )
        self.stats = KeeperStats()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._written = _Counter()

    def persist(self, plan: BasePlan, bodies: Sequence[Body], save: Save, *, show: bool) -> None:
        """Makes a base durable in the calling thread.

        Raises:
            EverstepError: the base failed; nothing of it is left.
        """
        with progress(f"save step {save.step}", plan.size_bytes) as bar:
            self._persist(plan, bodies, save, bar if show else silent)
        self._retain(save)

    def submit(
        self, plan: BasePlan, bodies: Sequence[Body], save: Save, release: Callable[[], None]
    ) -> None:
        """Queues a captured base.

        Args:
            release: called when the bodies are no longer needed.
        """
        job = _Job(plan, bodies, save, release)
        with self._changed:
            self._waiting.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="everstep-keeper", daemon=True
                )
                self._thread.start()
        self._jobs.put(job)

    def wait(self, timeout_s: float | None, *, show: bool = True) -> None:
        """Waits until everything that was submitted is durable or has failed.

        Raises:
            DeadlineError: after ``timeout_s``, or when the work makes no progress.
            EverstepError: what failed meanwhile, by the policy.
        """
        start_s = self._clock.monotonic_s()
        with self._changed:
            total = sum(job.plan.size_bytes for job in self._waiting)
        seen = self._written.count
        with progress("save", total) as bar:
            while True:
                with self._changed:
                    if not self._waiting:
                        break
                    self._changed.wait(_LOOK_AGAIN_S)
                if show:
                    bar.advance(self._written.count - seen)
                    seen = self._written.count
                self._channel.check()
                if self._channel.hung():  # reported already; waiting on would be for ever
                    raise DeadlineError(
                        f"{len(self._waiting)} base(s) are not durable: the storage hangs",
                        hint="look at the disk or the network file system (dmesg, df, iostat)",
                    )
                waited_s = self._clock.monotonic_s() - start_s
                if timeout_s is not None and waited_s > timeout_s:
                    raise DeadlineError(
                        f"{len(self._waiting)} base(s) are not durable after {waited_s:.0f} s",
                        hint="wait longer, or look at the disk",
                    )
        self._channel.check()

    def close(self) -> None:
        """Ends the thread; what is queued is persisted first."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join(timeout=_LOOK_AGAIN_S if self._waiting else None)
            if thread.is_alive():
                return  # the storage hangs: not one more call to it
        with contextlib.suppress(OSError):  # nobody will overwrite them now
            self._slots.clear()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            finally:  # whatever happens, nobody waits for it for ever
                with self._changed:
                    self._waiting.remove(job)
                    self._changed.notify_all()
            del job

    def _do(self, job: _Job) -> None:
        try:
            self._persist(job.plan, job.bodies, job.save, self._written)
        except EverstepError as error:
            self._channel.post(error)
            return
        except BaseException as error:  # a bug: reported like any other failure
            self._post_internal("in a save", error, job.save)
            return
        finally:
            job.release()
        try:
            self._retain(job.save)
        except BaseException as error:  # would end this thread, and with it all saves to come
            self._post_internal("in retention", error, job.save)

    def _post_internal(self, where: str, error: BaseException, save: Save) -> None:
        failed = EverstepError(f"internal error {where}: {error!r}", step=save.step)
        failed.__cause__ = error
        self._channel.post(failed)

    def _persist(
        self, plan: BasePlan, bodies: Sequence[Body], save: Save, shown: ProgressSink
    ) -> None:
        start_s = self._clock.monotonic_s()
        work = self._channel.begin(f"writing the base of step {save.step}", save.step)
        try:
            self._persister.persist(plan, bodies, _Watched(self._channel, work, shown))
        except BaseException as error:
            self.stats.failed += 1
            _fail(save.durable, error)
            raise
        finally:
            self._channel.end(work)
        self.stats.persist_s += self._clock.monotonic_s() - start_s
        self.stats.committed += 1
        self.stats.written_bytes += plan.size_bytes
        self.stats.durable_step = save.step
        if not save.durable.done():
            save.durable.set_result(plan.size_bytes)

    def _retain(self, save: Save) -> None:
        """Retention after a commit; its failure is reported, the base stays durable."""
        start_s = self._clock.monotonic_s()
        work = self._channel.begin("cleaning up old bases", save.step)
        try:
            self.retention.run(self._channel.post)
        except (FencedError, StorageError, DeadlineError) as error:
            self._channel.post(error)
        except Exception as error:
            self._post_internal("in retention", error, save)
        finally:
            self._channel.end(work)
            self.stats.retain_s += self._clock.monotonic_s() - start_s


def _fail(future: Future[int], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
