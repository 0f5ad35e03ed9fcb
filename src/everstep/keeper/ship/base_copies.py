"""Copy committed bases to another tier.

The copy is a run like the one on disk: same names, same bytes, read by the same code. Its
guarantees are the same: shards first, then markers, then the manifest (I5); and the fence (I11): a
process that opens a timeline of a run with copies opens it there, too. It is looked for before each
manifest and each deletion.

Files are verified against their digests while they are copied. Files that an earlier keeper has
already copied are not sent again. If newer bases are committed during a copy, only the newest is
copied next.

With several ranks, each rank's keeper copies its own files. Rank 0 chooses the base, so that all
ranks copy the same one. When every marker is in the tier, it creates the manifest (I5): the same as
on the disks, as it follows from the markers alone. If rank 0 dies before that, the next start of
the job does so (:mod:`everstep.restore.fetch.rank_copies`), or rank 0's next keeper.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from everstep.commit.job.cluster import COORDINATOR
from everstep.commit.job.messages import CopyMessage, CopyProgress, CopyReply, CopyRequest
from everstep.commit.lineage import BaseId, split_by_history
from everstep.errors import (
    DeadlineError,
    EverstepError,
    FencedError,
    ForeignDirectoryError,
    InfeasibleError,
    StorageError,
)
from everstep.format.message_codec import Stored
from everstep.format.names import (
    MANIFEST,
    RUN_RECORD,
    TIMELINE_RECORD,
    base_dir,
    marker_name,
    timeline_dir,
)
from everstep.format.reader import CheckedFile, read_header, read_record_bytes
from everstep.format.records import FileRecord, Manifest, Marker, RunRecord
from everstep.keeper.ship.copy_retention import CopyRetention
from everstep.keeper.ship.courier import Courier
from everstep.run.scan import BaseFound, Inventory, TimelineCache, scan_run
from everstep.seams.clock import Clock
from everstep.seams.failpoints import failpoint
from everstep.seams.files.filesystem import FileSystem, ReadFile
from everstep.tiers.streams import read_record

if TYPE_CHECKING:
    from everstep.keeper.persist.job_link import JobLink

_log = logging.getLogger("everstep.keeper")
_RATE_POLL_S = 1.0
_REPORT_INTERVAL_MIN_S = 0.1
_POLL_S = 0.1
# A longer gap between two ticks means that the driver itself was blocked and received nothing.
_TICK_GAP_S = 5.0


class CopyGroup:
    """The ranks that copy bases to one place together; one rank is a group of one.

    Args:
        others: keepers of the other ranks; None: there is one rank.
        number: index of the place among the places of the job.
        rank: rank whose files are copied.
        world: number of ranks.
        timeout_s: seconds without a message after which another rank is no longer waited for.
    """

    def __init__(
        self,
        others: JobLink | None,
        clock: Clock,
        number: int,
        rank: int,
        world: int,
        timeout_s: float,
    ) -> None:
        self.number = number
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._report_interval_s = max(_REPORT_INTERVAL_MIN_S, timeout_s / 10)
        self._others = others
        self._clock = clock
        self._next_report_s = 0.0

    @property
    def followers(self) -> range:
        """Ranks that copy what rank 0 chooses."""
        return range(1, self.world)

    @property
    def last_receive_s(self) -> float:
        """Time when the keepers' connections were last read."""
        return 0.0 if self._others is None else self._others.last_receive_s

    def send(self, message: CopyMessage) -> None:
        """Send a message to rank 0, or from there to all other ranks; it may be lost."""
        for rank in self.followers if self.rank == COORDINATOR else (COORDINATOR,):
            self.send_to(rank, message)

    def send_to(self, rank: int, message: CopyMessage) -> None:
        """Send a message to one rank; it may be lost."""
        if self._others is not None:
            self._others.send(rank, message)

    def is_disconnected(self, rank: int) -> bool:
        """Return True if a rank will send nothing any more."""
        return self._others is not None and self._others.is_disconnected(rank)

    def report_progress(self) -> None:
        """Send from time to time that this rank is still copying; called in any thread."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self._report_interval_s
            self.send(CopyProgress(self.number))


class BaseCopier:
    """Copies the files of one base after the other to the place of a courier.

    Args:
        run: the run folder on ``filesystem``.

    Attributes:
        expedited: True if the keeper is about to end: a base that would have to wait for the limit
            of objects per hour is not copied.
        waits_for_the_cap: True while a copy waits because of the limit of objects per hour.
    """

    def __init__(
        self, courier: Courier, filesystem: FileSystem, run: PurePath, group: CopyGroup
    ) -> None:
        self.filesystem = filesystem
        self.run = run
        self.expedited = False
        self.waits_for_the_cap = False
        self._courier = courier
        self._place = courier.place
        self._group = group

    def name(self, path: PurePath) -> str:
        """Return the name in the place of a file in the run folder."""
        return path.relative_to(self.run).as_posix()

    def has_files_of(self, marker: Marker) -> bool:
        """Return True if a rank's files of a base, and its marker, are in the place."""
        folder = self.name(base_dir(self.run, marker.timeline, marker.step))
        return self._place.has_rank_files(folder, marker)

    def copy_files(self, base: BaseFound, markers: Sequence[Marker]) -> None:
        """Copy these ranks' files, then their markers.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            StorageError: the files are not on this disk any more, or cannot be written.
            DamageError: a file on disk is damaged.
            DeadlineError: the tier hangs.
            InfeasibleError: a base has more objects than may be written in an hour.
        """
        with contextlib.ExitStack() as stack:
            try:
                # Open all files first: retention may delete the base while it is copied, and open
                # files stay readable.
                sources = [
                    (path, stack.enter_context(contextlib.closing(self._open(path, record))))
                    for marker in markers
                    for record in marker.files
                    for path in [base.path / record.name]
                ]
            except OSError as error:
                raise StorageError(
                    f"could not read the base to be copied: {error.strerror or error}",
                    step=base.id.step,
                    path=base.path,
                    hint="check the disk (dmesg, df); the next base will be copied",
                ) from error
            self._await_rate(len(sources) + len(markers) + 1)
            for path, source in sources:
                self.put(self.name(path), source)
        if self._group.world > 1:
            failpoint("copy.before_marker")
            # Copying takes long: a newer timeline may have been opened since the last check. One
            # rank checks it before the manifest, which follows at once.
            self._place.check_fence()
        # Markers after all files: a marker promises that its rank's files are complete (I5).
        for marker in markers:
            self._place.create(self.name(base.path / marker_name(marker.rank)), marker.encode())
        self._courier.stats.copied_bytes += sum(f.length for m in markers for f in m.files)

    def commit(self, base: BaseFound, manifest: Manifest) -> None:
        """Write the manifest; all markers are there."""
        # Right before the commit: a process of an older timeline must not commit (I11).
        self._place.check_fence()
        self._place.create(self.name(base.path / MANIFEST), manifest.encode())
        self._courier.stats.copied += 1
        _log.info("%s is in %s", base.id, self._place.url)

    def put(self, name: str, source: ReadFile) -> None:
        """Copy a file, unless an earlier keeper has."""
        # Its bytes are verified when retention reads it back.
        if self._place.size_of(name) == source.size_bytes:
            return
        if self._courier.closed:
            raise StorageError(f"copying was stopped before {name}")
        self._place.rate.wrote(1)
        self._place.tier.put(name, _ReportingFile(source, self._group))

    def _open(self, path: PurePath, record: FileRecord) -> CheckedFile:
        file = self.filesystem.open(path, direct=True)
        try:
            return CheckedFile(file, read_header(file, record, path), record, path)
        except BaseException:
            file.close()
            raise

    def _await_rate(self, count: int) -> None:
        """Wait until the limit of objects per hour allows ``count`` more."""
        while (wait_s := self._wait_s(count)) > 0:
            with self._courier.changed:
                if self._courier.closed or self.expedited:
                    self.waits_for_the_cap = False
                    raise StorageError(
                        "the newest base is not copied: the limit of objects per hour is reached",
                        tier=self._place.kind,
                        path=self._place.url,
                        hint="raise TierOptions.objects_per_hour, or lengthen every_s",
                    )
                if not self.waits_for_the_cap:
                    _log.info("the limit of objects per hour delays a copy by %.0f s", wait_s)
                self.waits_for_the_cap = True
                # In short waits, so that progress is reported and a claim that is settled early
                # is noticed.
                self._courier.changed.wait(min(wait_s, _RATE_POLL_S))
                self._group.report_progress()
        self.waits_for_the_cap = False

    def _wait_s(self, count: int) -> float:
        world = self._group.world
        try:
            return self._place.rate.wait_s(count, self._courier)
        except InfeasibleError as error:
            if world == 1:
                raise
            raise InfeasibleError(
                f"{error.message}: each of {world} ranks has an equal share of the limit",
                rank=self._group.rank,
                quantity="objects per hour",
                needed=count * world,
                hint=f"set objects_per_hour={count * world} or more",
            ) from error


@dataclass(slots=True)
class CopyRound:
    """Replies of the ranks that copy one base to one place, as rank 0 knows them.

    They are hints only: before it creates the manifest, rank 0 checks in the tier itself that every
    marker is there.

    Args:
        ranks: ranks that were sent a request; rank 0 is not among them.
        silent_s: seconds without a message after which rank 0 no longer waits for a rank.
        repeat_s: seconds between repetitions of an unanswered request.

    Attributes:
        there: ranks that have reported that their files are in place.
        problems: error message by rank, for ranks whose copy failed.
    """

    base: BaseId
    ranks: Collection[int]
    silent_s: float
    repeat_s: float = 1.0
    there: set[int] = field(default_factory=set)
    problems: dict[int, str] = field(default_factory=dict)
    _last_message_s: dict[int, float] = field(default_factory=dict)
    _requested_s: float | None = None
    _now_s: float | None = None

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks that have not reported success or failure."""
        return tuple(r for r in self.ranks if r not in self.there and r not in self.problems)

    def on_reply(self, rank: int, base: BaseId, problem: str) -> None:
        """Record the result of ``rank`` for ``base``; an empty ``problem`` means success."""
        self.on_message(rank)
        # A late reply about an earlier base is proof of life, and nothing more.
        if base != self.base or rank not in self.ranks:
            return
        if problem:
            self.problems[rank] = problem
        else:
            self.there.add(rank)

    def on_message(self, rank: int) -> None:
        """Record that ``rank`` has sent a message of any kind."""
        if self._now_s is not None:
            self._last_message_s[rank] = self._now_s

    def tick(self, now_s: float) -> tuple[int, ...]:
        """Advance the clock and return the ranks to which the request must be sent now."""
        if self._now_s is None:
            self._last_message_s = dict.fromkeys(self.ranks, now_s)
        elif now_s - self._now_s > _TICK_GAP_S:
            # Messages were not read during the gap, so it must not count as silence of the ranks.
            gap_s = now_s - self._now_s
            self._last_message_s = {rank: s + gap_s for rank, s in self._last_message_s.items()}
        self._now_s = now_s
        if self._requested_s is not None and now_s - self._requested_s < self.repeat_s:
            return ()
        self._requested_s = now_s
        return self.waits_for

    @property
    def silent(self) -> tuple[int, ...]:
        """Ranks that have sent no message for longer than ``silent_s``."""
        now_s = self._now_s
        if now_s is None:
            return ()
        silent_s = self.silent_s
        return tuple(r for r in self.waits_for if now_s - self._last_message_s[r] > silent_s)


class BaseCopies:
    """Copies the newest base of one timeline, as it becomes durable, to one place.

    This is the work of a single rank, or of rank 0: it also has the other ranks copy their files.

    Args:
        run: the run folder on ``filesystem``.
        group: ranks that copy together; this rank chooses the base and commits the copy.
        keep: number of copies to keep.
        every_s: minimum seconds from the start of one copy to the start of the next.
    """

    def __init__(
        self,
        courier: Courier,
        filesystem: FileSystem,
        run: PurePath,
        group: CopyGroup,
        *,
        keep: int,
        every_s: float = 0.0,
    ) -> None:
        self.courier = courier
        self.copier = BaseCopier(courier, filesystem, run, group)
        self.group = group
        self.retention = CopyRetention(courier.place, keep, courier.post, timeout_s=group.timeout_s)
        self._place = courier.place
        self._every_s = every_s
        self._timelines = TimelineCache()
        self._published = False
        self._round: CopyRound | None = None

    @property
    def busy(self) -> bool:
        """True while a base is being copied, or waits to be copied."""
        courier = self.courier
        with courier.changed:
            return not courier.over and (courier.at_work or courier.due)

    def base_durable(self, base: BaseId | None = None) -> None:
        """Queue a new base.

        Args:
            base: the base; None: look whether there is one.
        """
        self.courier.wake(self.courier.not_before_s)

    def expedite(self) -> None:
        """Copy the last base without waiting for its interval: the keeper is about to end.

        The limit of objects per hour still holds; a base that would have to wait for it is not
        copied, which is reported.
        """
        courier = self.courier
        with courier.changed:
            self.copier.expedited = True
            self._every_s = 0.0
            courier.not_before_s = courier.clock.monotonic_s()
            if courier.due:
                courier.look_again(courier.not_before_s)
            courier.changed.notify_all()

    def turn(self) -> None:
        """Copy what is due, then run retention."""
        self.courier.not_before_s = self.courier.clock.monotonic_s() + self._every_s
        self.copy_newest()
        self.retain()

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message of another rank about this place."""
        with self.courier.changed:
            if self._round is not None and isinstance(message, CopyReply):
                self._round.on_reply(sender, message.base, message.problem)
            elif self._round is not None:
                self._round.on_message(sender)
            self.courier.changed.notify_all()

    def copy_newest(self) -> BaseId | None:
        """Copy the newest base of the history unless it is already there; return its id.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            ForeignDirectoryError: the place holds another run.
            StorageError: the disk or the tier failed.
            DeadlineError: the tier hangs.
            InfeasibleError: a base has more objects than may be written in an hour.
        """
        run = self.copier.run
        try:
            inventory = scan_run(self.copier.filesystem, run, self._timelines)
        except OSError as error:
            raise StorageError(
                f"could not read the run to be copied: {error.strerror or error}", path=run
            ) from error
        committed = {base.id: base for base in inventory.bases if base.status == "committed"}
        in_history, _ = split_by_history(committed, inventory.branches)
        if not in_history or not self._may_copy(committed[in_history[0]]):
            return None
        self._place.check_fence()
        # Before looking for the base: in a place of another run, a base of the same timeline and
        # step would pass for a copy of this one.
        if self._published:
            self._verify_place(inventory)
        else:
            self._publish(inventory)
            self._published = True
        base = committed[in_history[0]]
        is_copied = self._place.size_of(self.copier.name(base.path / MANIFEST)) is not None
        if not is_copied and not self._copy(base):
            return None
        return base.id

    def retain(self) -> None:
        """Delete copies that are no longer needed.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            StorageError: the tier failed.
            DeadlineError: the tier hangs.
        """
        self.retention.run()

    def _may_copy(self, base: BaseFound) -> bool:
        """Return True if the base was saved by the same number of ranks.

        Files of other ranks' bases are on disks that no running keeper reads.
        """
        return base.manifest is not None and len(base.manifest.markers) == self.group.world

    def _copy(self, base: BaseFound) -> bool:
        """Copy a base; return False if it cannot be copied and that is no error."""
        manifest = base.manifest
        assert manifest is not None
        group = self.group
        with self.courier.changed:
            self._round = CopyRound(base.id, group.followers, group.timeout_s)
        try:
            self._request_copies(manifest)
            mine = manifest.markers[group.rank]
            if not self.copier.has_files_of(mine):
                self.copier.copy_files(base, [mine])
            self._await_others(manifest)
            self._commit(base, manifest)
        except StorageError as error:
            if base.id.timeline == self._place.timeline:
                raise
            # A base of an earlier start: hosts that stored files of it may have been replaced.
            _log.info("%s is not copied: %s", base.id, error.message)
            return False
        else:
            self.retention.all_ranks_past(base.id)
            return True
        finally:
            with self.courier.changed:
                self._round = None

    def _commit(self, base: BaseFound, manifest: Manifest) -> None:
        """Write the manifest if all files are in the tier, whatever the ranks have reported."""
        # Checked in the tier: a report may come from a keeper whose files were lost since.
        if missing := self._missing(manifest):
            raise StorageError(
                f"the copy of {base.id} is not committed: files of rank {missing[0]} are missing "
                f"in {self._place.url}",
                step=base.id.step,
                rank=missing[0],
                tier=self._place.kind,
                path=self._place.url,
                hint="the next base will be copied",
            )
        failpoint("copy.before_manifest")
        self.copier.commit(base, manifest)

    def _missing(self, manifest: Manifest) -> list[int]:
        others = (one for one in manifest.markers if one.rank != self.group.rank)
        return [one.rank for one in others if not self.copier.has_files_of(one)]

    def _request_copies(self, manifest: Manifest) -> None:
        with self.courier.changed:
            assert self._round is not None
            ranks = self._round.tick(self.group.last_receive_s)
        for rank in ranks:
            self.group.send_to(rank, CopyRequest(self.group.number, Stored(manifest)))

    def _await_others(self, manifest: Manifest) -> None:
        """Wait until every rank's files are in the tier, as reported or as found there."""
        while True:
            # Repeated: requests and replies may be lost.
            self._request_copies(manifest)
            self.group.report_progress()
            with self.courier.changed:
                current = self._round
                assert current is not None
                if self.courier.closed:
                    raise StorageError("copying was stopped while other ranks were copying")
                if current.problems:
                    raise self._failure(current, ())
                if not current.waits_for:
                    return
                ended = tuple(r for r in current.waits_for if self.group.is_disconnected(r))
                lost = current.silent or ended
                if not lost:
                    self.courier.changed.wait(_POLL_S)
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
                tier=self._place.kind,
                path=self._place.url,
                hint="older copies are kept; the next base will be copied",
            )
        return DeadlineError(
            f"{current.base} is not copied: no message from rank(s) {', '.join(map(str, lost))}",
            step=current.base.step,
            tier=self._place.kind,
            path=self._place.url,
            hint="their keepers have ended or hang; the next base will be copied",
        )

    def _publish(self, inventory: Inventory) -> None:
        """Write the records of the run and its timelines, which define the history of the
        copies.
        """
        place = self._place
        place.rate.wrote(1 + len(inventory.timelines))
        # Encoded again instead of copied: the file on disk may be damaged, and the id is known
        # from the other records.
        if not place.tier.create(RUN_RECORD, RunRecord(inventory.run or "").encode()):
            raise ForeignDirectoryError(
                f"{place.url} contains another run",
                tier=place.kind,
                path=place.url,
                hint="use a separate place for each run",
            )
        for number in sorted(inventory.timelines):
            path = timeline_dir(self.copier.run, number) / TIMELINE_RECORD
            if number > place.timeline or inventory.timelines[number] is None:
                continue
            name = self.copier.name(path)
            if not place.tier.create(name, read_record_bytes(self.copier.filesystem, path)):
                raise FencedError(
                    f"timeline {number} in {place.url} was opened by another process from "
                    "the copies alone: the two histories have diverged",
                    tier=place.kind,
                    path=f"{place.url}/{name}",
                    hint="stop one of the two processes, or copy to another place",
                )

    def _verify_place(self, inventory: Inventory) -> None:
        """Verify that the place still holds this run: it was not unmounted, emptied or replaced."""
        place = self._place
        own = timeline_dir(self.copier.run, self._place.timeline) / TIMELINE_RECORD
        records = {
            RUN_RECORD: RunRecord(inventory.run or "").encode(),
            self.copier.name(own): read_record_bytes(self.copier.filesystem, own),
        }
        for name, data in records.items():
            address = f"{place.url}/{name}"
            try:
                with contextlib.closing(place.tier.open(name)) as file:
                    found = read_record(file, name)
            except FileNotFoundError:
                raise StorageError(
                    f"{name} has disappeared from {place.url}: the place was unmounted or emptied",
                    tier=place.kind,
                    path=address,
                    hint="copying continues when it is back; to use a new place, restart training",
                ) from None
            if found != data:
                raise ForeignDirectoryError(
                    f"{place.url} now contains another run or another history",
                    tier=place.kind,
                    path=address,
                    hint="use a separate place for each run",
                )


class _ReportingFile:
    """A file being copied; each read counts as progress."""

    def __init__(self, file: ReadFile, group: CopyGroup) -> None:
        self._file = file
        self._group = group

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._group.report_progress()
        return self._file.read_into(buffer, offset)

    def close(self) -> None:
        self._file.close()


class FollowingCopies:
    """Copies of any other rank: its files of the bases that rank 0 chooses."""

    def __init__(
        self, courier: Courier, filesystem: FileSystem, run: PurePath, group: CopyGroup
    ) -> None:
        self.courier = courier
        self.copier = BaseCopier(courier, filesystem, run, group)
        self.group = group
        self._requested: Manifest | None = None
        # The newest base that rank 0 may still request, and the newest that was copied here.
        self._expected: BaseId | None = None
        self._copied: BaseId | None = None
        self._last_message_s = courier.clock.monotonic_s()
        self._refusal = ""

    @property
    def busy(self) -> bool:
        """True while files are being copied, or while rank 0 may still request some."""
        courier = self.courier
        with courier.changed:
            if courier.over:
                return False
            if courier.at_work or courier.due:
                return True
            waited_s = courier.clock.monotonic_s() - self._last_message_s
            # A keeper that ends must not wait for ever for a rank 0 that has died.
            silent = waited_s > self.group.timeout_s
            lost = silent or self.group.is_disconnected(COORDINATOR)
            return self._expected is not None and not lost

    def base_durable(self, base: BaseId | None = None) -> None:
        """Expect rank 0 to decide whether this new base is copied."""
        with self.courier.changed:
            if base is not None and (self._copied is None or base > self._copied):
                self._expected = base

    def expedite(self) -> None:
        """Wait for rank 0 no longer than the timeout from now on: the keeper is about to end."""
        with self.courier.changed:
            if not self.copier.expedited:
                self._last_message_s = self.courier.clock.monotonic_s()
            self.copier.expedited = True
            self.courier.changed.notify_all()

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        courier = self.courier
        with courier.changed:
            if sender != COORDINATOR or courier.closed:
                return
            self._last_message_s = courier.clock.monotonic_s()
            if isinstance(message, CopyRequest):
                self._on_request(message.manifest.record)
            courier.changed.notify_all()

    def turn(self) -> None:
        """Copy this rank's files of the requested base, and reply."""
        manifest = self._requested
        assert manifest is not None
        base = _base_of(manifest)
        problem = ""
        try:
            self.copy_own_files(manifest)
            self.courier.stats.copied += 1
        except StorageError as error:
            problem = error.message
            if base.timeline == self.courier.place.timeline:
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
            with self.courier.changed:
                self._refusal = problem or self._refusal
                self._copied = max(base, self._copied or base)
                if self._expected is not None and self._expected <= self._copied:
                    self._expected = None
            self._reply(base, problem)

    def copy_own_files(self, manifest: Manifest) -> None:
        """Copy this rank's files of a base, unless they are already there.

        Raises:
            EverstepError: as :meth:`.base_copies.BaseCopier.copy_files`.
        """
        self.courier.place.check_fence()
        base = _base_of(manifest)
        mine = manifest.markers[self.group.rank]
        if not self.copier.has_files_of(mine):
            path = base_dir(self.copier.run, base.timeline, base.step)
            found = BaseFound(base, path, "committed", manifest, None, ())
            self.copier.copy_files(found, [mine])

    def _on_request(self, manifest: Manifest) -> None:
        base = _base_of(manifest)
        if self.courier.refused:
            self._reply(base, self._refusal)
        elif self.courier.at_work and self._requested and base == _base_of(self._requested):
            # Repeated while it is being copied: rank 0 only wants to know that this rank is alive.
            self.group.send(CopyProgress(self.group.number))
        elif len(manifest.markers) != self.group.world:
            self._reply(base, "it was saved by another number of ranks")
        else:
            self._requested = manifest
            self.courier.wake()

    def _reply(self, base: BaseId, problem: str) -> None:
        self.group.send(CopyReply(self.group.number, base, problem))


def _base_of(manifest: Manifest) -> BaseId:
    return BaseId(manifest.timeline, manifest.step)
