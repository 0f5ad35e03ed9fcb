"""Copy what is durable to one place, in the background.

A :class:`Courier` has the thread, the time of its next turn, and the handling of failures. What is
copied, and in which order, is decided by its :class:`CopyWork`: bases (:mod:`.base_copies`)
or the log (:mod:`.log_copies`). Training never waits for a copy.

A place that keeps copies of a run, as seen by the process of one timeline.

Retention of copies: the same rules as on disk, with the operations of a tier.

A copy is deleted only if another one stays that was read back and found intact (``adr/005``). It is
deleted in two steps (``adr/004``): a record next to its manifest condemns it, which a resume sees;
then the fence is checked once more; then its files are deleted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import PurePath
from typing import Protocol

from everstep.commit import BaseId
from everstep.commit.retention import KeepRules
from everstep.errors import (
    DamageError,
    EverstepError,
    FencedError,
    ForeignDirectoryError,
    StorageError,
)
from everstep.format import MANIFEST, Marker, timeline_dir
from everstep.format.names import (
    CONDEMNED,
    RUN_RECORD,
    TIMELINE_RECORD,
    marker_name,
    parse_marker,
)
from everstep.format.reader import read_record_bytes
from everstep.format.records import RunRecord
from everstep.format.writer import ChunkRing
from everstep.keeper.retain import ReadBack
from everstep.keeper.ship.senders import CopyStats
from everstep.restore.fetch.rank_copies import foreign
from everstep.run import BaseFound, Inventory, TimelineCache, newest_timeline, scan_run
from everstep.run.uncondemn import uncondemn_in_tier
from everstep.seams import Clock, FileSystem
from everstep.seams.filesystem import observed
from everstep.seams.processes import Condition
from everstep.tiers import Tier, read_record
from everstep.tiers.files import TierFileSystem, tier_errors

ROOT = PurePath("/")
"""Root of the paths of files in a place."""


class CopyPlace:
    """Writes records of a run to a tier, and checks the fence there.

    Args:
        timeline: timeline of the writing process.

    Attributes:
        files: the tier as a file system for reading, under :data:`ROOT`.
    """

    def __init__(self, tier: Tier, timeline: int) -> None:
        self.tier = tier
        self.timeline = timeline
        self.files = TierFileSystem(tier, ROOT)
        self._timelines = TimelineCache()

    @property
    def kind(self) -> str:
        """Kind of the tier, for errors."""
        return self.tier.traits.kind

    @property
    def url(self) -> str:
        """URL or directory of the tier."""
        return self.tier.url

    def check_fence(self) -> None:
        """Raise if a newer timeline was opened in this place (I11).

        Raises:
            FencedError: a newer timeline has taken the run over.
        """
        # Read anew each time: the other process may have opened its timeline a moment ago.
        newest = newest_timeline_in(self.tier)
        if newest > self.timeline:
            raise FencedError(
                f"this process writes timeline {self.timeline}, but timeline {newest} has taken "
                f"the run over in {self.url}: nothing more is written there",
                tier=self.kind,
                path=self.url,
                hint="another process has resumed this run: stop this one, or use another place",
            )

    def publish(self, inventory: Inventory, filesystem: FileSystem) -> None:
        """Write the records of the run and its timelines, which define the history of the copies.

        Args:
            inventory: contents of the run folder, which lies on ``filesystem``.

        Raises:
            ForeignDirectoryError: the place holds another run.
            FencedError: a timeline was opened there by another process.
        """
        # Encoded again instead of copied: the file on disk may be damaged, and the id is known
        # from the other records.
        if not self.tier.create(RUN_RECORD, RunRecord(inventory.run or "").encode()):
            raise foreign(self.tier, "of another run")
        for number in sorted(inventory.timelines):
            path = timeline_dir(inventory.path, number) / TIMELINE_RECORD
            if number > self.timeline or inventory.timelines[number] is None:
                continue
            name = path.relative_to(inventory.path).as_posix()
            if not self.tier.create(name, read_record_bytes(filesystem, path)):
                raise FencedError(
                    f"timeline {number} in {self.url} was opened by another process from "
                    "the copies alone: the two histories have diverged",
                    tier=self.kind,
                    path=f"{self.url}/{name}",
                    hint="stop one of the two processes, or copy to another place",
                )

    def create(self, name: str, data: bytes) -> None:
        """Write a record, unless it exists already with the same content.

        Raises:
            StorageError: the name has other content.
        """
        # Exclusive: of two processes that write a record, one learns that it differs.
        if not self.tier.create(name, data):
            raise StorageError(
                f"{self.url}/{name} already has other content",
                tier=self.kind,
                path=f"{self.url}/{name}",
                hint="another process has written there: use a separate place for each run",
            )

    def size_of(self, name: str) -> int | None:
        """Return the size of an object in bytes; None: it does not exist."""
        try:
            # Opened, not listed: a listing of a store may be outdated.
            file = self.tier.open(name)
        except FileNotFoundError:
            return None
        with contextlib.closing(file):
            return file.size_bytes

    def has_rank_files(self, directory: str, marker: Marker) -> bool:
        """Return True if a rank's files and its marker are in the directory of a base.

        Opens each name: a listing may be outdated.
        """
        record = read_record(self.tier, f"{directory}/{marker_name(marker.rank)}")
        return record == marker.encode() and all(
            self.size_of(f"{directory}/{record.name}") == record.length for record in marker.files
        )

    def inventory(self) -> Inventory:
        """Return the inventory of all copies in this place."""
        with tier_errors():
            return scan_run(self.files, ROOT, self._timelines)


def newest_timeline_in(tier: Tier) -> int:
    """Return the number of the newest timeline in a tier; 0: there is none.

    A listing may be outdated, so the numbers that follow are opened by name.
    """
    with tier_errors():
        number = newest_timeline(TierFileSystem(tier, ROOT), ROOT)
    while True:
        path = timeline_dir(ROOT, number + 1) / TIMELINE_RECORD
        try:
            tier.open(path.relative_to(ROOT).as_posix()).close()
        except FileNotFoundError:
            return number
        number += 1


_CHUNKS = 3
_READERS = 1


class CopyRetention:
    """Retention of copies in one place.

    With several ranks, rank 0 alone runs it. It then also commits copies that lack only their
    manifest, and removes copies that can never be complete: incomplete ones older than a copy that
    was read back, when no rank copies them any more.

    Args:
        keep: copies to keep.
        post: called with the error of a damaged copy.
        timeout_s: timeout of a single transfer, in seconds.
        several: True if several ranks make the copies.
    """

    def __init__(
        self,
        place: CopyPlace,
        keep: KeepRules,
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
_STOP_TIMEOUT_S = 5.0


class CopyWork(Protocol):
    """Work of a courier: the objects that it copies."""

    def turn(self) -> None:
        """Copy what is due. Errors are reported; the thread goes on."""
        ...

    def waiting(self) -> float | None:
        """Return the seconds after which to call this again while no turn is due; None: never."""
        return None


class Courier:
    """Makes copies in one place, turn by turn.

    Args:
        tier: the place.
        timeline: the timeline that is copied.
        post: called with errors, in any thread.
        retry_s: seconds after which a failed turn is repeated, and reported once per outage. None:
            the next turn comes with the next base.

    Attributes:
        place: the place; each completed operation on it counts as progress.
        changed: guards the state of the courier and of its work, which several threads use.
        closed: True after :meth:`close`.
        refused: True after an error for good: no more copies are made.
        at_work: True during a turn.
        paused: True while being fenced off is no error.
        not_before_s: time before which no copy should begin: the pace, or a pause after a failure.
    """

    def __init__(
        self,
        tier: Tier,
        timeline: int,
        clock: Clock,
        post: Callable[[EverstepError], None],
        *,
        retry_s: float | None = None,
    ) -> None:
        self.place = CopyPlace(observed(tier, self.moved), timeline)
        self.clock = clock
        self.changed = Condition()
        self.closed = False
        self.refused = False
        self.at_work = False
        self.paused = False
        self.not_before_s = clock.monotonic_s()
        self.stats = CopyStats()
        self.post = post
        self._retry_s = retry_s
        self._down = False
        self._progress_s = 0.0
        self._due_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def due(self) -> bool:
        """True if a turn was requested that has not begun, even if it must wait for its time."""
        return self._due_s is not None

    @property
    def over(self) -> bool:
        """True if no more copies are made."""
        return self.closed or self.refused

    @property
    def stalled_s(self) -> float:
        """Seconds since the last progress of the turn; 0 between turns."""
        # at_work is read first: once it is set, so is the progress of this turn.
        return self.clock.running_s() - self._progress_s if self.at_work else 0.0

    def moved(self) -> None:
        """Note progress; called in any thread."""
        # running_s() stands still while this process is stopped: that is no hang.
        self._progress_s = self.clock.running_s()

    def start(self, work: CopyWork, name: str) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wake(self, at_s: float | None = None) -> None:
        """Request a turn: there is something new to copy.

        Args:
            at_s: earliest time; None: now.
        """
        with self.changed:
            self.paused = False
            self.look_again(self.clock.monotonic_s() if at_s is None else at_s)

    def look_again(self, at_s: float) -> None:
        """Request a turn at a time, unless an earlier one is due."""
        with self.changed:
            if not self.over:
                self._due_s = at_s if self._due_s is None else min(at_s, self._due_s)
                self.changed.notify_all()

    def pause(self) -> None:
        """Expect that the attached process itself opens another timeline.

        Being fenced off is no error then, until the next :meth:`wake` shows that it did not.
        """
        with self.changed:
            self.paused = True

    def succeeded(self) -> None:
        """Note that a copy succeeded: the next failure is another outage."""
        self._down = False
        self.not_before_s = self.clock.monotonic_s()

    def take_turn(self, work: CopyWork) -> None:
        """Take a turn in this thread, and handle its failure."""
        with self.changed:
            # One step: a courier is busy because a turn is due, or because it is at work.
            self._due_s = None
            self.moved()
            self.at_work = True
        try:
            work.turn()
        except (FencedError, ForeignDirectoryError) as error:
            self.fail(error, for_good=True)
        except EverstepError as error:
            self.fail(error)
        except Exception as error:
            # Must not end this thread: all later copies would be missing without a report.
            url = self.place.url
            internal = EverstepError(f"internal error while copying to {url}: {error!r}")
            internal.__cause__ = error
            self.fail(internal)
        finally:
            with self.changed:
                self.at_work = False

    def fail(self, error: EverstepError, *, for_good: bool = False) -> None:
        """Count and report a failed turn.

        Args:
            for_good: True: make no more copies.
        """
        with self.changed:
            # Fenced off by the attached process itself, which opens a new timeline: no error.
            expected = self.paused and isinstance(error, FencedError)
            self.refused = self.refused or (for_good and not expected)
            if self.closed or expected:
                _log.info("not copied: %s", error)
                return
            self.stats.failed += 1
            reported = self._down and not for_good
            if self._retry_s is not None:
                self._down = True
                self.not_before_s = self.clock.monotonic_s() + self._retry_s
                self.look_again(self.not_before_s)
        # One report per outage; later attempts only go to the keeper's log file.
        if reported:
            _log.warning("%s", error)
        else:
            self.post(error)

    def close(self) -> None:
        """Stop. A copy in progress is abandoned; the courier of the next timeline continues it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        # Ends the waiting of operations that are being retried.
        self.place.tier.close()
        if self._thread is not None:
            # With a timeout: a transfer in progress cannot be cancelled.
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self, work: CopyWork) -> None:
        while self._wait_for_turn(work):
            self.take_turn(work)

    def _wait_for_turn(self, work: CopyWork) -> bool:
        """Wait until a turn is due; return False if the thread must end."""
        with self.changed:
            while not self.over:
                now_s = self.clock.monotonic_s()
                if self._due_s is not None and self._due_s <= now_s:
                    return True
                waits_s = [None if self._due_s is None else self._due_s - now_s, work.waiting()]
                self.changed.wait(min((s for s in waits_s if s is not None), default=None))
            return False
