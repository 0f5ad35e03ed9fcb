"""Commit and deletion of one base on one disk, as state machines without I/O.

A driver performs each action and reports the resulting event; the machine returns the next action.
The order is the guarantee (I5): durable files, then this rank's marker, then, once *all* markers
are durable, the manifest. A fenced process never commits (I11).

::

    start -> CheckFence -> WriteFiles -> WriteMarker -> GatherMarkers* -> CheckFence
          -> WriteManifest -> None (committed)

Of the ranks that share a disk, one leads: it writes the manifest there. The others gather until
they find it. If it does not appear, any of them may take over (:meth:`BaseCommit.take_over`),
because the manifest is a pure function of the markers.

Deletion takes two steps (``adr/004``)::

    start -> CheckFence -> Condemn -> CheckFence -> DeleteFiles -> None (deleted)
                                          \\-> Lift -> FencedError

A process that resumes first opens its timeline and then looks for the condemned manifest. So either
it sees the condemned manifest and chooses another base, or the deleting process sees the new
timeline and lifts the condemnation. With several disks, each has its own manifest and fence, and
this argument holds on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from everstep.commit.lineage import BaseId, fenced_error
from everstep.errors import FencedError
from everstep.format import FileRecord, Manifest, Marker, ShardIdentity
from everstep.format.records import manifest_of


class Phase(Enum):
    """Progress of a commit."""

    NEW = "new"
    WRITING = "writing"
    MARKING = "marking"
    GATHERING = "gathering"
    COMMITTING = "committing"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class CheckFence:
    """Look up the newest timeline of the run; answer with :class:`FenceSeen`."""


@dataclass(frozen=True, slots=True)
class WriteFiles:
    """Write this rank's shards; answer with :class:`FilesDurable`."""


@dataclass(frozen=True, slots=True)
class WriteMarker:
    """Write this rank's marker; answer with :class:`MarkerDurable`."""

    marker: Marker


@dataclass(frozen=True, slots=True)
class GatherMarkers:
    """Read the markers that exist; answer with :class:`MarkersSeen`."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Write the manifest, which commits the base; answer with :class:`ManifestDurable`."""

    manifest: Manifest


Action = CheckFence | WriteFiles | WriteMarker | GatherMarkers | WriteManifest


@dataclass(frozen=True, slots=True)
class FenceSeen:
    """The newest timeline of the run is ``newest``."""

    newest: int


@dataclass(frozen=True, slots=True)
class FilesDurable:
    """This rank's shards are durable under their final names."""

    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class MarkerDurable:
    """This rank's marker is durable."""


@dataclass(frozen=True, slots=True)
class MarkersSeen:
    """Markers found so far, by rank.

    Attributes:
        committed: the manifest is durable on this rank's disk, whichever rank wrote it.
    """

    markers: Mapping[int, Marker]
    committed: bool = False


@dataclass(frozen=True, slots=True)
class ManifestDurable:
    """The manifest is durable."""


Event = FenceSeen | FilesDurable | MarkerDurable | MarkersSeen | ManifestDurable


class BaseCommit:
    """Commit of one base on one rank.

    Args:
        identity: identity of this rank's shards.
        leads: this rank writes the manifest on its disk.
    """

    def __init__(self, identity: ShardIdentity, *, leads: bool = True) -> None:
        self._identity = identity
        self._leads = leads
        self._manifest: Manifest | None = None
        self.phase = Phase.NEW

    @property
    def base(self) -> BaseId:
        """Base that is committed."""
        return BaseId(self._identity.timeline, self._identity.step)

    def take_over(self) -> None:
        """Allow this rank to write the manifest, because the leading rank does not."""
        self._leads = True

    def start(self) -> Action:
        """Return the first action."""
        assert self.phase is Phase.NEW
        return CheckFence()

    def on(self, event: Event) -> Action | None:
        """Return the action that follows ``event``; None when the base is committed.

        Raises:
            FencedError: a newer timeline exists.
        """
        if isinstance(event, FenceSeen):
            return self._on_fence(event.newest)
        if isinstance(event, FilesDurable):
            self._advance(Phase.WRITING, Phase.MARKING)
            return WriteMarker(Marker.of(self._identity, event.files))
        if isinstance(event, MarkerDurable):
            self._advance(Phase.MARKING, Phase.GATHERING)
            return GatherMarkers()
        if isinstance(event, MarkersSeen):
            return self._on_markers(event)
        self._advance(Phase.COMMITTING, Phase.COMMITTED)
        return None

    def _on_fence(self, newest: int) -> Action:
        # Checked before the first byte and again before the manifest: the files of a fenced process
        # do no harm, but its manifest would add a base to a history that has moved on.
        if newest > self._identity.timeline:
            raise fenced_error(
                self._identity.timeline,
                newest,
                "it can no longer commit bases",
                step=self._identity.step,
                rank=self._identity.rank,
            )
        if self.phase is Phase.NEW:
            self._advance(Phase.NEW, Phase.WRITING)
            return WriteFiles()
        assert self._manifest is not None
        self._advance(Phase.GATHERING, Phase.COMMITTING)
        return WriteManifest(self._manifest)

    def _on_markers(self, seen: MarkersSeen) -> Action | None:
        # No look at the fence: the manifest is durable already, and nothing more is written.
        if seen.committed:
            self._advance(Phase.GATHERING, Phase.COMMITTED)
            return None
        assert self.phase is Phase.GATHERING
        self._manifest = manifest_of(seen.markers)
        # Without a manifest, markers are missing, or contradict each other (see Member._go_on).
        return CheckFence() if self._leads and self._manifest is not None else GatherMarkers()

    def _advance(self, expected: Phase, next_phase: Phase) -> None:
        assert self.phase is expected, f"{self.phase} where {expected} was expected"
        self.phase = next_phase


@dataclass(frozen=True, slots=True)
class Condemn:
    """Rename the manifest durably so that no recovery chooses the base; answer with
    :class:`Condemned` or :class:`AlreadyDeleted`."""


@dataclass(frozen=True, slots=True)
class DeleteFiles:
    """Remove the files, markers first; answer with :class:`FilesDeleted`."""


@dataclass(frozen=True, slots=True)
class Lift:
    """Rename the manifest back, durably; answer with :class:`Lifted`."""


DeletionAction = CheckFence | Condemn | DeleteFiles | Lift


@dataclass(frozen=True, slots=True)
class Condemned:
    """The renamed manifest is durable."""


@dataclass(frozen=True, slots=True)
class FilesDeleted:
    """The files are removed."""


@dataclass(frozen=True, slots=True)
class Lifted:
    """The base is complete and committed again."""


@dataclass(frozen=True, slots=True)
class AlreadyDeleted:
    """Another process was deleting the base as well; ``newest`` is the newest timeline of the
    run."""

    newest: int


DeletionEvent = FenceSeen | Condemned | FilesDeleted | Lifted | AlreadyDeleted


class _Phase(Enum):
    NEW = "new"
    CONDEMNING = "condemning"
    CONDEMNED = "condemned"
    DELETING = "deleting"
    LIFTING = "lifting"
    OVER = "over"


class BaseDeletion:
    """Deletion of one base.

    Args:
        timeline: timeline of the deleting process; None for a user at the command line, who is not
            fenced off by any timeline.
    """

    def __init__(self, base: BaseId, timeline: int | None) -> None:
        self.base = base
        self._timeline = timeline
        self._phase = _Phase.NEW
        self._newest = 0

    def start(self) -> DeletionAction:
        """Return the first action."""
        assert self._phase is _Phase.NEW
        return CheckFence()

    def on(self, event: DeletionEvent) -> DeletionAction | None:
        """Return the action that follows ``event``; None when the base is deleted.

        Raises:
            FencedError: a newer timeline has begun. The base is complete and committed, or the
            process
                of that timeline has seen the condemned manifest and deleted the base itself.
        """
        if isinstance(event, FenceSeen):
            return self._on_fence(event.newest)
        if isinstance(event, Condemned):
            # Look again after the rename: a process that resumed in between may not have seen it.
            self._advance(_Phase.CONDEMNING, _Phase.CONDEMNED)
            return CheckFence()
        if isinstance(event, Lifted):
            self._advance(_Phase.LIFTING, _Phase.OVER)
            raise self._fenced()
        # Of two renames one succeeds, so the other process deletes the base or has lifted the mark.
        if isinstance(event, AlreadyDeleted):
            self._phase = _Phase.OVER
            self._newest = event.newest
            if self._is_fenced():
                raise self._fenced()
            return None
        self._advance(_Phase.DELETING, _Phase.OVER)
        return None

    def _on_fence(self, newest: int) -> DeletionAction:
        self._newest = newest
        if self._phase is _Phase.NEW:
            if self._is_fenced():
                self._phase = _Phase.OVER
                raise self._fenced()
            self._advance(_Phase.NEW, _Phase.CONDEMNING)
            return Condemn()
        fenced = self._is_fenced()
        self._advance(_Phase.CONDEMNED, _Phase.LIFTING if fenced else _Phase.DELETING)
        return Lift() if fenced else DeleteFiles()

    def _is_fenced(self) -> bool:
        return self._timeline is not None and self._newest > self._timeline

    def _fenced(self) -> FencedError:
        assert self._timeline is not None
        return fenced_error(self._timeline, self._newest, "it may not delete anything")

    def _advance(self, expected: _Phase, next_phase: _Phase) -> None:
        assert self._phase is expected, f"{self._phase} where {expected} was expected"
        self._phase = next_phase
