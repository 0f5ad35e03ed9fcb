"""Which bases of a place are known to be good; finding out where it must be known (``adr/005``).

A place is the run folder, or a tier with copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from everstep.commit.lineage import BaseId, Branch
from everstep.commit.retention import plan_retention
from everstep.errors import DamageError, StorageError
from everstep.format.writer import ChunkRing
from everstep.run.scan import BaseFound
from everstep.run.verify import verify_base
from everstep.seams.files.filesystem import FileSystem
from everstep.seams.progress import silent

__all__ = ["ReadBack"]


class ReadBack:
    """Plans retention in one place, and reads bases back where a plan has to rest on one.

    Args:
        filesystem: the place.
        ring: lends the chunks to read into.
        keep: bases to keep.
        timeout_s: of a single transfer.
        tier: kind of the place.
        url: of a tier that holds copies; empty for the run folder.

    Attributes:
        verified: bases that were read and found whole.
        damaged: bases that were read and found damaged.
    """

    def __init__(
        self,
        filesystem: FileSystem,
        ring: Callable[[], AbstractContextManager[ChunkRing]],
        *,
        keep: int,
        timeout_s: float,
        tier: str = "disk",
        url: str = "",
    ) -> None:
        self._filesystem = filesystem
        self._ring = ring
        self._keep = keep
        self._timeout_s = timeout_s
        self._tier = tier
        self._url = url
        self.verified: set[BaseId] = set()
        self.damaged: set[BaseId] = set()

    def plan(
        self,
        bases: Mapping[BaseId, BaseFound],
        branches: Mapping[int, Branch],
        post: Callable[[DamageError], None],
    ) -> tuple[BaseId, ...]:
        """Bases that may go, oldest first; one that stays was read back and found good.

        Args:
            post: told of a base that is found damaged.

        Raises:
            StorageError: one could not be read: nothing may go.
        """
        while True:
            plan = plan_retention(
                bases,
                branches,
                keep=self._keep,
                verified=self.verified,
                damaged=self.damaged,
            )
            if plan.verify is None:
                return plan.delete
            self._look_at(bases[plan.verify], post)

    def forget(self, base: BaseId) -> None:
        """It was deleted."""
        self.verified.discard(base)
        self.damaged.discard(base)

    def _look_at(self, base: BaseFound, post: Callable[[DamageError], None]) -> None:
        with self._ring() as ring:
            verdict = verify_base(
                self._filesystem, base, ring, timeout_s=self._timeout_s, progress=silent
            )
        if not verdict.damages:
            self.verified.add(base.id)
            return
        first = verdict.damages[0]
        where = f"{self._url}{first.path}"
        name = f"the copy of {base.id}" if self._url else str(base.id)
        if any(damage.unreadable for damage in verdict.damages):
            raise StorageError(  # no reason to call it damaged: nothing is deleted now
                f"{name} could not be read back: {first.problem}",
                step=base.id.step,
                tier=self._tier,
                path=where,
                hint="look at the store; nothing is deleted there meanwhile"
                if self._url
                else "look at the disk or the network file system (dmesg, df, mount)",
            )
        self.damaged.add(base.id)
        found = "is damaged" if self._url else "was committed, but read back it is damaged"
        post(
            DamageError(
                f"{name} {found}: {first.problem}; older {'copies' if self._url else 'bases'} "
                "are kept",
                entry=first.entry,
                step=base.id.step,
                tier=self._tier,
                path=where,
                hint="the store, or something on the way to it, damages data"
                if self._url
                else "the disk or memory of this machine may be failing",
            )
        )
