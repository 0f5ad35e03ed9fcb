"""Copies of bases that several ranks have saved: each rank's keeper copies its own files.

Rank 0 chooses the base (:mod:`everstep.commit.copy_round`), so that all ranks copy the same one.
When every marker is in the tier, it creates the manifest (I5): the same as on the disks, as it
follows from the markers alone. If rank 0 dies before that, the next start of the job does so
(:mod:`everstep.restore.fetch.rank_copies`), or rank 0's next keeper. Only rank 0 deletes copies
(:class:`RankRetention`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from everstep.commit.copy_round import CopyRound
from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import (
    CopyMessage,
    CopyProgress,
    CopyReply,
    CopyRequest,
    CopySettled,
)
from everstep.commit.lineage import BaseId
from everstep.errors import DeadlineError, EverstepError, InfeasibleError, StorageError
from everstep.format.message_codec import Stored
from everstep.format.names import MANIFEST, base_dir
from everstep.format.records import Manifest
from everstep.keeper.ship.copy_retention import CopyRetention
from everstep.keeper.ship.mirror import Mirror, MirrorOptions
from everstep.keeper.ship.place import ROOT, CopyPlace
from everstep.run.scan import BaseFound, Inventory
from everstep.seams.clock import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem, ReadFile

__all__ = [
    "AnyRankMirror",
    "CopyMember",
    "FollowingMirror",
    "LeadingMirror",
    "OtherKeepers",
    "RankRetention",
]

_log = logging.getLogger("everstep.keeper")
_POLL_S = 0.1


class OtherKeepers(Protocol):
    """Connections to the keepers of the other ranks (:class:`.job_link.JobLink`)."""

    last_receive_s: float

    def send(self, rank: int, message: CopyMessage) -> None:
        """Send a message; it may be lost."""
        ...

    def is_disconnected(self, rank: int) -> bool:
        """Return True if a rank will send nothing any more."""
        ...


@dataclass(frozen=True, slots=True)
class CopyMember:
    """One rank's membership in the job that copies together.

    Attributes:
        others: keepers of the other ranks.
        number: index of the place among the places of the job.
        rank: rank whose files are copied.
        world: number of ranks.
    """

    others: OtherKeepers
    number: int
    rank: int
    world: int


class _RankMirror(Mirror):
    """Base class of the mirrors of several ranks."""

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        place: CopyPlace,
        clock: Clock,
        post: Callable[[EverstepError], None],
        options: MirrorOptions,
        member: CopyMember,
    ) -> None:
        super().__init__(filesystem, run, place, clock, post, options)
        self._others = member.others
        self._number = member.number
        self._rank = member.rank
        self._world = member.world
        self._silence_timeout_s = options.timeout_s
        self._report_interval_s = max(_POLL_S, self._silence_timeout_s / 10)
        self._next_report_s = 0.0

    def _before_markers(self) -> None:
        failpoint("copy.before_marker")
        # Copying takes long: a newer timeline may have been opened since the last check.
        self._place.check_fence()

    def _put(self, name: str, source: ReadFile) -> None:
        super()._put(name, _ReportingFile(source, self))

    def _await_rate(self, count: int) -> None:
        try:
            super()._await_rate(count)
        except InfeasibleError as error:
            needed = count * self._world
            raise InfeasibleError(
                f"{error.message}: each of {self._world} ranks has an equal share of the limit",
                rank=self._rank,
                quantity="objects per hour",
                needed=needed,
                hint=f"set objects_per_hour={needed} or more",
            ) from error

    def report_progress(self) -> None:
        """Let the other ranks know from time to time that this one is still copying. In any
        thread.
        """
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self._report_interval_s
            self._send_alive()

    def _send_alive(self) -> None:
        raise NotImplementedError

    def _folder(self, base: BaseId) -> str:
        return self._name(base_dir(self._run, base.timeline, base.step))


class LeadingMirror(_RankMirror):
    """Rank 0's mirror: chooses the base, commits and deletes."""

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        place: CopyPlace,
        clock: Clock,
        post: Callable[[EverstepError], None],
        options: MirrorOptions,
        member: CopyMember,
    ) -> None:
        super().__init__(filesystem, run, place, clock, post, options, member)
        self._retention: RankRetention = RankRetention(
            place, options.keep, post, timeout_s=options.timeout_s
        )
        self._round: CopyRound | None = None
        self._base_in_turn: BaseId | None = None

    def base_durable(self, base: BaseId | None = None) -> None:
        super().base_durable(base)
        if base is not None and self._refused:
            self._send_settled(base)

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        with self._changed:
            if self._round is not None and isinstance(message, CopyReply):
                self._round.on_reply(sender, message.base, message.problem)
            elif self._round is not None:
                self._round.on_message(sender)
            self._changed.notify_all()

    def _run_once(self) -> None:
        try:
            super()._run_once()
        finally:
            # Also after errors: the other keepers must not wait for a request.
            if self._base_in_turn is not None:
                self._send_settled(self._base_in_turn)

    def _may_copy(self, base: BaseFound) -> bool:
        """Return True if the base was saved by the same number of ranks.

        Files of other ranks' bases are on disks that no running keeper reads.
        """
        self._base_in_turn = base.id
        return base.manifest is not None and len(base.manifest.markers) == self._world

    def _copy(self, inventory: Inventory, base: BaseFound) -> bool:
        assert base.manifest is not None
        with self._changed:
            self._round = CopyRound(base.id, range(1, self._world), self._silence_timeout_s)
        try:
            self._request_copies(base.manifest)
            mine = base.manifest.markers[self._rank]
            if not self._place.has_rank_files(self._folder(base.id), mine):
                self._copy_files(base, [mine])
            self._await_others(base.manifest)
            self._commit(base)
        except StorageError as error:
            if base.id.timeline == self._place.timeline:
                raise
            # A base of an earlier start: hosts that stored files of it may have been replaced.
            _log.info("%s is not copied: %s", base.id, error.message)
            return False
        else:
            self._retention.all_ranks_past(base.id)
            return True
        finally:
            with self._changed:
                self._round = None

    def _commit(self, base: BaseFound) -> None:
        """Write the manifest if all files are in the tier, whatever the ranks have reported."""
        assert base.manifest is not None
        # Checked in the tier: a report may come from a keeper whose files were lost since.
        if missing := self._missing(base.manifest):
            raise StorageError(
                f"the copy of {base.id} is not committed: files of rank {missing[0]} are missing "
                f"in {self._place.tier.url}",
                step=base.id.step,
                rank=missing[0],
                tier=self._place.tier.traits.kind,
                path=self._place.tier.url,
                hint="the next base will be copied",
            )
        failpoint("copy.before_manifest")
        super()._commit(base)

    def _missing(self, manifest: Manifest) -> list[int]:
        first = manifest.markers[0]
        folder = self._folder(BaseId(first.timeline, first.step))
        return [m.rank for m in manifest.markers if not self._place.has_rank_files(folder, m)]

    def _request_copies(self, manifest: Manifest) -> None:
        with self._changed:
            assert self._round is not None
            ranks = self._round.tick(self._others.last_receive_s)
        for rank in ranks:
            self._others.send(rank, CopyRequest(self._number, Stored(manifest)))

    def _await_others(self, manifest: Manifest) -> None:
        """Wait until every rank's files are in the tier, as reported or as found there."""
        while True:
            self._request_copies(manifest)
            self.report_progress()
            with self._changed:
                current = self._round
                assert current is not None
                if self._closed:
                    raise StorageError("copying was stopped while other ranks were copying")
                if current.problems:
                    raise self._failure(current, ())
                if not current.waits_for:
                    return
                ended = tuple(r for r in current.waits_for if self._others.is_disconnected(r))
                lost = current.silent or ended
                if not lost:
                    self._changed.wait(_POLL_S)
                    continue
            # Outside the lock: this reads the tier, and messages must be handled meanwhile.
            missing = set(self._missing(manifest))
            if missing & set(lost):
                raise self._failure(current, lost)
            # Their files are there; only the message about it was lost.
            current.there |= set(lost)

    def _failure(self, current: CopyRound, lost: tuple[int, ...]) -> EverstepError:
        """Return the error for a copy that other ranks did not complete."""
        if current.problems:
            rank, problem = min(current.problems.items())
            return StorageError(
                f"{current.base} is not copied: rank {rank} could not copy its files: {problem}",
                step=current.base.step,
                rank=rank,
                tier=self._place.tier.traits.kind,
                path=self._place.tier.url,
                hint="older copies are kept; the next base will be copied",
            )
        return DeadlineError(
            f"{current.base} is not copied: no message from rank(s) {', '.join(map(str, lost))}",
            step=current.base.step,
            tier=self._place.tier.traits.kind,
            path=self._place.tier.url,
            hint="their keepers have ended or hang; the next base will be copied",
        )

    def _send_settled(self, base: BaseId) -> None:
        """Tell the other ranks that ``base`` will not be requested any more."""
        for rank in range(1, self._world):
            self._others.send(rank, CopySettled(self._number, base))

    def _send_alive(self) -> None:
        for rank in range(1, self._world):
            self._others.send(rank, CopyProgress(self._number))


class FollowingMirror(_RankMirror):
    """Mirror of any other rank: copies its files of the bases that rank 0 chooses."""

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        place: CopyPlace,
        clock: Clock,
        post: Callable[[EverstepError], None],
        options: MirrorOptions,
        member: CopyMember,
    ) -> None:
        super().__init__(filesystem, run, place, clock, post, options, member)
        self._requested: Manifest | None = None
        # The newest base that rank 0 may still request.
        self._expected: BaseId | None = None
        # Rank 0 will request no base up to this one.
        self._settled: BaseId | None = None
        self._copying: BaseId | None = None
        self._last_message_s = self._clock.monotonic_s()
        self._refusal = ""

    @property
    def busy(self) -> bool:
        """True while files are being copied, or while rank 0 may still request some."""
        with self._changed:
            if self._closed or self._refused:
                return False
            if self._at_work or self._due:
                return True
            waited_s = self._clock.monotonic_s() - self._last_message_s
            # A keeper that ends must not wait for ever for a rank 0 that has died.
            lost = self._others.is_disconnected(COORDINATOR) or waited_s > self._silence_timeout_s
            return self._expected is not None and not lost

    def base_durable(self, base: BaseId | None = None) -> None:
        """Expect rank 0 to decide whether this new base is copied."""
        with self._changed:
            if self._closed or self._refused or base is None:
                return
            if self._settled is None or base > self._settled:
                self._expected = base
                self._wake()

    def expedite(self) -> None:
        """Wait for rank 0 no longer than the timeout from now on: the keeper is about to end."""
        with self._changed:
            if not self._expedited:
                self._last_message_s = self._clock.monotonic_s()
        super().expedite()

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        with self._changed:
            if sender != COORDINATOR or self._closed:
                return
            self._last_message_s = self._clock.monotonic_s()
            if isinstance(message, CopySettled):
                self._mark_settled(message.base)
            elif isinstance(message, CopyRequest):
                self._on_request(message.manifest.record)
            self._changed.notify_all()

    def copy_own_files(self, manifest: Manifest) -> None:
        """Copy this rank's files of a base, unless they are already there.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            StorageError: the files are not on this disk any more, or cannot be written.
            DamageError: a file on disk is damaged.
            DeadlineError: the tier hangs.
            InfeasibleError: a base has more objects than may be written in an hour.
        """
        self._place.check_fence()
        base = _base_of(manifest)
        mine = manifest.markers[self._rank]
        if not self._place.has_rank_files(self._folder(base), mine):
            path = base_dir(self._run, base.timeline, base.step)
            self._copy_files(BaseFound(base, path, "committed", manifest, None, ()), [mine])
        self.stats.step = base.step

    def _on_request(self, manifest: Manifest) -> None:
        base = _base_of(manifest)
        if self._refused:
            self._reply(base, self._refusal)
        elif base == self._copying:
            self._send_alive()
        elif len(manifest.markers) != self._world:
            self._reply(base, "it was saved by another number of ranks")
        else:
            self._requested = manifest
            self._due = True
            self._wake()

    def _wait_for_work(self) -> bool:
        """Wait for a request; report meanwhile that this rank is alive."""
        with self._changed:
            while not self._closed and not self._refused:
                if self._due and self._requested is not None:
                    self._due = False
                    self._at_work = True
                    self._copying = _base_of(self._requested)
                    return True
                self._changed.wait(self._report_interval_s if self._expected is not None else None)
                if self._expected is not None:
                    self.report_progress()
            return False

    def _run_once(self) -> None:
        manifest = self._requested
        assert manifest is not None
        base = _base_of(manifest)
        problem = ""
        try:
            self.copy_own_files(manifest)
            self.stats.copied += 1
        except StorageError as error:
            problem = error.message
            if base.timeline == self._place.timeline:
                raise
            # A base of an earlier start: a replaced host never had files of it.
            _log.info("%s is not copied: %s", base, problem)
        except EverstepError as error:
            problem = error.message
            raise
        except Exception as error:
            problem = repr(error)
            raise
        finally:
            # Also after errors: rank 0 waits for this reply.
            with self._changed:
                self._copying = None
                self._refusal = problem or self._refusal
                self._mark_settled(base)
            self._reply(base, problem)

    def _mark_settled(self, base: BaseId) -> None:
        """Note that rank 0 will not request ``base`` or an older one any more."""
        if self._settled is None or base > self._settled:
            self._settled = base
        if self._expected is not None and self._expected <= self._settled:
            self._expected = None

    def _reply(self, base: BaseId, problem: str) -> None:
        self._others.send(COORDINATOR, CopyReply(self._number, base, problem))

    def _send_alive(self) -> None:
        self._others.send(COORDINATOR, CopyProgress(self._number))


AnyRankMirror = LeadingMirror | FollowingMirror


class RankRetention(CopyRetention):
    """Retention of copies that several ranks have made, run by rank 0 alone.

    It also commits copies that lack only their manifest. And it removes copies that can never be
    complete: incomplete ones older than a copy that was read back, when no rank copies them any
    more.
    """

    _past: BaseId | None = None

    def all_ranks_past(self, base: BaseId) -> None:
        """Note that every rank has copied ``base``: none of them is copying an older one."""
        self._past = base

    def run(self) -> None:
        """Delete copies that are no longer needed.

        Raises:
            FencedError: a newer timeline was opened.
            StorageError: the tier failed.
            DeadlineError: the tier hangs.
        """
        self._roll_forward()
        super().run()
        self._sweep()

    def _roll_forward(self) -> None:
        """Commit copies whose files are all there."""
        for base in self._place.inventory().bases:
            if base.status == "complete" and base.id.timeline <= self._place.timeline:
                assert base.manifest is not None
                folder = self._folder(base)
                if all(self._place.has_rank_files(folder, one) for one in base.manifest.markers):
                    # Before every commit: a process of an older timeline must not commit (I11).
                    self._place.check_fence()
                    self._place.create(f"{folder}/{MANIFEST}", base.manifest.encode())

    def _sweep(self) -> None:
        """Delete incomplete copies that no rank copies any more."""
        newest = max(self._read_back.verified, default=None)
        if newest is None or self._past is None:
            return
        for base in self._place.inventory().bases:
            # Younger incomplete copies may be in progress.
            unfinished = base.status == "incomplete" and base.id < min(newest, self._past)
            # The listing may be outdated: the manifest may exist by now.
            listed_late = self._place.size_of(f"{self._folder(base)}/{MANIFEST}") is not None
            if unfinished and not listed_late:
                self._place.check_fence()
                self._delete_files(base)

    def _folder(self, base: BaseFound) -> str:
        return base.path.relative_to(ROOT).as_posix()


class _ReportingFile:
    """A file being copied; each read counts as progress."""

    def __init__(self, file: ReadFile, mirror: _RankMirror) -> None:
        self._file = file
        self._mirror = mirror

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._mirror.report_progress()
        return self._file.read_into(buffer, offset)

    def close(self) -> None:
        self._file.close()


def _base_of(manifest: Manifest) -> BaseId:
    return BaseId(manifest.timeline, manifest.step)
