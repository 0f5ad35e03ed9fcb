"""Commits of one rank's bases together with those of the other ranks.

Drives a :class:`~everstep.commit.job.member.Member` over disk and mailbox. Whoever persists a base
waits here until every rank has its part of it; a thread answers the others meanwhile. What one rank
cannot write exists on none, and a rank that is silent is named, and not waited for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from everstep.commit.job.cluster import COORDINATOR, Cluster
from everstep.commit.job.coordinator import Coordinator
from everstep.commit.job.member import Member
from everstep.commit.job.messages import (
    CopyMessage,
    DiskMoves,
    Envelope,
    Message,
    PeerMessage,
    accept,
    encode_message,
)
from everstep.commit.job.steps import (
    Do,
    Fenced,
    GaveUp,
    IsDamaged,
    IsDurable,
    IsLate,
    Out,
    Pace,
    Send,
    Withdraw,
)
from everstep.commit.lineage import BaseId
from everstep.commit.machine import WriteFiles, WriteManifest, WriteMarker
from everstep.errors import (
    DamageError,
    DeadlineError,
    EverstepError,
    FencedError,
    FormatError,
    StateError,
    StorageError,
)
from everstep.format.names import base_dir
from everstep.format.plan import BasePlan
from everstep.format.records import FileRecord, Marker
from everstep.format.writer import ChunkRing, Written
from everstep.keeper.persist.persister import Audit, Persister
from everstep.keeper.persist.rank_disk import RankDisk
from everstep.keeper.retain.history import history_windows
from everstep.link.job_session import JobSession
from everstep.restore.fetch.ranks import verify_rank
from everstep.run.fence import Fence
from everstep.run.scan import scan_base, scan_run
from everstep.seams import Seams
from everstep.seams.failpoints import failpoint
from everstep.seams.network.mailbox import Mailbox
from everstep.seams.processes.conditions import Condition
from everstep.seams.progress import ProgressSink
from everstep.state.layout.shards import Body
from everstep.tiers.disk import storage_errors

__all__ = [
    "RankCommits",
    "damaged_after_commit_error",
    "outcome_error",
]

_log = logging.getLogger("everstep.keeper")
_TICK_S = 0.1
_SETTLE_S = 5.0  # of retention over all ranks; whoever is left out of it is asked next time
_FAREWELL_S = 2.0
_TAKE_OVER_S = 10.0
_BEATS = 20  # within the time after which a silent rank is reported


@dataclass(eq=False, slots=True)
class _Work:
    """A base that somebody waits for."""

    plan: BasePlan
    bodies: Sequence[Body]
    progress: ProgressSink
    audit: Audit
    since_s: float
    written: tuple[Written, ...] = ()
    begun: bool = False
    marked: bool = False
    durable: bool = False
    error: BaseException | None = None


class RankCommits:
    """Persists one rank's bases of one timeline, as a :class:`.persist.Persister` does alone.

    Args:
        mailbox: open to the other ranks of the same start; closed with this.
        keep, history: bases to keep, on all disks together; steps that can be gone back to.
        post: told of what fails behind commits.
        timeout_s: other ranks that have not written their parts for so long are reported.

    Attributes:
        on_peer: told of messages about copies in peers' memory, and who has sent them.
        on_copy: likewise, about copies in other tiers.
        spared: which bases stay on all disks, however old they are.
        last_receive_s: when it was last looked what others say.
    """

    def __init__(
        self,
        seams: Seams,
        run: PurePath,
        timeline: int,
        job_session: JobSession,
        mailbox: Mailbox,
        persister: Persister,
        ring: ChunkRing,
        *,
        keep: int,
        history: str,
        post: Callable[[EverstepError], None],
        timeout_s: float,
    ) -> None:
        self._filesystem = seams.filesystem
        self._clock = seams.clock
        self._run = run
        self._job_session = job_session
        self._mailbox = mailbox
        self._persister = persister
        self._ring = ring
        self._post = post
        self._timeout_s = timeout_s
        self.spared: Callable[[], Iterable[BaseId]] = tuple
        # Whoever waits asks who has a marker before it says who is late.
        pace = Pace(take_over_s=min(_TAKE_OVER_S, timeout_s / 2), late_s=timeout_s)
        self._cluster = cluster = Cluster(job_session.disks)
        self._beat_s = timeout_s / _BEATS
        self._beat_not_before_s = -math.inf
        kept = self._markers_of(timeline) if job_session.again else {}
        self._member = (
            Coordinator(
                cluster,
                timeline,
                keep=keep,
                recovered=job_session.recovered,
                unread=job_session.unread,
                unreadable=job_session.unreadable,
                pace=pace,
                kept=kept,
                spared=lambda: self.spared(),
            )
            if job_session.rank == COORDINATOR
            else Member(
                cluster,
                job_session.rank,
                timeline,
                recovered=job_session.recovered,
                pace=pace,
                kept=kept,
            )
        )
        self._disk = RankDisk(
            seams.filesystem,
            run,
            job_session.rank,
            write_shards=self._write_shards,
            read_shards=self._read_shards,
            unique=f"{job_session.session}-{job_session.rank}",
            promise=history_windows(seams, history),
            fence=Fence(seams.filesystem, run, timeline),
        )
        self.on_peer: Callable[[int, PeerMessage], None] = lambda sender, message: None
        self.on_copy: Callable[[int, CopyMessage], None] = lambda sender, message: None
        self.last_receive_s = self._clock.running_s()
        self._changed = Condition()
        self._works: dict[BaseId, _Work] = {}
        self._again: list[Do] = []  # what the disk has refused
        self._withdrawing: dict[BaseId, str] = {}
        self._complained: set[str] = set()
        self._released = self._closing = self._in_vain = False
        self._late: BaseId | None = None  # waits for ranks that are silent
        for step in job_session.lost:
            self.refuse(
                BaseId(timeline, step), f"the keeper of rank {job_session.rank} was lost with it"
            )
        self._thread = threading.Thread(target=self._drive, name="everstep-ranks", daemon=True)
        self._thread.start()

    # What a keeper calls.

    def persist(
        self,
        plan: BasePlan,
        bodies: Sequence[Body],
        progress: ProgressSink,
        audit: Audit = lambda digests: None,
    ) -> tuple[Written, ...]:
        """Returns when the base is committed on all ranks: what this rank's files are.

        Raises:
            FencedError: when a newer timeline has taken over.
            StorageError: this rank or another one could not write its part; no rank has any.
            DeadlineError: other ranks have not written theirs in time; which, it says.
        """
        base = BaseId(plan.identity.timeline, plan.identity.step)
        work = _Work(plan, bodies, progress, audit, self._clock.running_s())
        with self._changed:
            if self._is_committed(base):
                return ()
            self._works[base] = work
            try:
                self._absorb(self._member.persist(plan.identity))
                while not self._is_over(base, work):
                    self._changed.wait(_TICK_S)
                    progress.advance(0)  # it is not the storage that hangs
            except BaseException:
                self._leave(base, work)
                raise
            finally:
                del self._works[base]
        if work.error is not None:
            raise work.error
        return work.written

    def moved(self) -> None:
        """An operation on the disk has come back: others, who may wait for what it is part of,
        hear that this rank is not silent. In any thread, with or without what is held in it."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._beat_not_before_s:
            self._beat_not_before_s = now_s + self._beat_s
            for rank in self._cluster.others(self._job_session.rank):
                self.send(rank, DiskMoves())

    def release(self) -> None:
        """The next start of the job has begun: what only waits for other ranks is left to it."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def no_more(self) -> None:
        """Training of this rank has ended: the others need not wait for bases of it."""
        with self._changed:
            why = f"training of rank {self._job_session.rank} has ended"
            self._absorb(self._member.no_more(why))

    def refuse(self, base: BaseId, why: str) -> None:
        """This rank will not begin a base for which others may wait."""
        with self._changed:
            self._absorb(self._member.refuse(base, why))

    def retain(self) -> None:
        """Waits, on the rank that leads all, until no rank has anything left to do; and deletes
        what of this rank's log leads nowhere any more.

        Raises:
            FencedError: a newer timeline has begun.
            StorageError
        """
        with self._changed:
            self._changed.wait_for(self._is_settled, _SETTLE_S)
        with storage_errors("clean up the log", self._run, rank=self._job_session.rank):
            self._disk.retain_log(self._member.timeline, leads=self._member.leads)

    def sweep(self) -> None:
        """Removes what older timelines have left unfinished, if this rank leads on its disk."""
        if not self._member.leads:
            return
        with self._changed, storage_errors("clean up", self._run, rank=self._job_session.rank):
            self._disk.sweep(self._member.timeline, spare=self._job_session.spare)

    def close(self) -> None:
        """Ends the thread, and lets the other ranks go."""
        with self._changed:
            if self._member.fenced is None and not self._released:
                self._changed.wait_for(self._is_dispensable, _FAREWELL_S)
            self._closing = True
        self._thread.join(self._timeout_s)
        self._mailbox.close()

    # Waiting.

    def _leave(self, base: BaseId, work: _Work) -> None:
        """Whoever wanted a base was interrupted."""
        if not work.begun:
            self._absorb(self._member.drop(base, "the save was interrupted"))
        elif not work.marked:
            self._withdrawing[base] = "the save was interrupted"

    def _is_over(self, base: BaseId, work: _Work) -> bool:
        """Whether nobody has to wait for ``base`` any more."""
        if work.durable or work.error is not None:
            return True
        if self._member.fenced is not None:
            work.error = self._member.fenced
            return True
        waited_s = self._clock.running_s() - work.since_s
        if self._released and (work.marked or not work.begun):
            work.error = StateError(
                "the next start of the job began before the base was durable on all ranks",
                step=base.step,
                rank=self._job_session.rank,
            )
        elif not work.begun and (self._late is not None or waited_s > self._timeout_s):
            work.error = DeadlineError(
                "the base before it is not durable on all ranks yet",
                step=base.step,
                rank=self._job_session.rank,
                hint="another rank hangs, or its storage does",
            )
        if work.error is not None and not work.begun:  # its memory is going to be used again
            self._absorb(self._member.drop(base, str(work.error)))
        return work.error is not None

    def _is_settled(self) -> bool:
        coordinator = self._member
        if not isinstance(coordinator, Coordinator) or coordinator.fenced is not None:
            return True
        return coordinator.is_settled or self._in_vain or self._closing

    def _is_in_vain(self) -> bool:
        """Whether a rank is waited for that has gone; the next start does what is left to do."""
        awaited = self._member.awaited if isinstance(self._member, Coordinator) else ()
        return any(self._mailbox.is_gone(rank) for rank in awaited if rank != COORDINATOR)

    def _is_dispensable(self) -> bool:
        """Whether no other rank will ask this one for anything that it cannot do without."""
        if self._job_session.rank == COORDINATOR:
            return self._is_settled()
        may_delete = self._member.watermark.before is not None or self._member.is_behind
        return self._mailbox.is_gone(COORDINATOR) or not may_delete

    # The thread.

    def _drive(self) -> None:
        while not self._closing:
            data = self._mailbox.receive(_TICK_S)
            self.last_receive_s = self._clock.running_s()
            try:
                with self._changed:
                    if data is not None:
                        self._hear(data)
                    # Of a rank that has gone there may be messages until there are none.
                    self._in_vain = data is None and self._is_in_vain()
                    self._absorb(self._member.tick(self._clock.running_s()))
                    self._try_again()
                    self._changed.notify_all()
            except BaseException as error:  # would end this thread, and all commits to come
                _log.exception("internal error in the commits of rank %d", self._job_session.rank)
                self._complain(EverstepError(f"internal error in commits: {error!r}"))

    def _hear(self, data: bytes) -> None:
        try:
            envelope = accept(data, self._job_session.session)
        except FormatError as error:
            _log.warning("a message was passed over: %s", error)
            return
        if envelope is None:
            return
        if isinstance(envelope.message, PeerMessage):
            self.on_peer(envelope.sender, envelope.message)
            return
        if isinstance(envelope.message, CopyMessage):
            self.on_copy(envelope.sender, envelope.message)
            return
        self._absorb(self._member.heard(envelope.sender, envelope.message))

    def is_gone(self, rank: int) -> bool:
        """Whether the keeper of a rank has been heard, and will not be heard any more."""
        return self._mailbox.is_gone(rank)

    def send(self, rank: int, message: Message) -> None:
        """Sends to the keeper of another rank; does not wait. In any thread."""
        envelope = Envelope(self._job_session.session, self._job_session.rank, message)
        self._mailbox.send(rank, encode_message(envelope))

    def _try_again(self) -> None:
        again = self._again
        self._again = []
        self._absorb(again)
        for base, reason in list(self._withdrawing.items()):
            self._absorb(self._withdraw(base, reason))

    def _absorb(self, outs: Iterable[Out]) -> None:
        todo = deque(outs)
        while todo:
            out = todo.popleft()
            if isinstance(out, Send):
                self.send(out.rank, out.message)
            elif isinstance(out, Do):
                todo.extend(self._perform(out))
            else:
                self._report(out)

    def _perform(self, do: Do) -> list[Out]:
        if self._member.fenced is not None:
            return []
        try:
            if isinstance(do.action, WriteMarker):
                failpoint("save.before_marker")
            elif isinstance(do.action, WriteManifest):
                failpoint("save.before_manifest")
            event = self._disk.perform(do)
        except FencedError as error:
            return self._member.fence_off(error)
        except (OSError, EverstepError) as error:
            return self._failed(do, error)
        except Exception as error:  # a bug: the others are not left waiting because of it
            internal = EverstepError(f"internal error in a save: {error!r}", step=do.base.step)
            internal.__cause__ = error
            return self._failed(do, internal)
        work = self._works.get(do.base)
        if isinstance(do.action, WriteMarker) and work is not None:
            work.marked = True
            work.since_s = self._clock.running_s()
        elif isinstance(do.action, WriteManifest):
            failpoint("save.after_manifest")
        elif isinstance(do.action, Withdraw):
            self._remove_empty(do.base)
        return self._member.done(do.base, event)

    def _failed(self, do: Do, error: OSError | EverstepError) -> list[Out]:
        """Files or marker that cannot be written end a base; all else is tried again."""
        ours = self._in_words(do, error)
        if not isinstance(do.action, WriteFiles | WriteMarker):
            self._again.append(do)
            self._complain(ours)
            return []
        if do.base in self._works:
            self._works[do.base].error = ours
        return self._withdraw(do.base, f"rank {self._job_session.rank}: {ours.message}")

    def _withdraw(self, base: BaseId, reason: str) -> list[Out]:
        try:
            self._disk.withdraw(base)
            self._remove_empty(base)
        except OSError:  # until that is done the others wait: a marker of it may be there
            self._withdrawing[base] = reason
            return []
        self._withdrawing.pop(base, None)
        return self._member.failed(base, reason)

    def _remove_empty(self, base: BaseId) -> None:
        """The last rank that withdraws leaves no directory behind."""
        with contextlib.suppress(OSError):  # others have files there
            self._filesystem.remove_dir(base_dir(self._run, base.timeline, base.step))

    def _in_words(self, do: Do, error: OSError | EverstepError) -> EverstepError:
        directory = base_dir(self._run, do.base.timeline, do.base.step)
        try:
            with storage_errors(
                "write the base", directory, step=do.base.step, rank=self._job_session.rank
            ):
                raise error
        except EverstepError as ours:
            return ours

    def _complain(self, error: EverstepError) -> None:
        """Once for each kind of trouble, however often it is tried again."""
        if error.message not in self._complained:
            self._complained.add(error.message)
            self._post(error)

    def _report(self, out: Out) -> None:
        if isinstance(out, IsDamaged):
            self._post(damaged_after_commit_error(out, self._run))
        elif isinstance(out, IsDurable | GaveUp | IsLate):
            self._late = out.base if isinstance(out, IsLate) else None
            work = self._works.get(out.base)
            if work is not None and work.error is None:
                work.durable = isinstance(out, IsDurable)
                work.error = outcome_error(out, self._run, self._timeout_s, self.is_gone)
        elif isinstance(out, Fenced):
            _log.warning("%s", out.error)
        self._changed.notify_all()

    # Files.

    def _is_committed(self, base: BaseId) -> bool:
        """An attempt that failed after its commit: nothing may be written over it."""
        try:
            return scan_base(self._filesystem, self._run, base).status == "committed"
        except FileNotFoundError:
            return False

    def _markers_of(self, timeline: int) -> dict[BaseId, Marker]:
        """This rank's, of the bases of a timeline."""
        found = scan_run(self._filesystem, self._run).bases
        return {
            base.id: marker
            for base in found
            if base.id.timeline == timeline
            for marker in (base.manifest.markers if base.manifest else base.markers)
            if marker.rank == self._job_session.rank
        }

    def _write_shards(self, base: BaseId) -> tuple[FileRecord, ...]:
        work = self._works[base]
        work.begun = True
        work.written = self._persister.write(work.plan, work.bodies, work.progress, work.audit)
        return tuple(shard.record for shard in work.written)

    def _read_shards(self, base: BaseId) -> str:
        about = self._filesystem, self._run, base, self._job_session.rank, self._ring
        problem = verify_rank(*about, timeout_s=self._timeout_s)
        if problem:  # perhaps in a file that the next base would link to
            self._persister.static.forget()
        return problem


_EACH = (
    "every rank calls ckpt.step() at the end of the same steps, and save() and close() there, too"
)
_SILENT = (
    f"they have not taken this base ({_EACH}), or they hang, or have died; everstep ps on their "
    "machine shows their keepers"
)
_GONE = f"they have left training ({_EACH}), or have died: what they have printed says which"


def damaged_after_commit_error(out: IsDamaged, run: PurePath) -> DamageError:
    """Of a base that was read back before older ones were to be deleted."""
    return DamageError(
        f"{out.base} was committed, but read back it is damaged: {out.problem}; "
        "older bases are kept",
        step=out.base.step,
        rank=out.rank,
        path=run,
        hint="the disk or memory of the rank's machine may be failing",
    )


def outcome_error(
    out: IsDurable | GaveUp | IsLate,
    run: PurePath,
    timeout_s: float,
    is_gone: Callable[[int], bool] = lambda rank: False,
) -> EverstepError | None:
    """Why whoever waits for a base waits no longer; None: it is durable.

    Args:
        timeout_s: that other ranks had for their parts.
        is_gone: whether the keeper of a rank was there, and is no more.
    """
    where: dict[str, Any] = {"step": out.base.step, "path": run}
    if isinstance(out, GaveUp):
        return StorageError(
            f"no rank has the base of step {out.base.step}: {out.reason}",
            **where,
            hint="training goes on; the next base is taken as usual",
        )
    if isinstance(out, IsLate):
        silent = _numbers(out.missing) or "that lead on a disk"
        gone = [rank for rank in out.missing if is_gone(rank)]
        left = f"; the keeper(s) of rank(s) {_numbers(gone)} are no longer there" if gone else ""
        return DeadlineError(
            f"rank(s) {silent} have not written their parts of the base of step "
            f"{out.base.step} within {timeout_s:g} s{left}",
            **where,
            hint=_GONE if len(gone) == len(out.missing) > 0 else _SILENT,
        )
    return None


def _numbers(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
