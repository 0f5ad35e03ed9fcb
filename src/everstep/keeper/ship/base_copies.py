"""Copy committed bases to another tier.

The copy is a run like the one on disk: same names, same bytes, read by the same code. Its
guarantees are the same: shards first, then markers, then the manifest (I5); and the fence (I11): a
process that opens a timeline of a run with copies opens it there, too. It is looked for before each
manifest and each deletion.

Files are verified against their digests while they are copied. Files that an earlier keeper has
already copied are not sent again. If newer bases are committed during a copy, only the newest is
copied next.

Retention of copies: the same rules as on disk, with the operations of a tier.

A copy is deleted only if another one stays that was read back and found intact (``adr/005``). It is
deleted in two steps (``adr/004``): a record next to its manifest condemns it, which a resume sees;
then the fence is checked once more; then its files are deleted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Protocol

from everstep.commit import BaseId, split_by_history
from everstep.commit.job import COORDINATOR, CopyMessage
from everstep.commit.job.messages import CopyProgress
from everstep.errors import (
    DamageError,
    FencedError,
    ForeignDirectoryError,
    InfeasibleError,
    StorageError,
)
from everstep.format import MANIFEST, FileRecord, Manifest, Marker, base_dir, timeline_dir
from everstep.format.names import CONDEMNED, RUN_RECORD, TIMELINE_RECORD, marker_name, parse_marker
from everstep.format.reader import CheckedFile, OpenShard, read_record_bytes
from everstep.format.records import RunRecord
from everstep.format.writer import ChunkRing
from everstep.keeper.retain import ReadBack
from everstep.keeper.ship.courier import ROOT, CopyPlace, Courier
from everstep.run import BaseFound, Inventory, TimelineCache, scan_run
from everstep.run.folder import uncondemn_in_tier
from everstep.seams import Clock, FileSystem, ReadFile, failpoint
from everstep.tiers import read_record

_CHUNKS = 3
_READERS = 1


class CopyRetention:
    """Retention of copies in one place.

    With several ranks, rank 0 alone runs it. It then also commits copies that lack only their
    manifest, and removes copies that can never be complete: incomplete ones older than a copy that
    was read back, when no rank copies them any more.

    Args:
        keep: number of copies to keep.
        post: called with the error of a damaged copy.
        timeout_s: timeout of a single transfer, in seconds.
        several: True if several ranks make the copies.
    """

    def __init__(
        self,
        place: CopyPlace,
        keep: int,
        post: Callable[[DamageError], None],
        *,
        timeout_s: float,
        several: bool = False,
    ) -> None:
        self._place = place
        self._post = post
        self._several = several
        self._all_past: BaseId | None = None
        self._read_back = ReadBack(
            place.files,
            lambda: contextlib.closing(ChunkRing(_CHUNKS, _READERS)),
            keep=keep,
            timeout_s=timeout_s,
            tier=place.kind,
            url=place.url,
        )
        self._swept: set[BaseId] = set()

    @property
    def verified(self) -> set[BaseId]:
        """Copies that were read back and found intact."""
        return self._read_back.verified

    def all_ranks_past(self, base: BaseId) -> None:
        """Note that every rank has copied ``base``: none of them is copying an older one."""
        self._all_past = base

    def run(self) -> None:
        """Delete copies that are no longer needed.

        Raises:
            FencedError: a newer timeline was opened; the copy in question is unchanged.
            StorageError: the tier failed.
            DeadlineError: the tier hangs.
        """
        if self._several:
            self._roll_forward()
        inventory = self._place.inventory()
        bases = {base.id: base for base in inventory.bases if self._is_candidate(base)}
        victims = self._read_back.plan(bases, inventory.branches, self._post)
        for base in bases.values():
            # Condemned by a process that crashed before the deletion, and needed after all.
            if base.status == "condemned" and base.id not in victims:
                self._place.check_fence()
                uncondemn_in_tier(self._place.tier, _name(base))
        for victim in victims:
            self._delete(bases[victim])
        for base in inventory.bases:
            # Partly deleted by a process that crashed: finish the deletion.
            not_newer = base.id.timeline <= self._place.timeline
            if base.status == "condemned" and not_newer and not base.is_usable:
                self._place.check_fence()
                self._delete_files(base)
        self._clean_older_timelines(inventory)
        if self._several:
            self._sweep()

    def _clean_older_timelines(self, inventory: Inventory) -> None:
        """Remove files left by crashed processes of older timelines.

        Only once there is a copy of this timeline: until then the last base of the previous
        timeline may still be in the process of being copied.
        """
        own = self._place.timeline
        if not any(b.status == "committed" and b.id.timeline == own for b in inventory.bases):
            return
        older = [base for base in inventory.bases if base.id.timeline < own]
        for base in older:
            if base.status == "incomplete":
                # The listing may be outdated: never delete a copy that has been committed since.
                if self._place.size_of(_name(base, MANIFEST)) is not None:
                    continue
                self._place.check_fence()
                self._delete_files(base)
            if base.id not in self._swept:
                self._place.tier.sweep(_name(base))
                self._swept.add(base.id)

    def _is_candidate(self, base: BaseFound) -> bool:
        """Return True for committed copies, and for condemned ones that still have all their
        files.
        """
        if base.status == "committed":
            return True
        usable = base.status == "condemned" and base.is_usable
        return usable and base.id.timeline <= self._place.timeline

    def _delete(self, base: BaseFound) -> None:
        assert base.manifest is not None
        condemned = _name(base, CONDEMNED)
        self._place.check_fence()
        self._place.create(condemned, base.manifest.encode())
        # Checked again after the record: a timeline opened before it has taken its inventory
        # without it and may rely on this copy; one opened later sees the record.
        try:
            self._place.check_fence()
        except FencedError:
            self._place.tier.delete(condemned)
            raise
        self._delete_files(base)
        self._read_back.forget(base.id)

    def _delete_files(self, base: BaseFound) -> None:
        """Delete the files of a copy: records first, the condemned record last.

        Without its records nobody reads the rest; the condemned record marks what is left until the
        end.
        """
        names = [file.name for file in base.files if file.kind == "file"]
        records = [name for name in names if name == MANIFEST or parse_marker(name) is not None]
        rest = [name for name in names if name not in records and name != CONDEMNED]
        for name in [*records, *rest, CONDEMNED]:
            self._place.tier.delete(_name(base, name))

    def _roll_forward(self) -> None:
        """Commit copies whose files are all there."""
        for base in self._place.inventory().bases:
            if base.status == "complete" and base.id.timeline <= self._place.timeline:
                assert base.manifest is not None
                folder = _name(base)
                if all(self._place.has_rank_files(folder, one) for one in base.manifest.markers):
                    # Before every commit: a process of an older timeline must not commit (I11).
                    self._place.check_fence()
                    self._place.create(_name(base, MANIFEST), base.manifest.encode())

    def _sweep(self) -> None:
        """Delete incomplete copies that no rank copies any more."""
        newest = max(self.verified, default=None)
        if newest is None or self._all_past is None:
            return
        for base in self._place.inventory().bases:
            # Younger incomplete copies may be in progress.
            unfinished = base.status == "incomplete" and base.id < min(newest, self._all_past)
            # The listing may be outdated: the manifest may exist by now.
            if unfinished and self._place.size_of(_name(base, MANIFEST)) is None:
                self._place.check_fence()
                self._delete_files(base)


def _name(base: BaseFound, name: str = "") -> str:
    return (base.path / name).relative_to(ROOT).as_posix()


_log = logging.getLogger("everstep.keeper")
_RATE_POLL_S = 1.0
_REPORT_INTERVAL_MIN_S = 0.1


class OtherKeepers(Protocol):
    """Connections to the keepers of the other ranks (:class:`.job_link.JobLink`)."""

    last_receive_s: float

    def send(self, rank: int, message: CopyMessage) -> None:
        """Send a message; it may be lost."""
        ...

    def is_disconnected(self, rank: int) -> bool:
        """Return True if a rank will send nothing any more."""
        ...


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
        others: OtherKeepers | None,
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
        self.report_interval_s = max(_REPORT_INTERVAL_MIN_S, timeout_s / 10)
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
        assert self._others is not None
        return self._others.last_receive_s

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
        # Two threads may pass this check together; a report too many does no harm.
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + self.report_interval_s
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
        return CheckedFile(OpenShard.open(self.filesystem, path, record))

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


class BaseCopies:
    """Copies the newest base of one timeline, as it becomes durable, to one place.

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
        self.retention = CopyRetention(
            courier.place,
            keep,
            courier.post,
            timeout_s=group.timeout_s,
            several=group.world > 1,
        )
        self._place = courier.place
        self._every_s = every_s
        self._timelines = TimelineCache()
        self._published = False

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

    def waiting(self) -> float | None:
        """Do nothing while no copy is due."""
        return None

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
        self.courier.stats.step = base.id.step
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
        """Return True if this base can be copied by this process."""
        return True

    def _copy(self, base: BaseFound) -> bool:
        """Copy a base; return False if it cannot be copied and that is no error."""
        assert base.manifest is not None
        self.copier.copy_files(base, base.manifest.markers)
        self.copier.commit(base, base.manifest)
        return True

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
