"""Commit this rank's bases together with those of the other ranks.

Drives a :class:`~everstep.commit.job.member.Member` over disk and mailbox. The thread that persists
a base waits here until every rank has written its shards; another thread answers messages
meanwhile. A base that one rank cannot write exists on no rank. A silent rank is named in an error
and no longer waited for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from everstep.commit import BaseId
from everstep.commit.base_commit import WriteFiles, WriteMarker
from everstep.commit.job import COORDINATOR, Send
from everstep.commit.job.coordinator import Coordinator
from everstep.commit.job.member import (
    BaseDamaged,
    BaseDurable,
    BaseLate,
    Fenced,
    GaveUp,
    Member,
    Origin,
    Out,
    Pace,
    Perform,
    Withdraw,
)
from everstep.commit.job.messages import Cluster
from everstep.errors import (
    DamageError,
    DeadlineError,
    EverstepError,
    FencedError,
    StateError,
    StorageError,
)
from everstep.format import BasePlan, FileRecord, base_dir
from everstep.format.writer import Written
from everstep.keeper.persist.committer import Timeline, is_committed
from everstep.keeper.persist.job_link import JobLink
from everstep.keeper.persist.rank_disk import RankDisk
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.keeper.retain import HistoryWindows, KeptBases
from everstep.restore.fetch.rank_copies import verify_rank
from everstep.run.fence import Fence
from everstep.seams.processes import Condition
from everstep.seams.progress import ProgressSink
from everstep.state.layout import Body
from everstep.tiers import storage_errors

_log = logging.getLogger("everstep.keeper")
_TICK_S = 0.1
# For retention over all ranks. A rank that does not answer in time is asked again after the next
# base.
_SETTLE_S = 5.0
_FAREWELL_S = 2.0
_TAKE_OVER_S = 10.0


@dataclass(eq=False, slots=True)
class _Work:
    """A base that a thread waits for.

    Attributes:
        since_s: start of the wait, or time at which the marker was written.
        written: files of this rank, once written.
        begun: this rank has started to write its files.
        marked: this rank's marker is durable.
        durable: the base is committed on all ranks.
        error: reason why the wait is over without a commit.
    """

    plan: BasePlan
    bodies: Sequence[Body]
    progress: ProgressSink
    since_s: float
    written: tuple[Written, ...] = ()
    begun: bool = False
    marked: bool = False
    durable: bool = False
    error: BaseException | None = None


class _Errors:
    """Errors of background work, of which some would be repeated as often as an action is.

    Args:
        post: receives each error.
    """

    def __init__(self, post: Callable[[EverstepError], None]) -> None:
        self.post = post
        self._posted: set[str] = set()

    def post_once(self, error: EverstepError) -> None:
        """Post an error unless one with the same message was posted."""
        if error.message not in self._posted:
            self._posted.add(error.message)
            self.post(error)


class JobCommitter:
    """Commits one rank's bases of one timeline (:class:`.committer.Committer`).

    Args:
        link: link to the other ranks of the same start; closed together with this object.
        writer: writes this rank's files.
        post: receives errors of background work.
    """

    def __init__(
        self,
        timeline: Timeline,
        link: JobLink,
        writer: ShardWriter,
        post: Callable[[EverstepError], None],
    ) -> None:
        self.writer = writer
        self.link = link
        self._timeline = timeline
        self._errors = _Errors(post)
        session = link.session
        timeout_s = timeline.timeout_s
        # Take over from a silent leader well before the deadline, so that the deadline error can
        # name the ranks whose markers are missing.
        pace = Pace(take_over_s=min(_TAKE_OVER_S, timeout_s / 2), late_s=timeout_s)
        cluster = Cluster(session.disks)
        filesystem = timeline.seams.filesystem
        self._disk = RankDisk(
            filesystem,
            timeline.run,
            session.rank,
            self,
            unique=f"{session.session}-{session.rank}",
            kept=KeptBases(
                timeline.keep, HistoryWindows(filesystem, timeline.seams.clock, timeline.history)
            ),
            fence=Fence(filesystem, timeline.run, timeline.number),
        )
        # A replacement keeper continues the commits of the lost one: its markers are on disk.
        kept = self._disk.markers_of(timeline.number) if session.again else {}
        origin = Origin(session.recovered, session.unread, session.unreadable, kept)
        self._member = (
            Coordinator(
                cluster,
                timeline.number,
                origin,
                keep=timeline.keep.newest,
                pace=pace,
                spared=timeline.spared,
            )
            if session.rank == COORDINATOR
            else Member(cluster, session.rank, timeline.number, origin, pace=pace)
        )
        # One condition guards the state machine: the keeper's threads and the message thread use
        # it.
        self._changed = Condition()
        self._works: dict[BaseId, _Work] = {}
        self._again: list[Perform] = []  # actions to repeat, as the disk has refused them
        self._withdrawing: dict[BaseId, str] = {}  # bases to withdraw, with the reason
        self._released = self._closing = self._in_vain = False
        self._late: BaseId | None = None  # base that waits for silent ranks
        # Other ranks may wait for bases that were lost with this rank's previous keeper.
        for step in session.lost:
            why = f"it was lost with the keeper of rank {session.rank}"
            self.refuse(BaseId(timeline.number, step), why)
        self._thread = threading.Thread(target=self._drive, name="everstep-ranks", daemon=True)
        self._thread.start()

    # --- Called by the keeper ---

    def persist(
        self, plan: BasePlan, bodies: Sequence[Body], progress: ProgressSink
    ) -> tuple[Written, ...]:
        """Write this rank's files of a base; wait until the base is committed on all ranks."""
        base = BaseId(plan.identity.timeline, plan.identity.step)
        work = _Work(plan, bodies, progress, self._timeline.seams.clock.running_s())
        with self._changed:
            if is_committed(self.writer, base):
                return ()
            # Registered before the machine starts, as its first action looks the work up.
            self._works[base] = work
            try:
                self._absorb(self._member.persist(plan.identity))
                # Polled: deadlines pass without a notification.
                while not self._is_over(base, work):
                    self._changed.wait(_TICK_S)
                    # Waiting for other ranks must not count as a hang of this rank's storage.
                    progress.advance(0)
            except BaseException:
                self._leave(base, work)
                raise
            finally:
                del self._works[base]
        if work.error is not None:
            raise work.error
        return work.written

    def release(self) -> None:
        """Fail bases that only wait for other ranks: the next start of the job decides on them."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def training_ended(self) -> None:
        """Tell the other ranks not to wait for further bases of this rank."""
        with self._changed:
            why = f"training of rank {self.link.session.rank} has ended"
            self._absorb(self._member.end_captures(why))

    def refuse(self, base: BaseId, why: str) -> None:
        """Tell the other ranks that this rank will not begin a base."""
        with self._changed:
            self._absorb(self._member.refuse(base, why))

    def retain(self) -> None:
        """Wait until retention has finished on all ranks (leading rank only); delete unneeded log
        segments.

        Raises:
            FencedError: a newer timeline has begun.
            StorageError: segments could not be deleted.
        """
        with self._changed:
            # Bounded: retention of silent ranks must not delay this rank's next base.
            self._changed.wait_for(self.is_settled, _SETTLE_S)
        with storage_errors("clean up the log", self.writer.run, rank=self.link.session.rank):
            self._disk.retain_log(self._member.timeline, leads=self._member.leads)

    def sweep(self) -> None:
        """Remove unfinished bases of older timelines, if this rank leads on its disk."""
        if not self._member.leads:
            return
        with (
            self._changed,
            storage_errors("clean up", self.writer.run, rank=self.link.session.rank),
        ):
            self._disk.sweep(self._member.timeline, spare=self.link.session.spare)

    def close(self) -> None:
        """End the thread after the other ranks can do without this one."""
        with self._changed:
            if self._member.fenced is None and not self._released:
                # Bounded: a rank that has died never says that it needs nothing more.
                self._changed.wait_for(self.is_dispensable, _FAREWELL_S)
            # Set under the lock: the thread must not handle a message after the mailbox is closed.
            self._closing = True
        # Joined before the mailbox is closed, as the thread reads from it.
        self._thread.join(self._timeline.timeout_s)
        self.link.close()

    # --- Waiting ---

    def _leave(self, base: BaseId, work: _Work) -> None:
        """Give up a base after an interrupt in the thread that waited for it."""
        if not work.begun:
            self._absorb(self._member.drop(base, "the save was interrupted"))
        elif not work.marked:
            # Without a marker no other rank counts on it. With one, the commit goes on.
            self._withdrawing[base] = "the save was interrupted"

    def _is_over(self, base: BaseId, work: _Work) -> bool:
        """Return True if the wait for ``base`` is over; set ``work.error`` if it has failed."""
        if work.durable or work.error is not None:
            return True
        if self._member.fenced is not None:
            work.error = self._member.fenced
            return True
        waited_s = self._timeline.seams.clock.running_s() - work.since_s
        # With a marker on disk the base may still become durable: the next start finds out.
        if self._released and (work.marked or not work.begun):
            work.error = StateError(
                "the next start of the job began before the base was durable on all ranks",
                step=base.step,
                rank=self.link.session.rank,
            )
        elif not work.begun and (self._late is not None or waited_s > self._timeline.timeout_s):
            work.error = DeadlineError(
                "the previous base is not durable on all ranks yet",
                step=base.step,
                rank=self.link.session.rank,
                hint="another rank or its storage hangs",
            )
        # The trainer reuses the memory after the error: this rank must never begin to write it.
        if work.error is not None and not work.begun:
            self._absorb(self._member.drop(base, str(work.error)))
        return work.error is not None

    def is_settled(self) -> bool:
        """Return True if no rank has work left for retention, as far as this rank must know."""
        coordinator = self._member
        if not isinstance(coordinator, Coordinator) or coordinator.fenced is not None:
            return True
        return coordinator.is_settled or self._in_vain or self._closing

    def _is_in_vain(self) -> bool:
        """Return True if a rank that is waited for has ended: the next start does the remaining
        work."""
        awaited = self._member.awaited if isinstance(self._member, Coordinator) else ()
        return any(self.link.is_disconnected(rank) for rank in awaited if rank != COORDINATOR)

    def is_dispensable(self) -> bool:
        """Return True if no other rank still needs an answer from this one."""
        if self.link.session.rank == COORDINATOR:
            return self.is_settled()
        may_delete = self._member.watermark.before is not None or self._member.watermark_pending
        return self.link.is_disconnected(COORDINATOR) or not may_delete

    # --- The thread ---

    def _drive(self) -> None:
        """Handle messages and deadlines until :meth:`close`."""
        while not self._closing:
            # Outside of the lock: persist() has to run while no message arrives.
            data = self.link.receive(_TICK_S)
            try:
                with self._changed:
                    envelope = None if data is None else self.link.deliver(data)
                    if envelope is not None:
                        self._absorb(self._member.receive(envelope.sender, envelope.message))
                    # Only when the mailbox is empty: a rank that has ended may have left messages.
                    self._in_vain = data is None and self._is_in_vain()
                    # At each turn, as deadlines and take-overs must work without messages.
                    self._absorb(self._member.tick(self._timeline.seams.clock.running_s()))
                    self._try_again()
                    self._changed.notify_all()
            except BaseException as error:
                # An exception would end this thread, and with it all later commits.
                _log.exception("internal error in the commits of rank %d", self.link.session.rank)
                self._errors.post_once(EverstepError(f"internal error in commits: {error!r}"))

    def _try_again(self) -> None:
        """Repeat actions and withdrawals that the disk has refused."""
        again = self._again
        self._again = []
        self._absorb(again)
        for base, reason in list(self._withdrawing.items()):
            self._absorb(self._withdraw(base, reason))

    def _absorb(self, outs: Iterable[Out]) -> None:
        """Carry out the outputs of the state machine, and those that follow from them."""
        # A queue, as an action produces further outputs that must follow those already there.
        todo = deque(outs)
        while todo:
            out = todo.popleft()
            if isinstance(out, Send):
                self.link.send(out.rank, out.message)
            elif isinstance(out, Perform):
                todo.extend(self._perform(out))
            else:
                self._report(out)

    def _perform(self, do: Perform) -> list[Out]:
        """Carry out one action on the disk; return the outputs that follow."""
        # A newer timeline owns the run: write nothing more.
        if self._member.fenced is not None:
            return []
        try:
            # With the lock held: the machine expects its actions one at a time and in order.
            event = self._disk.perform(do)
        except FencedError as error:
            return self._member.fence_off(error)
        except (OSError, EverstepError) as error:
            return self._failed(do, error)
        except Exception as error:
            # A bug in everstep counts as a failure, so that the other ranks do not wait for it.
            internal = EverstepError(f"internal error in a save: {error!r}", step=do.base.step)
            internal.__cause__ = error
            return self._failed(do, internal)
        work = self._works.get(do.base)
        if isinstance(do.action, WriteMarker) and work is not None:
            work.marked = True
            # The other ranks get the full time from here on.
            work.since_s = self._timeline.seams.clock.running_s()
        elif isinstance(do.action, Withdraw):
            self._disk.remove_empty(do.base)
        return self._member.done(do.base, event)

    def _failed(self, do: Perform, error: OSError | EverstepError) -> list[Out]:
        """End the base if its files or marker cannot be written; repeat any other action later."""
        ours = self._in_words(do, error)
        if not isinstance(do.action, WriteFiles | WriteMarker):
            self._again.append(do)
            self._errors.post_once(ours)
            return []
        if do.base in self._works:
            self._works[do.base].error = ours
        return self._withdraw(do.base, f"rank {self.link.session.rank}: {ours.message}")

    def _withdraw(self, base: BaseId, reason: str) -> list[Out]:
        """Remove this rank's marker and files of a base, then tell the other ranks."""
        try:
            self._disk.withdraw(base)
            self._disk.remove_empty(base)
        except OSError:
            # Say nothing to the other ranks yet: a marker on disk could still commit the base.
            self._withdrawing[base] = reason
            return []
        self._withdrawing.pop(base, None)
        return self._member.failed(base, reason)

    def _in_words(self, do: Perform, error: OSError | EverstepError) -> EverstepError:
        directory = base_dir(self.writer.run, do.base.timeline, do.base.step)
        try:
            with storage_errors(
                "write the base", directory, step=do.base.step, rank=self.link.session.rank
            ):
                raise error
        except EverstepError as ours:
            return ours

    def _report(self, out: Out) -> None:
        """Pass the outcome of a base on to the thread that waits for it."""
        if isinstance(out, BaseDamaged):
            self._errors.post(damaged_after_commit_error(out, self.writer.run))
        elif isinstance(out, BaseDurable | GaveUp | BaseLate):
            self._late = out.base if isinstance(out, BaseLate) else None
            # Nobody waits any more if the save was interrupted.
            work = self._works.get(out.base)
            if work is not None and work.error is None:
                work.durable = isinstance(out, BaseDurable)
                work.error = outcome_error(out, self.writer.run, self._timeline.timeout_s)
        elif isinstance(out, Fenced):
            _log.warning("%s", out.error)
        self._changed.notify_all()

    # --- Files ---

    def write_shards(self, base: BaseId) -> tuple[FileRecord, ...]:
        """Write this rank's files of a base that a thread waits for."""
        work = self._works[base]
        # From here on the memory is being read: the base can only be withdrawn, not dropped.
        work.begun = True
        work.written = self.writer.write(work.plan, work.bodies, work.progress)
        return tuple(shard.record for shard in work.written)

    def read_shards(self, base: BaseId) -> str:
        """Read this rank's files of a base back; return a description of the damage, or ""."""
        problem = verify_rank(
            self.writer.filesystem,
            self.writer.run,
            base,
            self.link.session.rank,
            self._timeline.ring,
            timeout_s=self._timeline.timeout_s,
        )
        # The damage may be in a file that the next base would link to.
        if problem:
            self.writer.static.forget()
        return problem


_EACH = (
    "every rank must call ckpt.step() at the end of the same steps, and save() and close() at the "
    "same steps, too"
)
_SILENT = (
    f"they have not taken this base ({_EACH}), or they hang, or have died; everstep ps on their "
    "machine shows their keepers"
)


def damaged_after_commit_error(out: BaseDamaged, run: PurePath) -> DamageError:
    """Return the error for a committed base that is damaged when read back before older ones
    are deleted."""
    return DamageError(
        f"{out.base} was committed, but is damaged when read back: {out.problem}; "
        "older bases are kept",
        step=out.base.step,
        rank=out.rank,
        path=run,
        hint="the disk or memory of the rank's machine may be failing",
    )


def outcome_error(
    out: BaseDurable | GaveUp | BaseLate, run: PurePath, timeout_s: float
) -> EverstepError | None:
    """Return the error for a base that is not durable; None if it is.

    Args:
        timeout_s: seconds that other ranks had to write their shards.
    """
    where: dict[str, Any] = {"step": out.base.step, "path": run}
    if isinstance(out, GaveUp):
        return StorageError(
            f"no rank has the base of step {out.base.step}: {out.reason}",
            **where,
            hint="training goes on; the next base is taken as usual",
        )
    if isinstance(out, BaseLate):
        silent = _numbers(out.missing) or "that lead on a disk"
        return DeadlineError(
            f"rank(s) {silent} have not written their shards of the base of step "
            f"{out.base.step} within {timeout_s:g} s",
            **where,
            hint=_SILENT,
        )
    return None


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
