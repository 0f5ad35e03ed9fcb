"""Read bases back before retention deletes older ones (``adr/005``).

Works on a *place*: the run folder, or a tier with copies of it.
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


class ReadBack:
    """Plans retention in one place, and reads back the base that a plan relies on.

    Args:
        filesystem: the place.
        ring: lends the chunks to read into.
        keep: number of bases to keep.
        timeout_s: seconds without progress after which a single transfer counts as hung.
        tier: kind of the place, for errors.
        url: URL of a tier that holds copies; empty for the run folder.

    Attributes:
        verified: bases that were read back and found intact.
        damaged: bases that were read back and found damaged.
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
        """Return the bases that may be deleted, oldest first.

        One of those that stay was read back and found intact.

        Args:
            post: receives an error for each base that is found damaged.

        Raises:
            StorageError: a base could not be read back: nothing may be deleted.
        """
        while True:
            plan = plan_retention(
                bases,
                branches,
                keep=self._keep,
                verified=self.verified,
                damaged=self.damaged,
            )
            # The result of a read-back changes the plan: repeat until it relies on verified bases
            # only.
            if plan.verify is None:
                return plan.delete
            self._read_back(bases[plan.verify], post)

    def forget(self, base: BaseId) -> None:
        """Forget a base that was deleted."""
        self.verified.discard(base)
        self.damaged.discard(base)

    def _read_back(self, base: BaseFound, post: Callable[[DamageError], None]) -> None:
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
        # Checked before damage: one unreadable file makes the verdict on the whole base uncertain.
        if any(damage.unreadable for damage in verdict.damages):
            # Unreadable is not damaged: the storage may recover. Delete nothing meanwhile.
            raise StorageError(
                f"{name} could not be read back: {first.problem}",
                step=base.id.step,
                tier=self._tier,
                path=where,
                hint="check the store; nothing is deleted there meanwhile"
                if self._url
                else "check the disk or the network file system (dmesg, df, mount)",
            )
        # Remembered: a damaged base never counts as one of those to keep, and is reported once.
        self.damaged.add(base.id)
        found = "is damaged" if self._url else "was committed, but is damaged when read back"
        post(
            DamageError(
                f"{name} {found}: {first.problem}; older {'copies' if self._url else 'bases'} "
                "are kept",
                entry=first.entry,
                step=base.id.step,
                tier=self._tier,
                path=where,
                hint="the store or the connection to it may corrupt data"
                if self._url
                else "the disk or memory of this machine may be failing",
            )
        )
