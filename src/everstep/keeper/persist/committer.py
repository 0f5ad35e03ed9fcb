"""Commit bases of one timeline, and delete those that are no longer needed.

:class:`Committer` is the contract. :class:`OneRankCommitter` serves a process that trains alone,
:class:`.job_committer.JobCommitter` a rank of a job; :func:`open_committer` chooses, and nothing
else has to ask which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from everstep.commit import BaseId
from everstep.commit.base_commit import (
    Action,
    BaseCommit,
    CheckFence,
    Event,
    FenceSeen,
    FilesDurable,
    GatherMarkers,
    ManifestDurable,
    MarkerDurable,
    MarkersSeen,
    WriteFiles,
    WriteManifest,
    WriteMarker,
)
from everstep.commit.retention import KeepRules
from everstep.errors import DamageError, EverstepError, FencedError
from everstep.format import MANIFEST, BasePlan, Marker, base_dir, timeline_dir
from everstep.format.names import SLOTS_DIR, marker_name
from everstep.format.reader import read_record_bytes
from everstep.format.writer import ChunkRing, Written
from everstep.keeper.persist.job_link import JobLink
from everstep.keeper.persist.shard_writer import ShardWriter
from everstep.keeper.retain import Retention
from everstep.run import scan_base
from everstep.run.fence import Fence
from everstep.seams import Seams, failpoint
from everstep.seams.progress import ProgressSink
from everstep.state.layout import Body
from everstep.tiers import SlotStore, remove_if_there, storage_errors, write_durably
from everstep.tiers.durable_files import temporary


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline that this process writes, and the rules for its bases.

    Attributes:
        run: the run folder.
        number: number of the timeline.
        ring: chunks and threads that write to disk and read back.
        timeout_s: seconds without progress after which a transfer counts as hung, and a rank of a
            job as late.
        keep: bases to keep.
        history: steps that resume can go back to (:meth:`everstep.config.options.History.parse`).
        verified: base that was read back and found intact, if any.
        link: link to the keepers of the other ranks of a job; None for a single rank.
        spared: returns bases that stay on all disks, however old they are, as peers send them.
    """

    seams: Seams
    run: PurePath
    number: int
    ring: ChunkRing
    timeout_s: float
    keep: KeepRules
    history: str = "last"
    verified: BaseId | None = None
    link: JobLink | None = None
    spared: Callable[[], Iterable[BaseId]] = tuple


class Committer(Protocol):
    """Commits the bases of one timeline."""

    writer: ShardWriter

    def persist(
        self, plan: BasePlan, bodies: Sequence[Body], progress: ProgressSink
    ) -> tuple[Written, ...]:
        """Write and commit a base.

        Returns:
            The files of this rank; an empty tuple if the base was committed before.

        Raises:
            FencedError: a newer timeline has taken over the run.
            StorageError: a rank could not write its files; no rank keeps any.
            DeadlineError: other ranks, which the message names, have not written theirs in time.
        """
        ...

    def retain(self) -> None:
        """Delete bases and log segments that are no longer needed, after a commit.

        Raises:
            FencedError: a newer timeline has begun.
            StorageError: the file system failed.
        """
        ...

    def sweep(self) -> None:
        """Clean up after crashes, before the first base.

        Raises:
            FencedError: a newer timeline has begun.
            StorageError: the file system failed.
        """
        ...

    def refuse(self, base: BaseId, why: str) -> None:
        """Tell the other ranks that this rank will not begin a base."""
        ...

    def release(self) -> None:
        """Fail bases that only wait for other ranks: the next start of the job decides on them."""
        ...

    def training_ended(self) -> None:
        """Tell the other ranks not to wait for further bases of this rank."""
        ...

    def close(self) -> None:
        """End all work, after the other ranks can do without this one."""
        ...


def open_committer(timeline: Timeline, post: Callable[[EverstepError], None]) -> Committer:
    """Return the committer of a timeline.

    Args:
        post: receives errors of background work.
    """
    filesystem = timeline.seams.filesystem
    slots = SlotStore(filesystem, timeline_dir(timeline.run, timeline.number) / SLOTS_DIR)
    writer = ShardWriter(
        filesystem, timeline.run, timeline.ring, slots, timeout_s=timeline.timeout_s
    )
    if timeline.link is None:
        return OneRankCommitter(timeline, writer, slots, post)
    # Loaded at first use, as a process that trains alone needs none of it.
    from everstep.keeper.persist.job_committer import JobCommitter

    return JobCommitter(timeline, timeline.link, writer, post)


class OneRankCommitter:
    """Commits the bases of a process that trains alone, and runs retention after each.

    Args:
        slots: parks files of deleted bases.
        post: receives an error for each committed base that is damaged when read back.
    """

    def __init__(
        self,
        timeline: Timeline,
        writer: ShardWriter,
        slots: SlotStore,
        post: Callable[[DamageError], None],
    ) -> None:
        self.writer = writer
        self._run = timeline.run
        self._post = post
        # Read once, now: the record on disk is still that of this process.
        self._fence = Fence(timeline.seams.filesystem, timeline.run, timeline.number)
        self.retention = Retention(
            self._fence,
            timeline.ring,
            slots,
            keep=timeline.keep,
            timeout_s=timeline.timeout_s,
            history=timeline.history,
            clock=timeline.seams.clock,
        )
        if timeline.verified is not None:
            self.retention.verified.add(timeline.verified)

    def persist(
        self, plan: BasePlan, bodies: Sequence[Body], progress: ProgressSink
    ) -> tuple[Written, ...]:
        """Write and commit a base (see :class:`Committer`)."""
        return OneRankCommit(self.writer, plan, self._fence).run(bodies, progress)

    def retain(self) -> None:
        """Delete bases and log segments that are no longer needed."""
        self.retention.run(self._on_damage)

    def _on_damage(self, error: DamageError) -> None:
        # The damaged file may be one that later bases would link to.
        self.writer.static.forget()
        self._post(error)

    def sweep(self) -> None:
        """Remove leftovers of crashes."""
        with storage_errors("clean up", self._run):
            self.retention.sweep(self.retention.scan())

    def refuse(self, base: BaseId, why: str) -> None:
        """Do nothing: no other rank waits for the base."""

    def release(self) -> None:
        """Do nothing: no base waits for other ranks."""

    def training_ended(self) -> None:
        """Do nothing: no other rank waits for bases."""

    def close(self) -> None:
        """Do nothing: no thread runs, and no connection is open."""


def is_committed(writer: ShardWriter, base: BaseId) -> bool:
    """Return True if an earlier attempt has committed ``base``: it must not be overwritten."""
    try:
        return scan_base(writer.filesystem, writer.run, base).status == "committed"
    except FileNotFoundError:
        return False


class OneRankCommit:
    """Commit of one base of a single rank: the commit machine, driven over the file system.

    Args:
        fence: fence of the writing process.
    """

    def __init__(self, writer: ShardWriter, plan: BasePlan, fence: Fence) -> None:
        self._writer = writer
        self.filesystem = writer.filesystem
        self._plan = plan
        self._base = BaseId(plan.identity.timeline, plan.identity.step)
        self._fence = fence
        self.directory = base_dir(writer.run, self._base.timeline, self._base.step)

    def run(self, bodies: Sequence[Body], progress: ProgressSink) -> tuple[Written, ...]:
        """Write and commit the base (see :meth:`Committer.persist`); remove its files if that
        fails."""
        identity = self._plan.identity
        commit = BaseCommit(identity)
        written: tuple[Written, ...] = ()
        with storage_errors(
            "write the base", self.directory, step=identity.step, rank=identity.rank
        ):
            # An earlier attempt may have failed after its commit: files of a committed base must
            # never be overwritten. Its manifest was renamed but perhaps not synced: sync it.
            if is_committed(self._writer, self._base):
                self.filesystem.sync_dir(self.directory)
                return ()
            try:
                action: Action | None = commit.start()
                while action is not None:
                    if isinstance(action, WriteFiles):
                        written = self._writer.write(self._plan, bodies, progress)
                        event: Event = FilesDurable(tuple(shard.record for shard in written))
                    else:
                        event = self.perform(action)
                    action = commit.on(event)
                return written
            except FencedError:
                # No cleanup: the process of the new timeline may rely on these files, and deletes
                # them if it does not.
                raise
            except FileNotFoundError:
                # A newer process may have swept the directory: raise FencedError in that case.
                BaseCommit(identity).on(FenceSeen(self._fence.newest()))
                # The fence is open: the directory was deleted by hand, or the disk has lost it.
                self._clean_up()
                raise
            except BaseException:
                self._clean_up()
                raise

    def perform(self, action: Action) -> Event:
        """Carry out one action of the commit machine, except that which writes the files."""
        if isinstance(action, CheckFence):
            return FenceSeen(self._fence.newest())
        if isinstance(action, WriteMarker):
            failpoint("save.before_marker")
            path = self.directory / marker_name(action.marker.rank)
            # The files were synced before: a marker on disk promises that all files of its rank are
            # durable.
            write_durably(self.filesystem, path, action.marker.encode())
            return MarkerDurable()
        if isinstance(action, GatherMarkers):
            return MarkersSeen(self._markers())
        assert isinstance(action, WriteManifest)
        failpoint("save.before_manifest")
        # The commit point: the base exists if and only if this rename is durable.
        write_durably(self.filesystem, self.directory / MANIFEST, action.manifest.encode())
        failpoint("save.after_manifest")
        return ManifestDurable()

    def _markers(self) -> dict[int, Marker]:
        found = {}
        for rank in range(self._plan.identity.world):
            path = self.directory / marker_name(rank)
            found[rank] = Marker.decode(read_record_bytes(self.filesystem, path), path)
        return found

    def _clean_up(self) -> None:
        """Remove the files of a base that failed; a committed base stays.

        A process that resumes the run meanwhile may complete the base and rely on it. It opens its
        timeline first and looks for the marker second; this method renames the marker first and
        looks for the timeline second. So at least one of the two sees the other (``adr/004``).
        """
        filesystem = self.filesystem
        directory = self.directory
        try:
            names = {entry.name for entry in filesystem.scan(directory)}
            # With a manifest the base is committed; fenced off, the files belong to the newer
            # timeline.
            if MANIFEST in names or self._is_fenced_off():
                return
            marker = marker_name(self._plan.identity.rank)
            # The marker first: files with a marker could be rolled forward to a base of mixed
            # contents.
            if marker in names:
                set_aside = directory / temporary(PurePath(marker)).name
                # Renamed, not deleted: it is put back if a newer timeline turns out to exist. Both
                # renames are synced, so that a crash leaves the state that the other process has
                # seen.
                filesystem.rename(directory / marker, set_aside)
                filesystem.sync_dir(directory)
                if self._is_fenced_off():
                    filesystem.rename(set_aside, directory / marker)
                    filesystem.sync_dir(directory)
                    return
            # Only this rank's files: other ranks clean up their own.
            mine = {shard.name for shard in self._plan.shards} | {marker, MANIFEST}
            for name in mine | {temporary(PurePath(name)).name for name in mine}:
                remove_if_there(filesystem, directory / name)
            if not filesystem.scan(directory):
                filesystem.remove_dir(directory)
        except OSError:
            # The disk that failed the save may fail the cleanup, too: retention repeats it later.
            pass

    def _is_fenced_off(self) -> bool:
        return self._fence.newest_or_next() != self._fence.timeline
