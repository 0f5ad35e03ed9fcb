"""Copies committed bases to another tier, behind everything else.

The copy is a run like the one on disk: the same names, the same bytes, read by the same code. In it
the same order is the guarantee (I5): shards, then markers, then the manifest; and the same fence
(I11): whoever opens a timeline of a run with copies opens it there, too, and before a manifest
and before each deletion the mirror looks for a newer one.

A base is copied as it is on disk, compared with its digests on the way. What is there already, of a
keeper that died, is not sent again. If a newer base is committed meanwhile, older ones that wait
are passed over: the newest counts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

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
from everstep.keeper.ship.place import CopyPlace
from everstep.keeper.ship.retain_copies import CopyRetention
from everstep.run.scan import BaseFound, Inventory, TimelineCache, scan_run
from everstep.seams.clock import Clock
from everstep.seams.files.filesystem import FileSystem, ReadFile
from everstep.seams.processes.conditions import Condition
from everstep.tiers.contract import Tier
from everstep.tiers.rate import ObjectRate
from everstep.tiers.streams import read_record

__all__ = ["Mirror", "MirrorStats"]

_log = logging.getLogger("everstep.keeper")
_STOP_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 1.0


@dataclass(slots=True)
class MirrorStats:
    """What a mirror has done so far.

    Attributes:
        passed_over: bases that were not copied because a newer one came before.
        step: of the newest base that is there.
    """

    copied: int = 0
    copied_bytes: int = 0
    passed_over: int = 0
    failed: int = 0
    step: int | None = None


class Mirror:
    """Copies the bases of one timeline to one tier as they become durable.

    Args:
        run: the run folder on ``filesystem``.
        post: told of what fails.
        keep: bases to keep in the tier.
        every_s: from the beginning of one copy to that of the next, at least.
        rate: how many objects may be written.
        timeout_s: of a single transfer, when copies are read back.

    Attributes:
        waits_for_the_cap: a copy waits until fewer objects were written in the last hour.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        run: PurePath,
        timeline: int,
        tier: Tier,
        clock: Clock,
        post: Callable[[EverstepError], None],
        *,
        keep: int,
        every_s: float = 0.0,
        rate: ObjectRate | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._filesystem = filesystem
        self._run = run
        self._timeline = timeline
        self._tier = tier
        self._clock = clock
        self._post = post
        self._every_s = every_s
        self._rate = rate or ObjectRate(None, clock)
        self._place = CopyPlace(tier, timeline, self._rate)
        self._timelines = TimelineCache()
        self._retention = CopyRetention(self._place, keep, post, timeout_s=timeout_s)
        self._changed = Condition()
        self._due = self._at_work = self._closed = self._refused = self._hurried = False
        self._published = self._paused = False
        self._not_before_s = clock.monotonic_s()
        self._thread: threading.Thread | None = None
        self.stats = MirrorStats()
        self.waits_for_the_cap = False

    @property
    def busy(self) -> bool:
        """Whether a base is being copied, or is going to be as soon as it may."""
        with self._changed:
            return not self._closed and not self._refused and (self._at_work or self._due)

    def base_durable(self, base: BaseId | None = None) -> None:
        """There is a new base on disk.

        Args:
            base: which; None: perhaps there is one.
        """
        with self._changed:
            if self._closed or self._refused:
                return
            self.stats.passed_over += self._due
            self._due = True
            self._paused = False
            self._begin()

    def pause(self) -> None:
        """Another timeline may be opened by the very process that is served: until there is another
        base, which says that it was not, it is no error to be shut out."""
        with self._changed:
            self._paused = True

    def hurry(self) -> None:
        """The keeper is about to end: the last base does not wait for its time. A cap of objects
        is kept to: what would have to wait for it is not copied, and that is said."""
        with self._changed:
            self._hurried = True
            self._every_s, self._not_before_s = 0.0, self._clock.monotonic_s()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the copy that is under way; the next mirror goes on with it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tier.close()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)  # it may be in a transfer, which nothing ends

    def copy_newest(self) -> BaseId | None:
        """Copies the newest base of the history, unless it is there; returns it.

        Raises:
            FencedError: a newer timeline has been opened in the tier.
            ForeignDirectoryError: it holds something else.
            StorageError, DeadlineError, InfeasibleError
        """
        try:
            inventory = scan_run(self._filesystem, self._run, self._timelines)
        except OSError as error:
            raise StorageError(
                f"could not read the run to copy: {error.strerror or error}", path=self._run
            ) from error
        there = {base.id: base for base in inventory.bases if base.status == "committed"}
        here, _ = split_by_history(there, inventory.branches)
        if not here or not self._may_copy(there[here[0]]):
            return None
        self._place.check_fence()
        if self._published:
            self._find_again(inventory)
        else:  # or another run's base might be taken for the copy of this one
            self._publish(inventory)
            self._published = True
        base = there[here[0]]
        there_already = self._place.size_of(self._name(base.path / MANIFEST)) is not None
        if not there_already and not self._copy(inventory, base):
            return None
        self.stats.step = base.id.step
        return base.id

    def retain(self) -> None:
        """Deletes copies that are no longer needed.

        Raises:
            FencedError, StorageError, DeadlineError
        """
        self._retention.run()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="everstep-mirror", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _turn(self) -> None:
        """What is due."""
        self.copy_newest()
        self.retain()

    def _work(self) -> None:
        while self._next():
            try:
                self._turn()
            except (FencedError, ForeignDirectoryError, InfeasibleError) as error:
                self._fail(error, for_good=True)
            except EverstepError as error:
                self._fail(error)
            except Exception as error:  # would end this thread, and all copies to come
                ours = EverstepError(f"internal error in copying to {self._tier.url}: {error!r}")
                ours.__cause__ = error
                self._fail(ours)
            finally:
                self._rate.settled(self)
                with self._changed:
                    self._at_work = False

    def _next(self) -> bool:
        """Waits until a copy may begin; False when there will be no more."""
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
        """Whether this is one that can be copied from here."""
        return True

    def _copy(self, inventory: Inventory, base: BaseFound) -> bool:
        """Copies a base; False: it cannot be, and that is nothing to report."""
        assert base.manifest is not None
        self._copy_parts(base, base.manifest.markers)
        self._commit(base)
        return True

    def _copy_parts(self, base: BaseFound, markers: Sequence[Marker]) -> None:
        """Copies these ranks' files, then their markers."""
        with contextlib.ExitStack() as stack:
            try:
                # All at once, first: retention may delete the base while it is copied.
                sources = [
                    (path, stack.enter_context(contextlib.closing(self._open(path, record))))
                    for marker in markers
                    for record in marker.files
                    for path in [base.path / record.name]
                ]
            except OSError as error:
                raise StorageError(
                    f"could not read the base to copy: {error.strerror or error}",
                    step=base.id.step,
                    path=base.path,
                    hint="look at the disk (dmesg, df); the next base is copied anew",
                ) from error
            self._await_rate(len(sources) + len(markers) + 1)
            for path, source in sources:
                self._put(self._name(path), source)
        self._before_markers()
        for marker in markers:
            self._place.create(self._name(base.path / marker_name(marker.rank)), marker.encode())
        self.stats.copied_bytes += sum(f.length for marker in markers for f in marker.files)

    def _before_markers(self) -> None:
        """Files are there, markers are not."""

    def _commit(self, base: BaseFound) -> None:
        """All markers are there."""
        assert base.manifest is not None
        self._place.check_fence()
        self._place.create(self._name(base.path / MANIFEST), base.manifest.encode())
        self.stats.copied += 1
        _log.info("%s is in %s", base.id, self._tier.url)

    def _open(self, path: PurePath, record: FileRecord) -> CheckedFile:
        file = self._filesystem.open(path, direct=True)
        try:
            return CheckedFile(file, read_header(file, record, path), record, path)
        except BaseException:
            file.close()
            raise

    def _publish(self, inventory: Inventory) -> None:
        """The run and its timelines, which give bases their history."""
        self._rate.wrote(1 + len(inventory.timelines))
        # Not the file: it may be damaged, and the run goes on with the id that all others have.
        if not self._tier.create(RUN_RECORD, RunRecord(inventory.run or "").encode()):
            raise ForeignDirectoryError(
                f"{self._tier.url} holds another run",
                tier=self._tier.traits.kind,
                path=self._tier.url,
                hint="give each run a place of its own",
            )
        for number in sorted(inventory.timelines):
            path = timeline_dir(self._run, number) / TIMELINE_RECORD
            if number > self._timeline or inventory.timelines[number] is None:
                continue
            if not self._tier.create(self._name(path), read_record_bytes(self._filesystem, path)):
                raise FencedError(
                    f"timeline {number} of {self._tier.url} was opened by another process, which "
                    "has not seen this run's disk: the two go different ways",
                    tier=self._tier.traits.kind,
                    path=f"{self._tier.url}/{self._name(path)}",
                    hint="end one of the two, or copy to another place",
                )

    def _find_again(self, inventory: Inventory) -> None:
        """The place still is what it was: no other directory lies under that name now, as where it
        was unmounted, and nobody has emptied it."""
        own = timeline_dir(self._run, self._timeline) / TIMELINE_RECORD
        records = {
            RUN_RECORD: RunRecord(inventory.run or "").encode(),
            self._name(own): read_record_bytes(self._filesystem, own),
        }
        for name, data in records.items():
            what: dict[str, Any] = {
                "tier": self._tier.traits.kind,
                "path": f"{self._tier.url}/{name}",
            }
            try:
                with contextlib.closing(self._tier.open(name)) as file:
                    found = read_record(file, name)
            except FileNotFoundError:
                raise StorageError(
                    f"{name}, which was written there, is gone: {self._tier.url} has been "
                    "unmounted, or emptied",
                    hint="copies go on when it is back; for a new place, start again",
                    **what,
                ) from None
            if found != data:
                raise ForeignDirectoryError(
                    f"{self._tier.url} holds another run, or another history of this one, now",
                    hint="give each run a place of its own",
                    **what,
                )

    def _beat(self) -> None:
        """It takes long, and goes on."""

    def _put(self, name: str, source: ReadFile) -> None:
        if self._place.size_of(name) == source.size_bytes:
            return  # an earlier keeper's; retention reads it back before it relies on it
        if self._closed:
            raise StorageError(f"the copy was broken off before {name}")
        self._rate.wrote(1)
        self._tier.put(name, source)

    def _await_rate(self, count: int) -> None:
        """Waits until the cap lets so many objects through."""
        while (wait_s := self._rate.wait_s(count, self)) > 0:
            with self._changed:
                if self._closed or self._hurried:
                    self.waits_for_the_cap = False
                    raise StorageError(
                        "the newest base is not copied: the cap of objects an hour is used up",
                        tier=self._tier.traits.kind,
                        path=self._tier.url,
                        hint="a higher TierOptions.objects_per_hour, or a longer every_s",
                    )
                if not self.waits_for_the_cap:
                    _log.info("the cap of objects an hour delays a copy by %.0f s", wait_s)
                self.waits_for_the_cap = True
                self._changed.wait(min(wait_s, _LOOK_AGAIN_S))
                self._beat()
        self.waits_for_the_cap = False

    def _name(self, path: PurePath) -> str:
        return path.relative_to(self._run).as_posix()

    def _fail(self, error: EverstepError, *, for_good: bool = False) -> None:
        with self._changed:
            paused = self._paused and isinstance(error, FencedError)
            self._refused = self._refused or (for_good and not paused)
            if self._closed or paused:
                _log.info("not copied: %s", error)
                return
            self.stats.failed += 1
        self._post(error)
