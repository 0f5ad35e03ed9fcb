"""Copy committed bases to another tier.

The copy is a run like the one on disk: same names, same bytes, read by the same code. Its
guarantees are the same: shards first, then markers, then the manifest (I5); and the fence (I11): a
process that opens a timeline of a run with copies opens it there, too. It is looked for before each
manifest and each deletion.

Files are verified against their digests while they are copied. Files that an earlier keeper has
already copied are not sent again. If newer bases are committed during a copy, only the newest is
copied next.

With several ranks each rank's keeper copies its own files. Rank 0 chooses the base
(:mod:`everstep.commit.peer_copies`), so that all ranks copy the same one. When every marker is in
the tier, it creates the manifest (I5): the same as on the disks, as it follows from the markers
alone. If rank 0 dies before that, the next start of the job does so
(:mod:`everstep.restore.fetch.rank_copies`), or rank 0's next keeper. Only rank 0 deletes copies
(:class:`.courier.CopyRetention`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep.commit import BaseId, split_by_history
from everstep.commit.job import COORDINATOR, CopyMessage
from everstep.commit.job.messages import CopyProgress, CopyReply, CopyRequest, CopySettled
from everstep.commit.peer_copies import CopyRound
from everstep.commit.retention import KeepRules
from everstep.errors import (
    DeadlineError,
    EverstepError,
    StorageError,
)
from everstep.format import MANIFEST, FileRecord, Manifest, Marker, base_dir, timeline_dir
from everstep.format.message_codec import Stored
from everstep.format.names import (
    ANNOTATIONS,
    PIN_RECORD,
    RUN_RECORD,
    TIMELINE_RECORD,
    marker_name,
)
from everstep.format.reader import CheckedFile, OpenShard, read_record_bytes
from everstep.format.records import RunRecord
from everstep.keeper.persist import JobLink
from everstep.keeper.ship.courier import CopyRetention, CopyWork, Courier
from everstep.restore.fetch.rank_copies import foreign
from everstep.run import BaseFound, Inventory, TimelineCache, scan_run
from everstep.seams import Clock, FileSystem, ReadFile, failpoint
from everstep.seams.filesystem import observed
from everstep.tiers import MemoryFile, read_record

_log = logging.getLogger("everstep.keeper")
_POLL_S = 0.1
_REPORT_INTERVAL_MIN_S = 0.1


@dataclass(eq=False)
class CopyGroup:
    """The ranks that copy bases to one place together; one rank is a group of one.

    Attributes:
        others: keepers of the other ranks; None: there is one rank.
        number: index of the place among the places of the job.
        rank: rank whose files are copied.
        world: number of ranks.
        timeout_s: seconds without a message after which another rank is no longer waited for.
    """

    others: JobLink | None
    clock: Clock
    number: int
    rank: int
    world: int
    timeout_s: float
    _next_report_s: float = 0.0

    @property
    def report_interval_s(self) -> float:
        """Seconds between two reports of progress."""
        return max(_REPORT_INTERVAL_MIN_S, self.timeout_s / 10)

    @property
    def followers(self) -> range:
        """Ranks that copy what rank 0 chooses."""
        return range(1, self.world)

    @property
    def last_receive_s(self) -> float:
        """Time when the keepers' connections were last read."""
        assert self.others is not None
        return self.others.last_receive_s

    def send(self, message: CopyMessage) -> None:
        """Send a message to rank 0, or from there to all other ranks; it may be lost."""
        for rank in self.followers if self.rank == COORDINATOR else (COORDINATOR,):
            self.send_to(rank, message)

    def send_to(self, rank: int, message: CopyMessage) -> None:
        """Send a message to one rank; it may be lost."""
        if self.others is not None:
            self.others.send(rank, message)

    def is_disconnected(self, rank: int) -> bool:
        """Return True if a rank will send nothing any more."""
        return self.others is not None and self.others.is_disconnected(rank)

    def report_progress(self) -> None:
        """Send from time to time that this rank is still copying; called in any thread."""
        now_s = self.clock.monotonic_s()
        # Two threads may pass this check together; a report too many does no harm.
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self.report_interval_s
            self.send(CopyProgress(self.number))


class BaseCopier(CopyWork):
    """Copies the files of one base after the other to the place of a courier.

    Args:
        run: the run folder on ``filesystem``.
        group: ranks that copy together.
        on_base: called with the newest base of which this rank's files are there.
    """

    def __init__(
        self,
        courier: Courier,
        filesystem: FileSystem,
        run: PurePath,
        group: CopyGroup,
        on_base: Callable[[BaseId], None] = lambda base: None,
    ) -> None:
        self.courier = courier
        self.group = group
        self._on_base = on_base
        self._filesystem = filesystem
        self._run = run
        self._place = courier.place

    def _name(self, path: PurePath) -> str:
        """Return the name in the place of a file in the run folder."""
        return path.relative_to(self._run).as_posix()

    def _has_files_of(self, marker: Marker) -> bool:
        """Return True if a rank's files of a base, and its marker, are in the place."""
        folder = self._name(base_dir(self._run, marker.timeline, marker.step))
        return self._place.has_rank_files(folder, marker)

    def _copy_files(self, base: BaseFound, markers: Sequence[Marker]) -> None:
        """Copy these ranks' files, then their markers.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            StorageError: the files are not on this disk any more, or cannot be written.
            DamageError: a file on disk is damaged.
            DeadlineError: the tier hangs.
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
            for path, source in sources:
                self.put(self._name(path), source)
        if self.group.world > 1:
            failpoint("copy.before_marker")
            # Copying takes long: a newer timeline may have been opened since the last check. One
            # rank checks it before the manifest, which follows at once.
            self._place.check_fence()
        # Markers after all files: a marker promises that its rank's files are complete (I5).
        for marker in markers:
            self._place.create(self._name(base.path / marker_name(marker.rank)), marker.encode())
        self.courier.stats.copied_bytes += sum(f.length for m in markers for f in m.files)

    def _write_manifest(self, base: BaseFound, manifest: Manifest) -> None:
        """Write the manifest; all markers are there."""
        # Right before the commit: a process of an older timeline must not commit (I11).
        self._place.check_fence()
        self._place.create(self._name(base.path / MANIFEST), manifest.encode())
        self.courier.stats.copied += 1
        _log.info("%s is in %s", base.id, self._place.url)

    def put(self, name: str, source: ReadFile) -> None:
        """Copy a file, unless an earlier keeper has."""
        # Its bytes are verified when retention reads it back.
        if self._place.size_of(name) == source.size_bytes:
            return
        if self.courier.closed:
            raise StorageError(f"copying was stopped before {name}")
        # The transfer may take long: each read counts as progress.
        self._place.tier.put(name, observed(source, self._report_progress))

    def _arrived(self, base: BaseId) -> None:
        self.courier.stats.step = base.step
        self._on_base(base)

    def _report_progress(self) -> None:
        self.courier.moved()
        self.group.report_progress()

    def _open(self, path: PurePath, record: FileRecord) -> CheckedFile:
        return CheckedFile(OpenShard.open(self._filesystem, path, record))


class BaseCopies(BaseCopier):
    """Copies the newest base of one timeline, as it becomes durable, to one place.

    Args:
        group: ranks that copy together; this rank chooses the base and commits the copy.
        keep: copies to keep.
        every_s: minimum seconds from the start of one copy to the start of the next.
    """

    def __init__(
        self,
        courier: Courier,
        filesystem: FileSystem,
        run: PurePath,
        group: CopyGroup,
        *,
        keep: KeepRules,
        every_s: float = 0.0,
        on_base: Callable[[BaseId], None] = lambda base: None,
    ) -> None:
        super().__init__(courier, filesystem, run, group, on_base)
        self.retention = CopyRetention(
            courier.place,
            keep,
            courier.post,
            timeout_s=group.timeout_s,
            several=group.world > 1,
        )
        self._every_s = every_s
        self._timelines = TimelineCache()
        self._published = False
        self._annotations: dict[PurePath, bytes] = {}  # as copied by this process
        self._round: CopyRound | None = None
        self._base_in_turn: BaseId | None = None

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
        if base is not None and self.courier.refused:
            self.send_settled(base)

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        with self.courier.changed:
            if self._round is not None and isinstance(message, CopyReply):
                self._round.on_reply(sender, message.base, message.problem)
            elif self._round is not None:
                self._round.on_message(sender)
            self.courier.changed.notify_all()

    def expedite(self) -> None:
        """Copy the last base without waiting for its interval: the keeper is about to end."""
        courier = self.courier
        with courier.changed:
            self._every_s = 0.0
            courier.not_before_s = courier.clock.monotonic_s()
            if courier.due:
                courier.look_again(courier.not_before_s)
            courier.changed.notify_all()

    def turn(self) -> None:
        """Copy what is due, then run retention."""
        self.courier.not_before_s = self.courier.clock.monotonic_s() + self._every_s
        try:
            self.copy_newest()
            self.retention.run()
        finally:
            # Also after errors: the other keepers must not wait for a request.
            if self._base_in_turn is not None:
                self.send_settled(self._base_in_turn)

    def copy_newest(self) -> BaseId | None:
        """Copy the newest base of the history unless it is already there; return its id.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            ForeignDirectoryError: the place holds another run.
            StorageError: the disk or the tier failed.
            DeadlineError: the tier hangs.
        """
        try:
            inventory = scan_run(self._filesystem, self._run, self._timelines)
        except OSError as error:
            raise StorageError(
                f"could not read the run to be copied: {error.strerror or error}", path=self._run
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
            self._place.publish(inventory, self._filesystem)
            self._published = True
        base = committed[in_history[0]]
        is_copied = self._place.size_of(self._name(base.path / MANIFEST)) is not None
        if not is_copied and not self._copy(base):
            return None
        self._copy_annotations(committed.values())
        self._arrived(base.id)
        return base.id

    def _copy_annotations(self, bases: Iterable[BaseFound]) -> None:
        """Copy annotations and pins that have changed: retention of the copies goes by them."""
        for base in bases:
            for name in (ANNOTATIONS, PIN_RECORD):
                if all(file.name != name for file in base.files):
                    continue
                path = base.path / name
                # The base may be deleted meanwhile, or its pin removed.
                with contextlib.suppress(FileNotFoundError):
                    data = read_record_bytes(self._filesystem, path)
                    copied = self._annotations.get(path) == data
                    if not copied and self._place.size_of(self._name(base.path / MANIFEST)):
                        self._place.tier.put(self._name(path), MemoryFile([memoryview(data)]))
                        self._annotations[path] = data

    def _may_copy(self, base: BaseFound) -> bool:
        """Return True if this keeper, or those of all ranks together, have the files of the base.

        Files of other ranks' bases are on disks that no running keeper reads.
        """
        if self.group.world == 1:
            return True
        self._base_in_turn = base.id
        return base.manifest is not None and len(base.manifest.markers) == self.group.world

    def send_settled(self, base: BaseId) -> None:
        """Tell the other ranks that ``base`` will not be requested any more."""
        self.group.send(CopySettled(self.group.number, base))

    def _copy(self, base: BaseFound) -> bool:
        """Copy a base; return False if it cannot be copied and that is no error."""
        manifest = base.manifest
        assert manifest is not None
        group = self.group
        if group.world == 1:
            self._copy_files(base, manifest.markers)
            self._write_manifest(base, manifest)
            return True
        with self.courier.changed:
            self._round = CopyRound(base.id, group.followers, group.timeout_s)
        try:
            self._request_copies(manifest)
            mine = manifest.markers[group.rank]
            if not self._has_files_of(mine):
                self._copy_files(base, [mine])
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
        self._write_manifest(base, manifest)

    def _missing(self, manifest: Manifest) -> list[int]:
        return [one.rank for one in manifest.markers if not self._has_files_of(one)]

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
            self._report_progress()
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

    def _verify_place(self, inventory: Inventory) -> None:
        """Verify that the place still holds this run: it was not unmounted, emptied or replaced."""
        place = self._place
        own = timeline_dir(self._run, self._place.timeline) / TIMELINE_RECORD
        records = {
            RUN_RECORD: RunRecord(inventory.run or "").encode(),
            self._name(own): read_record_bytes(self._filesystem, own),
        }
        for name, data in records.items():
            found = read_record(place.tier, name)
            if found is None:
                raise StorageError(
                    f"{name} has disappeared from {place.url}: the place was unmounted or emptied",
                    tier=place.kind,
                    path=f"{place.url}/{name}",
                    hint="copying continues when it is back; to use a new place, restart training",
                )
            if found != data:
                raise foreign(place.tier, "of another run or another history now")


class FollowingCopies(BaseCopier):
    """Copies of any other rank: its files of the bases that rank 0 chooses.

    All files and markers make a base that can be restored: the next start writes its manifest.
    """

    def __init__(
        self,
        courier: Courier,
        filesystem: FileSystem,
        run: PurePath,
        group: CopyGroup,
        on_base: Callable[[BaseId], None] = lambda base: None,
    ) -> None:
        super().__init__(courier, filesystem, run, group, on_base)
        self._requested: Manifest | None = None
        # The newest base that rank 0 may still request.
        self._expected: BaseId | None = None
        # Rank 0 will request no base up to this one.
        self._settled: BaseId | None = None
        self._last_message_s = courier.clock.monotonic_s()
        self._refusal = ""
        # True if the keeper is about to end.
        self._expedited = False

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
            if base is not None and (self._settled is None or base > self._settled):
                self._expected = base
                # Wakes the thread, which reports from now on that this rank is alive.
                self.courier.changed.notify_all()

    def expedite(self) -> None:
        """Wait for rank 0 no longer than the timeout from now on: the keeper is about to end."""
        with self.courier.changed:
            if not self._expedited:
                self._last_message_s = self.courier.clock.monotonic_s()
            self._expedited = True
            self.courier.changed.notify_all()

    def on_message(self, sender: int, message: CopyMessage) -> None:
        """Handle a message about this place."""
        courier = self.courier
        with courier.changed:
            if sender != COORDINATOR or courier.closed:
                return
            self._last_message_s = courier.clock.monotonic_s()
            if isinstance(message, CopySettled):
                self._mark_settled(message.base)
            elif isinstance(message, CopyRequest):
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
            with self.courier.changed:
                self._refusal = problem or self._refusal
                self._mark_settled(base)
            self._reply(base, problem)

    def waiting(self) -> float | None:
        """Report that this rank is alive while rank 0 may request a copy."""
        if self._expected is None:
            return None
        self.group.report_progress()
        return self.group.report_interval_s

    def copy_own_files(self, manifest: Manifest) -> None:
        """Copy this rank's files of a base, unless they are already there.

        Raises:
            EverstepError: as :meth:`.BaseCopier._copy_files`.
        """
        self._place.check_fence()
        base = _base_of(manifest)
        mine = manifest.markers[self.group.rank]
        if not self._has_files_of(mine):
            path = base_dir(self._run, base.timeline, base.step)
            found = BaseFound(base, path, "committed", manifest, None, ())
            self._copy_files(found, [mine])
        self._arrived(base)

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

    def _mark_settled(self, base: BaseId) -> None:
        """Note that rank 0 will not request ``base`` or an older one any more."""
        if self._settled is None or base > self._settled:
            self._settled = base
        if self._expected is not None and self._expected <= self._settled:
            self._expected = None

    def _reply(self, base: BaseId, problem: str) -> None:
        self.group.send(CopyReply(self.group.number, base, problem))


def _base_of(manifest: Manifest) -> BaseId:
    return BaseId(manifest.timeline, manifest.step)
