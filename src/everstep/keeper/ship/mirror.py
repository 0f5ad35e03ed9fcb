"""Copy committed bases to another tier, in the background.

The copy is a run like the one on disk: same names, same bytes, read by the same code. Its
guarantees are the same: shards first, then markers, then the manifest (I5); and the fence (I11): a
process that opens a timeline of a run with copies opens it there, too. The mirror checks for a
newer timeline before each manifest and each deletion.

Files are verified against their digests while they are copied. Files that an earlier keeper has
already copied are not sent again. If newer bases are committed during a copy, only the newest is
copied next.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from everstep.commit.lineage import BaseId, split_by_history
from everstep.errors import (
    EverstepError,
    FencedError,
    ForeignDirectoryError,
    InfeasibleError,
    StorageError,
)
from everstep.format.names import (
    MANIFEST,
    RUN_RECORD,
    TIMELINE_RECORD,
    marker_name,
    timeline_dir,
)
from everstep.format.reader import CheckedFile, read_header, read_record_bytes
from everstep.format.records import FileRecord, Marker, RunRecord
from everstep.keeper.ship.copy_retention import CopyRetention
from everstep.keeper.ship.place import CopyPlace
from everstep.run.scan import BaseFound, Inventory, TimelineCache, scan_run
from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import FileSystem, ReadFile
from everstep.seams.processes.conditions import Condition
from everstep.tiers.streams import read_record

__all__ = ["Mirror", "MirrorOptions", "MirrorStats"]

_log = logging.getLogger("everstep.keeper")
_STOP_TIMEOUT_S = 5.0
_RATE_POLL_S = 1.0


@dataclass(slots=True)
class MirrorStats:
    """Figures of a mirror since it started.

    Attributes:
        passed_over: bases that were not copied because a newer one followed.
        step: step of the newest copy.
    """

    copied: int = 0
    copied_bytes: int = 0
    passed_over: int = 0
    failed: int = 0
    step: int | None = None


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """Pace and retention of the copies in one place.

    Attributes:
        keep: number of copies to keep.
        every_s: minimum seconds from the start of one copy to the start of the next.
        timeout_s: timeout of a single transfer, in seconds, for reading copies back.
    """

    keep: int
    every_s: float = 0.0
    timeout_s: float = 120.0


class Mirror:
    """Copies the bases of one timeline to one place as they become durable.

    Args:
        run: the run folder on ``filesystem``.
        place: the place, with the timeline that is copied and the limit of objects per hour.
        post: called with errors.

    Attributes:
        waits_for_the_cap: True while a copy waits because of the limit of objects per hour.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        place: CopyPlace,
        clock: Clock,
        post: Callable[[EverstepError], None],
        options: MirrorOptions,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._place = place
        self._clock = clock
        self._post = post
        self._every_s = options.every_s
        self._timelines = TimelineCache()
        self._retention = CopyRetention(place, options.keep, post, timeout_s=options.timeout_s)
        self._changed = Condition()
        self._due = False
        self._at_work = False
        self._closed = False
        self._refused = False
        self._expedited = False
        self._published = False
        self._paused = False
        self._not_before_s = clock.monotonic_s()
        self._thread: threading.Thread | None = None
        self.stats = MirrorStats()
        self.waits_for_the_cap = False

    @property
    def busy(self) -> bool:
        """True while a base is being copied, or waits to be copied."""
        with self._changed:
            return not self._closed and not self._refused and (self._at_work or self._due)

    def base_durable(self, base: BaseId | None = None) -> None:
        """Queue a new base.

        Args:
            base: the base; None: look whether there is one.
        """
        with self._changed:
            if self._closed or self._refused:
                return
            self.stats.passed_over += self._due
            self._due = True
            self._paused = False
            self._wake()

    def pause(self) -> None:
        """Expect that the attached process itself opens another timeline.

        Being fenced off is no error then, until the next base shows that it did not.
        """
        with self._changed:
            self._paused = True

    def expedite(self) -> None:
        """Copy the last base without waiting for its interval: the keeper is about to end.

        The limit of objects per hour still holds; a base that would have to wait for it is not
        copied, which is reported.
        """
        with self._changed:
            self._expedited = True
            self._every_s = 0.0
            self._not_before_s = self._clock.monotonic_s()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop. A copy in progress is abandoned; the next mirror continues it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._place.tier.close()
        if self._thread is not None:
            # With a timeout: a transfer in progress cannot be cancelled.
            self._thread.join(_STOP_TIMEOUT_S)

    def copy_newest(self) -> BaseId | None:
        """Copy the newest base of the history unless it is already there; return its id.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            ForeignDirectoryError: the place holds another run.
            StorageError: the disk or the tier failed.
            DeadlineError: the tier hangs.
            InfeasibleError: a base has more objects than may be written in an hour.
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
            self._publish(inventory)
            self._published = True
        base = committed[in_history[0]]
        is_copied = self._place.size_of(self._name(base.path / MANIFEST)) is not None
        if not is_copied and not self._copy(inventory, base):
            return None
        self.stats.step = base.id.step
        return base.id

    def retain(self) -> None:
        """Delete copies that are no longer needed.

        Raises:
            FencedError: a newer timeline was opened in the tier.
            StorageError: the tier failed.
            DeadlineError: the tier hangs.
        """
        self._retention.run()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._copy_loop, name="everstep-mirror", daemon=True
            )
            self._thread.start()
        self._changed.notify_all()

    def _run_once(self) -> None:
        """Copy what is due, then run retention."""
        self.copy_newest()
        self.retain()

    def _copy_loop(self) -> None:
        while self._wait_for_work():
            try:
                self._run_once()
            except (FencedError, ForeignDirectoryError, InfeasibleError) as error:
                self._fail(error, for_good=True)
            except EverstepError as error:
                self._fail(error)
            except Exception as error:
                # Must not end this thread: all later copies would be missing without a report.
                internal = EverstepError(
                    f"internal error while copying to {self._place.tier.url}: {error!r}"
                )
                internal.__cause__ = error
                self._fail(internal)
            finally:
                self._place.rate.settled(self)
                with self._changed:
                    self._at_work = False

    def _wait_for_work(self) -> bool:
        """Wait until a copy may begin; return False if the thread must end."""
        with self._changed:
            while not self._closed and not self._refused:
                early_s = self._not_before_s - self._clock.monotonic_s()
                if self._due and early_s <= 0:
                    self._due = False
                    self._at_work = True
                    self._not_before_s = self._clock.monotonic_s() + self._every_s
                    return True
                self._changed.wait(early_s if self._due else None)
            return False

    def _may_copy(self, base: BaseFound) -> bool:
        """Return True if this base can be copied by this process."""
        return True

    def _copy(self, inventory: Inventory, base: BaseFound) -> bool:
        """Copy a base; return False if it cannot be copied and that is no error."""
        assert base.manifest is not None
        self._copy_files(base, base.manifest.markers)
        self._commit(base)
        return True

    def _copy_files(self, base: BaseFound, markers: Sequence[Marker]) -> None:
        """Copy these ranks' files, then their markers."""
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
                self._put(self._name(path), source)
        # Markers after all files: a marker promises that its rank's files are complete (I5).
        self._before_markers()
        for marker in markers:
            self._place.create(self._name(base.path / marker_name(marker.rank)), marker.encode())
        self.stats.copied_bytes += sum(f.length for marker in markers for f in marker.files)

    def _before_markers(self) -> None:
        """Hook: all files are there, no marker is."""

    def _commit(self, base: BaseFound) -> None:
        """Write the manifest; all markers are there."""
        assert base.manifest is not None
        # Right before the commit: a process of an older timeline must not commit (I11).
        self._place.check_fence()
        self._place.create(self._name(base.path / MANIFEST), base.manifest.encode())
        self.stats.copied += 1
        _log.info("%s is in %s", base.id, self._place.tier.url)

    def _open(self, path: PurePath, record: FileRecord) -> CheckedFile:
        file = self._filesystem.open(path, direct=True)
        try:
            return CheckedFile(file, read_header(file, record, path), record, path)
        except BaseException:
            file.close()
            raise

    def _publish(self, inventory: Inventory) -> None:
        """Write the records of the run and its timelines, which define the history of the
        copies.
        """
        tier = self._place.tier
        self._place.rate.wrote(1 + len(inventory.timelines))
        # Encoded again instead of copied: the file on disk may be damaged, and the id is known
        # from the other records.
        if not tier.create(RUN_RECORD, RunRecord(inventory.run or "").encode()):
            raise ForeignDirectoryError(
                f"{tier.url} contains another run",
                tier=tier.traits.kind,
                path=tier.url,
                hint="use a separate place for each run",
            )
        for number in sorted(inventory.timelines):
            path = timeline_dir(self._run, number) / TIMELINE_RECORD
            if number > self._place.timeline or inventory.timelines[number] is None:
                continue
            if not tier.create(self._name(path), read_record_bytes(self._filesystem, path)):
                raise FencedError(
                    f"timeline {number} in {tier.url} was opened by another process from "
                    "the copies alone: the two histories have diverged",
                    tier=tier.traits.kind,
                    path=f"{tier.url}/{self._name(path)}",
                    hint="stop one of the two processes, or copy to another place",
                )

    def _verify_place(self, inventory: Inventory) -> None:
        """Verify that the place still holds this run: it was not unmounted, emptied or replaced."""
        tier = self._place.tier
        own = timeline_dir(self._run, self._place.timeline) / TIMELINE_RECORD
        records = {
            RUN_RECORD: RunRecord(inventory.run or "").encode(),
            self._name(own): read_record_bytes(self._filesystem, own),
        }
        for name, data in records.items():
            kind = tier.traits.kind
            address = f"{tier.url}/{name}"
            try:
                with contextlib.closing(tier.open(name)) as file:
                    found = read_record(file, name)
            except FileNotFoundError:
                raise StorageError(
                    f"{name} has disappeared from {tier.url}: the place was unmounted or emptied",
                    tier=kind,
                    path=address,
                    hint="copying continues when it is back; to use a new place, restart training",
                ) from None
            if found != data:
                raise ForeignDirectoryError(
                    f"{tier.url} now contains another run or another history",
                    tier=kind,
                    path=address,
                    hint="use a separate place for each run",
                )

    def report_progress(self) -> None:
        """Hook: called while a copy is in progress, in any thread."""

    def _put(self, name: str, source: ReadFile) -> None:
        # Copied by an earlier keeper. Its bytes are verified when retention reads it back.
        if self._place.size_of(name) == source.size_bytes:
            return
        if self._closed:
            raise StorageError(f"copying was stopped before {name}")
        self._place.rate.wrote(1)
        self._place.tier.put(name, source)

    def _await_rate(self, count: int) -> None:
        """Wait until the limit of objects per hour allows ``count`` more."""
        while (wait_s := self._place.rate.wait_s(count, self)) > 0:
            with self._changed:
                if self._closed or self._expedited:
                    self.waits_for_the_cap = False
                    raise StorageError(
                        "the newest base is not copied: the limit of objects per hour is reached",
                        tier=self._place.tier.traits.kind,
                        path=self._place.tier.url,
                        hint="raise TierOptions.objects_per_hour, or lengthen every_s",
                    )
                if not self.waits_for_the_cap:
                    _log.info("the limit of objects per hour delays a copy by %.0f s", wait_s)
                self.waits_for_the_cap = True
                # In short waits, so that progress is reported and a claim that is settled early
                # is noticed.
                self._changed.wait(min(wait_s, _RATE_POLL_S))
                self.report_progress()
        self.waits_for_the_cap = False

    def _name(self, path: PurePath) -> str:
        return path.relative_to(self._run).as_posix()

    def _fail(self, error: EverstepError, *, for_good: bool = False) -> None:
        with self._changed:
            # Fenced off by the attached process itself, which opens a new timeline: no error.
            paused = self._paused and isinstance(error, FencedError)
            self._refused = self._refused or (for_good and not paused)
            if self._closed or paused:
                _log.info("not copied: %s", error)
                return
            self.stats.failed += 1
        self._post(error)
