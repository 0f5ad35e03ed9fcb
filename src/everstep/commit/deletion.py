"""Deletion of one base from one disk in two steps, as a state machine without I/O (``adr/004``).

::

    start -> CheckFence -> Condemn -> CheckFence -> DeleteFiles -> None (deleted)
                                          \\-> Lift -> FencedError

A process that resumes first opens its timeline and then looks for the condemned manifest. So either
it sees the condemned manifest and chooses another base, or the deleting process sees the new
timeline and lifts the condemnation. With several disks, each has its own manifest and fence, and
this argument holds on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from everstep.commit.base_commit import CheckFence, FenceSeen
from everstep.commit.lineage import BaseId, fenced_error
from everstep.errors import FencedError


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
